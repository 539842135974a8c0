// What a step of data parallelism sends, counted and compared with the formulas of
// docs/collectives.md; and what leaves before the last gradient is there.

#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/common/metrics.h"
#include "weft/tests/collectives/ddp_world.h"

namespace weft::testing {
namespace {

// Parameters of every size class of all_reduce: up to 64 KiB, up to 512 KiB, and above.
struct SizesImpl : torch::nn::Module {
  SizesImpl() {
    small = register_module("small", torch::nn::Linear(8, 300));
    middle = register_module("middle", torch::nn::Linear(300, 400));
    large = register_module("large", torch::nn::Linear(400, 401));
  }
  at::Tensor forward(const at::Tensor& x) { return large(middle(small(x))); }
  torch::nn::Linear small = nullptr, middle = nullptr, large = nullptr;
};

struct Sent {
  double messages = 0;
  double bytes = 0;

  Sent& operator+=(const Sent& other) {
    messages += other.messages;
    bytes += other.bytes;
    return *this;
  }
};

// Over all ranks; `ranks` and `bytes` as p and n in the documentation.
Sent of_all_reduce(int ranks, double bytes) {
  const double p = ranks;
  double q = 1;
  double log = 0;
  for (; q * 2 <= p; q *= 2) ++log;
  const double doubling = q * log + 2 * (p - q);
  if (bytes <= 64 << 10) return {doubling, doubling * bytes};
  const double once_each_way = 2 * (p - 1) * bytes;
  if (bytes <= 512 << 10 || ranks == 2) return {2 * q * log + 2 * (p - q), once_each_way};
  return {2 * p * (p - 1), once_each_way};
}
Sent of_broadcast(int ranks, double bytes) {
  const double p = ranks;
  double rounds = 0;
  while ((1 << static_cast<int>(rounds)) < ranks) ++rounds;
  return {p * rounds + p - 1, (p - 1) * bytes};  // after a barrier of empty messages
}

struct Way {
  std::string name{};
  DistributedDataParallelOptions options{};
  CommHook hook{};
  double element = 4;  // bytes, as they are sent
  bool synchronised = true;
  size_t buckets = 6;
};

struct Training {
  Sent sent{};
  std::vector<double> buckets{};  // elements of each
};

// All that a training of so many steps sends, from the first group to the end of all.
Training run_steps(int ranks, const Way& way, int steps) {
  std::vector<std::shared_ptr<Metrics>> metrics;
  for (int r = 0; r < ranks; ++r) metrics.push_back(std::make_shared<Metrics>());
  Training out;
  run_ranks(
      ranks, make_system_runtime(),
      [&](ProcessGroup& group, InprocFabric&) {
        const auto net = std::make_shared<SizesImpl>();
        DistributedDataParallel ddp(net, group, way.options);
        if (way.hook != nullptr) ddp.register_comm_hook(way.hook);
        for (int s = 0; s < steps; ++s) {
          const auto step = [&ddp] { ddp.forward(torch::randn({2, 8})).sum().backward(); };
          if (way.synchronised) {
            step();
          } else {
            const auto apart = ddp.no_sync();
            step();
          }
        }
        EXPECT_EQ(ddp.sight().reductions, way.synchronised ? steps : 0);
        if (group.rank() != 0) return;
        const auto named = net->named_parameters();
        for (const std::vector<std::string>& bucket : ddp.sight().buckets) {
          double elements = 0;
          for (const std::string& one : bucket) {
            elements += static_cast<double>(named[one].numel());
          }
          out.buckets.push_back(elements);
        }
      },
      [&](ProcessGroupOptions& options) {
        options.metrics = metrics[static_cast<size_t>(*options.rank)];
      });
  for (const auto& one : metrics) {
    const std::map<std::string, double> seen = one->snapshot();
    out.sent += {seen.at("weft_collectives_messages_sent_total"),
                 seen.at("weft_collectives_bytes_sent_total")};
  }
  return out;
}

// DDP-1 in numbers: a bucket is one all_reduce, and a step one more, of 24 bytes.
TEST(DdpCounts, AStepSendsItsBucketsAndAWord) {
  constexpr int64_t kParameters = 6;
  // Each parameter is a bucket of its own.
  const DistributedDataParallelOptions apart{.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6};
  DistributedDataParallelOptions unused = apart;
  unused.find_unused_parameters = true;
  DistributedDataParallelOptions views = apart;
  views.gradient_as_bucket_view = true;
  const Way ways[] = {
      {.name = "apart", .options = apart},
      {.name = "two buckets",
       .options = {.bucket_cap_mb = 0.7, .first_bucket_mb = 0.7},
       .buckets = 2},
      {.name = "one bucket", .options = {.first_bucket_mb = 25}, .buckets = 1},
      {.name = "views", .options = views},
      {.name = "unused", .options = unused},
      {.name = "bf16", .options = apart, .hook = &bf16_compress_hook, .element = 2},
      {.name = "no_sync", .options = apart, .synchronised = false},
  };
  for (const Way& way : ways) {
    for (const int ranks :
         way.name == "apart" ? std::vector<int>{2, 3, 4, 5} : std::vector<int>{3}) {
      SCOPED_TRACE(way.name + ", " + std::to_string(ranks) + " ranks");
      const bool finds_unused = way.options.find_unused_parameters;
      // With the word: which parameters are used.
      const double word = 8 * static_cast<double>(3 + (finds_unused ? kParameters : 0));
      const Training one = run_steps(ranks, way, 1);
      const Training many = run_steps(ranks, way, 4);
      Sent step;
      if (way.synchronised) {
        for (const double elements : many.buckets) {
          step += of_all_reduce(ranks, elements * way.element);
        }
        step += of_all_reduce(ranks, word);
      }
      EXPECT_EQ(many.sent.messages - one.sent.messages, 3 * step.messages);
      EXPECT_EQ(many.sent.bytes - one.sent.bytes, 3 * step.bytes);
      EXPECT_EQ(many.buckets.size(), way.buckets);
      // Those of the first step may be others.
      if (way.buckets == 2 || !way.synchronised) continue;
      // After the first step ranks learn rank 0's order of buckets.
      if (!finds_unused) step += of_broadcast(ranks, 8.0 * kParameters);
      const Training none = run_steps(ranks, way, 0);
      EXPECT_EQ(one.sent.messages - none.sent.messages, step.messages);
      EXPECT_EQ(one.sent.bytes - none.sent.bytes, step.bytes);
    }
  }
}

// The gradient of what is below comes when the first bucket has been reduced, on all ranks.
class Waits : public torch::autograd::Function<Waits> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            Future<at::Tensor>* bucket) {
    context->saved_data["bucket"] = reinterpret_cast<int64_t>(bucket);  // NOLINT
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto* const bucket = reinterpret_cast<const Future<at::Tensor>*>(  // NOLINT
        context->saved_data["bucket"].toInt());
    // Without it this backward would wait for ever.
    throw_if_error(bucket->try_wait(absl::Seconds(20)).status());
    return {grads[0], at::Tensor()};
  }
};

