#ifndef WEFT_TESTS_CONTRACT_TRANSPORT_HARNESS_H_
#define WEFT_TESTS_CONTRACT_TRANSPORT_HARNESS_H_

// What the transport contract suite needs: a world (runtime and network) per backend, peers with a
// transport and a recording acceptor, and handlers that record what they get. Everything waits
// through the Runtime, so that the same tests run on threads and in simulation.

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "weft/common/condition.h"
#include "weft/common/runtime.h"
#include "weft/common/sim.h"
#include "weft/transport/inproc_transport.h"
#include "weft/transport/transport.h"

namespace weft::testing {

struct Received {
  FrameKind kind;
  std::string header;
  std::string payload;
  int lane;
};

// A mutex and condition that all handlers of a world share.
class Signal {
 public:
  explicit Signal(Runtime* runtime) : runtime_(runtime), changed_(runtime) {}

  template <class F>
  auto with(F f) {
    MutexLock lock(&mutex_);
    changed_.notify_all();
    return f();
  }
  // False when `done` has not become true within `timeout`: a bound against hanging only.
  bool wait(const std::function<bool()>& done, absl::Duration timeout = absl::Seconds(30)) {
    const absl::Time deadline = runtime_->now() + timeout;
    MutexLock lock(&mutex_);
    while (!done()) {
      if (!changed_.wait_until(&mutex_, deadline).ok()) return done();
    }
    return true;
  }

 private:
  Runtime* const runtime_;
  Mutex mutex_;
  Condition changed_;
};

class RecordingHandler : public ConnectionHandler {
 public:
  explicit RecordingHandler(Signal* signal) : signal_(signal) {}

  void on_frame(const FrameView& frame, int lane) override {
    Received got{frame.kind, std::string(frame.header), std::string(), lane};
    for (std::string_view piece : frame.payload) got.payload.append(piece);
    EXPECT_EQ(got.payload.size(), frame.payload_bytes);
    std::function<void(const Received&)> reply;
    signal_->with([&] {
      EXPECT_EQ(lost_calls_, 0) << "a frame after on_lost (CONN-1)";
      reply = on_frame_;
      frames_.push_back(got);
    });
    if (reply) reply(got);
  }
  void on_lost(Lost lost) override {
    signal_->with([&] {
      ++lost_calls_;
      lost_ = std::move(lost);
    });
  }

  // Called for each frame, on the transport's thread. Set before traffic.
  void reply_with(std::function<void(const Received&)> f) {
    signal_->with([&] { on_frame_ = std::move(f); });
  }
  bool wait_frames(size_t n) {
    return signal_->wait([&] { return frames_.size() >= n; });
  }
  bool wait_frames_or_lost(size_t n) {
    return signal_->wait([&] { return frames_.size() >= n || lost_calls_ > 0; });
  }
  bool wait_lost() {
    return signal_->wait([&] { return lost_calls_ > 0; });
  }
  std::vector<Received> frames() {
    return signal_->with([&] { return frames_; });
  }
  size_t frame_count() {
    return signal_->with([&] { return frames_.size(); });
  }
  int lost_calls() {
    return signal_->with([&] { return lost_calls_; });
  }
  Lost lost() {
    return signal_->with([&] { return lost_; });
  }
  Signal& signal() { return *signal_; }

 private:
  Signal* const signal_;
  std::vector<Received> frames_;
  Lost lost_;
  int lost_calls_ = 0;
  std::function<void(const Received&)> on_frame_;
};

using HandlerRef = std::shared_ptr<RecordingHandler>;
using ConnectionRef = std::shared_ptr<Connection>;

// One end of an open connection.
struct End {
  ConnectionRef connection;
  HandlerRef handler;
};

class RecordingAcceptor : public Acceptor {
 public:
  RecordingAcceptor(Signal* signal, Hello own) : signal_(signal), own_(std::move(own)) {}

  StatusOr<Hello> check_hello(const Hello& theirs) override {
    std::function<Status(const Hello&)> check;
    Hello own;
    signal_->with([&] {
      ++hellos_;
      check = check_;
      own = own_;
    });
    if (check) WEFT_RETURN_IF_ERROR(check(theirs));
    if (theirs.job_id != own.job_id) {
      return make_error(ErrorKind::kPermission,
                        "'" + own.name + "' belongs to another job than '" + theirs.name + "'");
    }
    if (theirs.to_incarnation != 0 && theirs.to_incarnation != own.incarnation) {
      return make_error(ErrorKind::kPeerLost, "'" + own.name + "' was started anew");
    }
    return own;
  }
  std::shared_ptr<ConnectionHandler> on_connection(ConnectionRef connection) override {
    auto handler = std::make_shared<RecordingHandler>(signal_);
    std::function<void(const End&)> opened;
    signal_->with([&] { opened = opened_; });
    if (opened) opened({connection, handler});
    signal_->with([&] { accepted_.push_back({connection, handler}); });
    return handler;
  }

