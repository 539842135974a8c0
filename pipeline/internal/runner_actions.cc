// The actions of a runner, on its own thread.

#include <algorithm>
#include <set>

#include "ATen/ops/add.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "weft/pipeline/internal/runner.h"
#include "weft/pipeline/internal/runner_step.h"

namespace weft::pipeline::internal {
namespace {

// A wait of this length is worth a question.
constexpr absl::Duration kProbeAfter = absl::Milliseconds(500);
// RUN-9: a step whose waits are shorter has its answers at its end, all together. After a wait of this length
// the next action is not due at any moment.
constexpr absl::Duration kHoldFor = absl::Milliseconds(60);

}  // namespace

Status Runner::run_action(const Action& a, Current* now) {
  const int64_t step = now->message->step;
  {
    MutexLock lock(&mutex_);
    place_ = {a, step};
  }
  const auto compute = setup_.stages.find(a.stage);
  if (compute == setup_.stages.end()) return make_error(ErrorKind::kInternal, "no such stage here");
  StageCompute& stage = *compute->second;
  switch (a.kind) {
    case ActionKind::kForward: return forward(a, now);
    case ActionKind::kBackward:
    case ActionKind::kInputGrad: return backward(a, now);
    case ActionKind::kWeightGrad: --now->live; return stage.weight_grad(step, a.micro_batch);
    case ActionKind::kRecompute:
      now->end.peak_activations = std::max(now->end.peak_activations, ++now->live);
      return stage.recompute(step, a.micro_batch);
    case ActionKind::kSendForward:
    case ActionKind::kSendBackward: return send(a, now);
    case ActionKind::kReceiveForward:
    case ActionKind::kReceiveBackward:
      if (setup_.bug != RunnerBug::kReceivesWait) return absl::OkStatus();  // RUN-4
      return take(a, {step, a.edge, a.micro_batch, a.kind == ActionKind::kReceiveBackward},
                  now->deadline, /*keep=*/true)
          .status();
    case ActionKind::kReduce: return reduce(a, now);
    case ActionKind::kStep: return stage.step(step);
  }
  return absl::OkStatus();
}

size_t Runner::together_from(size_t first) const {
  const std::vector<Action>& list = setup_.plan.workers[setup_.self];
  const Action& a = list[first];
  if (a.kind != ActionKind::kWeightGrad) return 1;
  size_t next = first + 1;
  const auto is_gradient = [&](const Action& b) {
    return b.kind == ActionKind::kWeightGrad && b.stage == a.stage;
  };
  while (next < list.size() && is_gradient(list[next])) ++next;
  const size_t count = next - first;
  while (next < list.size() && list[next].stage != a.stage) ++next;
  return next < list.size() && list[next].kind == ActionKind::kReduce ? count : 1;
}

Status Runner::weight_grads(size_t first, size_t count, Current* now, Action* at) {
  const std::vector<Action>& list = setup_.plan.workers[setup_.self];
  const int64_t step = now->message->step;
  std::vector<int> micro_batches;
  for (size_t k = first; k < first + count; ++k) micro_batches.push_back(list[k].micro_batch);
  const auto stage = setup_.stages.find(at->stage);
  if (stage == setup_.stages.end()) return make_error(ErrorKind::kInternal, "no such stage here");
  now->live -= static_cast<int64_t>(count);
  return stage->second->weight_grads(step, micro_batches, [&](int micro_batch) -> Status {
    at->micro_batch = micro_batch;
    MutexLock lock(&mutex_);
    place_ = {*at, step};
    return error_;
  });
}

StatusOr<Tensors> Runner::take(const Action& action, SlotName name, absl::Time deadline,
                               bool keep) {
  if (setup_.bug == RunnerBug::kSlotWithoutStep) std::get<0>(name) = 0;
  const absl::Time began = runtime_->now();
  absl::Time probe_at = began + kProbeAfter;
  absl::Time held_from = began;
  while (true) {
    {
      MutexLock lock(&mutex_);
      while (true) {
        if (!error_.ok()) return error_;
        const auto it = slots_.find(name);
        if (it != slots_.end()) {
          const int64_t waited = absl::ToInt64Microseconds(runtime_->now() - began);
          metrics_->waited->add(static_cast<uint64_t>(std::max<int64_t>(waited, 0)));
          if (keep) return it->second.tensors;
          Slot slot = std::move(it->second);
          slots_.erase(it);
          lock.unlock();
          try {
            weft::internal::use_here(slot.ready, slot.tensors);  // RUN-7
          } catch (...) {
            return annotate(status_from_current_exception(),
                            absl::StrCat("taking the ", slot_text(name)));
          }
          return std::move(slot.tensors);
        }
        const absl::Time now = runtime_->now();
        if (now >= deadline) {
          return make_error(
              ErrorKind::kDeadline,
              absl::StrCat("the step's time of ", absl::FormatDuration(setup_.deadline),
                           " is over, waiting for the ", slot_text(name)));
        }
        const absl::Time answer_at = held_.empty() ? probe_at : held_from + kHoldFor;
        if (now >= std::min(probe_at, answer_at)) break;
        waits_ = name;
        (void)changed_.wait_until(&mutex_, std::min({deadline, probe_at, answer_at}));
        waits_.reset();
      }
    }
    answer_held();
    if (held_from = runtime_->now(); held_from < probe_at) continue;
    const std::string context =
        absl::StrCat(where(action, std::get<0>(name)), ", waiting for the ", slot_text(name));
    for (const WorkerInfo& peer : setup_.workers) probe(peer, "@pipeline.probe", context);
    probe_at = runtime_->now() + kProbeAfter;
  }
}

Status Runner::forward(const Action& a, Current* now) {
  const int64_t step = now->message->step;
  const int i = a.micro_batch;
  const std::pair<int, int> key{a.stage, i};
  ForwardCall call;
  call.step = step;
  call.micro_batch = i;
  if (to_[a.stage].empty()) {
    if (i >= static_cast<int>(now->message->inputs.size())) {
      return make_error(ErrorKind::kProtocol, "the step has no inputs for this micro-batch");
    }
    call.inputs = std::move(now->message->inputs[i]);
  }
  for (int e : to_[a.stage]) {
    WEFT_ASSIGN_OR_RETURN(Tensors in, take(a, {step, e, i, false}, now->deadline));
    now->brought[{e, i}] = in.size();
    for (at::Tensor& t : in) call.inputs.push_back(std::move(t));
  }
  call.is_last = from_[a.stage].empty();
  call.forward_only = now->message->forward_only;
  call.recompute = !call.forward_only && recomputed_.count(key) > 0;
  const bool keeps = !call.forward_only && !call.recompute;
  if (call.is_last) {
    if (i < static_cast<int>(now->message->targets.size())) {
      call.target = std::move(now->message->targets[i]);
    }
    const size_t scale = setup_.bug == RunnerBug::kScaleOfTheFirst ? 0 : static_cast<size_t>(i);
    if (scale < now->message->scales.size()) call.scale = now->message->scales[scale];
  }
  const bool is_last = call.is_last;
  now->began = runtime_->now();
  WEFT_ASSIGN_OR_RETURN(Tensors out, setup_.stages.at(a.stage)->forward(std::move(call)));
  if (keeps) now->end.peak_activations = std::max(now->end.peak_activations, ++now->live);
  now->end.weight_versions =
      std::max(now->end.weight_versions, setup_.stages.at(a.stage)->weight_versions());
  if (is_last && now->message->forward_only) {
    now->end.outputs.resize(static_cast<size_t>(setup_.plan.micro_batches));
    now->end.outputs[i] = std::move(out);
    return absl::OkStatus();
  }
  if (is_last) {
    now->end.losses.push_back(out.empty() ? 0 : out[0].item<double>());
    return absl::OkStatus();
  }
  now->given[key] = out.size();
  int remote = 0;
  for (int e : from_[a.stage]) {
    const int which = setup_.plan.edges[e].output;
    if (which >= static_cast<int>(out.size())) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("an edge to stage ", setup_.plan.edges[e].to, " takes output ",
                                     which, " of ", out.size()));
    }
    if (!local(e)) {
      ++remote;
      continue;
    }
    WEFT_RETURN_IF_ERROR(fill({step, e, i, false}, which < 0 ? out : Tensors{out[which]}));
  }
  if (remote > 0) {
    now->outputs_left[key] = remote;
    now->outputs[key] = std::move(out);
  }
  return absl::OkStatus();
}

