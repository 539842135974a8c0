#include "weft/pipeline/internal/runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "c10/core/GradMode.h"
#include "weft/pipeline/internal/runner_step.h"

namespace weft::pipeline::internal {
namespace {

// Between steps nothing else tells that the maker has ended.
constexpr absl::Duration kProbeMakerAfter = absl::Seconds(1);
constexpr absl::Duration kProbeDeadline = absl::Seconds(5);

// RUN-9.
constexpr size_t kMostHeld = 16;

using weft::internal::GuardRef;

// RUN-7: what the calling thread's current streams do for these now.
StatusOr<GuardRef> mark_of(c10::ArrayRef<Tensors> lists, const Tensors& more = {}) {
  try {
    weft::internal::StreamsUsed here;
    for (const Tensors& list : lists) {
      for (const at::Tensor& t : list) here.add(weft::internal::stream_here(t));
    }
    for (const at::Tensor& t : more) here.add(weft::internal::stream_here(t));
    return here.mark();
  } catch (...) {
    return annotate(status_from_current_exception(), "marking the work of a device");
  }
}

}  // namespace

Runner::Runner(std::shared_ptr<const Worker> worker, std::shared_ptr<Runtime> runtime,
               RunnerSetup setup)
    : worker_(std::move(worker)),
      runtime_(std::move(runtime)),
      setup_(std::move(setup)),
      metrics_(setup_.metrics != nullptr ? setup_.metrics
                                         : std::make_shared<PipelineMetrics>(nullptr)),
      from_(edges_from(setup_.plan)),
      to_(edges_to(setup_.plan)),
      changed_(runtime_.get()),
      posted_changed_(runtime_.get()),
      written_(runtime_.get()) {
  for (const Action& a : setup_.plan.workers[setup_.self]) {
    if (a.kind == ActionKind::kRecompute) recomputed_.insert({a.stage, a.micro_batch});
  }
  last_begun_ = setup_.first_step - 1;
  done_steps_ = setup_.first_step;
}

Runner::~Runner() = default;

void Runner::join() {
  std::unique_ptr<Thread> thread;
  std::unique_ptr<Thread> writer;
  {
    MutexLock lock(&mutex_);
    thread.swap(thread_);
    writer.swap(writer_);
  }
  if (thread != nullptr) thread->join();
  if (writer != nullptr) writer->join();
}

void Runner::start() {
  std::unique_ptr<Thread> writer = runtime_->spawn("pipeline-put", [this] { write_posted(); });
  std::unique_ptr<Thread> thread;
  try {
    thread = runtime_->spawn("pipeline", [this] { run(); });
  } catch (...) {
    close(status_from_current_exception());
    writer->join();
    throw;
  }
  MutexLock lock(&mutex_);
  thread_ = std::move(thread);
  writer_ = std::move(writer);
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

int Runner::root_of(int group) const {
  const auto& stages = setup_.plan.tied[group];
  return setup_.plan.placement[*std::min_element(stages.begin(), stages.end())];
}

const WorkerInfo& Runner::giver(const SlotName& name) const {
  const auto [step, edge, micro_batch, backward] = name;
  if (edge == norm_edge()) return setup_.workers[backward ? micro_batch : 0];
  if (edge < 0) return setup_.workers[backward ? micro_batch : root_of(group_of(edge))];
  const Edge& e = setup_.plan.edges[edge];
  return setup_.workers[setup_.plan.placement[backward ? e.to : e.from]];
}

std::string Runner::slot_text(const SlotName& name) const {
  const auto [step, edge, micro_batch, backward] = name;
  if (edge == norm_edge()) {
    return absl::StrCat(backward ? "part of the norm" : "norm", " of all gradients, step ", step,
                        ", from worker '", giver(name).name, "'");
  }
  if (edge < 0) {
    return absl::StrCat(backward ? "gradient" : "sum", " of the weights that stages ",
                        absl::StrJoin(setup_.plan.tied[group_of(edge)], ", "), " share, step ",
                        step, ", from worker '", giver(name).name, "'");
  }
  const Edge& e = setup_.plan.edges[edge];
  return absl::StrCat(backward ? "gradient" : "result", " of stage ", backward ? e.to : e.from,
                      ", micro-batch ", micro_batch, ", step ", step, ", from worker '",
                      giver(name).name, "'");
}

std::string Runner::where(const Action& a, int64_t step) const {
  return absl::StrCat("pipeline step ", step, ", worker '", setup_.workers[setup_.self].name,
                      "', stage ", a.stage, ", micro-batch ", a.micro_batch, ", action ",
                      to_text(setup_.plan, a));
}

std::string Runner::at_text(const Place& place) const {
  if (place.step >= 0) return where(place.action, place.step);
  return absl::StrCat("worker '", setup_.workers[setup_.self].name, "' waits for a step");
}

// ---- from other threads ------------------------------------------------------------------------

Status Runner::check_same(const PartDigest& other, std::string_view worker, int64_t step) {
  const std::string what = differences(setup_.digest, other);
  if (what.empty()) return absl::OkStatus();
  const Status why = make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("pipeline step ", step, ": workers '", setup_.workers[setup_.self].name,
                   "' and '", std::string(worker), "' differ in the pipeline's ", what));
  fail(why, /*tell_others=*/true);
  return why;
}

void Runner::begin(BeginMessage message, ReplyFn reply) {
  Status refused = check_same(message.of, setup_.maker.name, message.step);
  if (!refused.ok()) return reply(refused);
  StatusOr<GuardRef> ready = mark_of(message.inputs, message.targets);
  if (!ready.ok()) return reply(ready.status());
  {
    MutexLock lock(&mutex_);
    if (!error_.ok()) {
      refused = error_;
    } else if (message.step <= last_begun_ || begun_.count(message.step) > 0) {
      refused = make_error(ErrorKind::kProtocol,
                           absl::StrCat("step ", message.step, " begins a second time"));
    } else {
      const int64_t step = message.step;
      begun_.emplace(step, Begun{std::move(message), *std::move(ready), std::move(reply)});
    }
  }
  if (!refused.ok()) return reply(refused);
  changed_.notify_all();
}

Status Runner::fill(SlotName name, Tensors tensors, ReplyFn* reply) {
  if (setup_.bug == RunnerBug::kSlotWithoutStep) std::get<0>(name) = 0;
  WEFT_ASSIGN_OR_RETURN(GuardRef ready, mark_of(tensors));
  {
    MutexLock lock(&mutex_);
    if (!error_.ok()) return error_;                                  // RUN-3
    if (std::get<0>(name) < done_steps_ || slots_.count(name) > 0) {  // RUN-1
      return make_error(ErrorKind::kProtocol, absl::StrCat("a second time: ", slot_text(name)));
    }
    slots_.emplace(name, Slot{std::move(tensors), std::move(ready)});
    if (reply != nullptr) held_.push_back(std::exchange(*reply, nullptr));
  }
  changed_.notify_all();
  return absl::OkStatus();
}

void Runner::fail(const Status& why, bool tell_others) {
  bool failed = false;  // it was not closed
  std::map<int64_t, Begun> begun;
  std::map<SlotName, Slot> slots;
  {
    MutexLock lock(&mutex_);
    if (!error_.ok()) return;
    error_ = why;
    failed = !closed_;
    if (failed) metrics_->failures->add();
    begun.swap(begun_);
    if (setup_.bug != RunnerBug::kSlotsStay) slots.swap(slots_);
  }
  changed_.notify_all();
  posted_changed_.notify_all();
  written_.notify_all();
  for (const auto& [stage, compute] : setup_.stages) compute->cancel(why);
  if (tell_others) {
    const ErrorDetails details = error_details(why);
    const FailMessage message{
        setup_.pipeline, static_cast<int64_t>(why.code()), static_cast<int64_t>(details.kind),
        std::string(why.message()),
        details.origin.empty() ? setup_.workers[setup_.self].name : details.origin};
    for (size_t w = 0; w < setup_.workers.size(); ++w) {
      if (w == setup_.self) continue;
      // A worker that does not hear of it is gone, or waits until its step's deadline.
      call(*worker_, setup_.workers[w], "@pipeline.fail", message,
           {.deadline = absl::Seconds(10),
            .retry = Retry::kAtMostOnce,
            .backpressure = Backpressure::kWait},
           [](const StatusOr<Payload>&) {});
    }
  }
  answer_held();
  for (auto& [step, b] : begun) b.reply(why);
  if (failed && setup_.on_failed != nullptr) setup_.on_failed();
}

void Runner::lost(const Status& why, bool tell_others) {
  Place place;
  {
    MutexLock lock(&mutex_);
    if (!error_.ok()) return;
    place = place_;
  }
  ErrorDetails details = error_details(why);
  details.kind = ErrorKind::kPeerLost;
  fail(with_details(
           Status(why.code(), absl::StrCat(std::string(why.message()), "; ", at_text(place))),
           details),
       tell_others);
}

void Runner::close(const Status& why) {
  {
    MutexLock lock(&mutex_);
    closed_ = true;
  }
  fail(why, /*tell_others=*/false);
  changed_.notify_all();
}

bool Runner::thread_has_ended() const {
  MutexLock lock(&mutex_);
  return thread_ended_;
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
  if (!error_.ok()) return std::string(error_.message());
  if (place_.step < 0) return "waits for a step";
  return absl::StrCat(to_text(setup_.plan, place_.action), " of step ", place_.step,
                      waits_.has_value() ? ", waits for the " + slot_text(*waits_) : "");
}

// ---- the thread --------------------------------------------------------------------------------

std::optional<Runner::Begun> Runner::next() {
  absl::Time probe_at = runtime_->now() + kProbeMakerAfter;
  while (true) {
    {
      MutexLock lock(&mutex_);
      while (true) {
        if (!error_.ok() || closed_) return std::nullopt;
        if (auto first = begun_.extract(last_begun_ + 1); !first.empty()) {
          ++last_begun_;
          return std::move(first.mapped());
        }
        place_ = {};
        if (runtime_->now() >= probe_at || !held_.empty()) break;
        (void)changed_.wait_until(&mutex_, probe_at);
      }
    }
    answer_held();
    if (runtime_->now() < probe_at) continue;
    probe(setup_.maker, "@pipeline.touch",
          absl::StrCat(at_text({}), " of worker '", setup_.maker.name, "'"));
    probe_at = runtime_->now() + kProbeMakerAfter;
  }
}

// RUN-6.
void Runner::probe(const WorkerInfo& peer, std::string_view method, const std::string& context) {
  if (peer == setup_.workers[setup_.self]) return;
  {
    MutexLock lock(&mutex_);
    if (!error_.ok() || !probing_.insert(peer).second) return;
  }
  call(*worker_, peer, method, PipelineMessage{setup_.pipeline},
       {.deadline = kProbeDeadline,
        .retry = Retry::kAtMostOnce,
        .backpressure = Backpressure::kWait},
       [weak = weak_from_this(), peer, context](const StatusOr<Payload>& answer) {
         if (const auto self = weak.lock()) self->on_probed(peer, context, answer);
       });
}

void Runner::on_probed(const WorkerInfo& peer, const std::string& context,
                       const StatusOr<Payload>& answer) {
  {
    MutexLock lock(&mutex_);
    probing_.erase(peer);
  }
  if (answer.ok()) return;
  // What the peer says has ended its part; or that there is no peer any more. That it was not
  // reached in time says nothing.
  const bool said = !error_details(answer.status()).origin.empty();
  if (!said && error_kind(answer.status()) != ErrorKind::kPeerLost) return;
  if (!said && setup_.on_ended != nullptr) setup_.on_ended(peer, answer.status());
  fail(annotate(answer.status(), context), /*tell_others=*/true);
}

void Runner::run() {
  const c10::AutoGradMode grad(true);
  while (auto begun = next()) {
    StatusOr<EndMessage> end = run_step(&*begun);
    if (end.ok() && setup_.copies != nullptr) {
      if (const Status kept = keep_and_wait(); !kept.ok()) end = kept;
    }
    if (setup_.publish != nullptr) {
      try {
        setup_.publish();
      } catch (...) {
        if (end.ok()) end = status_from_current_exception();
      }
    }
    if (end.ok()) {
      begun->reply(encode(*end));
      continue;
    }
    fail(end.status(), /*tell_others=*/true);
    const Status first = status();
    for (const auto& [stage, compute] : setup_.stages) compute->drop(first);
    begun->reply(first);
  }
  MutexLock lock(&mutex_);
  thread_ended_ = true;
}

StatusOr<EndMessage> Runner::run_step(Begun* begun) {
  Current now;
  const absl::Time began = runtime_->now();
  now.message = &begun->message;
  if (setup_.deadline < absl::InfiniteDuration()) now.deadline = runtime_->now() + setup_.deadline;
  // What LibTorch throws of a device is an error of the step, as what the stages return.
  try {
    follow_published(*worker_);
    weft::internal::use_here(begun->ready, begun->message.targets);
    for (const Tensors& one : begun->message.inputs) weft::internal::use_here(begun->ready, one);
  } catch (...) {
    return status_from_current_exception();
  }
  WEFT_RETURN_IF_ERROR(run_actions(begun, &now));
  metrics_->steps->add();
  metrics_->step_seconds->observe(absl::ToDoubleSeconds(runtime_->now() - began));
  MutexLock lock(&mutex_);
  done_steps_ = begun->message.step + 1;
  return std::move(now.end);
}

Status Runner::run_actions(Begun* begun, Current* now) {
  for (const auto& [stage, compute] : setup_.stages) {
    if (begun->message.optimizer_options.empty()) break;
    WEFT_RETURN_IF_ERROR(compute->set_options(begun->message.optimizer_options));
  }
  const std::vector<Action>& list = setup_.plan.workers[setup_.self];
  for (size_t i = 0; i < list.size(); ++i) {
    const Action& a = list[i];
    if (a.kind == ActionKind::kStep && has_barrier() && !begun->message.forward_only) {
      now->put_off.push_back(i);
      if (setup_.record) now->end.times.resize(now->end.times.size() + 2);
      continue;
    }
    if (begun->message.forward_only && a.kind != ActionKind::kForward &&
        a.kind != ActionKind::kSendForward) {
      continue;
    }
    now->began = runtime_->now();
    now->place = i;
    const size_t count = together_from(i);
    Action at = a;
    const Status status = count > 1 ? weight_grads(i, count, now, &at) : run_action(a, now);
    {
      MutexLock lock(&mutex_);
      if (!error_.ok()) return error_;  // another worker's, the cause of this one
    }
    if (!status.ok()) return annotate(status, where(at, begun->message.step));
    answer_held(kMostHeld);
    i += count - 1;
    if (!setup_.record) continue;
    // What is taken layer by layer is divided evenly among its actions.
    const absl::Time ended = runtime_->now();
    const absl::Duration each = (ended - now->began) / static_cast<int64_t>(count);
    for (size_t k = 1; k <= count; ++k) {
      const absl::Time end = k == count ? ended : now->began + each;
      now->end.times.push_back(absl::ToUnixNanos(now->began));
      now->end.times.push_back(absl::ToUnixNanos(end));
      now->began = end;
    }
  }
  return step_together(now);
}

}  // namespace weft::pipeline::internal
