// The beginning of a pass, and its wave.

#include "weft/dist_autograd/internal/pass.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::internal {

std::string to_string(const PassId& id) {
  return absl::StrCat("backward ", id.counter, " of ", weft::to_string(id.context));
}

BackwardPass::BackwardPass(const PassId& id, const WorkerKey& self, RecordedSends recorded,
                           absl::Time deadline, std::shared_ptr<PassLinks> links)
    : id_(id),
      self_(self),
      recorded_(std::move(recorded)),
      deadline_(deadline),
      links_(std::move(links)),
      begun_(links_->runtime().now()),
      told_(links_->executor()),  // a thread that waits for it waits in the runtime's time
      graph_(std::make_unique<PassGraph>(
          id.context, self, recorded_.find, [deadline, weak = std::weak_ptr<PassLinks>(links_)] {
            // A reducer may keep its accessor for longer than the worker lives.
            const auto links = weak.lock();
            return links == nullptr ? absl::ZeroDuration() : deadline - links->runtime().now();
          })) {
  peers_.insert(id.root);
}

BackwardPass::State BackwardPass::state() const {
  MutexLock lock(&mutex_);
  return state_;
}

Status BackwardPass::error() const {
  MutexLock lock(&mutex_);
  return error_;
}

void BackwardPass::perform(Todo todo) {
  for (auto& one : todo) one();
}

// ---- the wave ----------------------------------------------------------------------------------

void BackwardPass::start(torch::autograd::edge_list roots, std::vector<at::Tensor> gradients,
                         const PassOptions& options) {
  Todo todo;
  bool run = false;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kRunning) return;
    options_ = options;
    begin_trace_locked();
    graph_->set_retain_graph(options.retain);
    PassGraph::Reached reached;
    Status walked = options.fast ? graph_->name_all(recorded_.all(), &reached) : absl::OkStatus();
    for (size_t i = 0; i < roots.size() && walked.ok(); ++i) {
      walked = graph_->root(roots[i], std::move(gradients[i]), &reached);
    }
    if (!walked.ok()) {
      fail_locked(walked, &todo);
    } else {
      spread_locked(std::move(reached));
      final_ = options.fast || graph_->named() == recorded_.outputs;
      if (deficit_ == 0) end_wave_locked(&todo);
      run = go_on_locked(&todo);
    }
  }
  perform(std::move(todo));
  if (run) run_all();
}

void BackwardPass::spread_locked(PassGraph::Reached reached) {
  for (auto& [origin, messages] : reached) {
    const auto [at, is_new] = unsent_.try_emplace(origin);
    if (is_new) {
      ++deficit_;
      ++asked_[origin];
    }
    children_.insert(origin);
    peers_.insert(origin);
    for (auto& [message, outputs] : messages) {
      auto& all = at->second[message];
      all.insert(all.end(), outputs.begin(), outputs.end());
    }
  }
}

void BackwardPass::on_advance(const WorkerKey& from, Advance advance, OnAdvanced reply) {
  Todo todo;
  bool run = false;
  {
    MutexLock lock(&mutex_);
    ++events_;
    Arrived arrived{from, std::move(advance), std::move(reply)};
    if (running_ && state_ == State::kRunning && !arrived.advance.named.empty()) {
      inbox_.push_back(std::move(arrived));  // the thread that runs the graph owns it
      return;
    }
    take_locked(std::move(arrived), &todo);
    run = go_on_locked(&todo);
  }
  perform(std::move(todo));
  if (run) run_all();
}

void BackwardPass::leave_advance(const WorkerKey& from, Advance advance, OnAdvanced reply) {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    const bool busy = running_ && state_ == State::kRunning;
    const bool names = !advance.named.empty();
    Arrived arrived{from, std::move(advance), std::move(reply)};
    if (busy && !names) {
      ++events_;
      take_locked(std::move(arrived), &todo);
      add_later_locked(&todo);
    } else {
      inbox_.push_back(std::move(arrived));
    }
    if (!busy && !call_waiter_locked(&todo)) {
      todo.push_back([self = shared_from_this()] {
        post_or_run(self->links_->executor().get(), [self] { self->serve(); });
      });
    }
  }
  perform(std::move(todo));
}

void BackwardPass::serve() {
  Todo todo;
  bool run = false;
  {
    MutexLock lock(&mutex_);
    ++events_;
    if (running_ && state_ == State::kRunning) return;
    for (Arrived& one : std::exchange(inbox_, {})) take_locked(std::move(one), &todo);
    run = go_on_locked(&todo);
  }
  perform(std::move(todo));
  if (run) run_all();
}

Status BackwardPass::check_locked(const Advance& advance) const {
  if (!error_.ok()) return error_;
  if (!is_root() && (advance.done || advance.answer.has_value())) {
    return not_root();
  }
  if (advance.named.empty() || is_named_already(advance)) return absl::OkStatus();
  if (state_ == State::kRunning && !final_) return absl::OkStatus();
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat(to_string(id_), " has all that it needs of ",
                                 weft::to_string(self_), ", but more is named"));
}

