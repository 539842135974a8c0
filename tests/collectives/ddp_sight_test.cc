// What observers see of reductions: a dictionary, metrics, the timeline, and who is waited for.

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/internal/service.h"
#include "weft/collectives/service.h"
#include "weft/common/files.h"
#include "weft/common/metrics.h"
#include "weft/common/trace.h"
#include "weft/rpc/inspection.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/timeline.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

struct SeenNetImpl : torch::nn::Module {
  SeenNetImpl() {
    first = register_module("first", torch::nn::Linear(4, 4));
    idle = register_module("idle", torch::nn::Linear(4, 4));
    out = register_module("out", torch::nn::Linear(4, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(first(x))); }
  torch::nn::Linear first = nullptr, idle = nullptr, out = nullptr;
};

// A bucket for each parameter.
constexpr double kTiny = 1.0 / (1 << 20);

int64_t seen_number(const DdpLoggingData& data, const std::string& name) {
  return std::get<int64_t>(data.at(name));
}
std::string seen_text(const DdpLoggingData& data, const std::string& name) {
  return std::get<std::string>(data.at(name));
}

TEST(DdpSight, TheDictionaryHasSizesUnusedAndOverlap) {
  run_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<SeenNetImpl>();
    DistributedDataParallel ddp(net, group, {.find_unused_parameters = true});
    EXPECT_EQ(seen_number(ddp.logging_data(), "iteration"), 0);
    for (int i = 0; i < 3; ++i) ddp.forward(torch::ones({2, 4})).sum().backward();
    const DdpLoggingData data = ddp.logging_data();
    EXPECT_EQ(seen_number(data, "world_size"), 2);
    EXPECT_EQ(seen_number(data, "rank"), group.rank());
    EXPECT_EQ(seen_number(data, "iteration"), 3);
    EXPECT_EQ(seen_text(data, "backend_name"), "inproc");
    EXPECT_EQ(seen_number(data, "num_parameter_tensors"), 6);
    EXPECT_EQ(seen_number(data, "total_parameter_size_bytes"), (16 + 4 + 16 + 4 + 8 + 2) * 4);
    EXPECT_EQ(seen_text(data, "bucket_sizes"), "200");
    EXPECT_EQ(seen_text(data, "rebuilt_bucket_sizes"), "");
    EXPECT_EQ(seen_text(data, "unused_parameters"), "idle.weight, idle.bias");
    EXPECT_EQ(seen_number(data, "unused_parameter_size"), 80);
    EXPECT_EQ(seen_number(data, "find_unused_parameters"), 1);
    EXPECT_GT(seen_number(data, "backward_comm_time"), 0);
    for (const std::string which : {"", "avg_"}) {
      const auto time = [&](const std::string& name) { return seen_number(data, which + name); };
      EXPECT_GT(time("forward_compute_time"), 0);
      // What was hidden and what was not are all of it.
      EXPECT_NEAR(static_cast<double>(time("backward_compute_comm_overlap_time") +
                                      time("backward_comm_exposed_time")),
                  static_cast<double>(time("backward_comm_time")), 2);
    }
  });
}

TEST(DdpSight, BucketsAreMadeAgainInTheOrderOfArrival) {
  run_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<torch::nn::LinearImpl>(3, 2);
    DistributedDataParallel ddp(net, group, {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny});
    for (int i = 0; i < 2; ++i) ddp.forward(torch::ones({2, 3})).sum().backward();
    const DdpLoggingData data = ddp.logging_data();
    EXPECT_EQ(seen_number(data, "has_rebuilt_buckets"), 1);
    EXPECT_EQ(seen_number(data, "num_buckets_reduced"), 2);
    const auto sizes = [&](const std::string& name) {
      const std::vector<std::string> all = absl::StrSplit(seen_text(data, name), ", ");
      return std::multiset<std::string>(all.begin(), all.end());
    };
    EXPECT_EQ(sizes("bucket_sizes"), (std::multiset<std::string>{"8", "24"}));
    EXPECT_EQ(sizes("rebuilt_bucket_sizes"), (std::multiset<std::string>{"8", "24"}));
    EXPECT_EQ(sizes("prev_iteration_grad_ready_order_indices"),
              (std::multiset<std::string>{"0", "1"}));
  });
}

