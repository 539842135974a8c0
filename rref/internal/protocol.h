#ifndef WEFT_RREF_INTERNAL_PROTOCOL_H_
#define WEFT_RREF_INTERNAL_PROTOCOL_H_

// RRefProtocol: the reference counts of remote objects, as seen by one worker. It keeps an object
// alive at its owner while any worker can reach it, and no longer, whatever is lost, repeated, late
// or dead.
//
// Vocabulary. The *owner* has the object. The *creator* called `remote`. A *fork* is one holder's
// share, counted by the owner; the creator's is the first. A *carrier* is a user message (request
// or answer) with RRefs inside; each of them becomes a fork of its own. A fork made by the owner is
// confirmed when it is made; one made by any other holder, the *parent*, is pending until the owner
// has acknowledged its `fork` item. docs/rref.md tells the story, proto/rref.proto the wire.
//
// Invariants (cited by tests):
//   RREF-1   a value is released only when no fork is live, no local handle exists and its function
//            does not run; and then it is.
//   RREF-2   a fork is deleted exactly once; no message revives it.
//   RREF-3   a handler starts only when every RRef among its arguments is confirmed.
//   RREF-4   a parent outlives every child that is not confirmed yet.
//   RREF-5   a control item that is handled twice has the effect of once, in any order.
//   RREF-6   all handles dropped and the network quiet: nothing is left but tombstones, and of
//            these at most one for each number that its sender has not settled.
//   RREF-7   no input aborts or throws.
//   RREF-8   a holder's death frees its forks; an owner's death fails every wait for it.
//   RREF-9   an RRef that is never shared costs one `delete`, a local one nothing; sharing costs at
//            most one `fork` per child and one `accept` per carrier.
//   RREF-10  an RRef whose creation failed gives that failure to every use.
//
// Numbers and floors. What a worker sends to a peer is numbered: control items and calls of
// `remote` in one row (`seq`), carriers in another. A number is *settled* when its sender needs
// nothing of it any more: acknowledged, answered, proven undelivered. Every message carries the
// sender's floors: below them all is settled, and the receiver ignores copies that still arrive. So
// a receiver needs a tombstone only for numbers that are not below the floor: this bounds them
// (RREF-6) without trusting the network to forget.
//
// Fork at its owner. `n` is the number that introduced the fork: of its creation or `fork` item; 0
// for one that the owner made, which nothing can revive. Whenever the last reference goes, the
// object's value is released.
//
//   state      event                  guard                     next       action
//   any        create, abandon, fork  n < floor                 same       ignore
//   unknown    create                                           live       start the function
//   unknown    abandon                object not created        live       the object is the error
//   unknown    fork                   object known, or parent   live       accept
//                                     is its living creator
//   unknown    fork                   otherwise                 tombstone  refuse
//   unknown    owner shares                                     live       bound to the carrier
//   unknown    delete                 n >= floor                tombstone  its uses end
//   unknown    delete                 n < floor                 unknown
//   live       create, abandon                                  live       do not start again
//   live       fork                                             live       accept again
//   live       delete                 n >= floor                tombstone  its uses end
//   live       delete                 n < floor                 unknown    its uses end
//   live       carrier undelivered,   bound to it               unknown
//              audit: not held
//   live       holder is gone                                   unknown
//   tombstone  create                 first time                tombstone  start, keep no value
//   tombstone  create                 otherwise                 tombstone
//   tombstone  abandon                object not created        tombstone  the object is the error
//   tombstone  fork                                             tombstone  refuse
//   tombstone  delete                                           tombstone
//   tombstone  floor passes n                                   unknown    forget
//
// Object at its owner. It is in the table while a fork, a local handle, a running function or a
// parked use refers to it.
//
//   state       event                guard              next     action
//   -           use, fork, carrier   of the creator     awaited  park uses
//   -, awaited  create                                  running  start the function
//   -, awaited  abandon                                 ready    every parked use gets the error
//   awaited     creator is gone                         ready    every parked use gets the error
//   running     flush_known          not told yet       running  send `known` to the creator
//   running     function ended                          ready    parked uses get value or error
//   ready       use                                     ready    done at once
//   awaited     no reference left                       -
//   ready       no reference left                       -        release the value, if there is one
//
// Handle at a user. A pending child is one that waits for the acknowledgement of its `fork`.
//
//   state          event              guard             next       action
//   -              remote                               pending    the call carries the creation
//   -              carrier arrives    fork owner-made   confirmed
//   -              carrier arrives    otherwise         pending    send `fork`
//   pending        known, answer      creator           confirmed
//   pending        fork acknowledged  accepted          confirmed  its arrival may be complete
//   pending        fork acknowledged  refused           failed     its arrival fails
//   pending        creation fails     creator           failed     send `abandon`
//   confirmed      creation fails     creator           failed     known: nothing to abandon
//   any            owner is gone                        failed     nothing is sent any more
//   any, but not   dropped            no unconfirmed    -          send `delete`, unless the owner
//   pending child                     child                        is gone or has refused it
//
// Carrier at its sender.
//
//   state    event           guard      next     action
//   -        share                      open     forks made; parents wait
//   open     delivered                  -        parents may go; owner-made forks are proven
//   open     accept                     -        the same
//   open     not delivered              -        parents may go; owner-made forks are removed
//   open     unknown                    audited  send `audit`
//   open     audit_answers   an answer  audited  send `audit`
//   audited  held            per fork   -        as delivered
//   audited  not held        per fork   -        as not delivered
//   audited  pending         per fork   audited  until accept
//   any      receiver gone              -        as not delivered
//
// Carrier at its receiver.
//
//   state    event            guard             next     action
//   -        arrives          n < floor, void   -        it fails
//   -        arrives          otherwise         pending  send `fork` for what is not confirmed
//   -        audit            nothing is held   void     until the floor passes n
//   pending  all confirmed                      ready    the handler starts
//   pending  all resolved     one refused       -        it fails; drop the others, send `accept`
//   pending  all resolved     cancelled         -        drop all, send `accept`
//   pending  audit                              pending  send `accept` as soon as it is ready
//   ready    answered                           -
//   ready    flush_accept,    a fork of it has  -        send `accept`
//            or is an answer  a parent
//
// Pure and single-threaded: no clock, no I/O, no randomness. Inputs append their effects to `out`;
// the caller performs them afterwards, those of several calls in any order. Two promises are the
// caller's: a carrier is handed in at most once (CALL-2), and a death that is told to one worker is
// told to every worker.

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "weft/common/api.h"
#include "weft/common/gone_workers.h"
#include "weft/rref/internal/message.h"

