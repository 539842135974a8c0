#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "weft/collectives/internal/group_handle.h"
#include "weft/collectives/internal/service.h"
#include "weft/collectives/internal/text.h"
#include "weft/collectives/process_group.h"

namespace weft {
namespace {

// Interval between two reads of the store while a member is missing.
constexpr absl::Duration kLook = absl::Milliseconds(20);
// For members that neither come nor are known to be gone, unless the caller says otherwise.
constexpr absl::Duration kPatience = absl::Seconds(30);

// COLL-4: one compare_set decides the members of a generation.
//
//   <prefix>alive/<rank>    that rank, of the generation before, is here
//   <prefix>members         the ranks that go on, as "0,2,3": the first writer decides
//
// `members` stays as long as the store, so that a late member finds out; where no rank was left out
// none can come, and it goes when all have read it.
class Rebuild {
 public:
  Rebuild(Store* store, Runtime* runtime, std::string prefix, const internal::Membership& old)
      : store_(store), runtime_(runtime), prefix_(std::move(prefix)), old_(old) {}

  // The members of the next generation, by their old ranks.
  StatusOr<std::vector<int>> members(internal::GroupCore& core, absl::Time deadline) {
    WEFT_RETURN_IF_ERROR(store_->set(internal::cat(prefix_, "alive/", old_.rank), "1"));
    const std::string key = prefix_ + "members";
    while (true) {
      WEFT_ASSIGN_OR_RETURN(std::optional<std::string> decided, store_->try_get(key));
      if (!decided.has_value()) {
        const std::vector<bool> gone = core.gone();
        WEFT_ASSIGN_OR_RETURN(const std::vector<int> here, alive(gone));
        if (complete(here, gone) || runtime_->now() >= deadline) {
          WEFT_ASSIGN_OR_RETURN(decided, store_->compare_set(key, "", absl::StrJoin(here, ",")));
        }
      }
      if (decided.has_value()) return parse(*decided);
      const auto changed = store_->wait_change(key, std::nullopt, kLook);
      if (!changed.ok() && error_kind(changed.status()) != ErrorKind::kDeadline) {
        return changed.status();
      }
    }
  }

  // REQUIRES: all of `members` have read the list.
  void clear(const std::vector<int>& members) {
    if (static_cast<int>(members.size()) == old_.size) {
      (void)store_->delete_key(prefix_ + "members", absl::Seconds(1));
    }
    for (int rank = 0; rank < old_.size; ++rank) {
      (void)store_->delete_key(internal::cat(prefix_, "alive/", rank), absl::Seconds(1));
    }
  }

 private:
  // Those that have come, and have not died since.
  StatusOr<std::vector<int>> alive(const std::vector<bool>& gone) {
    std::vector<int> out;
    for (int rank = 0; rank < old_.size; ++rank) {
      if (gone[static_cast<size_t>(rank)] && rank != old_.rank) continue;
      WEFT_ASSIGN_OR_RETURN(const bool here,
                            store_->check({internal::cat(prefix_, "alive/", rank)}));
      if (here) out.push_back(rank);
    }
    return out;
  }

  bool complete(const std::vector<int>& here, const std::vector<bool>& gone) const {
    for (int rank = 0; rank < old_.size; ++rank) {
      const bool came = std::find(here.begin(), here.end(), rank) != here.end();
      if (!came && !gone[static_cast<size_t>(rank)]) return false;
    }
    return true;
  }

  StatusOr<std::vector<int>> parse(const std::string& text) const {
    std::vector<int> out;
    for (const absl::string_view part : absl::StrSplit(text, ',')) {
      int rank = -1;
      if (!absl::SimpleAtoi(part, &rank) || rank < 0 || rank >= old_.size) {
        return make_error(ErrorKind::kProtocol,
                          internal::cat("the store has '", text, "' for a list of ranks"));
      }
      out.push_back(rank);
    }
    return out;
  }

  Store* const store_;
  Runtime* const runtime_;
  const std::string prefix_;
  const internal::Membership old_;
};

}  // namespace

StatusOr<ProcessGroup> ProcessGroup::try_rebuild(const RebuildOptions& options) {
  if (handle_ == nullptr) return make_error(ErrorKind::kState, "there is no process group");
  internal::GroupCore& core = handle_->core();
  core.fail(make_error(ErrorKind::kState, internal::cat("rank ", rank(), " rebuilds the group")));
  const absl::Duration patience = options.timeout.value_or(kPatience);
  while (true) {
    // A list that has a rank on it which died before the group was made stays decided. All that are
    // on it find that out alike, and go on behind it.
    const uint32_t behind = handle_->lists_in_vain();
    const uint32_t generation = this->generation() + 1 + behind;
    const std::string what =
        internal::cat("rebuild of group '", name(), "', generation ", generation);
    ProcessGroupOptions next = handle_->options();
    // Not where members of a group that was made from such a list would meet.
    const std::string prefix =
        internal::generation_prefix(next, generation) + (behind > 0 ? "again/" : "");
    Rebuild rebuild(next.store.get(), &core.runtime(), prefix, core.member());
    auto decided = rebuild.members(core, deadline_after(core.runtime().now(), patience));
    if (!decided.ok()) return annotate(decided.status(), what);
    const std::vector<int>& members = *decided;
    const auto own = std::find(members.begin(), members.end(), rank());
    if (own == members.end()) {
      return make_error(ErrorKind::kState,
                        internal::cat(what, ": rank ", rank(), " came too late; the others, ",
                                      absl::StrJoin(members, ", "), ", go on without it"));
    }
    next.rank = static_cast<int>(own - members.begin());
    next.size = static_cast<int>(members.size());
    next.workers = internal::workers_of_ranks(next.workers, members);
    // All of them have come: what they wait for now is no longer a rank that may never do so.
    next.init_timeout = std::max(patience, kPatience);
    auto made = internal::make_generation(next, generation, members);
    if (made.ok()) {
      if (*next.rank == 0) rebuild.clear(members);
      return ProcessGroup(*std::move(made));
    }
    handle_->list_was_in_vain();
    const std::vector<bool> gone = core.gone();
    const bool died = std::any_of(members.begin(), members.end(), [&](int member) {
      return member != rank() && gone[static_cast<size_t>(member)];
    });
    if (!died) return annotate(made.status(), what);
  }
}

const std::vector<int>& ProcessGroup::previous_ranks() const { return handle_->previous(); }

}  // namespace weft