Status Runner::backward(const Action& a, Current* now) {
  const int64_t step = now->message->step;
  const int i = a.micro_batch;
  const std::pair<int, int> key{a.stage, i};
  // Gradients of one output that several edges carry are summed in the edges' order.
  Tensors gradients(from_[a.stage].empty() ? 0 : now->given[key]);
  for (int e : from_[a.stage]) {
    WEFT_ASSIGN_OR_RETURN(Tensors in, take(a, {step, e, i, true}, now->deadline));
    const int which = setup_.plan.edges[e].output;
    if (in.size() != (which < 0 ? gradients.size() : 1) ||
        which >= static_cast<int>(gradients.size())) {
      return make_error(ErrorKind::kProtocol,
                        absl::StrCat("stage ", setup_.plan.edges[e].to, " gives ", in.size(),
                                     " gradients for ", gradients.size(), " outputs"));
    }
    for (size_t k = 0; k < in.size(); ++k) {
      at::Tensor& sum = gradients[which < 0 ? k : static_cast<size_t>(which)];
      if (!in[k].defined()) continue;
      const bool first = !sum.defined() || setup_.bug == RunnerBug::kGradientOverwritten;
      sum = first ? in[k] : at::add(sum, in[k]);
    }
  }
  StageCompute& stage = *setup_.stages.at(a.stage);
  const bool whole = a.kind == ActionKind::kBackward;
  now->began = runtime_->now();
  WEFT_ASSIGN_OR_RETURN(Tensors out, whole ? stage.backward(step, i, std::move(gradients))
                                           : stage.input_grad(step, i, std::move(gradients)));
  if (whole) --now->live;
  int remote = 0;
  size_t at = 0;
  for (int e : to_[a.stage]) {
    const size_t n = now->brought[{e, i}];
    if (!local(e)) {
      ++remote;
    } else {
      const auto begin = out.begin() + static_cast<int64_t>(at);
      WEFT_RETURN_IF_ERROR(
          fill({step, e, i, true}, Tensors(begin, begin + static_cast<int64_t>(n))));
    }
    at += n;
  }
  if (remote > 0) {
    now->gradients_left[key] = remote;
    now->gradients[key] = std::move(out);
  }
  return absl::OkStatus();
}