namespace weft::internal {

// Copyable, so that a test can try what happens next.
class WEFT_API RRefProtocol {
 public:
  explicit RRefProtocol(WorkerKey self) : self_(self) {}

  const WorkerKey& self() const { return self_; }

  // --- Handles of this worker ---

  // A new object at `owner`, which is another worker: what its call has to carry. The handle is
  // {rref, fork, owner}. Fails when the owner is dead.
  StatusOr<Creation> remote(const WorkerKey& owner);
  // How the call of remote() ended. kDelivered: the function has ended, with a value or an error of
  // its own. `why` is what every use gets otherwise (RREF-10).
  void creation_ended(const ForkId& fork, CallEnd outcome, const Status& why, Effects& out);
  // An object of this worker: `running` for a remote() to itself (function_ended() must follow),
  // else a local value that is shared for the first time.
  Handle create_local(bool running);
  // Forks of these handles for a message to `to`. Fails, and makes none, when one of them cannot be
  // used. carrier_ended() must follow for a request, and may for an answer. REQUIRES: there are
  // handles.
  StatusOr<Carrier> share(const WorkerKey& to, absl::Span<const Handle> handles, bool is_answer);
  void carrier_ended(const WorkerKey& to, uint64_t carrier, CallEnd outcome, Effects& out);
  // Once per handle; for the owner's, once per create_local() and per arrival.
  void drop(const Handle& handle, Effects& out);
  // All handles of forks, as if dropped. Dropping them again is nothing.
  void drop_all(Effects& out);
  // OK, or what its uses fail with.
  Status check(const Handle& handle) const;
  bool confirmed(const Handle& handle) const;
  // What a fetch over this handle carries. Keep the handle until the fetch has ended.
  Use use_of(const Handle& handle) const;

  // --- Arrivals ---

  // ArrivalReady or ArrivalFailed follows, now or later. When it is ready its handles are the
  // user's: a fork of this worker's own object as {rref, zero, self}, any other as it came.
  void receive(const WorkerKey& from, const Carrier& carrier, Effects& out);
  // The arrival is given up: true when nothing will follow. False when ArrivalReady or
  // ArrivalFailed was there first: of the former the handles are the caller's to drop.
  bool cancel_arrival(const WorkerKey& from, uint64_t carrier);
  // A ready request runs on: tell its sender that its parents may go, unless there are none.
  void flush_accept(const WorkerKey& from, uint64_t carrier, Effects& out);
  // The handler of a ready request has ended, whatever its answer is; the answer says the same, and
  // when it is lost its caller audits.
  void answered(const WorkerKey& from, uint64_t carrier);

  // --- Objects of this worker ---

