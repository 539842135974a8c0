// How a pass ends: done everywhere, or with an error everywhere.

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/util/Type.h"
#include "weft/dist_autograd/internal/pass.h"

namespace weft::internal {
namespace {

constexpr absl::Duration kAskFor = absl::Seconds(5);

}  // namespace

void BackwardPass::part_done_locked(Todo* todo) {
  part_done_ = true;
  if (traced_) links_->trace()->ended(id_, self_, work_, absl::OkStatus());
  leaves_ = graph_->take_leaves();
  if (is_root()) return finish_if_done_locked(todo);
  state_ = State::kDone;
  unsaid_ = true;
}

Status BackwardPass::failed_locked() const {
  return make_error(ErrorKind::kCancelled,
                    absl::StrCat(to_string(id_), " has failed: ", std::string(error_.message())));
}

Status BackwardPass::not_root() const {
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat(to_string(id_), " has another root than this worker"));
}

Status BackwardPass::on_done(const WorkerKey& from, const std::string& outcome) {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    if (state_ == State::kAborted) return failed_locked();
    if (!is_root()) return not_root();
    ++events_;
    done_.emplace(from, outcome);
    finish_if_done_locked(&todo);
  }
  perform(std::move(todo));
  return absl::OkStatus();
}

LeafOutcomes BackwardPass::outcomes() const {
  MutexLock lock(&mutex_);
  LeafOutcomes all = done_;
  all.emplace(self_, outcome_);
  return all;
}

void BackwardPass::say_done(absl::Time until) {
  std::string outcome;
  {
    MutexLock lock(&mutex_);
    outcome = outcome_;
  }
  links_->done(id_.root, id_, until, outcome, [self = shared_from_this()](const Status& heard) {
    if (heard.ok()) return;
    if (error_kind(heard) == ErrorKind::kCancelled) return self->drop();
    self->fail(annotate(heard, absl::StrCat("saying that its part is done to '",
                                            self->links_->name_of(self->id_.root), "'")));
  });
}

void BackwardPass::ask_root() {
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kDone || is_root() || std::exchange(has_asked_, true)) return;
  }
  say_done(links_->runtime().now() + kAskFor);
}

void BackwardPass::finish_if_done_locked(Todo* todo) {
  if (state_ != State::kRunning || !part_done_ || !wave_over_) return;
  bool all = true;
  for (const auto& [worker, is_final] : found_) {
    if (worker == self_ || done_.contains(worker)) continue;
    all = false;
    // It was not known to take part when it went.
    if (const auto gone = gone_.find(worker); gone != gone_.end()) {
      return fail_locked(gone->second, todo);
    }
  }
  if (!all) return;
  state_ = State::kDone;
  call_waiter_locked(todo);
}

void BackwardPass::visit_leaves(const std::function<void(const LeafGradient&)>& add) const {
  MutexLock lock(&mutex_);
  if (state_ != State::kDone) return;
  for (const LeafGradient& leaf : leaves_) add(leaf);
}

void BackwardPass::scale_leaves(double factor) {
  std::vector<LeafGradient> leaves;
  visit_leaves([&leaves](const LeafGradient& one) { leaves.push_back(one); });
  for (LeafGradient& one : leaves) {
    use_here(one.after, one.gradient);
    one.gradient = one.gradient.mul(factor);
    one.after = mark_here(one.gradient);
  }
  MutexLock lock(&mutex_);
  if (state_ == State::kDone && leaves_.size() == leaves.size()) leaves_.swap(leaves);
  lock.unlock();
}

std::vector<LeafGradient> BackwardPass::take_leaves() {
  MutexLock lock(&mutex_);
  return state_ == State::kDone ? std::exchange(leaves_, {}) : std::vector<LeafGradient>();
}

// ---- errors ------------------------------------------------------------------------------------

// The first worker that an error meets is where it happened.
Status BackwardPass::located(const Status& why) const {
  ErrorDetails details = error_details(why);
  if (!details.origin.empty()) return why;
  details.origin = links_->name_of(self_);
  if (details.kind == ErrorKind::kNone) details.kind = ErrorKind::kUser;
  return with_details(annotate(why, absl::StrCat("on worker '", details.origin, "'")), details);
}

