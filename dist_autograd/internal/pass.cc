// The wave, and the beginning of a pass.

#include "weft/dist_autograd/internal/pass.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::internal {

std::string to_string(const PassId& id) {
  return absl::StrCat("backward ", id.counter, " of ", weft::to_string(id.context));
}

BackwardPass::BackwardPass(const PassId& id, const WorkerKey& self, size_t recorded,
                           absl::Time deadline, PassGraph::FindSend find_send,
                           std::shared_ptr<PassLinks> links)
    : id_(id),
      self_(self),
      recorded_(recorded),
      deadline_(deadline),
      links_(std::move(links)),
      ended_(links_->executor()),  // whoever waits, waits in the runtime's time
      told_(links_->executor()),
      graph_(std::make_unique<PassGraph>(id.context, self, std::move(find_send))) {
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
                         bool retain) {
  Todo todo;
  bool run = false;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kRunning) return;
    retain_ = retain;
    graph_->set_retain_graph(retain);
    PassGraph::Reached reached;
    Status walked;
    for (size_t i = 0; i < roots.size() && walked.ok(); ++i) {
      walked = graph_->root(roots[i], std::move(gradients[i]), &reached);
    }
    if (!walked.ok()) {
      fail_locked(walked, &todo);
    } else {
      spread_locked(std::move(reached), &todo);
      final_ = graph_->named() == recorded_;
      if (deficit_ == 0) wave_ended_locked(&todo);
      run = may_run_locked();
    }
  }
  perform(std::move(todo));
  if (run) run_all();
}

void BackwardPass::spread_locked(PassGraph::Reached reached, Todo* todo) {
  for (auto& [origin, messages] : reached) {
    ++deficit_;
    ++asked_[origin];
    children_.insert(origin);
    peers_.insert(origin);
    todo->push_back([self = shared_from_this(), to = origin, retain = retain_,
                     named = std::move(messages)]() mutable {
      self->links_->discover(
          to, self->id_, self->deadline_, retain, std::move(named),
          [self, to](StatusOr<Participants> found) { self->discovered(to, std::move(found)); });
    });
  }
}

void BackwardPass::on_discover(const WorkerKey& from, bool retain, const Messages& messages,
                               OnDiscovered reply) {
  Todo todo;
  bool run = false;
  {
    MutexLock lock(&mutex_);
    ++events_;
    Status refused = error_;
    if (state_ == State::kDone || (refused.ok() && final_)) {
      refused = make_error(ErrorKind::kProtocol,
                           absl::StrCat(to_string(id_), " has all that it needs of ",
                                        weft::to_string(self_), ", but more is named"));
    }
    PassGraph::Reached reached;
    if (refused.ok()) {
      peers_.insert(from);
      retain_ = retain;
      graph_->set_retain_graph(retain);
      for (const auto& [message, outputs] : messages) {
        if (refused.ok()) refused = graph_->name(message, outputs, &reached);
      }
    }
    if (!refused.ok()) {
      todo.push_back([refused, reply = std::move(reply)]() mutable { reply(refused); });
      if (state_ == State::kRunning) fail_locked(refused, &todo);
    } else {
      spread_locked(std::move(reached), &todo);
      final_ = graph_->named() == recorded_;
      if (is_root() || owed_ != nullptr) {
        // Engaged already: what is found below is reported to whoever did it.
        todo.push_back([reply = std::move(reply)]() mutable { reply(Participants()); });
      } else {
        owed_ = std::move(reply);
        if (deficit_ == 0) wave_ended_locked(&todo);
      }
      run = may_run_locked();
    }
  }
  perform(std::move(todo));
  if (run) run_all();
}

Participants BackwardPass::report_locked() {
  Participants found = std::exchange(found_, {});
  if (!reported_.has_value() || *reported_ != final_) {
    reported_ = final_;
    found[self_] = final_;
  }
  return found;
}

