#ifndef WEFT_TESTS_SIM_CALLS_GROUP_H_
#define WEFT_TESTS_SIM_CALLS_GROUP_H_

// A group of workers in a simulation, over a transport with faults, for tests of calls and of
// connections.
//
// Threads: all on those of the simulation.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/rpc/call.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/worker.h"
#include "weft/store/hash_store.h"
#include "weft/tests/testing/forwarding_transport.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {

class Slow {
 public:
  explicit Slow(Runtime* runtime) : runtime_(runtime) {}
  int64_t hold(int64_t seconds) {
    runtime_->make_parker()->park_until(runtime_->now() + absl::Seconds(seconds));
    return seconds;
  }
  int64_t take(const at::Tensor& x) {
    ++taken;
    return x.numel();
  }
  int taken = 0;

 private:
  Runtime* const runtime_;
};

class SweptTransport final : public ForwardingTransport {
 public:
  SweptTransport(std::unique_ptr<Transport> inner, std::shared_ptr<int64_t> sweeps)
      : ForwardingTransport(std::move(inner)), sweeps_(std::move(sweeps)) {}
  void sweep() override {
    ++*sweeps_;
    ForwardingTransport::sweep();
  }

 private:
  const std::shared_ptr<int64_t> sweeps_;
};

struct GroupOptions {
  int size = 2;
  bool dynamic = false;
  Timeout lease = std::chrono::seconds(60);
  Environment environment{};
  uint64_t seed = 11;
  std::vector<ServiceFactory> services{};  // of each worker
  // Around each worker's transport.
  std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>, Runtime*)> wrap{};
};

// Workers w0, w1, ... in a simulation, each with a Slow of its own.
class Group {
  const GroupOptions options_;

 public:
  explicit Group(GroupOptions options) : options_(std::move(options)) {}

  // On a thread of the simulation. The workers leave afterwards, but for those that have.
  void run(const std::function<void(Group&)>& test) {
    const Status ended = sim->run([&] {
      store_ = std::make_shared<HashStore>(sim);
      workers.resize(static_cast<size_t>(options_.size));
      for (int i = 0; i < options_.size; ++i) {
        slow.push_back(std::make_shared<Slow>(sim.get()));
      }
      all([this](size_t i) { workers[i] = Worker::join(join_options(i)); });
      test(*this);
      all([this](size_t i) {
        const ShutdownResult left = workers[i].shutdown();
        EXPECT_TRUE(left.status.ok()) << i << ": " << left.status;
      });
    });
    EXPECT_TRUE(ended.ok()) << ended;
  }
  // One more of a dynamic group.
  Worker join(const std::string& name) {
    JoinOptions o = join_options(0);
    o.name = name;
    return Worker::join(std::move(o));
  }
  void pass(absl::Duration time) { sim->make_parker()->park_until(sim->now() + time); }
  int64_t count(size_t i, const std::string& name) { return workers[i].debug_info().at(name); }
  InprocNetwork& network() { return *network_; }

  const std::shared_ptr<SimRuntime> sim =
      std::make_shared<SimRuntime>(SimOptions{.seed = options_.seed});
  const std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>(3);
  const std::shared_ptr<int64_t> sweeps = std::make_shared<int64_t>(0);  // of all transports
  std::vector<Worker> workers{};
  std::vector<std::shared_ptr<Slow>> slow{};

 private:
  void all(const std::function<void(size_t)>& each) {
    std::vector<std::unique_ptr<Thread>> threads;
    for (size_t i = 0; i < workers.size(); ++i) {
      threads.push_back(sim->spawn("each", [&each, i] { each(i); }));
    }
  }
  JoinOptions join_options(size_t i) {
    Library lib("sim");
    lib.class_<Slow>("Slow").def("hold", &Slow::hold).def("take", &Slow::take);
    lib.instance("slow", slow[i]);
    lib.def("make", [](int64_t n) { return at::ones({n}); });
    lib.def("is_given_up", [](CallContext& context, int64_t seconds) {
      Runtime& runtime = context.worker().runtime();
      runtime.make_parker()->park_until(runtime.now() + absl::Seconds(seconds));
      return context.cancelled();
    });
    JoinOptions o;
    o.name = absl::StrCat("w", i);
    if (options_.dynamic) {
      o.dynamic = true;
    } else {
      o.rank = static_cast<int>(i);
      o.world_size = options_.size;
    }
    o.library = std::move(lib);
    o.store = store_->new_client();
    o.transport = [this](const TransportContext& context) -> StatusOr<std::unique_ptr<Transport>> {
      auto inner = faulty_transport(inproc_transport(network_), plan)(context);
      if (!inner.ok()) return inner.status();
      auto swept = std::make_unique<SweptTransport>(*std::move(inner), sweeps);
      if (options_.wrap == nullptr) return swept;
      return options_.wrap(std::move(swept), context.runtime.get());
    };
    o.worker_threads = 2;
    o.lease = options_.lease;
    o.runtime = sim;
    o.log_level = Severity::kOff;
    o.environment = options_.environment;
    o.services = options_.services;
    return o;
  }

  const std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  std::shared_ptr<HashStore> store_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_SIM_CALLS_GROUP_H_
