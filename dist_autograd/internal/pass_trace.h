#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_PASS_TRACE_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_PASS_TRACE_H_

// PassTrace: what a worker does in its passes, on the timeline of its calls (docs/sight.md).
// Categories:
//
//   backward  a pass at this worker, from its being engaged to its part's end: its root, how many
//             gradients and bytes came and went, how many nodes ran, the error. These overlap
//   run       nodes that could run together, on the thread that ran them, and what they had waited
//             for; an arrow leads from the run that gave a message's gradients to the one that they
//             let begin. So the arrow that came last, followed backwards, is the critical path
//   node      one node
//
// Threads: any.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/common/trace.h"
#include "weft/common/worker_key.h"

namespace weft::internal {

struct PassId;
struct MessageGradients;

// What a pass has done at one worker.
struct PassWork {
  int64_t nodes = 0;
  int64_t received = 0;  // messages whose gradients came
  int64_t received_bytes = 0;
  int64_t sent = 0;
  int64_t sent_bytes = 0;

  void receive(const MessageGradients& gradients);
  void send(const MessageGradients& gradients);
};

class PassTrace {
 public:
  PassTrace(std::shared_ptr<TraceWriter> writer, std::shared_ptr<Runtime> runtime)
      : writer_(std::move(writer)), runtime_(std::move(runtime)) {}

  absl::Time now() const { return runtime_->now(); }
  void begun(const PassId& pass, const WorkerKey& self, std::string_view root);
  void ended(const PassId& pass, const WorkerKey& self, const PassWork& work, const Status& error);
  // Numbers of messages that `self` had sent.
  using Messages = std::vector<uint64_t>;
  // Numbers of messages, with their senders.
  using Others = std::vector<std::pair<WorkerKey, uint64_t>>;
  void ran(const PassId& pass, const WorkerKey& self, absl::Time start, const Messages& fed,
           const Others& out, int64_t nodes);
  void node(std::string_view name, absl::Time start) {
    writer_->complete("node", name, start, now() - start);
  }

 private:
  const std::shared_ptr<TraceWriter> writer_;
  const std::shared_ptr<Runtime> runtime_;
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_PASS_TRACE_H_
