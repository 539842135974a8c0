#ifndef WEFT_PIPELINE_INTERNAL_MESSAGES_H_
#define WEFT_PIPELINE_INTERNAL_MESSAGES_H_

// What the workers of a pipeline say to each other: calls of the untyped core, each with one value.
//
//   method             who to whom                      when
//   @pipeline.open     maker to every worker            once, when the pipeline is made
//   @pipeline.touch    worker to those it sends to      while it opens: the connection is there; and
//                      the maker                       while no step comes; whether a worker has ended: by
//                                                       reducers over calls that wait, and for a survey
//   @pipeline.begin    maker to every worker            once per step; answered when it has ended
//   @pipeline.put      worker to worker                 for every send of the plan
//   @pipeline.fail     a worker that fails to all others at most once per pair: the error
//   @pipeline.probe    a worker that waits for a       again and again: whether the other one's part goes
//                      tensor to all others            on; answered with its error, if any
//   @pipeline.ended    a worker to the maker           another one's process has ended, as the transport knows
//                                                       here: it will answer no step
//   @pipeline.fetch    maker to a worker                gradients or state of a stage
//   @pipeline.keep     worker to its neighbour          with copies: after each step, its stages' state
//   @pipeline.survey   maker to every worker            to rebuild, until all have answered or are known to
//                                                       have ended: ends the parts there, and lists copies
//   @pipeline.close    maker to every worker            once
//   @pipeline.sum      replica to replica               with call_reducer(): for every bucket that is added
//                                                       up there; the answer is the sum (call_sums.h)
//   @pipeline.sum_fail replica to the others            once: it gives nothing more
//
// A process may run several workers of one plan (after a loss), so what is for one of them says which.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/rpc/struct.h"