  void set_check(std::function<Status(const Hello&)> check) {
    signal_->with([&] { check_ = std::move(check); });
  }
  // Called inside on_connection().
  void set_opened(std::function<void(const End&)> opened) {
    signal_->with([&] { opened_ = std::move(opened); });
  }
  void set_own(Hello own) {
    signal_->with([&] { own_ = std::move(own); });
  }
  int hellos() {
    return signal_->with([&] { return hellos_; });
  }
  bool wait_hellos(int n) {
    return signal_->wait([&] { return hellos_ >= n; });
  }
  size_t accepted_count() {
    return signal_->with([&] { return accepted_.size(); });
  }
  // The i-th accepted connection, waiting for it.
  End accepted(size_t i = 0) {
    if (!signal_->wait([&] { return accepted_.size() > i; })) return {};
    return signal_->with([&] { return accepted_[i]; });
  }
  void forget() {
    signal_->with([&] { accepted_.clear(); });
  }

 private:
  Signal* const signal_;
  Hello own_;
  std::function<Status(const Hello&)> check_;
  std::function<void(const End&)> opened_;
  int hellos_ = 0;
  std::vector<End> accepted_;
};

class World;

// A worker as far as transports are concerned.
struct Peer {
  std::string name;
  Hello hello;
  std::shared_ptr<RecordingAcceptor> acceptor;
  std::unique_ptr<Transport> transport;
  std::string address;
};

struct Backend {
  std::string name;
  bool simulated = false;
  bool sockets = false;  // has ports and bytes on them
  // A factory for the workers of one world.
  std::function<TransportFactory(World&)> make;
  bool late = false;  // the transport decides how many lanes there are, and when
};

class World {
 public:
  World(const Backend& backend, uint64_t seed);

  Runtime& runtime() { return *runtime_; }
  Signal& signal() { return *signal_; }
  // For inproc backends.
  const std::shared_ptr<InprocNetwork>& network() const { return network_; }

  // Runs the body as a thread of the world.
  void run(const std::function<void()>& body);
  std::unique_ptr<Peer> make_peer(const std::string& name, size_t max_frame_bytes = 5u << 20);
  Status listen(Peer& peer, ListenOptions options = {});
  // Dials and waits for the outcome.
  StatusOr<End> dial(Peer& from, std::string_view address,
                     absl::Duration timeout = absl::Seconds(20),
                     const std::function<void(Hello*)>& change = nullptr);
  uint64_t trace_hash() const { return sim_ == nullptr ? 0 : sim_->trace_hash(); }

 private:
  std::shared_ptr<SimRuntime> sim_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<InprocNetwork> network_;
  TransportFactory factory_;
  const bool late_;
  std::unique_ptr<Signal> signal_;
  uint32_t next_id_ = 0;
};

// Every backend. Under ThreadSanitizer those without sockets: gRPC is not instrumented.
std::vector<Backend> transport_backends();

// Two peers, joined: a dialled b.
struct Pair {
  std::unique_ptr<Peer> a, b;
  End at_a, at_b;
  bool ok = false;
  void shutdown() {
    a->transport->shutdown();
    b->transport->shutdown();
  }
};

class TransportContract : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override { world_ = std::make_unique<World>(GetParam(), 1); }
  World& world() { return *world_; }
  // The body runs inside the world. In simulation everything it made must end in it, too.
  void run(const std::function<void()>& body) { world().run(body); }
  Pair join(size_t max_frame_bytes = 5u << 20);

 private:
  std::unique_ptr<World> world_;
};

inline std::ostream& operator<<(std::ostream& out, const Backend& b) { return out << b.name; }
inline std::string backend_name(const ::testing::TestParamInfo<Backend>& info) {
  return info.param.name;
}

Frame make_frame(FrameKind kind, std::string header, std::string payload, uint64_t cookie = 0);
// `size` bytes that tell their place.
std::string pattern(size_t size, uint64_t salt = 0);

}  // namespace weft::testing

#endif  // WEFT_TESTS_CONTRACT_TRANSPORT_HARNESS_H_
