// What a runner sends to other workers, what these send, and what it answers.

#include <cstring>
#include <utility>

#include "ATen/EmptyTensor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "weft/pipeline/internal/runner.h"
#include "weft/rpc/plain_tensor.h"

namespace weft::pipeline::internal {
namespace {

// As clone() does; small ones without the dispatcher, which costs more than the copy.
at::Tensor copy_of(const at::Tensor& tensor) {
  at::Tensor own;
  if (tensor.layout() == c10::kStrided && !tensor.is_inference() && is_plain(tensor)) {
    own = at::detail::empty_cpu(tensor.sizes(), tensor.options());
    if (tensor.nbytes() > 0) {
      std::memcpy(own.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
    }
  } else {
    own = tensor.detach().clone();
  }
  return tensor.requires_grad() ? own.set_requires_grad(true) : own;
}

}  // namespace

bool Runner::is_small(const Tensors& tensors) {
  size_t bytes = 0;
  for (const at::Tensor& t : tensors) {
    if (t.defined() && !t.is_cpu()) return false;
    bytes += t.defined() ? t.nbytes() : 0;
  }
  return bytes <= kSmallBytes;
}

// No stage may write to what is borrowed before it is answered. The answer to a small message may come
// late (RUN-9), so that one is copied.
Status Runner::post(const Action& a, PutMessage message, bool later) {
  Posted posted{a, std::move(message), {}};
  const bool small = is_small(posted.message.tensors);
  bool on_device = false;
  for (at::Tensor& t : posted.message.tensors) {
    if (!t.defined()) continue;
    on_device = on_device || !t.is_cpu();
    if (small) {
      try {
        t = copy_of(t);
      } catch (...) {
        return annotate(status_from_current_exception(), "copying what is sent");
      }
    } else if (!t.is_inference()) {
      posted.lent.emplace_back(t, t._version());
    }
  }
  {
    MutexLock lock(&mutex_);
    // RUN-7: the streams on which these were computed are this thread's.
    while (on_device && (writing_ || !posted_.empty()) && error_.ok()) {
      WEFT_RETURN_IF_ERROR(written_.wait_until(&mutex_, absl::InfiniteFuture()));
    }
    if (!error_.ok()) return error_;
    later = !on_device && (later || writing_ || !posted_.empty());
    if (later) posted_.push_back(std::move(posted));
  }
  if (later) {
    posted_changed_.notify_all();
  } else {
    write(std::move(posted));
  }
  return absl::OkStatus();
}

void Runner::write(Posted posted) {
  PutMessage& message = posted.message;
  metrics_->messages->add();
  for (const at::Tensor& t : message.tensors) {
    if (t.defined()) metrics_->bytes->add(t.nbytes());
  }
  const WorkerInfo& peer = setup_.workers[static_cast<size_t>(message.worker)];
  {
    MutexLock lock(&mutex_);
    ++sends_;
  }
  CallOptions options{.retry = Retry::kAtMostOnce, .backpressure = Backpressure::kWait};
  options.deadline = setup_.deadline;
  call(
      *worker_, peer, "@pipeline.put", message, options,
      [weak = weak_from_this(), a = posted.action, step = message.step,
       lent = std::move(posted.lent), name = peer.name](const StatusOr<Payload>& answer) {
        const auto self = weak.lock();
        if (self == nullptr) return;
        if (!answer.ok()) {
          return self->fail(annotate(answer.status(), absl::StrCat(self->where(a, step),
                                                                   ", to worker '", name, "'")),
                            /*tell_others=*/true);
        }
        for (const auto& [tensor, version] : lent) {
          if (tensor._version() == version) continue;
          self->fail(make_error(ErrorKind::kInvalidArgument,
                                absl::StrCat(self->where(a, step),
                                             ": a tensor was written to in place while it was "
                                             "being sent")),
                     /*tell_others=*/true);
        }
      },
      /*prompt=*/true);
}

void Runner::write_posted() {
  MutexLock lock(&mutex_);
  while (true) {
    if (!error_.ok() || closed_) break;
    if (posted_.empty()) {
      (void)posted_changed_.wait_until(&mutex_, absl::InfiniteFuture());
      continue;
    }
    Posted posted = std::move(posted_.front());
    posted_.pop_front();
    writing_ = true;
    lock.unlock();
    write(std::move(posted));
    lock.lock();
    writing_ = false;
    if (posted_.empty()) written_.notify_all();
  }
  std::deque<Posted> dropped;
  dropped.swap(posted_);
  lock.unlock();  // tensors go without it
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
