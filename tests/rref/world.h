#ifndef WEFT_TESTS_RREF_WORLD_H_
#define WEFT_TESTS_RREF_WORLD_H_

// World: a few workers, each with its RRefProtocol, and a network between them that loses, repeats
// and reorders; users who make, share, use and drop RRefs; workers that crash. It holds the truth
// (who can reach what) and compares the protocols with it after every step. A value: a copy is a
// fork in time.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "weft/rref/internal/protocol.h"

namespace weft::test {

using namespace weft::internal;  // NOLINT: the tests' whole subject

// Bugs that a run plants on purpose: each must be found.
enum class Bug {
  kNone,
  kDeleteWithoutTombstone,  // deletes do not say what introduced their fork
  kParentGoesEarly,         // an unknown outcome counts as delivered
  kRefusalIgnored,          // a refused fork counts as accepted
};

struct Step {
  enum Kind : uint8_t {
    kRemote,         // a makes an object at b
    kLocal,          // a makes an object of its own
    kShare,          // a sends handle b to c
    kFetch,          // a fetches over handle b
    kDrop,           // a drops handle b
    kDeliver,        // packet a
    kRepeat,         // packet a, and it stays under way
    kLose,           // packet a; its caller is told that it was not delivered
    kGiveUp,         // call a: its caller takes the outcome for unknown
    kGiveUpFetch,    // fetch a
    kEnd,            // call a: its function or handler ends with a value
    kEndWithError,   // call a: its function ends with an error
    kEndWithHandle,  // call a: its handler returns handle b of its worker
    kFlush,          // call a: known or accept, early
    kCancel,         // call a: its arrival is given up by the callee
    kAudit,          // a audits its answers to b
    kCrash,          // a
    kDropAll,        // a leaves
  };
  Kind kind;
  int a = 0;
  int b = 0;
  int c = 0;
};

class World {
 public:
  // How many more of each there may be.
  struct Budget {
    int remotes = 0;
    int locals = 0;
    int shares = 0;
    int fetches = 0;
    int errors = 0;   // kEndWithError
    int returns = 0;  // kEndWithHandle
    int flushes = 0;
    int repeats = 0;
    int losses = 0;  // kLose and kGiveUp
    int cancels = 0;
    int audits = 0;
    int crashes = 0;
    int leaves = 0;
    int in_flight = 4;  // users wait while as many packets are under way
    bool roles = true;  // only worker 1 makes objects, only at worker 0; none sends to itself
  };

  World(int workers, const Budget& budget, Bug bug = Bug::kNone);

  // What may happen next.
  std::vector<Step> steps() const;
  void apply(const Step& step);
  std::string describe(const Step& step) const;

  // Lets everything come to an end, without further faults: what is under way arrives, functions
  // end, handles are dropped. Then nothing may be left (RREF-6).
  void drain();

  // The first violation of an invariant; empty: none.
  const std::string& violation() const { return violation_; }
  // All that decides what may happen from here on.
  std::string state() const;

  static WorkerKey key(int worker);
  RRefProtocol& protocol(int worker) { return workers_[worker].protocol; }
  const RRefProtocol& protocol(int worker) const { return workers_[worker].protocol; }
  bool is_up(int worker) const { return workers_[worker].is_up; }
  int size() const { return static_cast<int>(workers_.size()); }
  uint64_t sent(MessageKind kind) const { return sent_[static_cast<size_t>(kind)]; }
  // Uses that ended with the value, and with an error.
  int values() const { return values_; }
  int errors() const { return errors_; }

 private:
  struct Held {  // a handle that a user has; its index never changes
    Handle handle;
    bool is_there = true;
    bool has_failed = false;
    int uses = 0;
  };
  struct Worker {
    RRefProtocol protocol;
    bool is_up = true;
    std::vector<Held> handles;
    std::set<int> knows_gone;
  };
  struct Packet {
    enum Kind : uint8_t { kControl, kAcknowledge, kCall, kAnswer, kFetch, kFetched, kGone };
    Kind kind;
    int from;
    int to;
    int call = -1;      // kCall, kAnswer: into calls_; kFetch, kFetched: into fetches_
    bool ran = true;    // kAnswer: the handler gave it
    Message message{};  // kControl; of kAcknowledge the one that it is for
    Reply reply{};
  };
  struct Call {
    enum Phase : uint8_t { kFlying, kArrived, kRunning, kOver };
    int from;
    int to;
    bool is_remote;
    Creation creation{};
    Carrier carrier{};
    Carrier answer{};  // RRefs in the answer
    Phase phase = kFlying;
    bool is_open = true;  // its caller waits
    bool was_flushed = false;
  };
  struct Fetch {
    int from;
    int to;
    int handle;
    Use use;
    bool is_open = true;
  };
  struct Object {  // the truth
    int owner;
    bool started = false;
    bool running = false;
    bool is_released = false;
  };

  using Packets = std::vector<Packet>;

  void fail(const std::string& what);
  void push(Packet packet);
  void perform(int worker, const Effects& effects);
  void deliver(Packet packet);
  void deliver_call(int call);
  void deliver_answer(const Packet& packet);
  void lose(Packet packet);
  void remote(int from, int to);
  void local(int worker);
  void share(int from, int handle, int to);
  void fetch(int from, int handle);
  // Also looks whether use_if_ready() says the same.
  void use(int owner, int fetch, Effects& effects);
  void close_fetch(int fetch);
  void drop(int worker, int handle);
  void end_call(int call, const Status& status, int handle);
  void close_call(int call, CallEnd outcome);
  void flush(int call);
  void crash(int worker);
  void learn(int worker, int dead);
  void arrived(int worker, int from, uint64_t carrier, const Status& status);
  void take(int worker, const std::vector<Handle>& handles);
  void failed(int worker, const Handle& handle);
  void use_done(int worker, const UseDone& done);
  void released(int worker, const RRefId& rref);
  void deleting(int owner, const Message& message);
  bool see_each_other(int a, int b) const;
  bool drain_once();
  void check_rest();

  std::vector<Worker> workers_;
  Packets packets_;
  std::vector<Call> calls_;
  std::vector<Fetch> fetches_;
  std::map<RRefId, Object> objects_;
  // Forks whose delete was delivered, and children with the parent that waits for them.
  std::map<ForkId, int> deleted_;  // with their owner
  std::map<ForkId, std::vector<std::pair<int, Handle>>> children_;
  Budget budget_;
  Bug bug_;
  std::string violation_;
  // What was said, by whom: each item is made once, however often it travels.
  std::set<std::tuple<int, int, ForkId, int, uint64_t>> said_;
  uint64_t sent_[8] = {};
  int values_ = 0;
  int errors_ = 0;
};

}  // namespace weft::test

#endif  // WEFT_TESTS_RREF_WORLD_H_
