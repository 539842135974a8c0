#ifndef WEFT_TESTS_TESTING_RELAY_H_
#define WEFT_TESTS_TESTING_RELAY_H_

// Relay: passes TCP connections on to a target and breaks them at chosen bytes: cut, reset,
// half-close, stall, delay, throttle, garbage. Works on bytes, so it tests real sockets under a
// real transport. In this process, or as a program of its own (relay_main.cc) between two workers.
//
//   auto relay = Relay::start("127.0.0.1:4711");            // loopback only
//   relay->add({.action = RelayAction::kReset, .at_byte = 1000});
//   dial(relay->address());
//
// Threads: one of its own; all methods from anywhere. The destructor closes everything and joins.

#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace weft::testing {

enum class RelayAction {
  kNone,
  kCut,        // closes both sides in an orderly way, dropping what is under way
  kReset,      // closes both sides with a reset
  kHalfClose,  // the receiver sees the end of the stream, the other direction goes on
  kStall,      // passes nothing more in this direction until clear()
  kDelay,      // every piece from there on waits for `millis`
  kThrottle,   // from there on passes at most `count` bytes in `millis`
  kGarbage,    // inserts `count` bytes that no peer sent
  kFlip,       // changes `count` bytes
};

struct RelayRule {
  RelayAction action = RelayAction::kNone;
  bool to_target = true;  // the direction whose bytes are counted and broken
  int connection = -1;    // the n-th that was accepted; -1: each
  uint64_t at_byte = 0;
  int count = 64;
  int millis = 10;
};

class Relay {
 public:
  // Null: the system would not give a socket. `target` is "127.0.0.1:PORT".
  static std::unique_ptr<Relay> start(std::string_view target);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  const std::string& address() const { return address_; }
  // For connections that have not reached the byte yet, too.
  void add(const RelayRule& rule);
  // Forgets all rules; what was stalled flows again.
  void clear();
  // Breaks all connections now.
  void cut_all(bool reset);
  // Connections to come are closed at once.
  void refuse(bool refuse);
  int accepted() const;
  int open() const;
  uint64_t bytes(bool to_target) const;
  // Bytes of the n-th connection; 0 when it is closed.
  uint64_t passed(int connection, bool to_target) const;

 private:
  struct Pipe {  // one direction
    int from = -1;
    int to = -1;
    std::string buffer;
    uint64_t passed = 0;
    bool ended = false;  // `from` said end of stream
    bool shut = false;   // so was `to` told
    bool stalled = false;
    int delay_millis = 0;
    size_t throttle_bytes = 0;  // per throttle_millis; 0: any number
    int throttle_millis = 0;
    size_t throttle_left = 0;
    int64_t hold_until = 0;  // in milliseconds of the steady clock
    std::vector<bool> used;  // by rule
  };
  struct Link {
    int number = 0;
    int client = -1;
    int target = -1;
    Pipe pipes[2];  // 0 to the target, 1 to the client
    bool dead = false;
  };

  Relay() = default;
  void run();
  void accept_one();
  // Moves what may move; false: the link is to be closed.
  void move(Link* link, Pipe* pipe, bool to_target);
  void apply(Link* link, Pipe* pipe, bool to_target, size_t* may_pass);
  void close_link(Link* link, bool reset);
  void wake();

  std::string address_;
  int target_port_ = 0;
  int listener_ = -1;
  int wake_[2] = {-1, -1};
  std::thread thread_;

  mutable std::mutex mutex_;
  bool stopping_ = false;
  bool refuse_ = false;
  int accepted_ = 0;
  uint64_t bytes_[2] = {0, 0};
  std::vector<RelayRule> rules_;
  std::list<Link> links_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_RELAY_H_
