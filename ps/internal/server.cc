#include "weft/ps/server.h"

#include <utility>

#include "weft/ps/internal/service.h"

namespace weft {
namespace ps {

Server::Server(const Worker& worker, const ServerOptions& options)
    : service_(internal::PsService::of(worker)) {
  if (const Status s = service_->serve(options); !s.ok()) {
    service_ = nullptr;
    throw_error(s);
  }
}
Server& Server::operator=(Server&& other) noexcept {
  if (service_ != nullptr && service_ != other.service_) service_->stop_serving();
  service_ = std::move(other.service_);
  return *this;
}
void Server::drain(Timeout deadline) { throw_if_error(try_drain(deadline)); }
Status Server::try_drain(Timeout deadline) {
  return service_->drain(deadline.value_or(absl::Seconds(60)));
}
int64_t Server::join(const std::vector<std::string>& servers, Timeout deadline) {
  return value_or_throw(try_join(servers, deadline));
}
StatusOr<int64_t> Server::try_join(const std::vector<std::string>& servers, Timeout deadline) {
  return service_->join(servers, deadline.value_or(absl::Seconds(60)));
}
Server::~Server() {
  if (service_ != nullptr) service_->stop_serving();
}

}  // namespace ps

ServiceFactory ps_service() {
  return [](const ServiceContext& context) -> std::shared_ptr<Service> {
    return std::make_shared<ps::internal::PsService>(context);
  };
}

}  // namespace weft