Status Runner::send(const Action& a, Current* now) {
  const bool back = a.kind == ActionKind::kSendBackward;
  const Edge& edge = setup_.plan.edges[a.edge];
  const std::pair<int, int> key{a.stage, a.micro_batch};
  auto& made = back ? now->gradients : now->outputs;
  const auto it = made.find(key);
  if (it == made.end()) return make_error(ErrorKind::kInternal, "what it sends is not there");
  const int to = back ? edge.from : edge.to;
  PutMessage message{setup_.pipeline,
                     setup_.digest,
                     setup_.plan.placement[to],
                     now->message->step,
                     a.edge,
                     a.micro_batch,
                     back,
                     {}};
  if (back) {
    size_t at = 0;
    for (int e : to_[a.stage]) {
      const size_t n = now->brought[{e, a.micro_batch}];
      if (e == a.edge) {
        const auto begin = it->second.begin() + static_cast<int64_t>(at);
        message.tensors.assign(begin, begin + static_cast<int64_t>(n));
      }
      at += n;
    }
  } else if (edge.output < 0) {
    message.tensors = it->second;
  } else {
    message.tensors = {it->second[edge.output]};
  }
  if (--(back ? now->gradients_left : now->outputs_left)[key] == 0) made.erase(it);
  return post(a, std::move(message), /*later=*/!next_waits(now->place, now->message->step));
}

