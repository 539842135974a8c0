// Data parallelism beside pipelines: two replicas of two stages, reduced through process groups, and
// stages whose modules are a DistributedDataParallel.
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/inproc_fabric.h"
#include "weft/collectives/process_group.h"
#include "weft/dist_autograd/service.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/reducer.h"
#include "weft/rref/service.h"
#include "weft/tests/pipeline/model.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kReplicas = 2;

// For each stage a group of its replicas.
struct Groups {
  explicit Groups(int stages) {
    const auto runtime = make_system_runtime();
    const auto store = std::make_shared<HashStore>(runtime);
    for (int s = 0; s < stages; ++s) {
      const auto fabric = std::make_shared<InprocFabric>(runtime);
      auto& of_stage = groups.emplace_back();
      std::vector<std::thread> threads;
      for (int r = 0; r < kReplicas; ++r) {
        threads.emplace_back([&, s, r] {
          of_stage[static_cast<size_t>(r)] =
              init_process_group({.name = absl::StrCat("stage", s),
                                  .store = store->new_client(),
                                  .rank = r,
                                  .size = kReplicas,
                                  .timeout = std::chrono::seconds(20),
                                  .runtime = runtime,
                                  .fabric = fabric});
        });
      }
      for (auto& t : threads) t.join();
    }
  }
  std::vector<std::array<ProcessGroup, kReplicas>> groups;
};

// Each gradient is ready once per step, and what is reduced is all that the step adds.
class Counted final : public pipeline::GradReducer {
 public:
  explicit Counted(std::shared_ptr<pipeline::GradReducer> inner, int64_t* readies,
                   int64_t* finishes)
      : inner_(std::move(inner)), readies_(readies), finishes_(finishes) {}
  Status ready(const at::Tensor& gradient) override {
    EXPECT_TRUE(seen_.emplace(gradient.data_ptr(), 1).second) << "a second time";
    ++*readies_;
    return inner_->ready(gradient);
  }
  Status finish(absl::Duration time_left) override {
    seen_.clear();
    ++*finishes_;
    return inner_->finish(time_left);
  }

 private:
  const std::shared_ptr<pipeline::GradReducer> inner_;
  int64_t* const readies_;
  int64_t* const finishes_;
  std::map<void*, int> seen_;
};

// The mean over the replicas of what each would have alone.
void expect_mean(const pipeline::Pipeline& a, const pipeline::Pipeline& b, const Local& la,
                 const Local& lb, const std::string& prefix) {
  for (size_t s = 0; s < la.blocks.size(); ++s) {
    const auto ga = a.gradients(static_cast<int>(s));
    const auto gb = b.gradients(static_cast<int>(s));
    const auto wb = lb.blocks[s]->named_parameters();
    for (const auto& item : la.blocks[s]->named_parameters()) {
      const std::string name = prefix + item.key();
      ASSERT_EQ(ga.count(name), 1u) << name;
      EXPECT_TRUE(at::equal(ga.at(name), gb.at(name))) << "stage " << s << " " << name;
      const at::Tensor want = (item.value().grad() + wb[item.key()].grad()) / 2;
      EXPECT_TRUE(at::allclose(ga.at(name), want, 1e-6, 1e-6)) << "stage " << s << " " << name;
    }
  }
}

TEST(PipelineReplicas, PP_11_GradientsAreTheMeanForEverySchedule) {
  for (const std::string& name : pipeline::schedule_names()) {
    if (name == "pipedream") continue;
    SCOPED_TRACE(name);
    const pipeline::Plan plan = pipeline::with_reductions(*pipeline::make_schedule(name, 2, 4));
    const Groups groups(plan.stages());
    std::vector<int64_t> readies(static_cast<size_t>(kReplicas * plan.stages()));
    std::vector<int64_t> finishes(readies.size());
    const auto adjust_of = [&](int replica) {
      return [&, replica](int, JoinOptions* join) {
        join->services.pop_back();
        join->services.push_back(pipeline_service(
            {.make_reducer = [&, replica](const ServiceContext&, const pipeline::Plan&, int stage) {
              const auto k = static_cast<size_t>(stage * kReplicas + replica);
              // A bucket for every gradient.
              return std::make_shared<Counted>(
                  pipeline::group_reducer(groups.groups[stage][replica], {.bucket_bytes = 1}),
                  &readies[k], &finishes[k]);
            }}));
      };
    };
    World a(plan, {}, false, adjust_of(0));
    World b(plan, {}, false, adjust_of(1));
    Local la(plan.stages());
    Local lb(plan.stages());
    const at::Tensor xa = numbers(9, 0.37);
    const at::Tensor xb = numbers(9, 0.53);
    const at::Tensor y = numbers(9, 0.91);
    auto fa = a.pipe->step_async({xa}, y);
    auto fb = b.pipe->step_async({xb}, y);
    EXPECT_EQ(fa.wait().loss, la.step(xa, y, 4));
    EXPECT_EQ(fb.wait().loss, lb.step(xb, y, 4));
    expect_mean(*a.pipe, *b.pipe, la, lb, "");
    for (size_t k = 0; k < readies.size(); ++k) {
      EXPECT_EQ(readies[k], 3);  // weight, bias, scale
      EXPECT_EQ(finishes[k], 1);
    }
    a.expect_nothing_left();
    b.expect_nothing_left();
  }
}

