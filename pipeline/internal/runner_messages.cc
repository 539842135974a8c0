// What other workers send to a runner, and what it answers.

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/internal/runner.h"

namespace weft::pipeline::internal {

bool Runner::is_small(const Tensors& tensors) {
  size_t bytes = 0;
  for (const at::Tensor& t : tensors) {
    if (t.defined() && !t.is_cpu()) return false;
    bytes += t.defined() ? t.nbytes() : 0;
  }
  return bytes <= kSmallBytes;
}

void Runner::put(PutMessage message, std::string_view sender, ReplyFn reply) {
  if (const Status same = check_same(message.of, sender, message.step); !same.ok()) {
    return reply(same);
  }
  const StatusOr<SlotName> slot = slot_of(message);
  if (!slot.ok()) return reply(slot.status());
  ReplyFn* const may_wait = is_small(message.tensors) ? &reply : nullptr;
  const Status filled = fill(*slot, std::move(message.tensors), may_wait);
  if (!filled.ok()) return reply(filled);
  if (reply != nullptr) reply(encode(PipelineMessage{}));
}

StatusOr<Runner::SlotName> Runner::slot_of(const PutMessage& message) const {
  const Plan& plan = setup_.plan;
  const SlotName name{message.step, static_cast<int>(message.edge),
                      static_cast<int>(message.micro_batch), message.backward};
  const int64_t least = has_barrier() ? norm_edge() : norm_edge() + 1;
  if (message.edge < 0 && message.edge >= least && message.step >= 0 && message.micro_batch >= 0 &&
      message.micro_batch < static_cast<int64_t>(plan.workers.size())) {
    const int root =
        message.edge == norm_edge() ? 0 : root_of(group_of(static_cast<int>(message.edge)));
    const int to = message.backward ? root : static_cast<int>(message.micro_batch);
    if (to == static_cast<int>(setup_.self)) return name;
    return make_error(ErrorKind::kProtocol, "weights that this worker has no stage of");
  }
  if (message.edge < 0 || message.edge >= static_cast<int64_t>(plan.edges.size()) ||
      message.micro_batch < 0 || message.micro_batch >= plan.micro_batches || message.step < 0) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("edge ", message.edge, ", micro-batch ", message.micro_batch,
                                   ", step ", message.step, " for a plan of ", plan.edges.size(),
                                   " edges and ", plan.micro_batches, " micro-batches"));
  }
  const Edge& e = plan.edges[message.edge];
  if (plan.placement[message.backward ? e.from : e.to] != static_cast<int>(setup_.self)) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("edge ", e.from, ">", e.to, " does not end at this worker"));
  }
  return name;
}

void Runner::answer_held(size_t more_than) {
  std::vector<ReplyFn> held;
  {
    MutexLock lock(&mutex_);
    if (held_.size() <= more_than) return;
    held.swap(held_);
  }
  for (ReplyFn& reply : held) reply(encode(PipelineMessage{}));
}

}  // namespace weft::pipeline::internal