bool Runner::next_waits(size_t place, int64_t step) const {
  const std::vector<Action>& list = setup_.plan.workers[setup_.self];
  for (++place; place < list.size(); ++place) {
    const Action& a = list[place];
    const bool is_forward = a.kind == ActionKind::kForward;
    switch (a.kind) {
      case ActionKind::kSendForward:
      case ActionKind::kSendBackward:
      case ActionKind::kReceiveForward:
      case ActionKind::kReceiveBackward: continue;
      case ActionKind::kForward:
      case ActionKind::kBackward:
      case ActionKind::kInputGrad: break;
      case ActionKind::kWeightGrad:
      case ActionKind::kRecompute: return false;
      case ActionKind::kReduce:
      case ActionKind::kStep: return true;
    }
    MutexLock lock(&mutex_);
    for (int e : (is_forward ? to_ : from_)[a.stage]) {
      if (slots_.count({step, e, a.micro_batch, !is_forward}) == 0) return true;
    }
    return false;
  }
  return true;
}

Status Runner::reduce(const Action& a, Current* now) {
  answer_held();
  const absl::Duration left = now->deadline - runtime_->now();
  WEFT_RETURN_IF_ERROR(setup_.stages.at(a.stage)->reduce(now->message->step, left));
  for (size_t g = 0; g < setup_.plan.tied.size(); ++g) {
    const auto& group = setup_.plan.tied[g];
    if (std::find(group.begin(), group.end(), a.stage) == group.end()) continue;
    // The last of the group's stages here does it for all of them.
    const Action* last = nullptr;
    for (const Action& other : setup_.plan.workers[setup_.self]) {
      const bool of_group = std::find(group.begin(), group.end(), other.stage) != group.end();
      if (other.kind == ActionKind::kReduce && of_group) last = &other;
    }
    if (last != nullptr && last->stage == a.stage) {
      WEFT_RETURN_IF_ERROR(sum_tied(a, static_cast<int>(g), now));
    }
  }
  return absl::OkStatus();
}

// Summed in the order of workers, beginning with the first stage's: the same at every stage.
Status Runner::sum_tied(const Action& a, int group, Current* now) {
  const int64_t step = now->message->step;
  const int self = static_cast<int>(setup_.self);
  const int root = root_of(group);
  const auto add = [&](Tensors* sum, const Tensors& more) {
    if (sum->empty()) {
      *sum = more;
      return Status();
    }
    if (sum->size() != more.size()) {
      return make_error(ErrorKind::kProtocol, absl::StrCat("gradients of ", more.size(),
                                                           " shared weights for ", sum->size()));
    }
    for (size_t k = 0; k < sum->size(); ++k) (*sum)[k] = at::add((*sum)[k], more[k]);
    return Status();
  };
  std::set<int> others;
  Tensors sum;
  for (int s : setup_.plan.tied[group]) {
    if (setup_.plan.placement[s] != self) {
      others.insert(setup_.plan.placement[s]);
      continue;
    }
    WEFT_ASSIGN_OR_RETURN(const Tensors mine, setup_.stages.at(s)->tied_gradients());
    WEFT_RETURN_IF_ERROR(add(&sum, mine));
  }
  const int edge = -1 - group;
  const auto message = [&](int to, int worker, bool backward) {
    return PutMessage{setup_.pipeline, setup_.digest, to, step, edge, worker, backward, sum};
  };
  if (root != self) {
    WEFT_RETURN_IF_ERROR(post(a, message(root, self, /*backward=*/true)));
    WEFT_ASSIGN_OR_RETURN(sum, take(a, {step, edge, self, false}, now->deadline));
  } else {
    for (int w : others) {
      WEFT_ASSIGN_OR_RETURN(const Tensors given, take(a, {step, edge, w, true}, now->deadline));
      WEFT_RETURN_IF_ERROR(add(&sum, given));
    }
    for (int w : others) WEFT_RETURN_IF_ERROR(post(a, message(w, w, /*backward=*/false)));
  }
  for (int s : setup_.plan.tied[group]) {
    if (setup_.plan.placement[s] != self) continue;
    // Each its own: what is sent is lent, and an optimizer may write to a gradient.
    Tensors own;
    for (const at::Tensor& t : sum) own.push_back(t.clone());
    WEFT_RETURN_IF_ERROR(setup_.stages.at(s)->set_tied_gradients(std::move(own)));
  }
  return absl::OkStatus();
}

}  // namespace weft::pipeline::internal
