#include "weft/dist_autograd/internal/pass_trace.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/dist_autograd/internal/pass.h"

namespace weft::internal {
namespace {

// The same at all workers.
uint64_t number_of(const PassId& pass, const WorkerKey& worker, uint64_t message) {
  uint64_t all = 0;
  for (const uint64_t one :
       {pass.context.creator.incarnation.value(), pass.context.counter,
        pass.root.incarnation.value(), pass.counter, worker.incarnation.value(), message}) {
    all = (all ^ one) * 0x9E3779B97F4A7C15u;
    all ^= all >> 29;
  }
  return all;
}

int64_t bytes_of(const MessageGradients& gradients) {
  size_t bytes = 0;
  for (const at::Tensor& one : gradients.tensors) {
    if (!one.defined()) continue;
    bytes += one.is_sparse() ? one._values().nbytes() + one._indices().nbytes() : one.nbytes();
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace

void PassWork::receive(const MessageGradients& gradients) {
  ++received;
  received_bytes += bytes_of(gradients);
}

void PassWork::send(const MessageGradients& gradients) {
  ++sent;
  sent_bytes += bytes_of(gradients);
}

void PassTrace::begun(const PassId& pass, const WorkerKey& self, std::string_view root) {
  writer_->async_begin("backward", to_string(pass), number_of(pass, self, 0), now(),
                       {{"root", root}});
}

void PassTrace::ended(const PassId& pass, const WorkerKey& self, const PassWork& work,
                      const Status& error) {
  const std::string why(error.message());
  writer_->async_end("backward", to_string(pass), number_of(pass, self, 0), now(),
                     {{"nodes", work.nodes},
                      {"gradients_received", work.received},
                      {"bytes_received", work.received_bytes},
                      {"gradients_sent", work.sent},
                      {"bytes_sent", work.sent_bytes},
                      {"error", std::string_view(why)}});
}

void PassTrace::ran(const PassId& pass, const WorkerKey& self, absl::Time start,
                    const Messages& fed, const Others& out, int64_t nodes) {
  const absl::Time end = now();
  const std::string text = to_string(pass);
  const std::string after =
      fed.empty() ? "" : absl::StrCat("the gradients of messages ", absl::StrJoin(fed, ", "));
  writer_->complete("run", text, start, end - start,
                    {{"after", std::string_view(after)}, {"nodes", nodes}});
  for (const uint64_t message : fed) {
    writer_->flow_in("backward", "gradients", number_of(pass, self, message), start);
  }
  for (const auto& [origin, message] : out) {
    writer_->flow_out("backward", "gradients", number_of(pass, origin, message), end);
  }
}

}  // namespace weft::internal