  CreateVerdict create(const WorkerKey& from, const Creation& creation);
  void flush_known(const RRefId& rref, Effects& out);
  // `status` is not OK when the function failed: then that is what every use gets.
  void function_ended(const RRefId& rref, const Status& status, Effects& out);
  // UseDone{token} follows, now or later, unless cancelled. `from` is this worker for its own uses.
  void use(uint64_t token, const WorkerKey& from, const Use& use, Effects& out);
  // What use() would say at once of an object that is there; nothing: ask use(). Changes nothing.
  std::optional<Status> use_if_ready(const WorkerKey& from, const Use& use) const;
  void cancel_use(uint64_t token, const RRefId& rref, Effects& out);

  // --- Control items ---

  Reply deliver(const WorkerKey& from, const Message& message, Effects& out);
  // Also with an error when the peer will never take the item (it does not run the service, ...).
  void acknowledged(const WorkerKey& from, uint64_t seq, const Reply& reply, Effects& out);

  // --- Peers ---

  // This incarnation is dead or has left. Final.
  // `why`: for errors.
  void worker_gone(const WorkerKey& worker, Effects& out, std::string_view why = {});
  // Asks `peer` about RRefs in answers to it that nothing has proven to have arrived: after every
  // reconnect, and now and then, since no message says that an answer is lost or its caller has
  // given up. Each carrier below `below` is asked about once.
  void audit_answers(const WorkerKey& peer, uint64_t below, Effects& out);
  // The number that the next carrier to `peer` will have.
  uint64_t next_carrier(const WorkerKey& peer) const;

  // --- What there is ---

  struct Counts {
    size_t owners = 0;            // objects of this worker
    size_t forks = 0;             // of these, counted here
    size_t users = 0;             // forks of others' objects held here
    size_t pending_users = 0;     // of these, not confirmed
    size_t pending_children = 0;  // forks made here that may not have arrived or been confirmed
    size_t parked_uses = 0;
    size_t arrivals = 0;
    size_t unacknowledged = 0;  // control items and calls of remote
    size_t tombstones = 0;      // of forks and of carriers

    friend bool operator==(const Counts&, const Counts&) = default;
  };
  Counts counts() const;
  size_t workers_gone() const { return gone_.size(); }
  // Forks that this worker counts, with their holders. In order.
  std::vector<std::pair<RRefId, WorkerKey>> holders() const;
  // Whether this worker, its owner, counts the fork.
  bool counts_fork(const ForkId& fork) const { return forks_.contains(fork); }
  bool has_object(const RRefId& rref) const { return objects_.contains(rref); }
  // Items that a peer or this worker had to ignore as nonsense, or that a peer would not take.
  uint64_t faults() const { return faults_; }
  // All that decides what happens next, sorted, as text: for debugging and for exploring.
  std::string state() const;

 private:
  struct Slot {  // a number sent to a peer; see Message for the fields
    MessageKind kind;
    bool settled;
    RRefId rref;
    ForkId fork;
    uint64_t about;  // abandon: number of the creation; audit: carrier
  };
  struct Made {  // one fork in a carrier that this worker sent
    RRefId rref;
    ForkId fork;
    ForkId parent;  // zero: made by the owner
    bool open;      // its arrival is neither proven nor disproven
  };
  struct Sent {
    bool is_answer;
    bool audited;
    std::vector<Made> forks;  // their numbers follow each other
    size_t open = 0;          // of forks

    // Its arrival is proven or disproven; false: it was before.
    bool close(Made* made) {
      const bool was = std::exchange(made->open, false);
      if (was) --open;
      return was;
    }
  };
  struct Peer {
    WorkerKey key;
    // Numbers from outbox_floor on; the front is not settled.
    std::deque<Slot> outbox;
    uint64_t outbox_floor = 1;
    // Carriers that are not settled.
    absl::btree_map<uint64_t, Sent> carriers;
    uint64_t next_carrier = 1;
    // What the peer has settled, and what must have no effect if it arrives. A tombstone's value:
    // whether its creation has been here.
    Floors theirs;
    absl::btree_map<uint64_t, bool> tombstones;
    absl::btree_set<uint64_t> void_carriers;
  };
  struct Fork {  // at the owner
    RRefId rref;
    WorkerKey holder;
    uint64_t carrier;  // made by this worker, arrival not proven; else 0
  };
  struct Parked {
    uint64_t token;
    WorkerKey from;
    ForkId fork;
  };
  struct Object {
    bool created = false;    // started, local, or failed before it could be
    bool has_value = false;  // the caller keeps something for it: to be released
    bool running = false;
    bool known_sent = false;
    Status result;  // when created and not running
    ForkId first;   // the creator's fork
    size_t forks = 0;
    size_t local_handles = 0;
    std::vector<Parked> parked;
  };
  enum class UserState : uint8_t { kPending, kConfirmed, kFailed };
  struct User {  // a fork of another worker's object
    RRefId rref;
    WorkerKey owner;
    UserState state = UserState::kPending;
    bool is_creator = false;
    bool at_owner = true;  // the owner counts it, or may: a delete is due
    bool ended = true;     // false while the call of remote is under way
    bool dropped = false;
    bool deleted = false;
    size_t children = 0;  // unconfirmed
    uint64_t introduced_by = 0;
    uint64_t carrier = 0;  // pending child: the arrival that waits for it
    WorkerKey parent;      // pending child: its sender
    Status failure;
  };
  struct Arrival {
    bool is_answer = false;
    bool needs_accept = false;
    bool accept_now = false;
    bool cancelled = false;
    size_t pending = 0;
    Status failure;
    std::vector<Handle> handles;
  };
  using ArrivalKey = std::pair<WorkerKey, uint64_t>;

