#ifndef WEFT_PS_INTERNAL_PART_PROTOCOL_H_
#define WEFT_PS_INTERNAL_PART_PROTOCOL_H_

// PartProtocol: what one part of a table owes its clients: which pushes count, when they become
// values, who may read. Pure: no threads, no clock, no I/O, no tensors; the owner performs the
// effects. One thread at a time.
//
//   PSR-1  a push is accepted at most once, however often and late its copies come.
//   PSR-2  every copy of a push that was accepted, refused or dropped gets the same answer.
//   PSR-3  a push that its client has given up (its number is below a floor) is never accepted.
//   PSR-4  only clients that have entered, and have neither left nor died, are accepted from.
//   PSR-5  BSP: step r is applied once, when every client has finished it; it has every push that
//          was accepted for it, in order of (client, number); a pull of clock c sees the steps
//          below c and nothing else.
//   PSR-6  SSP: a pull of clock c is answered only while no client's clock is below c - bound.
//   PSR-7  batch: a step has the pushes of the first K clients, and of no other; a push for a step
//          that has ended is dropped. A step waits for no more clients than may push to it: one whose
//          last push was dropped here may wait at another part for one that waits here.
//   PSR-8  a client that leaves or dies holds up no other; what was accepted from it stays.
//   PSR-9  a pull that waits ends exactly once: ready, cancelled, or closed.
//
// A client is: unknown -> entered -> left, or dead with its worker. A push of an entered client:
//
//   mode        number known   below floor   step                   verdict
//   any         yes            -             -                      what it was (PSR-2)
//   any         no             yes           -                      settled (PSR-3)
//   ASP, SSP    no             no            -                      apply
//   any         no             no            (an assignment)        apply
//   BSP         no             no            clock >= open step     hold for step `clock`
//   BSP         no             no            clock < open step      hold for the open step
//   batch       no             no            version == now         hold for this step
//   batch       no             no            version < now          drop
//   batch       no             no            version > now          nonsense: kind protocol

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "weft/common/error.h"
#include "weft/common/worker_key.h"
#include "weft/ps/internal/wire.h"
#include "weft/ps/table.h"

namespace weft::ps::internal {

struct ClientKey {
  WorkerKey worker;
  uint64_t number = 0;
  friend constexpr auto operator<=>(const ClientKey&, const ClientKey&) = default;
};
WEFT_API std::string to_string(const ClientKey& client);

// These pushes, by token and in this order, become one update: divided by `divisor`. Without any: that
// many steps in a row have ended, and no push is in them.
struct ApplyStep {
  std::vector<uint64_t> tokens{};
  uint64_t divisor = 1;
  uint64_t steps = 1;
};
struct PullReady {
  uint64_t token = 0;
  uint64_t lag = 0;
};
using PartEffect = std::variant<ApplyStep, PullReady>;
using PartEffects = std::vector<PartEffect>;

// All that a PartProtocol knows besides the pulls that wait: for a copy of it.
struct ProtocolImage {
  struct Outcome {
    uint64_t number = 0;
    Status told{};
    bool dropped = false;
  };
  struct Client {
    ClientKey key{};
    uint64_t clock = 0;
    uint64_t floor = 1;
    std::vector<Outcome> outcomes{};
  };
  struct Held {
    ClientKey client{};
    uint64_t number = 0;
    uint64_t step = 0;
    uint64_t token = 0;  // of this copy alone
  };
  std::vector<Client> clients{};
  std::vector<ClientKey> left{};
  std::vector<WorkerKey> gone{};
  uint64_t entered = 0;
  bool started = false;
  uint64_t version = 0;
  uint64_t step = 0;
  std::vector<Held> held{};
};

class WEFT_API PartProtocol {
 public:
  // The most numbers that a client may have between its floor and its newest push.
  static constexpr uint64_t kMostOpen = 1 << 16;

  explicit PartProtocol(const Consistency& consistency) : consistency_(consistency) {}

