// Connections between workers under virtual time: which of two stays, what a worker that is gone
// takes with it, and what is told when one is there again.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/rpc/call.h"
#include "weft/rpc/worker.h"
#include "weft/tests/sim/calls_group.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

const FunctionRef<bool(int64_t)> kIsGivenUp{"sim.is_given_up"};

// Both dial at once; afterwards each knows of one connection, and the other one is closed.
TEST(ConnectionsSim, OfTwoThatAreMadeAtOnceOneStays) {
  int both = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    GroupOptions options;
    options.seed = seed;
    Group(options).run([&both](Group& g) {
      const auto call = [&g](size_t from) {
        for (int i = 0; i < 5; ++i) {
          EXPECT_EQ(rpc_sync(g.workers[from], absl::StrCat("w", 1 - from), on("slow", &Slow::take),
                             at::ones({1 << 16})),
                    1 << 16);
        }
      };
      auto other = g.sim->spawn("other", [&] { call(1); });
      call(0);
      other->join();
      both += g.count(0, "dials") > 0 && g.count(1, "dials") > 0 ? 1 : 0;
      g.pass(absl::Seconds(10));
      for (const size_t i : {0, 1}) EXPECT_EQ(g.count(i, "connections"), 1) << i;
      call(0);
    });
  }
  EXPECT_GT(both, 10) << "seeds in which both dialled";
}

TEST(ConnectionsSim, AWorkerThatIsGoneTakesTheHandlersOfItsOwnCallsAlone) {
  Group({.size = 2, .dynamic = true, .lease = 5s}).run([](Group& g) {
    Worker leaves = g.join("a");
    const Future<bool> stays = rpc_async(g.workers[0], "w1", kIsGivenUp, 30);
    const Future<bool> ends = rpc_async(leaves, "w1", {.deadline = kInfinite}, kIsGivenUp, 40);
    g.pass(absl::Seconds(2));
    (void)leaves.shutdown({.graceful = false, .deadline = 1s});
    EXPECT_FALSE(ends.try_wait().ok());
    EXPECT_FALSE(stays.wait()) << "another worker's call was given up with it";
  });
}

// What comes from a peer lies there unread while more threads want to run than there are cores.
TEST(ConnectionsSim, SILENT_1_APeerThatIsListedMayBeSilentForMoreThanALease) {
  Group({.size = 2, .lease = 5s}).run([](Group& g) {
    EXPECT_FALSE(rpc_sync(g.workers[0], "w1", kIsGivenUp, 0));
    const int late =
        g.plan->add({.fault = Fault::kDelay, .from = "w1", .delay = absl::Seconds(14)});
    const int64_t dials = g.count(0, "dials") + g.count(1, "dials");
    EXPECT_FALSE(rpc_sync(g.workers[0], "w1", {.deadline = 1min}, kIsGivenUp, 0));
    EXPECT_GT(g.plan->hits(late), 0);
    g.plan->clear();
    EXPECT_EQ(g.count(0, "dials") + g.count(1, "dials"), dials);
  });
}

TEST(ConnectionsSim, SILENT_1_AConnectionThatIsSilentForFourLeasesEnds) {
  Group({.size = 2, .lease = 5s}).run([](Group& g) {
    EXPECT_FALSE(rpc_sync(g.workers[0], "w1", kIsGivenUp, 0));
    g.plan->add({.fault = Fault::kDrop, .from = "w1"});
    const absl::Time begun = g.sim->now();
    const Status lost =
        rpc_async(g.workers[0], "w1", {.deadline = kInfinite}, kIsGivenUp, 0).try_wait().status();
    EXPECT_EQ(error_kind(lost), ErrorKind::kMaybeExecuted) << lost;
    EXPECT_THAT(std::string(lost.message()), ::testing::HasSubstr("no sign of life for 20s"));
    EXPECT_GE(g.sim->now() - begun, absl::Seconds(17));
    EXPECT_LE(g.sim->now() - begun, absl::Seconds(23));
    g.plan->clear();
    EXPECT_FALSE(rpc_sync(g.workers[0], "w1", kIsGivenUp, 0)) << "the next connection works";
  });
}

TEST(ConnectionsSim, SILENT_1_ADialMayTakeMoreThanALease) {
  Group({.size = 2, .lease = 5s}).run([](Group& g) {
    g.plan->add({.fault = Fault::kDelay, .kind = FrameKind::kHello, .delay = absl::Seconds(14)});
    EXPECT_FALSE(rpc_sync(g.workers[0], "w1", {.deadline = 1min}, kIsGivenUp, 0));
    EXPECT_EQ(g.count(0, "dials"), 1);
    g.plan->clear();
  });
}