struct GatedImpl : torch::nn::Module {
  GatedImpl() {
    first = register_module("first", torch::nn::Linear(3, 3));
    last = register_module("last", torch::nn::Linear(3, 3));
  }
  at::Tensor forward(const at::Tensor& x, Future<at::Tensor>* bucket) {
    return last(Waits::apply(first(x), bucket));
  }
  torch::nn::Linear first = nullptr, last = nullptr;
};

TEST(DdpCounts, TheFirstBucketIsReducedBeforeTheLastGradientIsThere) {
  run_ranks(3, [](ProcessGroup& group) {
    const auto net = std::make_shared<GatedImpl>();
    DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6});
    Future<at::Tensor> first;
    ddp.register_comm_hook([&first](ProcessGroup& of, const GradBucket& bucket) {
      Future<at::Tensor> mean = allreduce_hook(of, bucket);
      if (bucket.index == 0) first = mean;
      return mean;
    });
    for (int i = 0; i < 3; ++i) {
      ddp.forward(torch::randn({2, 3}), &first).sum().backward();
    }
    EXPECT_EQ(ddp.sight().reductions, 3);
  });
}

// The thread of a backward that waits for its last bucket writes the means of the others.
TEST(DdpCounts, MeansAreWrittenWhileTheLastBucketIsUnderWay) {
  run_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<SizesImpl>();
    DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6});
    const auto backward = [&ddp, &group] {
      ddp.forward(torch::full({2, 8}, 1.0F + static_cast<float>(group.rank()))).sum().backward();
    };
    {
      const auto apart = ddp.no_sync();
      backward();
    }
    std::vector<at::Tensor> wanted;
    for (const at::Tensor& one : net->parameters()) {
      wanted.push_back(one.grad().clone());
      group.all_reduce(wanted.back(), {.op = ReduceOp::kAvg});
    }
    ddp.zero_grad();
    std::atomic<bool> over{false};
    std::unique_ptr<Thread> releases;
    int64_t written = 0;
    ddp.register_comm_hook([&](ProcessGroup& of, const GradBucket& bucket) {
      Future<at::Tensor> mean = allreduce_hook(of, bucket);
      if (!bucket.is_last()) return mean;
      Promise<at::Tensor> last;
      Future<at::Tensor> out = last.future();
      releases = of.runtime()->spawn("releases", [&, mean, last = std::move(last)]() mutable {
        (void)mean.try_wait();
        const DdpSight sight = ddp.sight();
        for (size_t i = 0; i + 1 < sight.buckets.size(); ++i) {
          written += static_cast<int64_t>(sight.buckets[i].size());
        }
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
        while (ddp.sight().written_early < written && !over &&
               std::chrono::steady_clock::now() < until) {
          std::this_thread::yield();
        }
        last.try_set(mean.try_wait());
      });
      return out;
    });
    backward();
    over = true;
    releases->join();
    EXPECT_GT(written, 0);
    EXPECT_EQ(ddp.sight().written_early, written);
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(at::allclose(net->parameters()[i].grad(), wanted[i])) << i;
    }
  });
}

// What else refers to a gradient goes on to see it.
TEST(DdpCounts, AGradientThatTheProgramHoldsIsWrittenInPlace) {
  run_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<SizesImpl>();
    DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6});
    std::vector<at::Tensor> held;
    for (at::Tensor& one : net->parameters()) {
      one.mutable_grad() = at::zeros_like(one);
      held.push_back(one.grad());
    }
    for (int i = 0; i < 3; ++i) {
      ddp.zero_grad(/*set_to_none=*/false);
      ddp.forward(torch::full({2, 8}, 1.0F + static_cast<float>(group.rank()))).sum().backward();
      for (size_t p = 0; p < held.size(); ++p) {
        EXPECT_TRUE(held[p].is_same(net->parameters()[p].grad())) << p;
      }
    }
  });
}

}  // namespace
}  // namespace weft::testing