// A replica that fails ends the step of the other one, with the reduction named, by its deadline.
TEST(PipelineReplicas, AReplicaThatFailsEndsTheOthersByTheirDeadline) {
  const pipeline::Plan plan = pipeline::with_reductions(pipeline::one_f_one_b(2, 2));
  const Groups groups(2);
  const auto adjust_of = [&](int replica) {
    return [&, replica](int, JoinOptions* join) {
      join->services.pop_back();
      join->services.push_back(pipeline_service(
          {.make_reducer = [&, replica](const ServiceContext&, const pipeline::Plan&, int stage) {
            return pipeline::group_reducer(groups.groups[stage][replica]);
          }}));
    };
  };
  World a(plan, {.deadline = std::chrono::milliseconds(1500)}, false, adjust_of(0));
  World b(plan, {.deadline = std::chrono::milliseconds(1500)}, false, adjust_of(1));
  b.blocks[1].rpc_sync(&BlockImpl::throw_in, int64_t{1});
  auto fa = a.pipe->step_async({numbers(4, 0.3)}, numbers(4, 0.5));
  auto fb = b.pipe->step_async({numbers(4, 0.3)}, numbers(4, 0.5));
  EXPECT_THAT(std::string(fb.try_wait().status().message()), HasSubstr("this block is broken"));
  EXPECT_THAT(std::string(fa.try_wait().status().message()), HasSubstr("reducing over group"));
}

// ---- over calls ---------------------------------------------------------------------------------

// Four workers of one job: two replicas of a plan over two, reduced by calls.
struct Pair {
  Pair(const pipeline::Plan& plan, pipeline::PipelineOptions options, int64_t bucket_bytes = 1)
      : plan(plan) {
    ClusterOptions o;
    o.size = 2 * kReplicas;
    o.library = model_library();
    o.adjust = [plan, bucket_bytes](int index, JoinOptions* join) {
      add_pipeline_services(join);
      join->services.back() = pipeline_service(
          {.make_reducer = [plan, bucket_bytes, index](const ServiceContext& context,
                                                       const pipeline::Plan&, int stage) {
            const int at = plan.placement[stage];
            EXPECT_EQ(index % 2, at);
            return pipeline::call_reducer(
                context, {absl::StrCat("worker", at), absl::StrCat("worker", 2 + at)},
                {.name = absl::StrCat("stage", stage), .bucket_bytes = bucket_bytes});
          }});
    };
    cluster = std::make_unique<Cluster>(o);
    options.loss = "app.squares";
    for (int r = 0; r < kReplicas; ++r) {
      auto& of_replica = blocks.emplace_back();
      for (int s = 0; s < plan.stages(); ++s) {
        of_replica.emplace_back((*cluster)[2 * r],
                                absl::StrCat("worker", 2 * r + plan.placement[s]), int64_t{s},
                                false);
      }
      pipes.push_back(std::make_unique<pipeline::Pipeline>(
          (*cluster)[2 * r], std::vector<pipeline::Stage>(of_replica.begin(), of_replica.end()),
          plan, options));
    }
  }
  ~Pair() {
    for (auto& pipe : pipes) pipe->close();
    pipes.clear();
    blocks.clear();
    for (size_t w = 0; w < cluster->size(); ++w) {
      const Worker& worker = (*cluster)[w];
      EXPECT_EQ(counter(worker, "pipelines"), 0);
      EXPECT_EQ(counter(worker, "pipeline_slots"), 0);
      const auto service = worker.service<pipeline::internal::PipelineService>();
      EXPECT_EQ(service->sums()->waiting(), 0);
    }
    cluster->shutdown();
  }
  const pipeline::Plan plan;
  std::unique_ptr<Cluster> cluster;
  std::vector<std::vector<RemoteModule<BlockImpl>>> blocks;  // by replica
  std::vector<std::unique_ptr<pipeline::Pipeline>> pipes;
};