void BackwardPass::time_is_over() {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kRunning) return;
    const std::string what = is_root()
                                 ? absl::StrCat("deadline of ", absl::FormatDuration(options_.time),
                                                " exceeded by ", to_string(id_), ", which")
                                 : absl::StrCat("the deadline of ", to_string(id_), " is over; it");
    fail_locked(
        make_error(ErrorKind::kDeadline, absl::StrCat(what, " waits for ", waits_for_locked())),
        &todo);
  }
  perform(std::move(todo));
}

void BackwardPass::fail(Status why) {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    fail_any_locked(std::move(why), &todo);
  }
  perform(std::move(todo));
}

void BackwardPass::fail_any_locked(Status why, Todo* todo) {
  if (state_ == State::kAborted || (state_ == State::kDone && is_root())) return;
  if (state_ == State::kRunning) return fail_locked(std::move(why), todo);
  // Its part is done and it has said so: that it does not know whether something of its own has
  // arrived is no failure yet. The root knows, and aborts what it has not finished.
  todo->push_back([self = shared_from_this(), error = located(why)] {
    self->links_->abort(self->id_.root, self->id_, error, [](const Status&) {});
  });
}

void BackwardPass::drop() {
  std::vector<LeafGradient> leaves;
  MutexLock lock(&mutex_);
  if (state_ != State::kDone) return;
  state_ = State::kAborted;
  leaves.swap(leaves_);
  lock.unlock();
}

void BackwardPass::fail_locked(Status why, Todo* todo) {
  const bool was_done = part_done_;
  state_ = State::kAborted;
  error_ = located(why);
  if (traced_ && !was_done) links_->trace()->ended(id_, self_, work_, error_);
  leaves_.clear();
  fed_.clear();
  unsent_.clear();
  unsaid_ = false;
  if (running_) graph_->stop();
  add_later_locked(todo);
  for (Arrived& one : std::exchange(inbox_, {})) {
    todo->push_back([reply = std::move(one.reply), error = error_]() mutable { reply(error); });
  }
  std::set<WorkerKey> below = children_;
  below.insert(id_.root);
  for (const auto& [worker, is_final] : found_) below.insert(worker);
  for (const auto& [worker, outcome] : done_) below.insert(worker);
  below.erase(self_);
  // Tensors and graphs are destroyed without the mutex, and so are callbacks.
  todo->push_back(
      [parked = std::exchange(parked_, {}), graph = running_ ? nullptr : std::move(graph_)] {});
  if (owed_ != nullptr) {
    todo->push_back(
        [reply = std::exchange(owed_, nullptr), error = error_]() mutable { reply(error); });
  }
  call_waiter_locked(todo);
  untold_ = static_cast<int64_t>(below.size()) + 1;
  for (const WorkerKey& worker : below) {
    todo->push_back([self = shared_from_this(), worker, error = error_] {
      self->links_->abort(worker, self->id_, error,
                          [self](const Status& heard) { self->one_told(heard); });
    });
  }
  todo->push_back([self = shared_from_this()] { self->one_told(absl::OkStatus()); });
}

void BackwardPass::one_told(const Status& heard) {
  std::vector<OnTold> waiting;
  Status all;
  {
    MutexLock lock(&mutex_);
    if (!heard.ok()) unheard_ = heard;
    if (--untold_ > 0) return;
    waiting.swap(wait_for_told_);
    all = unheard_;
  }
  told_.try_set(all);
  for (OnTold& one : waiting) one(all);
}

void BackwardPass::on_abort(const WorkerKey& from, const Status& why, OnTold reply) {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    if (state_ == State::kAborted && from == id_.root && untold_ > 0) {
      wait_for_told_.push_back(std::move(reply));  // the root wants to know whether all know
    } else if (state_ == State::kAborted || (state_ == State::kDone && is_root())) {
      todo.push_back(
          [reply = std::move(reply), heard = unheard_]() mutable { reply(std::move(heard)); });
    } else {
      fail_locked(why, &todo);
      if (is_root()) {
        // It tells all, the sender among them, who does not wait for the root in turn.
        todo.push_back([reply = std::move(reply)]() mutable { reply(absl::OkStatus()); });
      } else {
        wait_for_told_.push_back(std::move(reply));
      }
    }
  }
  perform(std::move(todo));
}

OnTold BackwardPass::failing_with(std::string what, const WorkerKey& who) {
  return [self = shared_from_this(), what = std::move(what), who](const Status& status) {
    if (status.ok()) return;
    self->fail(annotate(status, absl::StrCat(what, " to '", self->links_->name_of(who), "'")));
  };
}

