#include "weft/dist_autograd/internal/context_state.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"

namespace weft::internal {
namespace {

Status released(const AutogradContextId& id) {
  return make_error(ErrorKind::kState, absl::StrCat(to_string(id), " has been released"));
}

void add_to(LeafSums* sums, const LeafGradient& one, size_t references) {
  LeafGradient* at = sums->find(one.leaf);
  if (at == nullptr) at = &sums->add(LeafGradient{one.leaf, {}, {}});
  use_here(one.after, one.gradient);
  use_here(at->after, at->gradient);
  // It is added to in place, and a reader keeps the value that it has read.
  if (at->gradient.defined() && at->gradient.use_count() > 1) at->gradient = at->gradient.clone();
  add_gradient(one.leaf, &at->gradient, one.gradient, references);
  at->after = mark_here(at->gradient);
}

}  // namespace

const LeafGradient* LeafSums::find(const at::Tensor& leaf) const {
  const auto at = places_.find(leaf.unsafeGetTensorImpl());
  return at == places_.end() ? nullptr : &all_[at->second];
}

LeafGradient* LeafSums::find(const at::Tensor& leaf) {
  const auto at = places_.find(leaf.unsafeGetTensorImpl());
  return at == places_.end() ? nullptr : &all_[at->second];
}

LeafGradient& LeafSums::add(LeafGradient one) {
  places_.emplace(one.leaf.unsafeGetTensorImpl(), all_.size());
  return all_.emplace_back(std::move(one));
}

// ---- recording ---------------------------------------------------------------------------------

bool ContextState::record(const WorkerKey& to, const std::vector<at::Tensor>& tensors,
                          bool grad_mode, bool is_request, const CallOrder& served,
                          uint64_t* number, std::vector<DeviceCode>* devices) {
  std::vector<at::Tensor> wanted;
  if (grad_mode) wanted = with_gradient(tensors);
  *devices = devices_of(wanted);
  NodePtr send;
  if (!wanted.empty()) {
    send = make_node<SendRpcBackward>(
        to, wanted, is_request ? order_within(served, *number) : order_of_answer(served));
  }
  MutexLock lock(&mutex_);
  if (closed_) return false;
  if (to != self_) known_.insert(to);
  if (send == nullptr) {
    *number = 0;
    return true;
  }
  outputs_ += wanted.size();
  sends_.emplace(*number, std::move(send));
  return true;
}

void ContextState::forget(uint64_t number) {
  NodePtr send;  // destroyed without the mutex
  MutexLock lock(&mutex_);
  const auto at = sends_.find(number);
  if (at == sends_.end()) return;
  outputs_ -= at->second->num_outputs();
  send = std::move(at->second);
  sends_.erase(at);
  lock.unlock();
}

std::map<uint64_t, NodePtr> ContextState::sends() const {
  MutexLock lock(&mutex_);
  return sends_;
}

// ---- passes ------------------------------------------------------------------------------------

PassGraph::FindSend ContextState::find_send() {
  // Weak: a pass belongs to its context.
  return [weak = weak_from_this()](uint64_t message) -> NodePtr {
    const auto self = weak.lock();
    if (self == nullptr) return nullptr;
    MutexLock lock(&self->mutex_);
    const auto at = self->sends_.find(message);
    return at == self->sends_.end() ? nullptr : at->second;
  };
}

std::shared_ptr<BackwardPass> ContextState::add_locked(const PassId& id, absl::Time deadline,
                                                       const std::shared_ptr<PassLinks>& links) {
  RecordedSends recorded{outputs_, find_send(), [weak = weak_from_this()] {
                           const auto self = weak.lock();
                           return self == nullptr ? PassGraph::Sends() : self->sends();
                         }};
  auto pass = std::make_shared<BackwardPass>(id, self_, std::move(recorded), deadline, links);
  passes_.emplace(id, pass);
  return pass;
}

StatusOr<std::shared_ptr<BackwardPass>> ContextState::begin(
    absl::Time deadline, const std::shared_ptr<PassLinks>& links) {
  MutexLock lock(&mutex_);
  if (closed_) return released(id_);
  const uint64_t counter = ++last_pass_;
  running_own_.insert(counter);
  return add_locked(PassId{id_, self_, counter}, deadline, links);
}

StatusOr<std::shared_ptr<BackwardPass>> ContextState::find(
    const PassId& id, absl::Time deadline, bool make, const std::shared_ptr<PassLinks>& links) {
  MutexLock lock(&mutex_);
  if (closed_) return released(id_);
  if (const auto at = passes_.find(id); at != passes_.end()) return at->second;
  const auto settled = settled_.find(id.root);
  if (id.root == self_ || !make ||
      (settled != settled_.end() && id.counter < settled->second.below)) {
    return make_error(ErrorKind::kState, absl::StrCat(to_string(id), " has ended"));
  }
  if (const auto why = refused_.find(id); why != refused_.end()) return why->second;
  return add_locked(id, deadline, links);
}

void ContextState::refuse(const PassId& pass, const Status& why) {
  MutexLock lock(&mutex_);
  const auto settled = settled_.find(pass.root);
  if (settled != settled_.end() && pass.counter < settled->second.below) return;
  refused_.emplace(pass, why);
}

void ContextState::settle(const WorkerKey& root, uint64_t below,
                          const std::vector<uint64_t>& aborted) {
  if (root == self_) return;
  std::vector<std::shared_ptr<BackwardPass>> over;
  std::vector<std::shared_ptr<BackwardPass>> failed;
  {
    MutexLock sums(&leaves_mutex_);  // CTX-2
    {
      MutexLock lock(&mutex_);
      Settled& settled = settled_[root];
      if (below > settled.below) settled = Settled{below, aborted};
      refused_.erase(refused_.lower_bound(PassId{id_, root, 0}),
                     refused_.lower_bound(PassId{id_, root, below}));
      for (auto at = passes_.lower_bound(PassId{id_, root, 0});
           at != passes_.end() && at->first.root == root && at->first.counter < below;) {
        over.push_back(std::move(at->second));
        at = passes_.erase(at);
      }
    }
    for (const auto& pass : over) {
      if (std::find(aborted.begin(), aborted.end(), pass->id().counter) == aborted.end() &&
          pass->state() == BackwardPass::State::kDone) {
        merge_locked(pass->take_leaves());
      } else {
        failed.push_back(pass);
      }
    }
  }
  for (const auto& pass : failed) {
    if (pass->state() == BackwardPass::State::kRunning) {
      pass->fail(make_error(ErrorKind::kCancelled, "it has failed elsewhere"));
    } else {
      pass->drop();
    }
  }
}

void ContextState::ended(const BackwardPass& pass, bool all_told) {
  const bool done = pass.state() == BackwardPass::State::kDone;
  std::shared_ptr<BackwardPass> over;  // destroyed without the mutexes
  MutexLock sums(&leaves_mutex_);      // CTX-2
  {
    MutexLock lock(&mutex_);
    running_own_.erase(pass.id().counter);
    if (!all_told) aborted_own_.insert(pass.id().counter);
    const auto at = passes_.find(pass.id());
    if (at == passes_.end()) return;
    over = std::move(at->second);
    passes_.erase(at);
    if (done) last_added_own_ = std::max(last_added_own_, pass.id().counter);
  }
  merge_locked(over->take_leaves());
}

void ContextState::ended_passes(const WorkerKey& root, uint64_t* below,
                                std::vector<uint64_t>* aborted) const {
  MutexLock lock(&mutex_);
  if (root != self_) {
    const auto settled = settled_.find(root);
    if (settled == settled_.end()) return;
    *below = settled->second.below;
    *aborted = settled->second.aborted;
    return;
  }
  *below = running_own_.empty() ? last_pass_ + 1 : *running_own_.begin();
  aborted->assign(aborted_own_.begin(), aborted_own_.end());
}

EndedPasses ContextState::own_passes() const {
  EndedPasses out;
  out.root = self_;
  MutexLock lock(&mutex_);
  out.below = running_own_.empty() ? last_pass_ + 1 : *running_own_.begin();
  out.last = last_pass_;
  out.running.assign(running_own_.begin(), running_own_.end());
  out.aborted.assign(aborted_own_.begin(), aborted_own_.end());
  return out;
}

bool ContextState::has_failed(const PassId& pass) const {
  MutexLock lock(&mutex_);
  return pass.root == self_ && aborted_own_.contains(pass.counter);
}

std::vector<std::shared_ptr<BackwardPass>> ContextState::passes() const {
  std::vector<std::shared_ptr<BackwardPass>> out;
  MutexLock lock(&mutex_);
  for (const auto& [id, pass] : passes_) out.push_back(pass);
  return out;
}

// ---- gradients ---------------------------------------------------------------------------------

void ContextState::merge_locked(std::vector<LeafGradient> leaves) {
  const c10::AutoGradMode no_grad(false);
  for (const LeafGradient& one : leaves) add_to(&leaves_, one, 1);
}

LeafSums ContextState::sum_locked(std::vector<LeafGradient>* apart,
                                  const std::function<bool(const PassId&)>& counts) const {
  for (const auto& pass : passes()) {
    if (!counts(pass->id())) continue;
    pass->visit_leaves([apart](const LeafGradient& one) { apart->push_back(one); });
  }
  return leaves_;
}

namespace {

// What others may hold is not to change: from the second contribution on, a new tensor.
std::vector<LeafGradient> sum_up(LeafSums sums, const std::vector<LeafGradient>& apart) {
  const c10::AutoGradMode no_grad(false);
  for (const LeafGradient& one : apart) {
    LeafGradient* at = sums.find(one.leaf);
    if (at == nullptr) {
      sums.add(one);
    } else {
      use_here(one.after, one.gradient);
      use_here(at->after, at->gradient);
      at->gradient = at->gradient.clone();
      add_gradient(one.leaf, &at->gradient, one.gradient, 0);
      at->after = nullptr;
    }
  }
  for (LeafGradient& one : sums.all()) use_here(std::exchange(one.after, nullptr), one.gradient);
  return std::move(sums.all());
}

}  // namespace

std::vector<LeafGradient> ContextState::gradients() const {
  LeafSums sums;
  std::vector<LeafGradient> apart;
  {
    MutexLock lock(&leaves_mutex_);
    sums = sum_locked(&apart, [](const PassId&) { return true; });
  }
  return sum_up(std::move(sums), apart);
}

at::Tensor ContextState::gradient(const at::Tensor& leaf) const {
  LeafSums sums;
  std::vector<LeafGradient> apart;
  {
    MutexLock lock(&leaves_mutex_);
    if (const LeafGradient* sum = leaves_.find(leaf)) sums.add(*sum);
    for (const auto& pass : passes()) {
      pass->visit_leaves([&](const LeafGradient& one) {
        if (one.leaf.is_same(leaf)) apart.push_back(one);
      });
    }
  }
  const std::vector<LeafGradient> found = sum_up(std::move(sums), apart);
  return found.empty() ? at::Tensor() : found[0].gradient;
}

Status ContextState::check_added_locked(const EndedPasses& ended) const {
  MutexLock lock(&mutex_);
  bool others = false;
  if (ended.root == self_) {
    others = last_added_own_ > ended.last;
    for (const uint64_t one : ended.running) others = others || !running_own_.contains(one);
  } else {
    const auto settled = settled_.find(ended.root);
    others = settled != settled_.end() && settled->second.below > ended.below;
  }
  if (!others) return absl::OkStatus();
  return make_error(
      ErrorKind::kState,
      absl::StrCat("the gradients of passes ", ended.below, " to ", ended.last, " of ",
                   weft::to_string(id_),
                   " were asked for, but later ones have been added to them at worker ",
                   weft::to_string(self_),
                   ": a step is to be done before the second backward after it begins"));
}

StatusOr<std::vector<LeafGradient>> ContextState::gradients(const EndedPasses& ended) {
  settle(ended.root, ended.below, ended.aborted);
  LeafSums sums;
  std::vector<LeafGradient> apart;
  {
    MutexLock lock(&leaves_mutex_);
    WEFT_RETURN_IF_ERROR(check_added_locked(ended));
    sums = sum_locked(&apart, [&ended](const PassId& pass) {
      if (pass.root != ended.root) return true;
      const auto among = [&pass](const std::vector<uint64_t>& all) {
        return std::find(all.begin(), all.end(), pass.counter) != all.end();
      };
      return pass.counter <= ended.last && !among(ended.running) && !among(ended.aborted);
    });
  }
  return sum_up(std::move(sums), apart);
}

void ContextState::scale(double factor) {
  const c10::AutoGradMode no_grad(false);
  MutexLock lock(&leaves_mutex_);
  for (LeafGradient& one : leaves_.all()) {
    use_here(one.after, one.gradient);
    one.gradient = one.gradient.mul(factor);
    one.after = mark_here(one.gradient);
  }
  for (const auto& pass : passes()) pass->scale_leaves(factor);
}

std::set<WorkerKey> ContextState::known() const {
  MutexLock lock(&mutex_);
  return known_;
}

// ---- the end -----------------------------------------------------------------------------------

Status ContextState::release_error() const {
  return make_error(ErrorKind::kCancelled, absl::StrCat(to_string(id_), " was released"));
}

std::set<WorkerKey> ContextState::close(const Status& why) {
  std::map<uint64_t, NodePtr> sends;  // destroyed without the mutex
  LeafSums leaves;
  std::vector<std::shared_ptr<BackwardPass>> over;
  std::set<WorkerKey> known;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    sends.swap(sends_);
    outputs_ = 0;
    known.swap(known_);
    for (auto& [id, pass] : std::exchange(passes_, {})) over.push_back(std::move(pass));
  }
  {
    MutexLock lock(&leaves_mutex_);
    std::swap(leaves, leaves_);
  }
  for (const auto& pass : over) {
    if (pass->state() == BackwardPass::State::kRunning) pass->fail(why);
  }
  return known;
}

bool ContextState::closed() const {
  MutexLock lock(&mutex_);
  return closed_;
}

ContextState::Counts ContextState::counts() const {
  Counts counts;
  for (const auto& pass : passes()) {
    if (pass->state() == BackwardPass::State::kRunning) ++counts.running;
  }
  {
    MutexLock leaves(&leaves_mutex_);
    counts.leaves = static_cast<int64_t>(leaves_.size());
  }
  MutexLock lock(&mutex_);
  counts.sends = static_cast<int64_t>(sends_.size());
  return counts;
}

}  // namespace weft::internal
