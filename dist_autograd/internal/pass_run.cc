// What a worker does in a pass: it runs what can be run, and says what there is to say.

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/dist_autograd/internal/pass.h"

namespace weft::internal {
namespace {

// Gradients above this go alone: what names something is kept until all below have answered.
constexpr size_t kRideBytes = 64 << 10;

size_t bytes_of(const MessageGradients& gradients) {
  size_t bytes = 0;
  for (const at::Tensor& one : gradients.tensors) {
    if (one.defined()) bytes += one.is_sparse() ? kRideBytes + 1 : one.nbytes();
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
  if (running_ || state_ == State::kAborted) return false;
  if (state_ == State::kRunning && !part_done_ && has_work_locked()) {
    started_ = true;
    running_ = true;
    return true;
  }
  flush_locked({}, todo);
  return false;
}

void BackwardPass::run_elsewhere() {
  post_or_run(links_->executor().get(), [self = shared_from_this()] { self->run_all(); });
}

std::map<uint64_t, std::vector<at::Tensor>> BackwardPass::next_locked(Todo* todo) {
  for (Arrived& one : std::exchange(inbox_, {})) take_locked(std::move(one), todo);
  std::map<uint64_t, std::vector<at::Tensor>> fed;
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

Status BackwardPass::run_graph(std::map<uint64_t, std::vector<at::Tensor>> fed,
                               std::vector<PassGraph::Outgoing>* out) {
  try {
    for (auto& [message, gradients] : fed) {
      if (value_or_throw(graph_->feed(message, std::move(gradients)))) continue;
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

Status BackwardPass::end_graph() {
  try {
    graph_->run_at_end();
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

void BackwardPass::run_all() {
  for (bool again = true; again;) {
    Todo todo;
    std::map<uint64_t, std::vector<at::Tensor>> fed;
    {
      MutexLock lock(&mutex_);
      fed = next_locked(&todo);
    }
    perform(std::exchange(todo, {}));
    std::vector<PassGraph::Outgoing> out;
    Status failed = run_graph(std::move(fed), &out);
    if (failed.ok() && is_last_run()) failed = end_graph();
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
    }
    perform(std::move(todo));
  }
}

void BackwardPass::flush_locked(std::vector<PassGraph::Outgoing> gradients, Todo* todo) {
  std::map<WorkerKey, Advance> out;
  std::map<WorkerKey, size_t> bytes;
  std::vector<std::pair<WorkerKey, Advance>> alone;
  for (auto& [origin, named] : std::exchange(unsent_, {})) out[origin].named = std::move(named);
  for (PassGraph::Outgoing& one : gradients) {
    const size_t size = bytes_of(one.gradients);
    if (bytes[one.origin] + size > kRideBytes) {
      alone.emplace_back(one.origin, Advance{})
          .second.gradients.push_back(std::move(one.gradients));
    } else {
      bytes[one.origin] += size;
      out[one.origin].gradients.push_back(std::move(one.gradients));
    }
  }
  if (const auto to_root = out.find(id_.root); to_root != out.end() && !running_) {
    to_root->second.done = std::exchange(unsaid_, false);
    // The root answers at once, with nothing: so this worker's own answer can go along.
    if (owed_ != nullptr && owed_to_ == id_.root && deficit_ == 1 &&
        !to_root->second.named.empty()) {
      to_root->second.answer = Advanced{report_locked()};
      answer_locked(Advanced{.carried = true}, todo);
    }
  }
  for (auto& [to, advance] : out) send_locked(to, std::move(advance), todo);
  for (auto& [to, advance] : alone) send_locked(to, std::move(advance), todo);
  if (owed_ != nullptr && deficit_ == 0 && !(running_ && final_)) {
    const bool done = owed_to_ == id_.root && std::exchange(unsaid_, false);
    answer_locked(Advanced{report_locked(), done}, todo);
  }
  if (!running_ && std::exchange(unsaid_, false)) {
    todo->push_back([self = shared_from_this()] { self->say_done(self->deadline_); });
  }
}

void BackwardPass::send_locked(const WorkerKey& to, Advance advance, Todo* todo) {
  advance.retain = retain_;
  advance.fast = fast_;
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