void BackwardPass::discovered(const WorkerKey& by, StatusOr<Participants> found) {
  Todo todo;
  bool run = false;
  {
    MutexLock lock(&mutex_);
    ++events_;
    if (--asked_[by] == 0) asked_.erase(by);
    if (state_ == State::kAborted) return;
    if (!found.ok()) {
      fail_locked(annotate(found.status(), absl::StrCat("asking '", links_->name_of(by),
                                                        "' what the losses depend on")),
                  &todo);
    } else {
      for (const auto& [worker, is_final] : *found) {
        found_[worker] |= is_final;
        if (is_root()) peers_.insert(worker);
      }
      if (--deficit_ == 0) wave_ended_locked(&todo);
      run = may_run_locked();
    }
  }
  perform(std::move(todo));
  if (run) run_elsewhere();  // this is a thread of the transport
}

void BackwardPass::wave_ended_locked(Todo* todo) {
  if (!is_root()) {
    if (owed_ == nullptr) return;
    todo->push_back([reply = std::exchange(owed_, nullptr), found = report_locked()]() mutable {
      reply(std::move(found));
    });
    return;
  }
  wave_over_ = true;
  final_ = true;
  for (const auto& [worker, is_final] : found_) {
    if (is_final || worker == self_) continue;
    todo->push_back([self = shared_from_this(), to = worker] {
      self->links_->close(to, self->id_, self->deadline_,
                          self->failing_with("telling that all is known", to));
    });
  }
  finish_if_done_locked(todo);
}

void BackwardPass::on_close(OnTold taken) {
  bool run = false;
  Status refused;
  {
    MutexLock lock(&mutex_);
    ++events_;
    refused = error_;
    if (state_ == State::kRunning) {
      final_ = true;
      run = may_run_locked();
    }
  }
  taken(refused);
  if (run) run_all();
}

// ---- gradients ---------------------------------------------------------------------------------

void BackwardPass::on_gradient(const WorkerKey& from, uint64_t message,
                               std::vector<at::Tensor> gradients, OnTold taken) {
  bool run = false;
  Status refused;
  {
    MutexLock lock(&mutex_);
    ++events_;
    refused = error_;
    if (state_ == State::kRunning && fed_.insert(message).second) {  // LIVE-4
      peers_.insert(from);
      parked_.emplace(message, std::move(gradients));
      run = may_run_locked();
    }
  }
  taken(refused);
  if (run) run_all();
}

bool BackwardPass::may_run_locked() {
  if (!final_ || running_ || part_done_ || state_ != State::kRunning) return false;  // LIVE-3
  if (started_ && parked_.empty()) return false;
  // Without a root's losses there is nothing to begin with.
  if (!started_ && !is_root() && parked_.empty() && graph_->has_live_sends()) return false;
  started_ = true;
  running_ = true;
  return true;
}

void BackwardPass::run_elsewhere() {
  post_or_run(links_->executor().get(), [self = shared_from_this()] { self->run_all(); });
}

void BackwardPass::run_all() {
  while (true) {
    std::map<uint64_t, std::vector<at::Tensor>> fed;
    {
      MutexLock lock(&mutex_);
      fed.swap(parked_);
    }
    std::vector<PassGraph::Outgoing> out;
    Status failed;
    try {
      for (auto& [message, gradients] : fed) {
        if (value_or_throw(graph_->feed(message, std::move(gradients)))) continue;
        throw_error(make_error(
            ErrorKind::kProtocol,
            absl::StrCat("a gradient for message ", message, ", which nobody has named")));
      }
      graph_->run(&out);
    } catch (...) {
      failed = status_from_current_exception();
    }
    for (PassGraph::Outgoing& one : out) {
      const WorkerKey to = one.origin;
      const uint64_t message = one.message;
      links_->gradient(id_, deadline_, std::move(one),
                       failing_with(absl::StrCat("the gradient of message ", message), to));
    }
    Todo todo;
    std::unique_ptr<PassGraph> dropped;  // without the mutex
    bool again = false;
    {
      MutexLock lock(&mutex_);
      ++events_;
      if (state_ == State::kRunning && !failed.ok()) fail_locked(failed, &todo);
      if (state_ != State::kRunning) {
        dropped = std::move(graph_);
      } else if (parked_.empty()) {
        if (graph_->complete()) {
          part_done_locked(&todo);
          dropped = std::move(graph_);
        }
      } else {
        again = true;
      }
      running_ = again;
    }
    perform(std::move(todo));
    if (!again) return;
  }
}

}  // namespace weft::internal