  // protocol.cc: numbers and peers.
  bool is_gone(const WorkerKey& worker) const { return gone_.contains(worker.incarnation); }
  Peer& peer(const WorkerKey& key);
  Peer* find_peer(const WorkerKey& key);
  Floors floors(const Peer& p) const;
  void note_floors(Peer& p, const Floors& theirs);
  uint64_t number(Peer& p, MessageKind kind, const RRefId& rref, const ForkId& fork,
                  uint64_t about);
  void settle(Peer& p, uint64_t seq);
  // Returns the number; 0 when `to` is gone, and nothing is sent.
  uint64_t send(const WorkerKey& to, Message message, uint64_t about, Effects& out);

  // protocol_owner.cc: objects and forks of this worker.
  Object& object(const RRefId& rref) { return objects_[rref]; }
  Object* find_object(const RRefId& rref);
  void add_fork(const RRefId& rref, const ForkId& fork, const WorkerKey& holder, uint64_t carrier);
  void remove_fork(const ForkId& fork, Effects& out);
  void end_uses(const RRefId& rref, const ForkId& fork, Effects& out);
  void finish(const RRefId& rref, Object& o, const Status& result, Effects& out);
  void release_if_unused(const RRefId& rref, Effects& out);
  Status handle_fork(Peer& from, const Message& m);
  Status handle_delete(Peer& from, const Message& m, Effects& out);
  Status handle_abandon(Peer& from, const Message& m, Effects& out);
  Status not_yours(const Peer& from, const Message& m);
  void objects_lose(const WorkerKey& worker, Effects& out);

  // protocol_user.cc: forks held here.
  Status owner_gone(const RRefId& rref, const WorkerKey& owner) const;
  void handle_known(const Peer& from, const Message& m, Effects& out);
  void delete_if_due(const ForkId& fork, Effects& out);
  void fail_user(const ForkId& fork, const Status& why, Effects& out);
  void fork_answered(const ForkId& fork, const Status& status, Effects& out);
  void users_lose(const WorkerKey& owner, Effects& out);

  // protocol_carrier.cc: messages with RRefs inside.
  void release_parent(const Made& made, Effects& out);
  void arrived(Sent& sent, Made& made, Effects& out);
  void not_arrived(Sent& sent, Made& made, Effects& out);
  void close_if_settled(Peer& p, uint64_t carrier);
  void audit(Peer& p, uint64_t carrier, Sent& sent, Effects& out);
  void handle_accept(Peer& from, const Message& m, Effects& out);
  Reply handle_audit(Peer& from, const Message& m);
  void audit_answered(Peer& from, uint64_t carrier, const Reply& reply, Effects& out);
  void receive_fork(const WorkerKey& from, const Carrier& carrier, const Handle& handle,
                    Arrival& arrival, Effects& out);
  void resolve_if_complete(const ArrivalKey& key, Effects& out);
  void send_accept(ArrivalKey key, Effects& out);

  WorkerKey self_;
  uint64_t last_id_ = 0;
  uint64_t faults_ = 0;
  // Ordered where they are walked; the hash maps are walked only through a sorted copy of their
  // keys.
  std::map<Incarnation, Peer> peers_;
  std::map<ArrivalKey, Arrival> arrivals_;
  absl::flat_hash_map<RRefId, Object> objects_;
  absl::flat_hash_map<ForkId, Fork> forks_;
  absl::flat_hash_map<ForkId, User> users_;
  GoneWorkers gone_;
};

}  // namespace weft::internal

#endif  // WEFT_RREF_INTERNAL_PROTOCOL_H_