TEST(PipelineReplicas, PP_11_OverCallsGradientsAreTheMean) {
  for (const std::string name : {"1f1b", "zb-h1", "zb-v"}) {
    for (const int64_t bucket_bytes : {int64_t{1}, int64_t{1} << 20}) {
      SCOPED_TRACE(absl::StrCat(name, ", buckets of ", bucket_bytes));
      Pair pair(pipeline::with_reductions(*pipeline::make_schedule(name, 2, 4)), {}, bucket_bytes);
      Local la(pair.plan.stages());
      Local lb(pair.plan.stages());
      const at::Tensor y = numbers(9, 0.91);
      for (int step = 0; step < 2; ++step) {
        const at::Tensor xa = numbers(9, 0.37 + step);
        const at::Tensor xb = numbers(9, 0.53 + step);
        for (Local* local : {&la, &lb}) {
          for (const auto& block : local->blocks) block->zero_grad();
        }
        for (auto& pipe : pair.pipes) pipe->zero_grad();
        auto fa = pair.pipes[0]->step_async({xa}, y);
        auto fb = pair.pipes[1]->step_async({xb}, y);
        EXPECT_EQ(fa.wait().loss, la.step(xa, y, 4));
        EXPECT_EQ(fb.wait().loss, lb.step(xb, y, 4));
        expect_mean(*pair.pipes[0], *pair.pipes[1], la, lb, "");
      }
    }
  }
}

TEST(PipelineReplicas, OverCallsAReplicaThatFailsEndsTheOther) {
  Pair pair(pipeline::with_reductions(pipeline::one_f_one_b(2, 2)), {});
  pair.blocks[1][1].rpc_sync(&BlockImpl::throw_in, int64_t{1});
  auto fa = pair.pipes[0]->step_async({numbers(4, 0.3)}, numbers(4, 0.5));
  auto fb = pair.pipes[1]->step_async({numbers(4, 0.3)}, numbers(4, 0.5));
  EXPECT_THAT(std::string(fb.try_wait().status().message()), HasSubstr("this block is broken"));
  // Long before the step's minute is over, and the reducer's ten.
  EXPECT_THAT(std::string(fa.try_wait().status().message()),
              ::testing::AllOf(HasSubstr("reducing over calls, reducer 'stage"),
                               HasSubstr("worker 'worker"), HasSubstr("has failed")));
}

TEST(PipelineReplicas, BadInput_ReducersOverCalls) {
  Pair pair(pipeline::with_reductions(pipeline::one_f_one_b(2, 2)), {});
  const Worker& worker = (*pair.cluster)[0];
  const auto service = worker.service<pipeline::internal::PipelineService>();
  const auto refused = [&](const std::vector<std::string>& replicas,
                           const pipeline::CallReducerOptions& options) {
    try {
      (void)pipeline::call_reducer(service->context(), replicas, options);
    } catch (const Error& error) {
      return std::string(error.status().message());
    }
    return std::string();
  };
  EXPECT_THAT(refused({"worker0", "worker1"}, {}), HasSubstr("a name of 1 to 200 bytes"));
  EXPECT_THAT(refused({"worker0"}, {.name = "x", .bucket_bytes = 0}), HasSubstr("buckets of 0"));
  EXPECT_THAT(refused({"worker0"}, {.name = "x", .op = ReduceOp::kMax}),
              HasSubstr("averaged or summed"));
  EXPECT_THAT(refused({"worker1", "worker2"}, {.name = "x"}),
              HasSubstr("this worker, 'worker0', is none of the replicas"));
  EXPECT_THAT(refused({"worker0", "worker0"}, {.name = "x"}), HasSubstr("is there twice"));
  EXPECT_THAT(refused({"worker0", "worker9"}, {.name = "x"}), HasSubstr("worker9"));
  EXPECT_THAT(refused({"worker0", "worker2"}, {.name = "stage0"}),
              HasSubstr("has a reducer 'stage0' already"));
  // Parts that do not fit the reducer, or each other.
  using pipeline::internal::SumMessage;
  std::vector<Status> answers;
  const auto give = [&](SumMessage part) {
    service->sums()->give(std::move(part), absl::Now(), absl::InfiniteFuture(),
                          [&answers](const auto& sum) { answers.push_back(sum.status()); });
  };
  SumMessage part{.reducer = "stage0", .round = 5, .rank = 2, .size = 3};
  part.tensors = {numbers(1, 1)};
  give(part);
  part.size = 2;
  part.rank = 0;
  give(part);
  give(part);
  ASSERT_EQ(answers.size(), 2u);  // the second of the three waits
  EXPECT_THAT(std::string(answers[0].message()), HasSubstr("replica 2 of 3 gives 1 gradients"));
  EXPECT_THAT(std::string(answers[1].message()), HasSubstr("a second time"));
  part.rank = 1;
  part.tensors = {numbers(2, 1)};
  give(part);
  ASSERT_EQ(answers.size(), 4u);
  for (int k : {2, 3}) {
    EXPECT_THAT(std::string(answers[k].message()), HasSubstr("their modules differ"));
  }
}

