#include "weft/collectives/ddp/join.h"

#include <algorithm>
#include <set>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/internal/ddp/group_io.h"
#include "weft/collectives/internal/ddp/join_session.h"

namespace weft::internal {
namespace {

// What an announcement says: no batches left, or 1 + part * kSteps + step.
constexpr int64_t kNoBatches = 0;
constexpr int64_t kSteps = 4;
// Most bytes of one operation that gives all ranks the state of the last one.
constexpr int64_t kStateBytes = int64_t{250} << 20;

ProcessGroup group_of(const std::vector<Joinable*>& parts) {
  if (parts.empty()) {
    throw_error(make_error(ErrorKind::kInvalidArgument, "Join: it was given no part"));
  }
  return parts.front()->join_group();
}

}  // namespace

JoinSession::JoinSession(std::vector<Joinable*> parts, const UnevenJoinOptions& options)
    : parts_(std::move(parts)),
      options_(options),
      group_(group_of(parts_)),
      last_active_(static_cast<size_t>(group_.size()), -1) {
  for (const Joinable* one : parts_) {
    // The handles on a group share the string.
    if (&one->join_group().name() == &group_.name()) continue;
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("Join: its parts are of groups '", group_.name(), "' and '",
                     one->join_group().name(), "'; ranks can wait in one group at a time only")));
  }
}

std::string JoinSession::describe(int64_t code) const {
  if (code == kNoBatches) return "has no batches left";
  const auto part = (code - 1) / kSteps;
  switch (static_cast<JoinStep>((code - 1) % kSteps)) {
    case JoinStep::kSyncBuffers: return absl::StrCat("begins a forward of part ", part);
    case JoinStep::kReduce: return absl::StrCat("begins a backward of part ", part);
    case JoinStep::kOptimize: return absl::StrCat("begins a step of part ", part);
  }
  return absl::StrCat("says ", code);
}

JoinSession::AnnouncementRef JoinSession::announce(size_t part, JoinStep step) {
  return announce_code(1 + static_cast<int64_t>(part) * kSteps + static_cast<int64_t>(step));
}

JoinSession::AnnouncementRef JoinSession::announce_code(int64_t code) {
  auto one = std::make_shared<Announcement>();
  one->mine = at::empty({1}, at::kLong).fill_(code);
  one->all = at::empty({group_.size()}, at::kLong);
  MutexLock lock(&mutex_);
  one->work = group_.all_gather_into_tensor_async(one->all, one->mine);
  unsettled_.push_back(one);
  return one;
}

JoinActive JoinSession::settle(const AnnouncementRef& one) {
  one->work.wait();
  MutexLock lock(&mutex_);
  // Earlier ones, too: those of backwards that failed here were not waited for.
  while (!one->settled) {
    const AnnouncementRef next = unsettled_.front();
    next->work.wait();  // done, as operations of a group are in order
    unsettled_.pop_front();
    settle_locked(next.get());
  }
  return one->active;
}

void JoinSession::settle_locked(Announcement* one) {
  one->settled = true;
  const int64_t number = settled_++;
  const auto* const codes = one->all.const_data_ptr<int64_t>();
  const int64_t own = codes[group_.rank()];
  bool differ = false;
  int64_t some = own;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (codes[rank] == kNoBatches) continue;
    differ |= some != kNoBatches && some != codes[rank];
    some = codes[rank];
    ++one->active.count;
    one->active.highest = rank;
    last_active_[static_cast<size_t>(rank)] = number;
  }
  const bool early = options_.throw_on_early_termination && one->active.count > 0 &&
                     one->active.count < group_.size();
  if (!differ && !early) return;
  std::vector<std::string> said;
  for (int rank = 0; rank < group_.size(); ++rank) {
    said.push_back(absl::StrCat("rank ", rank, " ", describe(codes[rank])));
  }
  const std::string why =
      absl::StrCat("Join: ", differ ? "ranks take different steps: " : "a rank ends early: ",
                   absl::StrJoin(said, ", "));
  if (group_.failure().ok()) group_.abort(why);
  throw_error(make_error(ErrorKind::kState, why));
}

void JoinSession::begin() {
  try {
    for (size_t i = 0; i < parts_.size(); ++i) parts_[i]->set_join(shared_from_this(), i);
  } catch (...) {
    end();
    throw;
  }
}

void JoinSession::end() {
  // A part that is in another Join stays there.
  for (Joinable* one : parts_) {
    if (one->join().get() == this) one->set_join(nullptr, 0);
  }
}

int JoinSession::last_rank() const {
  // The highest one of equals.
  const auto last = std::max_element(last_active_.rbegin(), last_active_.rend());
  return static_cast<int>(last_active_.rend() - last) - 1;
}

void JoinSession::wait() {
  over_ = true;
  while (true) {
    const AnnouncementRef one = announce_code(kNoBatches);
    const JoinActive active = settle(one);
    if (active.count == 0) break;
    const int64_t code = one->all.const_data_ptr<int64_t>()[active.highest] - 1;
    try {
      parts_[static_cast<size_t>(code / kSteps)]->shadow(static_cast<JoinStep>(code % kSteps),
                                                         active);
    } catch (const Error&) {
      // A backward that failed on all ranks is an error where there was one.
      if (group_.failure().ok()) continue;
      throw_error(annotate(group_.failure(), "Join: this rank has no batches left"));
    }
  }
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> state;
  std::set<const void*> seen;  // parts share parameters
  for (const Joinable* one : parts_) {
    for (const at::Tensor& tensor : one->join_state()) {
      if (tensor.numel() > 0 && seen.insert(tensor.const_data_ptr()).second)
        state.push_back(tensor.detach());
    }
  }
  broadcast_all(group_, state, last_rank(), kStateBytes, {});
}

}  // namespace weft::internal

namespace weft {

Join::Join(std::initializer_list<internal::JoinableRef> parts, const UnevenJoinOptions& options) {
  std::vector<internal::Joinable*> all;
  for (const internal::JoinableRef& one : parts) all.push_back(one.joinable);
  session_ = std::make_shared<internal::JoinSession>(std::move(all), options);
  session_->begin();
}

Join::~Join() {
  session_->end();
  if (session_->is_over()) return;
  ProcessGroup& group = session_->group();
  if (!group.failure().ok()) return;
  group.abort(absl::StrCat("rank ", group.rank(), " has left a Join without wait()"));
}

void Join::wait() {
  if (session_->is_over()) {
    throw_error(make_error(ErrorKind::kState, "Join: wait() is called once"));
  }
  session_->wait();
  session_->end();
}

}  // namespace weft