// Takes a millisecond for each frame, as a line does that is full.
class SlowConnection final : public Connection {
 public:
  SlowConnection(std::shared_ptr<Connection> inner, Runtime* runtime)
      : inner_(std::move(inner)), runtime_(runtime) {}
  const Hello& peer() const override { return inner_->peer(); }
  LaneRange bulk_lanes() const override { return inner_->bulk_lanes(); }
  bool dialled() const override { return inner_->dialled(); }
  Status send(Frame frame, int lane) override {
    const Status sent = inner_->send(std::move(frame), lane);
    runtime_->make_parker()->park_until(runtime_->now() + absl::Milliseconds(1));
    return sent;
  }
  void close(Status reason) override { inner_->close(std::move(reason)); }
  std::string describe() const override { return inner_->describe(); }
  ConnectionStats stats() const override { return inner_->stats(); }

 private:
  const std::shared_ptr<Connection> inner_;
  Runtime* const runtime_;
};

class SlowTransport final : public ForwardingTransport {
 public:
  SlowTransport(std::unique_ptr<Transport> inner, Runtime* runtime)
      : ForwardingTransport(std::move(inner)), runtime_(runtime) {}
  void connect(std::string_view address, const Hello& hello, absl::Time deadline,
               std::shared_ptr<ConnectionHandler> handler, DialDone done) override {
    auto wrapped = [done = std::move(done),
                    runtime = runtime_](StatusOr<std::shared_ptr<Connection>> made) mutable {
      if (made.ok()) made = std::make_shared<SlowConnection>(*std::move(made), runtime);
      done(std::move(made));
    };
    ForwardingTransport::connect(address, hello, deadline, std::move(handler), std::move(wrapped));
  }

 private:
  Runtime* const runtime_;
};

// The thread that writes its frames goes on, and learns from them what has become of it.
TEST(ConnectionsSim, ACallWhoseConnectionIsLostWhileItIsSentIsSentAgain) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    GroupOptions options;
    options.seed = seed;
    options.wrap = [](std::unique_ptr<Transport> inner, Runtime* runtime) {
      return std::make_unique<SlowTransport>(std::move(inner), runtime);
    };
    Group(options).run([seed](Group& g) {
      // With a connection there, the frames are written by the thread that calls.
      EXPECT_EQ(rpc_sync(g.workers[0], "w1", on("slow", &Slow::take), at::ones({4})), 4);
      g.plan->add({.fault = Fault::kCut,
                   .kind = FrameKind::kChunk,
                   .from = "w0",
                   .skip = static_cast<int64_t>(seed % 4),
                   .times = 1});
      const StatusOr<int64_t> taken =
          try_rpc_sync(g.workers[0], "w1", {.retry = Retry::kAtMostOnce}, on("slow", &Slow::take),
                       at::ones({1 << 21}));
      EXPECT_TRUE(taken.ok()) << taken.status();
      EXPECT_EQ(g.slow[1]->taken, 2);
      g.plan->clear();
    });
  }
}

// Tells of the connections that are there again.
class Hears final : public Service {
 public:
  explicit Hears(std::vector<std::string>* heard) : heard_(heard) {}
  std::vector<Method> methods() override { return {}; }
  void on_reconnected(const WorkerInfo& worker) override { heard_->push_back(worker.name); }

 private:
  std::vector<std::string>* const heard_;
};

TEST(ConnectionsSim, AServiceHearsOnceOfAConnectionThatIsThereAgain) {
  std::vector<std::string> heard;
  GroupOptions options;
  options.services.push_back(
      [&heard](const ServiceContext&) { return std::make_shared<Hears>(&heard); });
  Group(options).run([&heard](Group& g) {
    const auto call = [&g] {
      EXPECT_EQ(rpc_sync(g.workers[0], "w1", {.retry = Retry::kAtMostOnce}, on("slow", &Slow::take),
                         at::ones({4})),
                4);
    };
    call();
    g.pass(absl::Seconds(5));
    EXPECT_TRUE(heard.empty()) << "nothing was lost";
    g.plan->add({.fault = Fault::kCut, .kind = FrameKind::kRequest, .from = "w0", .times = 1});
    call();
    g.pass(absl::Seconds(5));
    std::sort(heard.begin(), heard.end());
    EXPECT_EQ(heard, (std::vector<std::string>{"w0", "w1"}));
    call();
    EXPECT_EQ(heard.size(), 2U);
  });
}

}  // namespace
}  // namespace weft::testing
