#ifndef WEFT_PS_INTERNAL_REPLICA_PROTOCOL_H_
#define WEFT_PS_INTERNAL_REPLICA_PROTOCOL_H_

// ReplicaProtocol: one copy of one range of a table that has two copies: who may answer for the
// range, what has to be at the backup before an answer leaves, and who takes over. Pure: no threads,
// clock, I/O or tensors; the owner performs the effects, those of one call in their order. One
// thread at a time.
//
// The range's *map* (epoch, owner, backup, whether the backup is ready) is one value in the job's
// store and changes only by compare_set. Whatever the owner does takes a *position* in its log: a
// request that changes the range, and a read, too. An answer is *released* when its position is.
//
//   PSR-10  an answer that was released is in every copy that the map lets answer, now or later: it
//           is in the backup, or the map names no backup that is ready.
//   PSR-11  what a copy released as owner is seen by every read that begins after it, at whichever
//           copy: an owner that another may have followed releases nothing.
//   PSR-12  a backup has the owner's log up to its position: nothing left out, nothing twice, in
//           order.
//   PSR-13  epochs of the map only grow; of two writers of one epoch one wins, and the other learns
//           what is there.
//   PSR-14  no read of a clock decides any of this: suspicion may be wrong at any time, and costs a
//           copy, not a push.
//
// The map, by who writes it:
//
//   from               to                      writer  when
//   (none)             (A, -, 1)               A       the table is opened first
//   (A, -, e)          (A, B joining, e+1)     A       offer(B)
//   (A, B joining, e)  (A, B ready, e)         A       B has confirmed all that A has released
//   (A, B any, e)      (A, -, e+1)             A       lost_backup()
//   (A, B ready, e)    (B, -, e+1)             B       suspect_owner()
//   (A, B ready, e)    (A, C ready, e+1)       A       replace_backup(C), and C has confirmed all that A
//                                                      has released
//   (A, B ready, e)    (B, A ready, e+1)       A       hand_over(), and B has confirmed all
//
// Owner. The gate is closed while answers need the backup's confirmation.
//
//   state    the map says  gate    event                      next     action
//   alone    (A, -)        open    offer(B)                   asking   write joining
//   asking   (A, -)        open    written                    joining  send an image, then the log
//   joining  (A, B joining) open   B confirms the first time  closing  the gate closes
//   joining  (A, B joining) open   lost_backup()              leaving  write alone
//   closing  (A, B joining) closed B has all that is released promoting write ready
//   closing  (A, B joining) closed lost_backup()              leaving  the gate opens; write alone
//   promoting  unknown     closed  written                    paired
//   promoting  unknown     closed  lost_backup()              promoting  alone is written after it
//   paired   (A, B ready)  closed  lost_backup()              leaving  write alone; closed till then
//   leaving  unknown       as was  written                    alone    the gate opens
//   paired   (A, B ready)  closed  replace_backup(C)          both     send an image to C, then the log to both
//   both     (A, B ready)  closed  C confirms the first time  both     the gate waits for C, too
//   both     (A, B ready)  closed  C has all that is released changing  write C as backup
//   both     (A, B ready)  closed  lost_next()                paired
//   both     (A, B ready)  closed  lost_backup()              leaving  C is given up; write alone
//   changing unknown       closed  written                    paired   C follows on, without another image
//   changing unknown       closed  lost_next(), lost_backup() changing  for C alone is written after it
//   paired   (A, B ready)  closed  hand_over()                handing  takes no requests
//   handing  (A, B ready)  closed  B has all                  handing  write B as owner
//   handing  (A, B ready)  closed  lost_backup()              leaving  takes requests
//   handing  unknown       closed  written                    follows  it is the backup of B
//   any      another owner -       learnt                     gone     retire: nothing is released
//
// Backup.
//
//   state    event                  next     action
//   follows  log of its epoch       follows  apply what is new, confirm
//   follows  a gap, another epoch   follows  refuse
//   follows  suspect_owner()        taking   write itself as owner; refuses the log from here
//   taking   written                owner    serve, alone
//   taking   it was not ready       follows
//   taking   another map            gone     discard
//   follows  a map of a later epoch gone     discard
//   follows  (B, A ready, e+1)      owner    its owner A has handed over: serve, with A as backup
//
// One that is to take another's place as backup (joins) follows the log without being in the map. It may not
// take over, and learns from the next message, or from the store, that it is the backup.
//
//   joins    log of its epoch       joins    apply what is new, confirm
//   joins    (A, C ready, e+1)      follows
//   joins    the owner has given it up  gone discard

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "weft/common/api.h"

