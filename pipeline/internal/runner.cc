#include "weft/pipeline/internal/runner.h"

#include <algorithm>

#include "ATen/ops/add.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "c10/core/GradMode.h"

namespace weft::pipeline::internal {

struct Runner::Current {
  BeginMessage* message = nullptr;
  EndMessage end{};
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time began = absl::InfinitePast();  // the action that runs: with all that it takes
  int64_t live = 0;
  // What a stage made and this worker has not sent yet, by (stage, micro-batch): outputs, and
  // gradients of inputs with how many come from each edge.
  std::map<std::pair<int, int>, Tensors> outputs{};
  std::map<std::pair<int, int>, Tensors> gradients{};
  std::map<std::pair<int, int>, int> outputs_left{};
  std::map<std::pair<int, int>, int> gradients_left{};
  // How many tensors each edge brought to a forward, and how many outputs one gave.
  std::map<std::pair<int, int>, size_t> brought{};
  std::map<std::pair<int, int>, size_t> given{};
};

Runner::Runner(std::shared_ptr<const Worker> worker, std::shared_ptr<Runtime> runtime,
               RunnerSetup setup)
    : worker_(std::move(worker)),
      runtime_(std::move(runtime)),
      setup_(std::move(setup)),
      from_(edges_from(setup_.plan)),
      to_(edges_to(setup_.plan)),
      changed_(runtime_.get()) {
  for (const Action& a : setup_.plan.workers[setup_.self]) {
    if (a.kind == ActionKind::kRecompute) recomputed_.insert({a.stage, a.micro_batch});
  }
}

Runner::~Runner() = default;

void Runner::join() {
  if (thread_ != nullptr) thread_->join();
  thread_ = nullptr;
}

void Runner::start() {
  thread_ = runtime_->spawn("pipeline", [this] { run(); });
}

bool Runner::local(int edge) const {
  const Edge& e = setup_.plan.edges[edge];
  return setup_.plan.placement[e.from] == setup_.plan.placement[e.to];
}

bool Runner::concerns(const WorkerInfo& worker) const {
  return std::any_of(setup_.workers.begin(), setup_.workers.end(), [&](const WorkerInfo& w) {
    return w.id == worker.id && w.incarnation == worker.incarnation;
  });
}

std::string Runner::slot_text(const SlotName& name) const {
  const auto [step, edge, micro_batch, backward] = name;
  const Edge& e = setup_.plan.edges[edge];
  const int from = backward ? e.to : e.from;
  return absl::StrCat(backward ? "gradient" : "result", " of stage ", from, ", micro-batch ",
                      micro_batch, ", step ", step, ", from worker '",
                      setup_.workers[setup_.plan.placement[from]].name, "'");
}

std::string Runner::where(const Action& a, int64_t step) const {
  return absl::StrCat("pipeline step ", step, ", worker '", setup_.workers[setup_.self].name,
                      "', stage ", a.stage, ", micro-batch ", a.micro_batch, ", action ",
                      to_text(setup_.plan, a));
}

// ---- from other threads ------------------------------------------------------------------------

void Runner::begin(BeginMessage message, ReplyFn reply) {
  Status refused;
  {
    MutexLock lock(&mutex_);
    if (!error_.ok()) {
      refused = error_;
    } else if (message.step != last_begun_ + 1) {
      refused = make_error(ErrorKind::kProtocol,
                           absl::StrCat("step ", message.step, " begins after step ", last_begun_));
    } else {
      last_begun_ = message.step;
      begun_.push_back({std::move(message), std::move(reply)});
    }
  }
  if (!refused.ok()) return reply(refused);
  changed_.notify_all();
}

Status Runner::put(PutMessage message) {
  const Plan& plan = setup_.plan;
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
  return fill({message.step, static_cast<int>(message.edge), static_cast<int>(message.micro_batch),
               message.backward},
              std::move(message.tensors));
}

Status Runner::fill(SlotName name, Tensors tensors) {
  {
    MutexLock lock(&mutex_);
    if (!error_.ok()) return error_;                                  // RUN-3
    if (std::get<0>(name) < done_steps_ || slots_.count(name) > 0) {  // RUN-1
      return make_error(ErrorKind::kProtocol, absl::StrCat("a second time: ", slot_text(name)));
    }
    slots_.emplace(name, std::move(tensors));
  }
  changed_.notify_all();
  return absl::OkStatus();
}

void Runner::fail(const Status& why, bool tell_others) {
  std::deque<Begun> begun;
  std::map<SlotName, Tensors> slots;
  {
    MutexLock lock(&mutex_);
    if (!error_.ok()) return;
    error_ = why;
    begun.swap(begun_);
    slots.swap(slots_);
  }
  changed_.notify_all();
  if (tell_others) {
    const ErrorDetails details = error_details(why);
    const FailMessage message{
        setup_.pipeline, static_cast<int64_t>(why.code()), static_cast<int64_t>(details.kind),
        std::string(why.message()),
        details.origin.empty() ? setup_.workers[setup_.self].name : details.origin};
    for (size_t w = 0; w < setup_.workers.size(); ++w) {
      if (w == setup_.self) continue;
      // Who does not hear of it is gone, or waits until its step's deadline.
      call(*worker_, setup_.workers[w], "@pipeline.fail", message,
           {.deadline = absl::Seconds(10),
            .retry = Retry::kAtMostOnce,
            .backpressure = Backpressure::kWait},
           [](const StatusOr<Payload>&) {});
    }
  }
  for (Begun& b : begun) b.reply(why);
}

void Runner::close(const Status& why) {
  {
    MutexLock lock(&mutex_);
    closed_ = true;
  }
  fail(why, /*tell_others=*/false);
  changed_.notify_all();
}

Status Runner::status() const {
  MutexLock lock(&mutex_);
  return error_;
}

Runner::Counts Runner::counts() const {
  MutexLock lock(&mutex_);
  return {static_cast<int64_t>(slots_.size()), static_cast<int64_t>(begun_.size()), done_steps_,
          sends_};
}

std::string Runner::doing() const {
  MutexLock lock(&mutex_);
  return error_.ok() ? doing_ : std::string(error_.message());
}

// ---- the thread --------------------------------------------------------------------------------

std::optional<Runner::Begun> Runner::next() {
  MutexLock lock(&mutex_);
  while (true) {
    if (!error_.ok() || closed_) return std::nullopt;
    if (!begun_.empty()) {
      Begun first = std::move(begun_.front());
      begun_.pop_front();
      return first;
    }
    doing_ = "waits for a step";
    (void)changed_.wait_until(&mutex_, absl::InfiniteFuture());
  }
}

void Runner::run() {
  const c10::AutoGradMode grad(true);
  while (auto begun = next()) {
    StatusOr<EndMessage> end = run_step(&begun->message);
    if (end.ok()) {
      begun->reply(encode(*end));
      continue;
    }
    fail(end.status(), /*tell_others=*/true);
    for (const auto& [stage, compute] : setup_.stages) compute->drop();
    begun->reply(status());  // the first one
  }
}

StatusOr<EndMessage> Runner::run_step(BeginMessage* message) {
  Current now;
  now.message = message;
  if (setup_.deadline < absl::InfiniteDuration()) now.deadline = runtime_->now() + setup_.deadline;
  for (const Action& a : setup_.plan.workers[setup_.self]) {
    now.began = runtime_->now();
    const Status status = run_action(a, &now);
    {
      MutexLock lock(&mutex_);
      if (!error_.ok()) return error_;  // another worker's, the cause of this one
    }
    if (!status.ok()) return annotate(status, where(a, message->step));
    if (setup_.record) {
      now.end.times.push_back(absl::ToUnixNanos(now.began));
      now.end.times.push_back(absl::ToUnixNanos(runtime_->now()));
    }
  }
  MutexLock lock(&mutex_);
  done_steps_ = message->step + 1;
  return now.end;
}

Status Runner::run_action(const Action& a, Current* now) {
  const int64_t step = now->message->step;
  {
    MutexLock lock(&mutex_);
    doing_ = absl::StrCat(to_text(setup_.plan, a), " of step ", step);
  }
  const auto compute = setup_.stages.find(a.stage);
  if (compute == setup_.stages.end()) return make_error(ErrorKind::kInternal, "no such stage here");
  StageCompute& stage = *compute->second;
  switch (a.kind) {
    case ActionKind::kForward: return forward(a, now);
    case ActionKind::kBackward:
    case ActionKind::kInputGrad: return backward(a, now);
    case ActionKind::kWeightGrad: --now->live; return stage.weight_grad(step, a.micro_batch);
    case ActionKind::kRecompute: return stage.recompute(step, a.micro_batch);
    case ActionKind::kSendForward:
    case ActionKind::kSendBackward: return send(a, now);
    case ActionKind::kReceiveForward:
    case ActionKind::kReceiveBackward: return absl::OkStatus();  // RUN-4
    case ActionKind::kReduce:
      return make_error(ErrorKind::kUnimplemented, "this pipeline has no reducer");
    case ActionKind::kStep: return stage.step(step);
  }
  return absl::OkStatus();
}

StatusOr<Tensors> Runner::take(SlotName name, absl::Time deadline) {
  MutexLock lock(&mutex_);
  while (true) {
    if (!error_.ok()) return error_;
    const auto it = slots_.find(name);
    if (it != slots_.end()) {
      Tensors tensors = std::move(it->second);
      slots_.erase(it);
      return tensors;
    }
    if (runtime_->now() >= deadline) {
      return make_error(ErrorKind::kDeadline,
                        absl::StrCat("the step's time of ", absl::FormatDuration(setup_.deadline),
                                     " is over, waiting for the ", slot_text(name)));
    }
    (void)changed_.wait_until(&mutex_, deadline);
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
    WEFT_ASSIGN_OR_RETURN(Tensors in, take({step, e, i, false}, now->deadline));
    now->brought[{e, i}] = in.size();
    for (at::Tensor& t : in) call.inputs.push_back(std::move(t));
  }
  call.is_last = from_[a.stage].empty();
  call.recompute = recomputed_.count(key) > 0;
  if (call.is_last) {
    if (i < static_cast<int>(now->message->targets.size())) {
      call.target = std::move(now->message->targets[i]);
    }
    if (i < static_cast<int>(now->message->scales.size())) call.scale = now->message->scales[i];
  }
  const bool is_last = call.is_last;
  now->began = runtime_->now();
  WEFT_ASSIGN_OR_RETURN(Tensors out, setup_.stages.at(a.stage)->forward(std::move(call)));
  now->end.peak_activations = std::max(now->end.peak_activations, ++now->live);
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
    WEFT_ASSIGN_OR_RETURN(Tensors in, take({step, e, i, true}, now->deadline));
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
      sum = sum.defined() ? at::add(sum, in[k]) : in[k];
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
  PutMessage message{setup_.pipeline, now->message->step, a.edge, a.micro_batch, back, {}};
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
  // The tensors are borrowed until the answer: no stage may write to them before.
  std::vector<std::pair<at::Tensor, uint32_t>> lent;
  for (const at::Tensor& t : message.tensors) {
    if (t.defined() && !t.is_inference()) lent.emplace_back(t, t._version());
  }
  const int to = back ? edge.from : edge.to;
  const WorkerInfo& peer = setup_.workers[setup_.plan.placement[to]];
  {
    MutexLock lock(&mutex_);
    ++sends_;
  }
  CallOptions options{.retry = Retry::kAtMostOnce, .backpressure = Backpressure::kWait};
  options.deadline = setup_.deadline;
  call(*worker_, peer, "@pipeline.put", message, options,
       [weak = weak_from_this(), a, step = message.step, lent = std::move(lent),
        name = peer.name](const StatusOr<Payload>& answer) {
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
       });
  return absl::OkStatus();
}

}  // namespace weft::pipeline::internal
