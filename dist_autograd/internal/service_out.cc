// Gradients on their way out. To each worker some are under way, the others wait here, in order,
// and nothing of a pass that has failed is sent any more. So a pass may have more for a worker than
// may be on its way to it; what is under way waits for room as any call that wants to.
//
// Two workers that wait for each other do not wait for ever: a gradient is answered when it is
// parked, which takes nothing of the one who parks it; what names something, and is kept until all
// below have answered, does not wait here and carries little (kRideBytes).

#include <utility>

#include "weft/dist_autograd/internal/service.h"

namespace weft::internal {
namespace {

constexpr int64_t kCallsUnderWay = 64;
constexpr uint64_t kBytesUnderWay = uint64_t{256} << 20;

uint64_t bytes_of(const Advance& advance) {
  uint64_t bytes = 0;
  for (const MessageGradients& one : advance.gradients) {
    for (const at::Tensor& tensor : one.tensors) {
      if (tensor.defined() && !tensor.is_sparse()) bytes += tensor.nbytes();
    }
  }
  return bytes;
}

}  // namespace

void DistAutogradService::queue_out(const WorkerKey& to, Outgoing one) {
  one.bytes = bytes_of(one.advance);
  {
    MutexLock lock(&mutex_);
    out_[to].waiting.push_back(std::move(one));
  }
  serve_out(to);
}

void DistAutogradService::serve_out(const WorkerKey& to) {
  bool first = true;
  while (true) {
    std::optional<Outgoing> next;
    {
      MutexLock lock(&mutex_);
      const auto at = out_.find(to);
      if (at == out_.end()) return;
      OutQueue& queue = at->second;
      if (first && std::exchange(queue.serving, true)) return;  // it looks once more
      first = false;
      const bool may =
          !queue.waiting.empty() &&
          (queue.calls == 0 || (queue.calls < kCallsUnderWay &&
                                queue.bytes + queue.waiting.front().bytes <= kBytesUnderWay));
      if (!may) {
        queue.serving = false;
        if (queue.calls == 0 && queue.waiting.empty()) out_.erase(at);
        return;
      }
      next = std::move(queue.waiting.front());
      queue.waiting.pop_front();
      ++queue.calls;
      queue.bytes += next->bytes;
    }
    send_advance(to, next->pass, next->deadline, std::move(next->advance),
                 [self = shared_from_this(), to, bytes = next->bytes,
                  done = std::move(next->done)](StatusOr<Advanced> answer) mutable {
                   {
                     MutexLock lock(&self->mutex_);
                     const auto at = self->out_.find(to);
                     if (at != self->out_.end()) {
                       --at->second.calls;
                       at->second.bytes -= bytes;
                     }
                   }
                   done(std::move(answer));
                   self->serve_out(to);
                 });
  }
}

void DistAutogradService::drop_out(const PassId& pass) {
  std::vector<Outgoing> dropped;  // told and destroyed without the mutex
  {
    MutexLock lock(&mutex_);
    for (auto& [to, queue] : out_) {
      std::deque<Outgoing> left;
      for (Outgoing& one : queue.waiting) {
        (one.pass == pass ? dropped.emplace_back(std::move(one))
                          : left.emplace_back(std::move(one)));
      }
      queue.waiting.swap(left);
    }
  }
  // There is nothing to advance: the pass has failed.
  for (Outgoing& one : dropped) one.done(Advanced());
}

}  // namespace weft::internal