// ---- DistributedDataParallel in a stage ---------------------------------------------------------

const Groups* ddp_groups = nullptr;  // of the test that runs

struct ReplicatedImpl : torch::nn::Module {
  ReplicatedImpl(int64_t replica, int64_t index)
      : block(register_module("block", std::make_shared<BlockImpl>(index, false))),
        ddp(block, ddp_groups->groups[index][replica], {.find_unused_parameters = index == 1}) {}
  at::Tensor forward(const at::Tensor& x) { return ddp.forward(x); }
  int64_t reductions() const { return ddp.sight().reductions; }

  std::shared_ptr<BlockImpl> block;
  DistributedDataParallel<BlockImpl> ddp;
};

struct Replica {
  Replica(int number, const pipeline::Plan& plan) {
    ClusterOptions o;
    o.size = static_cast<int>(plan.workers.size());
    o.library = model_library();
    module_<ReplicatedImpl>(o.library, "Replicated")
        .constructor<int64_t, int64_t>()
        .def("forward", &ReplicatedImpl::forward)
        .def("reductions", &ReplicatedImpl::reductions);
    o.adjust = [](int, JoinOptions* join) { add_pipeline_services(join); };
    cluster = std::make_unique<Cluster>(o);
    for (int s = 0; s < plan.stages(); ++s) {
      modules.emplace_back((*cluster)[0], absl::StrCat("worker", plan.placement[s]),
                           int64_t{number}, int64_t{s});
    }
    pipe = std::make_unique<pipeline::Pipeline>(
        (*cluster)[0], std::vector<pipeline::Stage>(modules.begin(), modules.end()), plan,
        pipeline::PipelineOptions{.loss = "app.squares"});
  }
  ~Replica() {
    pipe->close();
    pipe = nullptr;
    modules.clear();
    cluster->shutdown();
  }
  std::unique_ptr<Cluster> cluster;
  std::vector<RemoteModule<ReplicatedImpl>> modules;
  std::unique_ptr<pipeline::Pipeline> pipe;
};

// Captured gradients run no accumulator's hook: the pipeline calls them, once per step.
TEST(PipelineReplicas, DA_66_APipelineInsideDistributedDataParallel) {
  // With checkpoints never, always, and except for the last micro-batch.
  const auto made = [](const std::string& name) { return *pipeline::make_schedule(name, 2, 4); };
  for (const pipeline::Plan& without :
       {made("1f1b"), pipeline::with_recompute(made("1f1b")),
        pipeline::with_recompute(made("zb-h1"), {}, /*except_last=*/true), made("zb-v")}) {
    SCOPED_TRACE(pipeline::to_text(without));
    const pipeline::Plan plan = pipeline::with_reductions(without);
    const Groups groups(plan.stages());
    ddp_groups = &groups;
    std::unique_ptr<Replica> a;
    std::unique_ptr<Replica> b;
    {
      // Both at once: their modules compare parameters.
      std::thread other([&] { b = std::make_unique<Replica>(1, plan); });
      a = std::make_unique<Replica>(0, plan);
      other.join();
    }
    Local la(plan.stages());
    Local lb(plan.stages());
    const at::Tensor y = numbers(9, 0.91);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor xa = numbers(9, 0.37 + step);
      const at::Tensor xb = numbers(9, 0.53 + step);
      for (Local* local : {&la, &lb}) {
        for (const auto& block : local->blocks) block->zero_grad();
      }
      a->pipe->zero_grad();
      b->pipe->zero_grad();
      auto fa = a->pipe->step_async({xa}, y);
      auto fb = b->pipe->step_async({xb}, y);
      EXPECT_EQ(fa.wait().loss, la.step(xa, y, 4));
      EXPECT_EQ(fb.wait().loss, lb.step(xb, y, 4));
      expect_mean(*a->pipe, *b->pipe, la, lb, "block.");
      for (auto& module : a->modules) {
        EXPECT_EQ(module.rpc_sync(&ReplicatedImpl::reductions), step + 1);
      }
    }
    a = nullptr;
    b = nullptr;
  }
}

}  // namespace
}  // namespace weft::testing