namespace weft::pipeline::internal {

inline constexpr std::string_view kSignature = "(message)->message";

struct OpenMessage {
  uint64_t pipeline = 0;
  std::string plan{};
  int64_t self = 0;  // which worker of the plan the callee is
  std::vector<WorkerInfo> workers{};
  std::string loss{};
  std::string optimizer{};
  std::vector<double> optimizer_options{};
  bool has_seed = false;
  uint64_t seed = 0;
  int64_t deadline_ns = 0;  // of a step; 0: none
  bool record = false;
  int64_t first_step = 0;
  bool keep_copies = false;
  std::vector<std::vector<std::string>> tied{};  // by stage, or empty
  double clip_norm = 0;                          // 0: none
  bool skip_not_finite = false;
};
WEFT_STRUCT(OpenMessage, pipeline, plan, self, workers, loss, optimizer, optimizer_options,
            has_seed, seed, deadline_ns, record, first_step, keep_copies, tied, clip_norm,
            skip_not_finite);

// What all parts of a pipeline have in common, in short: a worker whose part is of something else says so
// at the first step.
struct PartDigest {
  uint64_t plan = 0;
  uint64_t seed = 0;
  uint64_t partition = 0;  // which stage is where, and the weights that stages share
  uint64_t options = 0;    // loss, optimizer, deadline, first step
};
WEFT_STRUCT(PartDigest, plan, seed, partition, options);

PartDigest digest_of(const OpenMessage& message);
// "plan and seed": where they differ; "": nowhere.
std::string differences(const PartDigest& a, const PartDigest& b);

struct BeginMessage {
  uint64_t pipeline = 0;
  PartDigest of{};     // as the maker has it
  int64_t worker = 0;  // of the plan
  int64_t step = 0;
  std::vector<std::vector<at::Tensor>> inputs{};  // by micro-batch, for the first stage
  std::vector<at::Tensor> targets{};              // for the last one
  std::vector<double> scales{};
  bool forward_only = false;
  std::vector<double> optimizer_options{};  // from this step on; empty: as before
};
WEFT_STRUCT(BeginMessage, pipeline, of, worker, step, inputs, targets, scales, forward_only,
            optimizer_options);

struct EndMessage {
  std::vector<double> losses{};  // of the last stage, by micro-batch, before their scales
  int64_t peak_activations = 0;
  std::vector<int64_t> times{};  // start and end of each action, on the worker's clock, if recorded
  std::vector<std::vector<at::Tensor>> outputs{};  // by micro-batch, of a step that is only forward
  int64_t weight_versions = 1;
  double grad_norm = 0;  // of all stages, of a step with a barrier
  bool skipped = false;
};
WEFT_STRUCT(EndMessage, losses, peak_activations, times, outputs, weight_versions, grad_norm,
            skipped);

struct PutMessage {
  uint64_t pipeline = 0;
  PartDigest of{};     // as the sender has it
  int64_t worker = 0;  // of the plan
  int64_t step = 0;
  int64_t edge = 0;
  int64_t micro_batch = 0;
  bool backward = false;
  std::vector<at::Tensor> tensors{};
};
WEFT_STRUCT(PutMessage, pipeline, of, worker, step, edge, micro_batch, backward, tensors);

struct FailMessage {
  uint64_t pipeline = 0;
  int64_t code = 0;
  int64_t kind = 0;
  std::string message{};
  std::string origin{};
};
WEFT_STRUCT(FailMessage, pipeline, code, kind, message, origin);

struct EndedMessage {
  uint64_t pipeline = 0;
  WorkerInfo worker{};
  std::string why{};
};
WEFT_STRUCT(EndedMessage, pipeline, worker, why);

enum class Fetch : int64_t {
  kGradients,
  kZeroGrad,
  kState,
  kLoadState,
  kCopy,      // the copy of `owner` after `steps` steps
  kLoadCopy,  // that copy, of pipeline `from`, is at the callee
  kKeep,      // the part's stages as they are now become its copy
  kShapes,    // of parameters and buffers, by name
  kSetSteps,  // `steps` are done: the next one has that number
};

struct FetchMessage {
  uint64_t pipeline = 0;
  int64_t stage = 0;
  int64_t what = 0;  // Fetch
  std::map<std::string, at::Tensor> state{};
  uint64_t from = 0;
  int64_t owner = 0;  // a worker of the plan
  int64_t steps = 0;
};
WEFT_STRUCT(FetchMessage, pipeline, stage, what, state, from, owner, steps);

// A stage with its state.
struct StageState {
  int64_t stage = 0;
  std::map<std::string, at::Tensor> state{};
};
WEFT_STRUCT(StageState, stage, state);

struct KeepMessage {
  uint64_t pipeline = 0;
  int64_t owner = 0;  // the worker of the plan whose stages they are
  int64_t steps = 0;  // how many it has done
  std::vector<StageState> states{};
};
WEFT_STRUCT(KeepMessage, pipeline, owner, steps, states);

struct KeptCopy {
  int64_t owner = 0;
  int64_t steps = 0;
};
WEFT_STRUCT(KeptCopy, owner, steps);

struct SurveyAnswer {
  std::vector<KeptCopy> copies{};
  std::vector<WorkerInfo> gone{};  // workers of the plan that are known to have ended here
};
WEFT_STRUCT(SurveyAnswer, copies, gone);

struct PipelineMessage {  // close, touch, and answers that say nothing
  uint64_t pipeline = 0;
};
WEFT_STRUCT(PipelineMessage, pipeline);

template <class T>
StatusOr<T> decode(Payload payload) {
  Decoder in(std::move(payload));
  WEFT_ASSIGN_OR_RETURN(T message, in.take<T>());
  WEFT_RETURN_IF_ERROR(in.finish());
  return message;
}
template <class T>
StatusOr<Payload> encode(const T& message) {
  Payload payload;
  Encoder out(&payload);
  out.put(message);
  WEFT_RETURN_IF_ERROR(out.status());
  return payload;
}

// How a call ends whose callee's process has ended, as the transport knows, or the group: nothing has
// answered it.
inline bool has_ended(const Status& answer) {
  return error_kind(answer) == ErrorKind::kPeerLost && error_details(answer).origin.empty();
}

// `done` once.
template <class T>
void call(const Worker& worker, const WorkerInfo& to, std::string_view method, const T& message,
          const CallOptions& options, CallDone done, bool prompt = false) {
  StatusOr<Payload> payload = encode(message);
  if (!payload.ok()) return done(payload.status());
  start_call(worker, Destination(to),
             UntypedCall{.method = std::string(method),
                         .signature = kSignature,
                         .object = "",
                         .arguments = *std::move(payload),
                         .options = options,
                         .prompt = prompt},
             std::move(done));
}

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_MESSAGES_H_
