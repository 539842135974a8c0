// The hybrid under the seeded scheduler: trainers reduce the gradients of their contexts, an
// embedding lies at a server, LibTorch's engine runs the nodes inside of the simulation. Frames come
// late, in another order or twice, connections break, hooks throw, contexts run at once in different
// orders, a trainer dies and the others go on with a rebuilt group.

#include <array>
#include <random>
#include <thread>

#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "absl/strings/str_cat.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/inproc_fabric.h"
#include "weft/collectives/process_group.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/sim.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/rpc/call.h"
#include "weft/rpc/worker.h"
#include "weft/rref/service.h"
#include "weft/store/hash_store.h"
#include "weft/tests/testing/environment.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

enum class HybridTrouble : uint8_t { kNone, kOrder, kNetwork, kThrow, kServer, kAtOnce, kKill };
constexpr int kHybridTroubles = 7;
constexpr int kHybridSteps = 3;
constexpr absl::Duration kHybridTimeout = absl::Seconds(20);

struct HybridSimNetImpl : torch::nn::Module {
  HybridSimNetImpl() {
    first = register_module("first", torch::nn::Linear(2, 3));
    last = register_module("last", torch::nn::Linear(3, 1));
    to(torch::kFloat64);
    double at = 0.1;
    for (at::Tensor& one : parameters()) {
      const torch::NoGradGuard no_grad;
      one.copy_(torch::arange(one.numel(), torch::kFloat64).view(one.sizes()).mul(0.2).sub(at));
      at += 0.15;
    }
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first = nullptr, last = nullptr;
};

// Gradients cannot come back through it.
class HybridFails : public torch::autograd::Function<HybridFails> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::domain_error("no gradient on purpose");
  }
};

class HybridWorld {
 public:
  HybridWorld(uint64_t seed, std::shared_ptr<SimRuntime> sim)
      : seed_(seed),
        trouble_(static_cast<HybridTrouble>(seed % kHybridTroubles)),
        random_(seed * 0x9e3779b97f4a7c15u),
        sim_(std::move(sim)),
        trainers_(2 + below(2)),
        table_(torch::arange(8, torch::kFloat64).view({4, 2}).mul(0.3).set_requires_grad(true)),
        plan_(std::make_shared<FaultPlan>(seed)),
        got_(static_cast<size_t>(trainers_)),
        // Before, others may still make theirs.
        fault_step_(trouble_ == HybridTrouble::kKill ? 1 + below(kHybridSteps - 1)
                                                     : below(kHybridSteps)),
        fault_rank_(below(trainers_)),
        small_buckets_(below(2) == 0),
        numbered_(below(2) == 0) {}