void BackwardPass::on_gone(const WorkerKey& worker, const Status& why) {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kRunning) return;
    const bool has_to_do = is_root() ? !done_.contains(worker) || !wave_over_ : true;
    const Status error =
        annotate(why, absl::StrCat("'", links_->name_of(worker), "', which takes part"));
    if (!peers_.contains(worker)) {
      gone_.emplace(worker, error);
    } else if (has_to_do) {
      fail_locked(error, &todo);
    }
  }
  perform(std::move(todo));
}

// ---- sight -------------------------------------------------------------------------------------

bool BackwardPass::look() {
  Todo todo;
  bool stuck = false;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kRunning) return false;
    const bool first = seen_events_ == 0;
    const bool still = std::exchange(seen_events_, events_) == events_;
    still_looks_ = still ? still_looks_ + 1 : 0;
    stuck = still && still_looks_ % 2 == 0;
    if (!first && !is_root()) {
      todo.push_back([self = shared_from_this(),
                      progress = PassProgress{events_, waits_for_locked()}]() mutable {
        self->links_->progress(self->id_.root, self->id_, self->deadline_, std::move(progress),
                               self->failing_with("how far it is", self->id_.root));
      });
    }
  }
  perform(std::move(todo));
  return stuck;
}

Status BackwardPass::on_progress(const WorkerKey& from, const PassProgress& progress) {
  MutexLock lock(&mutex_);
  if (state_ == State::kAborted) return failed_locked();
  if (!is_root()) return not_root();
  auto& [at, last] = progress_[from];
  if (last.events != progress.events) ++events_;
  at = links_->runtime().now();
  last = progress;
  return absl::OkStatus();
}

std::string BackwardPass::waits_for() const {
  MutexLock lock(&mutex_);
  return waits_for_locked();
}

BackwardPass::Sight BackwardPass::sight() const {
  Sight out;
  MutexLock lock(&mutex_);
  out.state = state_;
  out.age = links_->runtime().now() - begun_;
  out.peers = static_cast<int64_t>(peers_.size() - peers_.count(self_));
  out.gradients = static_cast<int64_t>(fed_.size());
  for (const auto& [message, gradients] : parked_) {
    for (const at::Tensor& one : gradients.tensors) {
      if (one.defined() && !one.is_sparse()) out.parked_bytes += static_cast<int64_t>(one.nbytes());
    }
  }
  out.waits_for = waits_for_locked();
  return out;
}

std::string BackwardPass::waits_for_locked() const {
  if (state_ != State::kRunning) return "nothing";
  std::vector<std::string> out;
  if (running_) {
    const std::type_info* const node = graph_->running_node();
    const std::string end = node == nullptr ? graph_->end_waits_for() : "";
    if (!end.empty()) {
      out.push_back(end);
    } else if (node == nullptr) {
      out.emplace_back("its own nodes");
    } else {
      out.push_back(absl::StrCat("its own node ", c10::demangle(node->name())));
    }
  } else {
    for (const auto& [worker, count] : asked_) {
      out.push_back(absl::StrCat(count, " answers about what the losses need from '",
                                 links_->name_of(worker), "'"));
    }
    if (!final_) out.emplace_back("all being known");
    if (!part_done_) {
      for (const auto& [worker, messages] : graph_->missing()) {
        out.push_back(absl::StrCat("the gradients of messages ", absl::StrJoin(messages, ", "),
                                   " from '", links_->name_of(worker), "'"));
      }
    }
  }
  if (!is_root()) return absl::StrJoin(out, ", ");
  for (const auto& [worker, is_final] : found_) {
    if (worker != self_ && !done_.contains(worker)) {
      out.push_back(absl::StrCat("'", links_->name_of(worker), "' to be done"));
    }
  }
  std::string all = absl::StrJoin(out, ", ");
  for (const auto& [worker, said] : progress_) {
    if (done_.contains(worker)) continue;
    const absl::Duration ago = links_->runtime().now() - said.first;
    absl::StrAppend(&all, "; '", links_->name_of(worker), "' waits for ", said.second.waits_for,
                    " (it said ", absl::FormatDuration(absl::Trunc(ago, absl::Milliseconds(1))),
                    " ago)");
  }
  return all;
}

}  // namespace weft::internal
