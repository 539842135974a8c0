#ifndef WEFT_RPC_INTERNAL_MEMBERSHIP_MEMBERSHIP_H_
#define WEFT_RPC_INTERNAL_MEMBERSHIP_MEMBERSHIP_H_

// Membership: who is in the job, by way of the store. No rank is special.
//
// Keys, below "weft/<job>/" (values in brackets; "inc" is the incarnation in hexadecimal):
//   mode          [static N | dynamic]  set by the first, compared by all
//   rank/R        [inc name | free]     static: which worker has this rank
//   name/NAME     [id inc | free]       the worker with this name; "swept inc": about to be deleted
//   next_id       counter               dynamic: ids, never reused
//   beat/inc      [counter]             renewed every heartbeat by its owner; set before any claim
//   member/ID.inc [MemberRecord]        it can be called; the key tells all that ever changes
//   dead/inc      [reason]              its lease lapsed; set by the worker that saw it
//   version       counter               raised after every change of the others: what is watched
//   came          counter               static: of those who have published, until rank 0 leaves
//   full          "1"                   static: wakes the workers that wait, when as many have
//                                       come as the group has, or it was aborted; until rank 0
//                                       leaves
//   abort         [reason]              static: the group can never be complete; "invalid " before
//                                       it: by a mistake in some worker's options
//
//   MEM-1  a worker appears in a list only after it can be reached, and leaves every list when it
//          left or its lease lapsed; each raises one event at every other worker.
//   MEM-2  a name (and a static rank) has one owner: claims are compare-and-set, and a claim is
//          taken over only from an incarnation whose beat stood still for a whole lease, or that
//          is gone.
//   MEM-3  who watches whom is a ring in order of id over the living, so a worker costs the store
//          one write and one read per heartbeat, however many there are. While all that a worker
//          watches stand still, it watches twice as many: of n neighbours that died together the
//          last is known after a lease and 3 log2 n heartbeats.
//   MEM-4  leases are judged on the watcher's own clock: clocks are never compared. Only time in
//          which the watcher looked counts: after a pause of its own, or of the store, a lease
//          begins where it stood.
//   MEM-5  a dynamic group may last: of those that are gone a list keeps the last kMostGone, and
//          every few hundred changes the living worker with the lowest id deletes what they left
//          in the store.
//
//   MEM-6  what a change costs the store does not grow with the number of workers: one list of keys
//          and one request for what is new there. In a large group changes that follow each other
//          closely are looked at together, at the latest after a heartbeat; and while a static
//          group gathers, a worker looks once per heartbeat, and when the group is full.
//   MEM-7  stop() waits for no store: the operations of the thread are interrupted, at a client of
//          our own (ForkableStore). At a store that gives out none they last a second at most.
//
// One thread of its own talks to the store; callbacks run on it.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/condition.h"
#include "weft/common/log.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/rpc/internal/membership/members.h"
#include "weft/rpc/worker.h"
#include "weft/store/store.h"

namespace weft::internal {

// An incarnation as keys have it.
std::string hex(uint64_t incarnation);

struct MembershipOptions {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Store> store;
  std::string prefix;  // "weft/<job>/"
  std::string name;
  uint64_t incarnation = 0;
  std::optional<uint32_t> rank;  // static only
  int world_size = 0;            // 0: dynamic
  absl::Duration heartbeat = absl::Seconds(1);
  absl::Duration lease = absl::Seconds(15);
  Logger log;
  std::function<void(MemberListRef)> on_list;
  std::function<void(const MembershipChange&)> on_change;
  std::function<void(bool healthy)> on_store_health;
  std::function<void(Status)> on_evicted;  // we ourselves were declared dead
};

// A member as its record in the store has it; none when the record is odd.
WEFT_API std::optional<Member> read_member(const std::string& record);

class WEFT_API Membership {
 public:
  explicit Membership(MembershipOptions options);
  ~Membership();

  // Mode, id and name. Starts to renew the lease.
  StatusOr<uint32_t> claim(absl::Time deadline);
  // Makes us callable, then waits for the others (static) or for the first list (dynamic).
  Status publish(const Member& self, absl::Time deadline);
  // Tells the workers that still wait for a static group that it can never be complete, unless one
  // has died in it: then only the worker that came in its place fails.
  Status abort(const std::string& reason, absl::Time deadline);
  // Reads from the store whether a worker has aborted the group; its error if so.
  Status aborted(absl::Time deadline);
  // Takes us out of the store, as far as it can be reached. Idempotent.
  void leave(absl::Time deadline);
  // Ends the thread.
  void stop();

  MemberListRef list() const;
  // Waits until the list is not `seen` any more; false when the deadline came first.
  bool wait_list_change(const MemberListRef& seen, absl::Time deadline);

  bool dynamic() const { return options_.world_size == 0; }
  // For the phases of shutdown (internal/drain.cc).
  Store* store() const { return store_.get(); }
  std::string key(std::string_view name) const;
  Status bump_version(absl::Duration timeout);

 private:
  struct Claim {  // that no other worker may have made
    enum class Of { kRank, kName };
    Of of = Of::kName;
    std::string key{};
    std::string value{};
  };
  Status make_claim(const Claim& claim, absl::Time deadline);
  StatusOr<bool> is_alive(const std::string& incarnation, absl::Time deadline);
  void declare_dead(const Member& member, const std::string& reason);
  void run();
  // Waits for a change, at most until then, and takes it in.
  Status watch(absl::Time until);
  // `version`: as it was before the members are read.
  Status refresh(const std::optional<std::string>& version);
  // What the store has of the members.
  struct Listing;
  Status read_listing(const MemberList& old, Listing* out);
  void tell_if_evicted(const std::optional<std::string>& dead);
  Status missing_ranks(const std::string& name) const;
  // For one operation of the thread.
  absl::Duration patience() const;
  bool stopping() const;
  // MEM-5.
  Status sweep(const MemberList& list);
  bool has_left() const;
  Status beat();
  Status watch_successors();
  Status abort_if_incomplete(const std::string& reason, absl::Time deadline);
  void nap(absl::Duration d);
  // Until then, until a caller waits for a change of this worker, or stop().
  void rest(absl::Time until);

  const MembershipOptions options_;
  // One of our own where the store gives them out.
  const std::shared_ptr<Store> store_;
  const bool interruptible_;
  const std::string incarnation_;  // in hexadecimal

  mutable Mutex mutex_;
  Condition changed_;
  MemberListRef list_ ABSL_GUARDED_BY(mutex_);
  Status aborted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  bool hurry_ ABSL_GUARDED_BY(mutex_) = false;  // publish() waits for our own record
  std::string record_key_ ABSL_GUARDED_BY(mutex_);
  std::string name_value_ ABSL_GUARDED_BY(mutex_);

  // The thread's own.
  std::optional<std::string> seen_version_;
  bool full_ = false;
  absl::Duration pace_;  // between looks; MEM-6
  absl::Time looked_ = absl::InfinitePast();
  uint64_t beats_ = 0;
  struct Watched {
    std::optional<std::string> beat;
    absl::Duration stood;  // still, as far as we looked
    absl::Time looked;
  };
  std::map<uint64_t, Watched> watched_;  // successors, by incarnation
  size_t watch_width_ = 1;
  bool evicted_ = false;
  uint64_t swept_at_ = 0;  // the version at the last sweep
  bool healthy_ = true;

  std::unique_ptr<Thread> thread_;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_MEMBERSHIP_MEMBERSHIP_H_
