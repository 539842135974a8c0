// LIVE-1 to LIVE-8, as far as they are seen from outside of a pass.

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "torch/autograd.h"
#include "torch/types.h"
#include "weft/dist_autograd/service.h"
#include "weft/tests/sim/autograd_schedule.h"

namespace weft::testing {

using internal::DistAutogradService;

void World::judge(const Pass& pass) {
  if (pass.status.ok()) {
    ++out_.passes;
    return;
  }
  ++out_.failed;
  const ErrorKind kind = error_kind(pass.status);
  bool expected = false;
  switch (trouble_) {
    case Trouble::kNone:
    case Trouble::kOrder: break;
    case Trouble::kNetwork:
      expected = kind == ErrorKind::kDeadline || kind == ErrorKind::kPeerLost ||
                 kind == ErrorKind::kUnavailable || kind == ErrorKind::kMaybeExecuted;
      break;
    case Trouble::kThrow: expected = kind == ErrorKind::kUser; break;
    case Trouble::kTime: expected = kind == ErrorKind::kDeadline; break;
    case Trouble::kRelease:
      expected = kind == ErrorKind::kCancelled || kind == ErrorKind::kState ||
                 kind == ErrorKind::kNotFound;
      break;
    case Trouble::kKill:
      expected = kind == ErrorKind::kPeerLost || kind == ErrorKind::kState ||
                 kind == ErrorKind::kCancelled;
      break;
  }
  if (!expected) fail(annotate(pass.status, "LIVE-4: not what such a fault leads to"));
}

void World::check_messages() {
  if (trouble_ == Trouble::kKill && gone_ >= 0) return;
  std::vector<const LiveSet*> must;
  std::vector<const LiveSet*> may;
  std::vector<const Pass*> left;
  for (const Pass& pass : passes_) {
    may.push_back(&pass.live);
    if (!pass.status.ok()) continue;
    must.push_back(&pass.live);
    left.push_back(&pass);
  }
  const Status runs = counter_.check(must, may);
  if (!runs.ok()) fail(runs);
  if (must.size() < may.size()) return;
  // Which pass of two from one root got which number does not matter.
  for (const internal::PassId& id : audit_.passes()) {
    std::vector<std::string> wrong;
    bool is_one = false;
    for (size_t i = 0; i < left.size() && !is_one; ++i) {
      if (key_of(workers_[static_cast<size_t>(left[i]->root)].info()) != id.root) continue;
      const Status why = audit_.check(id, *recorded_, left[i]->live, left[i]->root,
                                      trouble_ == Trouble::kTime || trouble_ == Trouble::kNetwork);
      is_one = why.ok();
      if (is_one) left.erase(left.begin() + static_cast<std::ptrdiff_t>(i));
      wrong.push_back(absl::StrCat("as that of ", left[i]->live.participants.size(),
                                   " workers: ", std::string(why.message())));
    }
    if (!is_one) {
      fail(absl::StrCat("LIVE-6: pass ", id.counter, " is none of ", wrong.size(), ": ",
                        absl::StrJoin(wrong, "; ")));
    }
  }
  for (const Pass* pass : left) {
    if (pass->live.participants.size() > 1) fail("LIVE-6: a pass without messages");
  }
}

void World::check_gradients(const std::vector<Pass>& passes) {
  std::vector<at::Tensor> leaves;
  for (const auto& list : parameters_) leaves.insert(leaves.end(), list.begin(), list.end());
  // What may be there; for a pass whose root has left in the middle it is unknown whether it is.
  std::vector<std::vector<at::Tensor>> choices(1, std::vector<at::Tensor>(leaves.size()));
  for (const Pass& pass : passes) {
    if (!pass.status.ok() && !is_gone(pass.root)) continue;
    const auto some = torch::autograd::grad(pass.alone, leaves, {}, true, false, true);
    std::vector<at::Tensor> sum = choices.back();
    for (size_t i = 0; i < sum.size(); ++i) {
      if (some[i].defined()) sum[i] = sum[i].defined() ? sum[i] + some[i] : some[i];
    }
    if (pass.status.ok()) choices.pop_back();
    choices.push_back(std::move(sum));
  }
  const size_t each = parameters_[0].size();
  for (int w = 0; w < size_; ++w) {
    if (is_gone(w)) continue;
    std::vector<internal::LeafGradient> there;
    const auto service = workers_[static_cast<size_t>(w)].service<DistAutogradService>();
    if (const auto state = service->find(context_->id())) there = state->gradients();
    for (size_t i = static_cast<size_t>(w) * each; i < static_cast<size_t>(w + 1) * each; ++i) {
      at::Tensor got;
      for (const auto& one : there) {
        if (one.leaf.is_same(leaves[i])) got = one.gradient;
      }
      bool right = false;
      for (const auto& want : choices) {
        // A leaf that only zeros reach may have none.
        right |= got.defined() ? want[i].defined() && torch::equal(got, want[i])
                               : !want[i].defined() || torch::equal(want[i], want[i] * 0);
      }
      if (!right) {
        const at::Tensor& want = choices.back()[i];
        std::string outcomes;
        for (const Pass& pass : passes) {
          absl::StrAppend(&outcomes, "; pass from w", pass.root, ": ", pass.status.ToString());
        }
        fail(absl::StrCat("LIVE-1: the gradient of leaf ", i, " at w", w, " is ",
                          got.defined() ? at::str(got) : "none", " instead of ",
                          want.defined() ? at::str(want) : "none", outcomes));
      }
    }
  }
}

void World::check_no_pass(const char* when) {
  for (int w = 0; w < size_; ++w) {
    if (is_gone(w)) continue;
    const auto info = workers_[static_cast<size_t>(w)].debug_info();
    if (info.at("num_current_backward_passes") != 0) {
      fail(absl::StrCat("LIVE-5: a pass runs at w", w, " ", when));
    }
  }
}

void World::check_nothing_left() {
  for (int w = 0; w < size_; ++w) {
    if (is_gone(w)) continue;
    const auto info = workers_[static_cast<size_t>(w)].debug_info();
    for (const char* name : {"num_autograd_contexts", "num_current_backward_passes",
                             "autograd_sends", "autograd_leaves", "autograd_releases"}) {
      if (info.at(name) != 0) {
        fail(absl::StrCat("LIVE-5: w", w, " has ", name, " = ", info.at(name)));
      }
    }
  }
}

}  // namespace weft::testing