  // ---- clients ----
  // The client's clock from now on: at least `clock`, and not below what is closed.
  StatusOr<uint64_t> enter(const ClientKey& client, uint64_t clock, PartEffects* out);
  // The client has finished the steps below.
  Status advance(const ClientKey& client, uint64_t clock, PartEffects* out);
  void leave(const ClientKey& client, PartEffects* out);
  void worker_gone(const WorkerKey& worker, PartEffects* out);

  // ---- pushes ----
  enum class Verdict : uint8_t {
    kApply,    // accepted when commit() says so; then it is to be applied now
    kHold,     // accepted when commit() says so; a later ApplyStep names its token
    kDrop,     // noted
    kSame,     // a copy: `told` and `dropped` are what was said of it
    kRefused,  // `told`; nothing is noted
  };
  struct Judgement {
    Verdict verdict = Verdict::kRefused;
    Status told{};
    bool dropped = false;
    uint64_t step = 0;  // kHold
  };
  // Notes the floor and, of a push that is to be dropped, that. Nothing else changes.
  Judgement judge(const ClientKey& client, const PushHeader& push);
  // After kDrop, at once: a step may wait for this client no more.
  void after_drop(PartEffects* out) { settle(out); }
  // After kApply or kHold, at once: the push is accepted, or refused with this error.
  void commit(const ClientKey& client, const PushHeader& push, const Judgement& judgement,
              const Status& accepted, uint64_t token, PartEffects* out);

  // ---- pulls ----
  // Ready now (an effect), or later.
  Status pull(const ClientKey& client, const PullHeader& pull, uint64_t token, PartEffects* out);
  // False: it was ready, or cancelled.
  bool cancel_pull(uint64_t token) { return parked_.erase(token) > 0; }

  // Updates so far: applied pushes (ASP, SSP) or steps (BSP, batch).
  uint64_t version() const { return version_; }
  uint64_t clients() const { return clients_.size(); }
  uint64_t held() const { return held_count_; }
  uint64_t parked() const { return parked_.size(); }
  // Numbers that are remembered, over all clients.
  uint64_t remembered() const;
  uint64_t clock_of(const ClientKey& client) const;

  std::vector<ClientKey> client_keys() const;
  struct ClientView {
    ClientKey key{};
    uint64_t clock = 0;
    uint64_t floor = 0;
    uint64_t remembered = 0;  // numbers
  };
  std::vector<ClientView> client_views() const;
  bool has_client(const ClientKey& client) const { return clients_.contains(client); }
  // The push was judged here, or given up; the client has finished the steps below `clock`; or it takes
  // no part any more. 0: says nothing.
  bool has_seen(const ClientKey& client, uint64_t push, uint64_t clock) const;

  ProtocolImage image() const;
  // REQUIRES: nothing has been done yet.
  void load(const ProtocolImage& image);

 private:
  struct Outcome {
    Status told;
    bool dropped = false;
  };
  struct Client {
    uint64_t clock = 0;
    uint64_t floor = 1;
    std::map<uint64_t, Outcome> outcomes{};  // by number, none below the floor
  };
  struct Parked {
    std::optional<uint64_t> clock{};
    uint64_t at_least = 0;
  };
  using HeldKey = std::pair<ClientKey, uint64_t>;  // and number

  // The smallest clock; nothing while fewer clients have come than the definition asks for.
  std::optional<uint64_t> slowest() const;
  bool may_read(const Parked& pull) const;
  void ready(uint64_t token, const Parked& pull, PartEffects* out) const;
  // batch: the clients that a step waits for.
  uint64_t wanted() const;
  void settle(PartEffects* out);
  bool close_step(PartEffects* out);
  void skip_empty_steps(uint64_t end, PartEffects* out);

  const Consistency consistency_;
  std::map<ClientKey, Client> clients_;
  std::set<ClientKey> left_;
  std::set<WorkerKey> gone_;
  uint64_t entered_ = 0;
  bool started_ = false;  // as many clients have been there as the definition asks for
  uint64_t version_ = 0;
  // BSP, batch: the first step that is not applied.
  uint64_t step_ = 0;
  std::map<uint64_t, std::map<HeldKey, uint64_t>> held_;  // by step; token
  uint64_t held_count_ = 0;
  std::map<uint64_t, Parked> parked_;  // by token
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_PART_PROTOCOL_H_