namespace weft::ps::internal {

// One life of a server.
struct CopyPlace {
  std::string name{};
  uint64_t incarnation = 0;
  bool empty() const { return name.empty(); }
  friend auto operator<=>(const CopyPlace&, const CopyPlace&) = default;
};

struct RangeMap {
  uint64_t epoch = 0;  // 0: there is none
  CopyPlace owner{};
  CopyPlace backup{};
  bool ready = false;  // the backup may take over
  friend bool operator==(const RangeMap&, const RangeMap&) = default;
};
// "epoch 3: 'ps0', backup 'ps1'".
WEFT_API std::string to_string(const RangeMap& map);

// compare_set of the map, until there is an answer: wrote().
struct WriteMap {
  RangeMap expected;
  RangeMap desired;
};
// The state as it is now goes to the backup, and the log from here on.
struct SendImage {};
// The same, to the one that is to be the backup.
struct SendImageToNext {};
// What went to the next backup goes to the backup from now on.
struct NextIsBackup {};
// Answers up to this position may leave.
struct Release {
  uint64_t position = 0;
};
struct Serve {};    // this copy is the owner now
struct Follow {};   // it has handed over: it is the backup now, with all that it had
struct Retire {};   // it is the owner no more: nothing that was not released may leave
struct Discard {};  // a backup that nobody counts on
using ReplicaEffect = std::variant<WriteMap, SendImage, SendImageToNext, NextIsBackup, Release,
                                   Serve, Follow, Retire, Discard>;
using ReplicaEffects = std::vector<ReplicaEffect>;

// For tests of the tests: what must be found.
enum class ReplicaBug : uint8_t {
  kNone,
  kReleaseEarly,        // the gate is never closed
  kReadWithoutLog,      // a read takes no position of its own
  kGateAtReady,         // the gate closes when the map says ready, not before it is written
  kReadyTooEarly,       // ready is written at the first confirmation
  kOpenWhileLeaving,    // the gate opens when the backup is given up, not when that is written
  kGateForgotten,       // a lost backup during promotion opens the gate
  kTakesOverJoining,    // a backup takes over without being ready
  kTakesGaps,           // the log is applied whatever its position
  kRepeats,             // entries that came before are applied again
  kOldEpoch,            // the log of an older epoch is applied and confirmed
  kConfirmsOldEpoch,    // a confirmation of an older epoch counts
  kOwnerStays,          // an owner that learns of another goes on
  kNextNotWaitedFor,    // answers do not wait for the one that is to be the backup
  kHandsOverEarly,      // a part is handed over before its backup has all
  kServesWhileHanding,  // requests are taken after the new owner is written
};
constexpr int kReplicaBugs = 15;

class WEFT_API ReplicaProtocol {
 public:
  enum class Role : uint8_t { kOwner, kBackup, kGone };

  // REQUIRES: the map in the store says that `self` is the owner, alone.
  static ReplicaProtocol owner(CopyPlace self, RangeMap map, ReplicaBug bug = ReplicaBug::kNone);
  // From an image at this position; `map` names `self` as its backup.
  static ReplicaProtocol backup(CopyPlace self, RangeMap map, uint64_t position,
                                ReplicaBug bug = ReplicaBug::kNone);