  void run() {
    join();
    if (!workers_.empty() && !::testing::Test::HasFailure()) live();
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  std::string text() const {
    return absl::StrCat("seed ", seed_, " trouble ", static_cast<int>(trouble_), " trainers ",
                        trainers_, " step ", fault_step_, " rank ", fault_rank_);
  }
  void join();
  void live();
  void train(int rank);
  void one_step(const Worker& worker, DistributedDataParallel<HybridSimNetImpl>& ddp, int rank,
                int step, int number);
  void at_once(const Worker& worker, DistributedDataParallel<HybridSimNetImpl>& ddp, int rank,
               int step);
  void after_death(int rank, ProcessGroup& group);
  void add_faults();
  // Nothing is left of contexts and passes at the living.
  bool is_clean() const;
  void check() const;
  std::vector<at::Tensor> expected(int step, const std::vector<int>& ranks) const;
  at::Tensor input(const at::Tensor& rows, int step) const { return rows * (1 + step); }
  at::Tensor ids(int step, int rank) const {
    return torch::tensor({(step + rank) % 4, (2 * rank + 1) % 4}, torch::kLong);
  }
  at::Tensor loss(const at::Tensor& out, int rank) const {
    return (out - (0.3 + 0.2 * rank)).pow(2).mean();
  }
  bool here(int rank, int step) const { return rank == fault_rank_ && step == fault_step_; }

  const uint64_t seed_;
  const HybridTrouble trouble_;
  std::mt19937_64 random_;
  const std::shared_ptr<SimRuntime> sim_;
  const int trainers_;
  const at::Tensor table_;
  const std::shared_ptr<FaultPlan> plan_;
  std::shared_ptr<InprocFabric> fabric_;
  std::shared_ptr<HashStore> store_;
  std::vector<Worker> workers_;  // the server last
  // By rank and step: the gradients of the dense part; empty where the backward failed. The last one
  // of each survivor is of the rebuilt group.
  std::vector<std::vector<std::vector<at::Tensor>>> got_;
  const int fault_step_;
  const int fault_rank_;
  const bool small_buckets_;
  const bool numbered_;
};

void HybridWorld::join() {
  Library library("sim");
  library.def("rows", [this](const at::Tensor& which) { return table_.index_select(0, which); });
  library.def("fails", [](const at::Tensor& x) { return HybridFails::apply(x); });
  const auto network = std::make_shared<InprocNetwork>();
  store_ = std::make_shared<HashStore>(sim_);
  fabric_ = std::make_shared<InprocFabric>(sim_);
  workers_.resize(static_cast<size_t>(trainers_ + 1));
  std::vector<std::unique_ptr<Thread>> threads;
  for (int i = 0; i <= trainers_; ++i) {
    threads.push_back(sim_->spawn("join", [&, i] {
      JoinOptions o;
      o.name = absl::StrCat("w", i);
      o.rank = i;
      o.world_size = trainers_ + 1;
      o.library = library;
      o.store = store_->new_client();
      o.transport = faulty_transport(inproc_transport(network), plan_);
      o.services = {rref_service(), dist_autograd_service()};
      o.worker_threads = 2;
      o.rpc_timeout = 5s;
      o.shutdown_timeout = 300s;
      o.runtime = sim_;
      o.log_level = Severity::kOff;
      o.environment = Environment{};
      StatusOr<Worker> w = Worker::try_join(std::move(o));
      EXPECT_TRUE(w.ok()) << text() << ": " << w.status();
      if (w.ok()) workers_[static_cast<size_t>(i)] = *std::move(w);
    }));
  }
}

void HybridWorld::add_faults() {
  const absl::Duration late = absl::Milliseconds(1 + below(40));
  plan_->add({.fault = Fault::kDelay, .probability = 0.15, .delay = late});
  plan_->add({.fault = Fault::kReorder, .probability = 0.15, .delay = late});
  if (trouble_ == HybridTrouble::kOrder) return;
  plan_->add({.fault = Fault::kDuplicate, .probability = 0.05});
  static constexpr std::pair<Fault, FrameKind> kChoices[] = {
      {Fault::kCut, FrameKind::kRequest},       {Fault::kCut, FrameKind::kResponse},
      {Fault::kFailAfter, FrameKind::kRequest}, {Fault::kLoseUnsent, FrameKind::kRequest},
      {Fault::kDrop, FrameKind::kRequest},      {Fault::kDrop, FrameKind::kResponse},
  };
  for (int i = 0, rules = 1 + below(3); i < rules; ++i) {
    const auto& [fault, kind] = kChoices[below(static_cast<int>(std::size(kChoices)))];
    FaultRule rule{.fault = fault, .kind = kind};
    rule.skip = below(12);
    rule.times = 1 + below(2);
    plan_->add(rule);
  }
}

bool HybridWorld::is_clean() const {
  for (int w = 0; w <= trainers_; ++w) {
    if (trouble_ == HybridTrouble::kKill && w == fault_rank_) continue;
    auto now = workers_[static_cast<size_t>(w)].debug_info();
    if (now["num_autograd_contexts"] != 0 || now["num_current_backward_passes"] != 0) return false;
  }
  return true;
}

void HybridWorld::live() {
  if (trouble_ == HybridTrouble::kOrder || trouble_ == HybridTrouble::kNetwork) add_faults();
  {
    std::vector<std::unique_ptr<Thread>> threads;
    for (int r = 0; r < trainers_; ++r) {
      threads.push_back(sim_->spawn("trainer", [this, r] {
        try {
          train(r);
        } catch (const std::exception& e) {
          ADD_FAILURE() << text() << ", trainer " << r << ": " << e.what();
        }
      }));
    }
  }
  plan_->clear();
  check();
  // What is told of contexts and of the dead arrives, within 90 s where messages were lost. Each second costs some twenty
  // heartbeats, so it lasts no longer than it has to.
  for (int second = 0; second < 90 && !is_clean(); ++second) sim_->sleep(absl::Seconds(1));
  const bool dead = trouble_ == HybridTrouble::kKill;
  for (int w = 0; w <= trainers_; ++w) {
    if (dead && w == fault_rank_) continue;
    auto now = workers_[static_cast<size_t>(w)].debug_info();
    EXPECT_EQ(now["num_autograd_contexts"], 0) << text() << " w" << w;
    EXPECT_EQ(now["num_current_backward_passes"], 0) << text() << " w" << w;
  }
  std::vector<std::unique_ptr<Thread>> threads;
  for (int w = 0; w <= trainers_; ++w) {
    if (dead && w == fault_rank_) continue;
    threads.push_back(sim_->spawn("leave", [this, w, dead] {
      (void)workers_[static_cast<size_t>(w)].shutdown({.graceful = !dead});
    }));
  }
}

void HybridWorld::train(int rank) {
  const Worker& worker = workers_[static_cast<size_t>(rank)];
  ProcessGroup group = init_process_group({.store = store_->new_client(),
                                           .rank = rank,
                                           .size = trainers_,
                                           .timeout = kHybridTimeout,
                                           .runtime = sim_,
                                           .fabric = fabric_,
                                           .environment = Environment{}});
  const double mib = small_buckets_ ? 0.00002 : 1;
  DistributedDataParallel ddp(std::make_shared<HybridSimNetImpl>(), group,
                              {.bucket_cap_mb = mib, .first_bucket_mb = mib});
  for (int step = 0; step < kHybridSteps; ++step) {
    if (trouble_ == HybridTrouble::kKill && here(rank, step)) {
      fabric_->kill(rank);
      (void)workers_[static_cast<size_t>(rank)].shutdown({.graceful = false});
      return;
    }
    got_[static_cast<size_t>(rank)].emplace_back();
    if (trouble_ == HybridTrouble::kAtOnce) {
      at_once(worker, ddp, rank, step);
    } else {
      one_step(worker, ddp, rank, step, step + 1);
    }
  }
  if (trouble_ == HybridTrouble::kKill) return after_death(rank, group);
  // A rank that leaves ends the group for those that are still in an operation.
  (void)group.try_barrier();
}

void HybridWorld::one_step(const Worker& worker, DistributedDataParallel<HybridSimNetImpl>& ddp,
                           int rank, int step, int number) {
  try {
    DistAutogradContext context(worker);
    const at::Tensor rows = rpc_sync(
        worker, trainers_, FunctionRef<at::Tensor(at::Tensor)>{"sim.rows"}, ids(step, rank));
    if (trouble_ == HybridTrouble::kThrow && here(rank, step)) {
      rows.register_hook([](const at::Tensor&) { throw std::runtime_error("on purpose"); });
    }
    // Without numbers a rank whose lookup failed would be one forward behind the others.
    if (numbered_ || trouble_ == HybridTrouble::kNetwork) ddp.iteration(number);
    at::Tensor total = loss(ddp.forward(input(rows, step)), rank);
    if (trouble_ == HybridTrouble::kServer && here(rank, step)) {
      total = total + rpc_sync(worker, trainers_, FunctionRef<at::Tensor(at::Tensor)>{"sim.fails"},
                               rows.sum());
    }
    context.backward({total});
    for (const at::Tensor& one : ddp.module()->parameters()) {
      got_[static_cast<size_t>(rank)].back().push_back(context.gradient(one).clone());
    }
  } catch (const std::exception&) {
    got_[static_cast<size_t>(rank)].back().clear();
  }
}

// Two contexts, whose backwards begin in an order of the scheduler's: with numbers they are reduced
// in theirs, without numbers each pair succeeds or fails on all ranks.
void HybridWorld::at_once(const Worker& worker, DistributedDataParallel<HybridSimNetImpl>& ddp,
                          int rank, int step) {
  struct Pass {
    bool forwarded = false;
    bool may_begin = false;
    std::vector<at::Tensor> gradients{};
  };
  std::array<Pass, 2> passes;
  Mutex mutex;
  Condition changed(sim_.get());
  const auto set = [&](bool Pass::*what, size_t i) {
    MutexLock lock(&mutex);
    passes[i].*what = true;
    changed.notify_all();
  };
  const auto wait = [&](bool Pass::*what, size_t i) {
    MutexLock lock(&mutex);
    while (!(passes[i].*what)) {
      throw_if_error(changed.wait_until(&mutex, absl::InfiniteFuture()));
    }
  };
  {
    std::vector<std::unique_ptr<Thread>> threads;
    for (size_t i = 0; i < 2; ++i) {
      threads.push_back(sim_->spawn("pass", [&, i] {
        const int factor = 1 + static_cast<int>(i);
        try {
          DistAutogradContext context(worker);
          const at::Tensor rows = rpc_sync(
              worker, trainers_, FunctionRef<at::Tensor(at::Tensor)>{"sim.rows"}, ids(step, rank));
          if (numbered_) ddp.iteration(2 * step + factor);
          const at::Tensor one = loss(ddp.forward(input(rows, step)), rank) * factor;
          set(&Pass::forwarded, i);
          wait(&Pass::may_begin, i);
          const Status done = context.try_backward({one});
          EXPECT_TRUE(done.ok() || !numbered_) << text() << ": " << done;
          if (!done.ok()) return;
          for (const at::Tensor& of : ddp.module()->parameters()) {
            passes[i].gradients.push_back(context.gradient(of) / factor);
          }
        } catch (const std::exception& e) {
          ADD_FAILURE() << text() << ", pass " << i << " of trainer " << rank << ": " << e.what();
          set(&Pass::forwarded, i);
        }
      }));
      wait(&Pass::forwarded, i);
    }
    for (const size_t i : rank % 2 == 0 ? std::vector<size_t>{0, 1} : std::vector<size_t>{1, 0}) {
      set(&Pass::may_begin, i);
    }
  }
  // They are of one size when both are there: never a mixture of the two.
  if (!passes[0].gradients.empty() && !passes[1].gradients.empty()) {
    for (size_t p = 0; p < passes[0].gradients.size(); ++p) {
      EXPECT_LE((passes[0].gradients[p] - passes[1].gradients[p]).abs().max().item<double>(), 1e-12)
          << text();
    }
  }
  got_[static_cast<size_t>(rank)].back() = passes[0].gradients;
}

void HybridWorld::after_death(int rank, ProcessGroup& group) {
  ProcessGroup again = group.rebuild({.timeout = absl::Seconds(5)});
  DistributedDataParallel ddp(std::make_shared<HybridSimNetImpl>(), again);
  got_[static_cast<size_t>(rank)].emplace_back();
  one_step(workers_[static_cast<size_t>(rank)], ddp, rank, kHybridSteps, 1);
  (void)again.try_barrier();
}

// Plain autograd on one worker: the mean over those ranks.
std::vector<at::Tensor> HybridWorld::expected(int step, const std::vector<int>& ranks) const {
  HybridSimNetImpl net;
  at::Tensor sum = torch::zeros({}, torch::kFloat64);
  const at::Tensor table = table_.detach();
  for (const int r : ranks) {
    const at::Tensor rows = table.index_select(0, ids(step, r));
    sum = sum + loss(net.forward(input(rows, step)), r) / static_cast<double>(ranks.size());
  }
  return torch::autograd::grad({sum}, net.parameters());
}

void HybridWorld::check() const {
  std::vector<int> all;
  std::vector<int> survivors;
  for (int r = 0; r < trainers_; ++r) {
    all.push_back(r);
    if (r != fault_rank_) survivors.push_back(r);
  }
  for (int step = 0; step <= kHybridSteps; ++step) {
    const std::vector<at::Tensor> want = expected(step, step < kHybridSteps ? all : survivors);
    const std::vector<at::Tensor>* first = nullptr;
    for (int r = 0; r < trainers_; ++r) {
      const auto& steps = got_[static_cast<size_t>(r)];
      if (static_cast<size_t>(step) >= steps.size()) continue;
      const std::vector<at::Tensor>& mine = steps[static_cast<size_t>(step)];
      const bool faulty = trouble_ == HybridTrouble::kThrow || trouble_ == HybridTrouble::kServer;
      const bool must_fail = trouble_ == HybridTrouble::kThrow && step == fault_step_;
      const bool must_succeed = trouble_ == HybridTrouble::kNone ||
                                trouble_ == HybridTrouble::kOrder || step == kHybridSteps ||
                                (faulty && step != fault_step_) ||
                                (trouble_ == HybridTrouble::kAtOnce && numbered_);
      EXPECT_TRUE(mine.empty() || !must_fail) << text() << ", " << r << " at " << step;
      EXPECT_FALSE(mine.empty() && must_succeed) << text() << ", " << r << " at " << step;
      if (mine.empty()) continue;
      for (size_t p = 0; p < want.size(); ++p) {
        EXPECT_LE((mine[p] - want[p]).abs().max().item<double>(), 1e-12)
            << text() << ", " << r << " at " << step << ", parameter " << p;
        EXPECT_TRUE(first == nullptr || torch::equal(mine[p], (*first)[p])) << text();
      }
      first = &mine;
    }
  }
}

struct HybridLife {
  uint64_t hash = 0;
};

HybridLife hybrid_life(uint64_t seed) {
  HybridLife out;
  // LibTorch numbers the nodes of its graphs by thread, and the order in which they run follows.
  std::thread([&] {
    const auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed});
    HybridWorld world(seed, sim);
    const Status ended = sim->run([&] { world.run(); });
    EXPECT_TRUE(ended.ok()) << "seed " << seed << ": " << ended;
    out.hash = sim->trace_hash();
  }).join();
  return out;
}

TEST(DdpHybridSim, RandomSchedules) {
  const auto one = weft::testing::environment_number<uint64_t>("WEFT_DDP_HYBRID_SIM_SEED", 0);
  if (one != 0) {
    hybrid_life(one);
    return;
  }
  const auto schedules =
      weft::testing::environment_number<uint64_t>("WEFT_DDP_HYBRID_SIM_SCHEDULES", 1000);
  for (uint64_t seed = 1; seed <= schedules && !HasFailure(); ++seed) hybrid_life(seed);
}

TEST(DdpHybridSim, TheSameSeedGivesTheSameTrace) {
  for (uint64_t seed = 1; seed <= kHybridTroubles; ++seed) {
    EXPECT_EQ(hybrid_life(seed).hash, hybrid_life(seed).hash) << "seed " << seed;
  }
}

}  // namespace
}  // namespace weft::testing