// Each bucket has its two parts on the timeline, in order; what was exposed and the forward are there.
TEST(DdpSight, TimelineAndMetrics) {
  constexpr int kSteps = 3;
  constexpr int kBuckets = 4;
  Timelines timelines;
  std::vector<std::shared_ptr<TraceWriter>> traces;
  std::vector<std::shared_ptr<Metrics>> metrics;
  for (int r = 0; r < 2; ++r) {
    traces.push_back(std::make_shared<TraceWriter>(TraceOptions{.rank = r}));
    metrics.push_back(std::make_shared<Metrics>());
  }
  run_ranks(
      2, make_system_runtime(),
      [](ProcessGroup& group, InprocFabric&) {
        const auto net = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(4, 4),
                                                                     torch::nn::Linear(4, 2));
        DistributedDataParallel ddp(net, group, {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny});
        for (int i = 0; i < kSteps; ++i) ddp.forward(torch::ones({2, 4})).sum().backward();
      },
      [&](ProcessGroupOptions& o) {
        o.trace = traces[static_cast<size_t>(*o.rank)];
        o.metrics = metrics[static_cast<size_t>(*o.rank)];
      });
  for (size_t r = 0; r < 2; ++r) {
    const auto files = make_system_files();
    ASSERT_TRUE(traces[r]->write_file(files.get(), timelines.path("t")).ok());
    const auto count = [&](const std::string& name) {
      return timelines.events("t", {"\"ddp\"", "\"name\":\"" + name + "\""}).size();
    };
    EXPECT_EQ(count("forward"), kSteps);
    EXPECT_EQ(count("exposed"), kSteps);
    EXPECT_EQ(count("reduction"), 2 * kSteps);  // begin and end
    EXPECT_EQ(count("bucket ready"), 2 * kSteps * kBuckets);
    EXPECT_EQ(count("bucket reduced"), 2 * kSteps * kBuckets);
    const std::string text = metrics[r]->text();
    EXPECT_THAT(text, HasSubstr("weft_ddp_reductions_total 3\n"));
    EXPECT_THAT(text, HasSubstr("weft_ddp_failures_total 0\n"));
    EXPECT_THAT(text, HasSubstr("weft_ddp_buckets_total 12\n"));
    EXPECT_THAT(text, HasSubstr("weft_ddp_bytes_total 360\n"));  // 30 floats
    EXPECT_THAT(text, HasSubstr("weft_ddp_exposed_seconds_count 3\n"));
  }
}

// weft-inspect's tables, and the text of a pass: bucket and rank.
TEST(DdpSight, ObserversSeeTheBucketAndTheRankThatIsWaitedFor) {
  ClusterOptions options{.size = 2};
  options.adjust = [](int, JoinOptions* o) { o->services.push_back(collectives_service()); };
  Cluster c(options);
  const auto runtime = make_system_runtime();
  Promise<void> seen;
  std::vector<std::unique_ptr<Thread>> ranks;
  for (size_t i = 0; i < 2; ++i) {
    ranks.push_back(runtime->spawn("rank", [&c, &seen, i] {
      try {
        ProcessGroup group = init_process_group(c[i], {.name = "g"});
        DistributedDataParallel ddp(std::make_shared<SeenNetImpl>(), group,
                                    {.find_unused_parameters = true});
        if (i == 1) throw_if_error(seen.future().try_wait(absl::Seconds(30)));
        ddp.forward(torch::ones({2, 4})).sum().backward();
        group.barrier();
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << i << ": " << e.what();
      }
    }));
  }
  std::string last;
  eventually(
      [&] {
        Inspection all(100);
        c[0].service<internal::CollectivesService>()->put_inspection(&all);
        last = all.text();
        return last.find("bucket 0 of 1 (first.weight and 5 more)") != std::string::npos &&
               last.find("rank 1 ('worker1')", last.find("bucket 0 of 1")) != std::string::npos;
      },
      "the bucket and the rank in " + last);
  seen.set_value();
  for (const auto& one : ranks) one->join();
}

}  // namespace
}  // namespace weft::testing
