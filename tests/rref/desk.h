#ifndef WEFT_TESTS_RREF_DESK_H_
#define WEFT_TESTS_RREF_DESK_H_

// Desk: three workers' protocols side by side. Control items lie on the desk until a test delivers
// them; all other effects are written down.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "weft/common/error.h"
#include "weft/rref/internal/protocol.h"

namespace weft::test {

using namespace weft::internal;  // NOLINT: the tests' whole subject

// Roles: the owner, the creator, and a third worker.
inline constexpr int kOwner = 0;
inline constexpr int kCreator = 1;
inline constexpr int kThird = 2;

inline Status late() { return make_error(ErrorKind::kDeadline, "the creation timed out"); }

class Desk {
 public:
  struct Item {
    int from;
    int to;
    Message message;
  };

  Desk() {
    for (int i = 0; i < 3; ++i) workers_.emplace_back(key(i));
  }

  static WorkerKey key(int worker) {
    return WorkerKey{WorkerId(static_cast<uint32_t>(worker)),
                     Incarnation(static_cast<uint64_t>(0xa + worker))};
  }
  static Handle handle(const Creation& c) { return Handle{c.rref, c.fork, key(kOwner)}; }
  RRefProtocol& operator[](int worker) { return workers_[worker]; }

  // Calls f(protocol, effects) and sorts the effects.
  template <class F>
  auto on(int worker, F f) {
    Effects effects;
    if constexpr (std::is_void_v<decltype(f(workers_[worker], effects))>) {
      f(workers_[worker], effects);
      perform(worker, effects);
    } else {
      auto result = f(workers_[worker], effects);
      perform(worker, effects);
      return result;
    }
  }

  // The steps that tests take most.
  Creation remote() { return *workers_[kCreator].remote(key(kOwner)); }
  CreateVerdict create(const Creation& c) { return workers_[kOwner].create(key(kCreator), c); }
  void end(const Creation& c, const Status& status = Status()) {
    on(kOwner, [&](auto& p, Effects& out) { p.function_ended(c.rref, status, out); });
  }
  void creation_ended(const Creation& c, CallEnd outcome, const Status& why = Status()) {
    on(kCreator, [&](auto& p, Effects& out) { p.creation_ended(c.fork, outcome, why, out); });
  }
  // An object that its creator has, and whose function has ended.
  Creation made() {
    Creation c = remote();
    EXPECT_EQ(create(c), CreateVerdict::kStart);
    end(c);
    creation_ended(c, CallEnd::kDelivered);
    return c;
  }
  Carrier share(int from, const Handle& handle, int to, bool is_answer = false) {
    return *workers_[from].share(key(to), {handle}, is_answer);
  }
  void receive(int at, int from, const Carrier& carrier) {
    on(at, [&](auto& p, Effects& out) { p.receive(key(from), carrier, out); });
  }
  void carrier_ended(int at, int to, const Carrier& carrier, CallEnd outcome) {
    on(at, [&](auto& p, Effects& out) { p.carrier_ended(key(to), carrier.number, outcome, out); });
  }
  void drop(int at, const Handle& handle) {
    on(at, [&](auto& p, Effects& out) { p.drop(handle, out); });
  }
  void gone(int at, int dead) {
    on(at, [&](auto& p, Effects& out) { p.worker_gone(key(dead), out); });
  }
  void use(uint64_t token, int from, const Use& use) {
    on(kOwner, [&](auto& p, Effects& out) { p.use(token, key(from), use, out); });
  }

  // Delivers an item without acknowledging it.
  Reply deliver(const Item& item) {
    return on(item.to,
              [&](auto& p, Effects& out) { return p.deliver(key(item.from), item.message, out); });
  }
  void acknowledge(const Item& item, const Reply& reply) {
    on(item.from,
       [&](auto& p, Effects& out) { p.acknowledged(key(item.to), item.message.seq, reply, out); });
  }
  // The oldest item of this kind, taken off the desk.
  Item take(MessageKind kind) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].message.kind != kind) continue;
      Item item = items[i];
      items.erase(items.begin() + static_cast<std::ptrdiff_t>(i));
      return item;
    }
    ADD_FAILURE() << "no " << name(kind) << " was sent";
    return Item{0, 0, Message()};
  }
  Reply pass(MessageKind kind) {
    const Item item = take(kind);
    Reply reply = deliver(item);
    acknowledge(item, reply);
    return reply;
  }
  void pass_all() {
    while (!items.empty()) pass(items.front().message.kind);
  }

  // What was written down since the last time, as "worker: effect" lines.
  std::vector<std::string> log() { return std::exchange(log_, {}); }
  std::optional<Status> use_status(uint64_t token) const {
    for (const auto& [done, status] : uses_) {
      if (done == token) return status;
    }
    return std::nullopt;
  }

  std::vector<Item> items;
  int sent = 0;  // control items ever

 private:
  void perform(int worker, const Effects& effects) {
    for (const Effect& effect : effects) {
      if (const auto* send = std::get_if<SendMessage>(&effect)) {
        items.push_back({worker, static_cast<int>(send->to.id.value()), send->message});
        ++sent;
        continue;
      }
      if (const auto* done = std::get_if<UseDone>(&effect)) {
        uses_.emplace_back(done->token, done->status);
        continue;
      }
      static constexpr const char* kNames[] = {"sent", "confirmed", "failed",  "ready",
                                               "lost", "used",      "released"};
      log_.push_back(std::to_string(worker) + ": " + kNames[effect.index()]);
    }
  }

  std::vector<RRefProtocol> workers_;
  std::vector<std::string> log_;
  std::vector<std::pair<uint64_t, Status>> uses_;
};

}  // namespace weft::test

#endif  // WEFT_TESTS_RREF_DESK_H_
