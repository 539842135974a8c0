#include "weft/dist_optim/service.h"

#include "absl/strings/str_cat.h"
#include "weft/dist_optim/internal/functional.h"
#include "weft/dist_optim/internal/service.h"

namespace weft {
namespace internal {

std::shared_ptr<DistOptimService> DistOptimService::of(const Worker& worker) {
  auto service = worker.service<DistOptimService>();
  if (service == nullptr) {
    throw_error(make_error(ErrorKind::kState, absl::StrCat("worker '", worker.name(),
                                                           "' has no distributed optimizers: list "
                                                           "dist_optim_service() at join")));
  }
  return service;
}

void DistOptimService::put_debug_info(std::map<std::string, int64_t>* out) const {
  (*out)["optimizers"] = optimizers.load();
  (*out)["optimizer_parameters"] = static_cast<int64_t>(parameters_.in_use());
  (*out)["optimizer_lock_waits"] = parameters_.waits();
  (*out)["optimizer_steps"] = steps.load();
  (*out)["optimizer_refusals"] = refusals.load();
  (*out)["optimizer_reservations"] = reservations.load();
}

}  // namespace internal

ServiceFactory dist_optim_service() {
  return [](const ServiceContext& context) -> std::shared_ptr<Service> {
    return std::make_shared<internal::DistOptimService>(context);
  };
}

Library dist_optim_library() {
  Library library("weft_optim");
  auto def = library.class_<internal::FunctionalOptimizer>("Functional", {.concurrent = true});
  def.constructor<std::string>();
  internal::def_owner_methods(def);
  return library;
}

}  // namespace weft