  Role role() const { return role_; }
  const CopyPlace& self() const { return self_; }
  // As last learnt.
  const RangeMap& map() const { return map_; }
  uint64_t last() const { return last_; }
  uint64_t confirmed() const { return confirmed_; }
  uint64_t released() const { return released_; }
  bool writing() const { return want_.has_value(); }
  // The log of this epoch goes to the map's backup.
  bool streams() const { return role_ == Role::kOwner && !map_.backup.empty() && !lost_; }

  // The one that is to take the backup's place; empty: none.
  const CopyPlace& next() const { return next_; }
  bool streams_to_next() const { return role_ == Role::kOwner && !next_.empty() && !next_lost_; }
  // An owner that does not hand over.
  bool takes_requests() const {
    const bool serves = bug_ == ReplicaBug::kServesWhileHanding && want_.has_value();
    return role_ == Role::kOwner && (!handing_ || serves);
  }
  bool handing() const { return handing_; }
  // A copy that is in no map, as far as it knows.
  bool joins() const { return role_ == Role::kBackup && map_.backup != self_; }

  // What the other getters do not say, for tests that compare states.
  std::string state_text() const;

  // ---- as owner ----
  // The position of what was just done, or is read. REQUIRES: takes_requests().
  uint64_t append(bool reads_only, ReplicaEffects* out);
  void offer(const CopyPlace& candidate, ReplicaEffects* out);
  void confirm(uint64_t epoch, uint64_t position, ReplicaEffects* out);
  void lost_backup(uint64_t epoch, ReplicaEffects* out);
  // Nothing, unless the map says that a backup is ready and no other change is under way.
  void replace_backup(const CopyPlace& candidate, ReplicaEffects* out);
  void confirm_next(uint64_t epoch, uint64_t position, ReplicaEffects* out);
  void lost_next(uint64_t epoch, ReplicaEffects* out);
  void hand_over(ReplicaEffects* out);

  // ---- as backup ----
  struct Accepted {
    bool refused = false;  // nothing is applied; the answer has map() and last()
    uint64_t skip = 0;     // of the entries: they came before
    uint64_t apply = 0;    // after those
  };
  // Entries `first` to `first + count - 1`; they are applied when this returns.
  Accepted entries(uint64_t epoch, uint64_t first, uint64_t count);
  void suspect_owner(ReplicaEffects* out);
  // The map that the owner sends with its log: one that joins may be the backup by now.
  void adopt(const RangeMap& of_owner);
  // The owner says that one that joins is given up.
  void given_up(ReplicaEffects* out);

  // ---- the store ----
  // The map after WriteMap, whatever it is.
  void wrote(const RangeMap& now, ReplicaEffects* out);
  // The map as somebody has read it, perhaps long ago.
  void read(const RangeMap& then, ReplicaEffects* out);

 private:
  ReplicaProtocol(Role role, CopyPlace self, RangeMap map, uint64_t position, ReplicaBug bug);
  void write(RangeMap desired, ReplicaEffects* out);
  void write_alone(ReplicaEffects* out);
  void settle(ReplicaEffects* out);
  void learn(const RangeMap& now, ReplicaEffects* out);
  void write_next(ReplicaEffects* out);
  void write_handed(ReplicaEffects* out);
  bool is_promotion(const RangeMap& now) const;
  void forget_next();

  Role role_;
  CopyPlace self_;
  RangeMap map_;
  ReplicaBug bug_;
  std::optional<RangeMap> want_{};  // a write that is not answered
  uint64_t last_ = 0;               // backup: applied
  uint64_t confirmed_ = 0;
  uint64_t released_ = 0;
  bool gate_ = false;
  bool lost_ = false;  // the backup is given up; it is in the map until that is written
  CopyPlace next_{};
  uint64_t next_confirmed_ = 0;
  bool next_gate_ = false;
  bool next_lost_ = false;  // while it may be written as backup
  bool handing_ = false;
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_REPLICA_PROTOCOL_H_
