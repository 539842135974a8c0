// What a worker does in a pass: it runs what can be run, and says what there is to say.

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/dist_autograd/internal/pass.h"

namespace weft::internal {
namespace {

// No more than this goes along with what names something, which is kept until all below have
// answered; nor in one message. Half of it costs less to keep for that time than a message of its
// own, and its answer, cost.
constexpr size_t kRideBytes = 512 << 10;

size_t bytes_to_ride(const MessageGradients& gradients) {
  size_t bytes = 0;
  for (const at::Tensor& one : gradients.tensors) {
    // One on a device goes when it has been computed: nothing else is to wait for that.
    const bool alone = on_device(one) || (one.defined() && one.is_sparse());
    bytes += alone ? kRideBytes + 1 : (one.defined() ? one.nbytes() : 0);
  }
  return bytes;
}

}  // namespace

bool BackwardPass::has_work_locked() const {
  if (is_root() && !started_) return true;
  if (!inbox_.empty()) return true;
  if (final_ && !released_ && (started_ || graph_->complete())) return true;
  for (const auto& [message, gradients] : parked_) {
    if (final_ || graph_->is_named(message)) return true;
  }
  return false;
}

bool BackwardPass::go_on_locked(Todo* todo) {
  if (running_ || state_ == State::kAborted) {
    if (running_ && ending_ && state_ == State::kRunning) flush_locked({}, todo);
    add_later_locked(todo);
    return false;
  }
  if (state_ == State::kRunning && !part_done_ && has_work_locked()) {
    started_ = true;
    running_ = true;
    return true;
  }
  flush_locked({}, todo);
  add_later_locked(todo);
  return false;
}

void BackwardPass::add_later_locked(Todo* todo) {
  for (auto& one : std::exchange(later_, {})) todo->push_back(std::move(one));
}

void BackwardPass::run_elsewhere() {
  Todo todo;
  bool called = false;
  {
    MutexLock lock(&mutex_);
    called = call_waiter_locked(&todo);
  }
  perform(std::move(todo));
  if (called) return;
  post_or_run(links_->executor().get(), [self = shared_from_this()] { self->serve(); });
}

bool BackwardPass::call_waiter_locked(Todo* todo) {
  if (!call_.has_value()) return false;
  todo->push_back([call = std::move(*call_)]() mutable { call.try_set({}); });
  call_.reset();
  return true;
}

void BackwardPass::wait_until(absl::Time end) {
  while (true) {
    serve();
    Promise<void> call(links_->executor());
    const Future<void> called = call.future();
    call.state()->set_wait_driver(links_->driver());
    {
      MutexLock lock(&mutex_);
      if (state_ != State::kRunning) return;
      if (!inbox_.empty() && !running_) continue;
      call_.emplace(std::move(call));
    }
    const absl::Duration left = end - links_->runtime().now();
    if (left <= absl::ZeroDuration() || !called.try_wait(left).ok()) break;
  }
  Todo todo;
  MutexLock lock(&mutex_);
  call_waiter_locked(&todo);  // clears call_: this thread waits no longer
  lock.unlock();
  perform(std::move(todo));
}

std::map<uint64_t, MessageGradients> BackwardPass::next_locked(Todo* todo) {
  for (Arrived& one : std::exchange(inbox_, {})) take_locked(std::move(one), todo);
  std::map<uint64_t, MessageGradients> fed;
  if (state_ != State::kRunning) return fed;
  if (final_) {
    if (!std::exchange(released_, true)) graph_->release();
  } else if (!std::exchange(held_, true)) {
    graph_->hold(recorded_.all());  // LIVE-3
  }
  for (auto at = parked_.begin(); at != parked_.end();) {
    const auto now = at++;
    if (final_ || graph_->is_named(now->first)) fed.insert(parked_.extract(now));
  }
  return fed;
}

Status BackwardPass::run_graph(std::map<uint64_t, MessageGradients> fed,
                               std::vector<PassGraph::Outgoing>* out) {
  try {
    for (auto& [message, gradients] : fed) {
      if (value_or_throw(graph_->feed(std::move(gradients)))) continue;
      return make_error(ErrorKind::kProtocol, absl::StrCat("a gradient for message ", message,
                                                           ", which nobody has named"));
    }
    graph_->run(out);
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

bool BackwardPass::is_last_run() const {
  MutexLock lock(&mutex_);
  return state_ == State::kRunning && final_ && graph_->complete() && !has_work_locked();
}

Status BackwardPass::begin_graph() {
  if (std::exchange(has_effect_, true)) return absl::OkStatus();
  std::string effect;
  {
    MutexLock lock(&mutex_);
    effect = options_.effect;
  }
  if (effect.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(auto made, links_->make_effect(effect));
  graph_->set_effect(std::move(made));
  return absl::OkStatus();
}

Status BackwardPass::end_graph() {
  try {
    std::string outcome = graph_->run_at_end();
    MutexLock lock(&mutex_);
    outcome_ = std::move(outcome);
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

void BackwardPass::begin_trace_locked() {
  PassTrace* const trace = links_->trace();
  if (trace == nullptr || std::exchange(traced_, true)) return;
  trace->begun(id_, self_, links_->name_of(id_.root));
  graph_->set_trace(trace);
}

void BackwardPass::trace_run(PassTrace* trace, absl::Time start,
                             const std::vector<PassGraph::Outgoing>& out) {
  const auto nodes = static_cast<int64_t>(graph_->take_ran());
  PassTrace::Others sent;
  for (const PassGraph::Outgoing& one : out) sent.emplace_back(one.origin, one.gradients.message);
  if (nodes > 0) trace->ran(id_, self_, start, std::exchange(fed_untraced_, {}), sent, nodes);
  MutexLock lock(&mutex_);
  work_.nodes += nodes;
  for (const PassGraph::Outgoing& one : out) work_.send(one.gradients);
}

void BackwardPass::run_all() {
  PassTrace* const trace = links_->trace();
  for (bool again = true; again;) {
    Todo todo;
    std::map<uint64_t, MessageGradients> fed;
    {
      MutexLock lock(&mutex_);
      fed = next_locked(&todo);
    }
    perform(std::exchange(todo, {}));
    const absl::Time start = trace == nullptr ? absl::InfinitePast() : trace->now();
    if (trace != nullptr) {
      for (const auto& [message, gradients] : fed) fed_untraced_.push_back(message);
    }
    std::vector<PassGraph::Outgoing> out;
    Status failed = begin_graph();
    if (failed.ok()) failed = run_graph(std::move(fed), &out);
    const bool ends = failed.ok() && is_last_run();
    if (ends && graph_->has_at_end()) {
      if (trace != nullptr) trace_run(trace, start, out);
      send_before_end(std::exchange(out, {}));
    }
    if (ends) failed = end_graph();
    if (trace != nullptr) trace_run(trace, start, out);
    std::unique_ptr<PassGraph> dropped;  // without the mutex
    {
      MutexLock lock(&mutex_);
      ++events_;
      if (state_ == State::kRunning && !failed.ok()) fail_locked(failed, &todo);
      if (state_ != State::kRunning) {
        again = running_ = false;
        dropped = std::move(graph_);
      } else {
        again = running_ = has_work_locked();
        if (!again && final_ && graph_->complete()) {
          part_done_locked(&todo);
          dropped = std::move(graph_);
        }
        flush_locked(std::move(out), &todo);
      }
      add_later_locked(&todo);
    }
    perform(std::move(todo));
  }
}

void BackwardPass::send_before_end(std::vector<PassGraph::Outgoing> gradients) {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kRunning) return;
    ending_ = true;
    flush_locked(std::move(gradients), &todo);
    add_later_locked(&todo);
  }
  perform(std::move(todo));
}

void BackwardPass::flush_locked(std::vector<PassGraph::Outgoing> gradients, Todo* todo) {
  std::map<WorkerKey, Advance> out;
  std::map<WorkerKey, size_t> bytes;
  std::vector<std::pair<WorkerKey, Advance>> apart;
  std::map<WorkerKey, std::pair<size_t, size_t>> open;  // the last of those, and its bytes
  Todo answers;                                         // others wait for the rest
  for (auto& [origin, named] : std::exchange(unsent_, {})) out[origin].named = std::move(named);
  for (PassGraph::Outgoing& one : gradients) {
    const size_t size = bytes_to_ride(one.gradients);
    Advance& first = out[one.origin];
    size_t& riding = first.named.empty() ? bytes[one.origin] : riding_[one.origin];
    if (riding + size <= kRideBytes) {
      riding += size;
      first.gradients.push_back(std::move(one.gradients));
      continue;
    }
    auto at = open.find(one.origin);
    if (at == open.end() || at->second.second + size > kRideBytes) {
      apart.emplace_back(one.origin, Advance{});
      at = open.insert_or_assign(one.origin, std::pair(apart.size() - 1, size_t{0})).first;
    }
    at->second.second += size;
    apart[at->second.first].second.gradients.push_back(std::move(one.gradients));
  }
  std::erase_if(out, [](const auto& one) {
    return one.second.named.empty() && one.second.gradients.empty();
  });
  if (const auto to_root = out.find(id_.root); to_root != out.end() && !running_) {
    to_root->second.done = std::exchange(unsaid_, false);
    if (to_root->second.done) to_root->second.outcome = outcome_;
    // The root answers at once, with nothing: so this worker's own answer can go along.
    if (owed_ != nullptr && owed_to_ == id_.root && deficit_ == 1 &&
        !to_root->second.named.empty()) {
      to_root->second.answer = Advanced{report_locked()};
      answer_locked(Advanced{.carried = true}, &answers);
    }
  }
  for (auto& [to, advance] : out) send_locked(to, std::move(advance), todo);
  for (auto& [to, advance] : apart) send_locked(to, std::move(advance), todo);
  for (auto& one : answers) todo->push_back(std::move(one));
  if (owed_ != nullptr && deficit_ == 0 && !(running_ && final_ && !ending_)) {
    const bool done = owed_to_ == id_.root && std::exchange(unsaid_, false);
    answer_locked(Advanced{report_locked(), done, false, done ? outcome_ : ""}, todo);
  }
  if (!running_ && std::exchange(unsaid_, false)) {
    todo->push_back([self = shared_from_this()] { self->say_done(self->deadline_); });
  }
}

void BackwardPass::send_locked(const WorkerKey& to, Advance advance, Todo* todo) {
  advance.retain = options_.retain;
  advance.fast = options_.fast;
  if (!advance.named.empty()) advance.effect = options_.effect;
  todo->push_back([self = shared_from_this(), to, advance = std::move(advance)]() mutable {
    OnAdvanced done;
    if (!advance.named.empty()) {
      done = [self, to](StatusOr<Advanced> answer) { self->advanced(to, std::move(answer)); };
    } else {
      const std::string what =
          absl::StrCat("the gradient of message ", advance.gradients.front().message);
      done = [taken = self->failing_with(what, to)](const StatusOr<Advanced>& answer) mutable {
        taken(answer.status());
      };
    }
    self->links_->advance(to, self->id_, self->deadline_, std::move(advance), std::move(done));
  });
}

void BackwardPass::answer_locked(Advanced answer, Todo* todo) {
  todo->push_back([reply = std::exchange(owed_, nullptr), answer = std::move(answer)]() mutable {
    reply(std::move(answer));
  });
}

}  // namespace weft::internal