Status BackwardPass::name_locked(const Advance& advance) {
  // The gradients may have been faster, and the graph has run and is gone.
  if (is_named_already(advance)) return absl::OkStatus();
  options_.retain = advance.retain;
  options_.effect = advance.effect;
  begin_trace_locked();
  graph_->set_retain_graph(advance.retain);
  PassGraph::Reached reached;
  if (advance.fast) {
    options_.fast = true;
    WEFT_RETURN_IF_ERROR(graph_->name_all(recorded_.all(), &reached));
  } else {
    for (const auto& [message, outputs] : advance.named) {
      WEFT_RETURN_IF_ERROR(graph_->name(message, outputs, &reached));
    }
  }
  spread_locked(std::move(reached));
  final_ = options_.fast || graph_->named() == recorded_.outputs;
  return absl::OkStatus();
}

void BackwardPass::take_locked(Arrived arrived, Todo* todo) {
  Advance& advance = arrived.advance;
  const bool names = !advance.named.empty();
  Status refused = check_locked(advance);
  if (refused.ok() && names && state_ == State::kRunning) {
    peers_.insert(arrived.from);
    refused = name_locked(advance);
  }
  if (refused.ok() && state_ == State::kRunning) {
    for (MessageGradients& one : advance.gradients) {
      if (!fed_.insert(one.message).second) continue;  // LIVE-4
      peers_.insert(arrived.from);
      if (traced_) work_.receive(one);
      const uint64_t message = one.message;
      parked_.emplace(message, std::move(one));
    }
  }
  if (refused.ok() && is_root()) {
    if (advance.done) done_.emplace(arrived.from, std::move(advance.outcome));
    if (advance.answer.has_value()) refused = answered_locked(arrived.from, *advance.answer, todo);
    if (refused.ok()) finish_if_done_locked(todo);
  }
  if (!refused.ok()) {
    todo->push_back(
        [refused, reply = std::move(arrived.reply)]() mutable { reply(std::move(refused)); });
    if (state_ == State::kRunning) fail_locked(refused, todo);
  } else if (!names || is_root() || owed_ != nullptr || state_ != State::kRunning) {
    // Engaged already: what is found below is reported to the worker that did it. To the root's own
    // part nothing but the end of the wave is more urgent, and there the answer is but a receipt.
    const bool first = !is_root() || (names && !final_);
    (first ? todo : &later_)->push_back([reply = std::move(arrived.reply)]() mutable {
      reply(Advanced());
    });
  } else {
    owed_ = std::move(arrived.reply);
    owed_to_ = arrived.from;
  }
}

Status BackwardPass::answered_locked(const WorkerKey& by, const Advanced& answer, Todo* todo) {
  if (answer.done && is_root()) done_.emplace(by, answer.outcome);
  if (answer.carried) return absl::OkStatus();
  const auto asked = asked_.find(by);
  if (asked == asked_.end()) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat(to_string(id_), ": an answer of ", weft::to_string(by),
                                   ", which was not asked"));
  }
  if (--asked->second == 0) {
    asked_.erase(asked);
    riding_.erase(by);
  }
  for (const auto& [worker, is_final] : answer.participants) {
    found_[worker] |= is_final;
    if (is_root()) peers_.insert(worker);
  }
  if (--deficit_ == 0) end_wave_locked(todo);
  return absl::OkStatus();
}

void BackwardPass::advanced(const WorkerKey& by, StatusOr<Advanced> answer) {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    ++events_;
    if (state_ == State::kAborted) return;
    Status failed = answer.status();
    if (failed.ok() && is_root() && state_ == State::kDone) return;
    if (failed.ok()) failed = answered_locked(by, *answer, &todo);
    if (!failed.ok()) {
      failed = annotate(
          failed, absl::StrCat("asking '", links_->name_of(by), "' what the losses depend on"));
      if (owed_ != nullptr) {
        fail_locked(failed, &todo);
      } else {
        fail_any_locked(failed, &todo);
      }
    } else {
      if (is_root()) finish_if_done_locked(&todo);
      if (state_ == State::kRunning && !running_ && has_work_locked()) {
        todo.push_back([self = shared_from_this()] { self->run_elsewhere(); });
      } else {
        go_on_locked(&todo);
      }
    }
  }
  perform(std::move(todo));
}

Participants BackwardPass::report_locked() {
  Participants found = std::exchange(found_, {});
  if (!reported_.has_value() || *reported_ != final_) {
    reported_ = final_;
    found[self_] = final_;
  }
  return found;
}

void BackwardPass::end_wave_locked(Todo* todo) {
  if (!is_root() || std::exchange(wave_over_, true)) return;
  final_ = true;
  for (const auto& [worker, is_final] : found_) {
    if (is_final || worker == self_) continue;
    todo->push_back([self = shared_from_this(), to = worker] {
      self->links_->close(to, self->id_, self->deadline_,
                          self->failing_with("telling that all is known", to));
    });
  }
}

void BackwardPass::on_close(OnTold taken) {
  Todo todo;
  bool run = false;
  Status refused;
  {
    MutexLock lock(&mutex_);
    ++events_;
    refused = error_;
    if (state_ == State::kRunning) {
      final_ = true;
      if (!running_) run = go_on_locked(&todo);
    }
  }
  taken(refused);
  perform(std::move(todo));
  if (run) run_all();
}

}  // namespace weft::internal
