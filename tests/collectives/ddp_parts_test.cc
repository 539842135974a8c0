// The parts that stand beside DistributedDataParallel: buckets, sampler, values of all ranks.

#include <algorithm>
#include <limits>
#include <random>
#include <set>

#include <torch/data/dataloader.h>
#include <torch/data/datasets/tensor.h>
#include <torch/serialize.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "ATen/detail/CUDAHooksInterface.h"
#include "weft/collectives/ddp/distributed_sampler.h"
#include "weft/collectives/ddp/local_device.h"
#include "weft/collectives/ddp/reduce_value.h"
#include "weft/collectives/internal/ddp/buckets.h"
#include "weft/collectives/internal/ddp/gradient_copy.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"

namespace weft::testing {
namespace {

// LibTorch's own function of that name is in the library. Leftovers of several kinds stand there in
// the order of a hash map (DB11): with `order` those are compared as a set.
TEST(DdpParts, CL_5_and_DB_11_BucketsAreThoseOfC10d) {
  std::mt19937 random(11);
  const auto below = [&random](size_t n) { return static_cast<size_t>(random() % n); };
  for (int round = 0; round < 100; ++round) {
    std::vector<at::Tensor> tensors;
    std::vector<bool> sparse;
    const size_t count = 1 + below(30);
    for (size_t i = 0; i < count; ++i) {
      const auto dtype = below(3) == 0 ? torch::kFloat64 : torch::kFloat32;
      tensors.push_back(torch::empty({static_cast<int64_t>(below(600))}, dtype));
      sparse.push_back(below(10) == 0);
    }
    std::vector<int64_t> limits = {static_cast<int64_t>(1 + below(2000))};
    if (below(2) == 0) limits.push_back(static_cast<int64_t>(1 + below(6000)));
    std::vector<int64_t> order;
    if (below(2) == 0) {
      for (size_t i = 0; i < count; ++i) order.push_back(static_cast<int64_t>(i));
      std::shuffle(order.begin(), order.end(), random);
    }
    auto got = internal::compute_bucket_assignment_by_size(tensors, limits, sparse, order);
    // It takes the tensors in that order already.
    std::vector<at::Tensor> in_order;
    for (size_t i = 0; i < count; ++i) {
      in_order.push_back(tensors[order.empty() ? i : static_cast<size_t>(order[i])]);
    }
    const std::vector<size_t> their_limits(limits.begin(), limits.end());
    auto [buckets, used] =
        c10d::compute_bucket_assignment_by_size(in_order, their_limits, sparse, order);
    ASSERT_EQ(got.buckets.size(), buckets.size());
    std::multiset<int64_t> got_limits(got.limits.begin(), got.limits.end());
    EXPECT_EQ(got_limits, std::multiset<int64_t>(used.begin(), used.end()));
    if (!order.empty()) {
      std::sort(got.buckets.begin(), got.buckets.end());
      std::sort(buckets.begin(), buckets.end());
    }
    EXPECT_EQ(got.buckets, buckets) << "round " << round;
  }
}

// Those of small models and of large ones alike, lazy views too.
TEST(DdpParts, GradientsAreCopiedAsLibTorchMultiplies) {
  torch::manual_seed(3);
  const at::Tensor base = torch::randn({70, 101}, torch::kFloat64);
  std::vector<at::Tensor> gradients;
  for (const auto type : {torch::kFloat16, torch::kBFloat16, torch::kFloat32, torch::kFloat64}) {
    gradients.push_back(base.to(type));
    gradients.push_back(base.to(type).t().slice(0, 1, 90, 2));
    gradients.push_back(at::_neg_view(base.to(type)));
  }
  gradients.push_back(at::complex(base, 2 * base));
  gradients.push_back(gradients.back().conj());
  for (const at::Tensor& from : gradients) {
    for (const size_t whole : {size_t{1}, size_t{1} << 30}) {
      const at::Tensor to = torch::empty(from.sizes(), from.options());
      internal::copy_scaled(from, 1.0 / 3, whole, to);
      EXPECT_TRUE(torch::equal(to, from * at::scalar_tensor(1.0 / 3, from.options())))
          << from.dtype() << ", " << whole;
      EXPECT_EQ(to._version(), 1);
      internal::copy_gradient(from, whole, to);
      EXPECT_TRUE(torch::equal(to, from)) << from.dtype() << ", " << whole;
      EXPECT_EQ(to._version(), 2);
    }
  }
  const at::Tensor other = torch::empty({70, 101}, torch::kFloat32);
  internal::copy_scaled(base, 0.5, size_t{1} << 30, other);
  EXPECT_TRUE(torch::equal(other, base.to(torch::kFloat32) * 0.5));
}

std::vector<size_t> all_of(DistributedSampler& sampler, size_t batch = 4) {
  std::vector<size_t> out;
  while (const auto some = sampler.next(batch)) {
    EXPECT_LE(some->size(), batch);
    out.insert(out.end(), some->begin(), some->end());
  }
  return out;
}

TEST(DdpParts, SamplersOfAllRanksShareTheEpoch) {
  for (const size_t samples : {1, 5, 12, 13, 14}) {
    for (const bool drop_last : {false, true}) {
      if (drop_last && samples < 4) continue;
      std::multiset<size_t> all;
      std::set<size_t> unrepeated;
      size_t without = 0;
      for (int rank = 0; rank < 4; ++rank) {
        DistributedSampler sampler(samples,
                                   {.rank = rank, .size = 4, .seed = 3, .drop_last = drop_last});
        const std::vector<size_t> mine = all_of(sampler);
        EXPECT_EQ(mine.size(), sampler.size());
        EXPECT_EQ(mine.size(), drop_last ? samples / 4 : (samples + 3) / 4);
        all.insert(mine.begin(), mine.end());
        without += sampler.unrepeated();
        unrepeated.insert(mine.begin(), mine.begin() + static_cast<int64_t>(sampler.unrepeated()));
      }
      const std::set<size_t> distinct(all.begin(), all.end());
      EXPECT_EQ(distinct.size(), drop_last ? samples / 4 * 4 : samples);
      EXPECT_EQ(unrepeated.size(), distinct.size());
      EXPECT_EQ(without, distinct.size());
    }
  }
}

// A loader has a copy: set_epoch() on the program's own counts.
TEST(DdpParts, DB_12_EpochsHaveOrdersOfTheirOwn) {
  const auto order_of = [](int64_t epochs) {
    DistributedSampler sampler(40, {.rank = 1, .size = 2, .seed = 9});
    auto data = torch::data::datasets::TensorDataset(torch::arange(40));
    auto loader = torch::data::make_data_loader(data, sampler, /*batch_size=*/7);
    std::vector<std::vector<int64_t>> orders;
    for (int64_t epoch = 0; epoch < epochs; ++epoch) {
      sampler.set_epoch(epoch);
      auto& order = orders.emplace_back();
      for (const auto& batch : *loader) {
        for (const auto& one : batch) order.push_back(one.data.item<int64_t>());
      }
    }
    return orders;
  };
  const auto orders = order_of(3);
  EXPECT_EQ(orders, order_of(3));
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
  for (const auto& one : orders) EXPECT_EQ(one.size(), 20U);
}

TEST(DdpParts, ASamplerGoesOnInTheMiddleOfAnEpoch) {
  DistributedSampler first(40, {.rank = 1, .size = 2});
  first.set_epoch(5);
  (void)first.next(7);
  std::stringstream stream;
  {
    torch::serialize::OutputArchive archive;
    first.save(archive);
    archive.save_to(stream);
  }
  DistributedSampler second(40, {.rank = 1, .size = 2});
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  second.load(archive);
  EXPECT_EQ(second.position(), 7U);
  EXPECT_EQ(second.epoch(), 5);
  second.reset();  // as a loader does
  EXPECT_EQ(all_of(second), all_of(first));
  second.reset();
  EXPECT_EQ(second.position(), 0U);
}

TEST(DdpParts, BadInput_samplers_that_cannot_be) {
  EXPECT_THROW(DistributedSampler(0), Error);
  EXPECT_THROW(DistributedSampler(5, {.rank = 2, .size = 2}), Error);
  EXPECT_THROW(DistributedSampler(5, {.rank = -1, .size = 2}), Error);
  EXPECT_THROW(DistributedSampler(3, {.rank = 1, .size = 4, .drop_last = true}), Error);
  DistributedSampler sampler(5);
  EXPECT_THROW(sampler.load_position(0, 6), Error);
  EXPECT_THROW(sampler.reset(0), Error);
}

// The CPU, or one GPU for each process of this machine, and then from the first one again.
TEST(DdpParts, TheDeviceOfARank) {
  const int gpus = static_cast<int>(at::detail::getCUDAHooks().deviceCount());
  for (const int local : {0, 1, 7}) {
    const std::string number = std::to_string(local);
    const at::Device device = local_device(
        {{"RANK", number}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", number}, {"LOCAL_WORLD_SIZE", "8"}});
    EXPECT_EQ(device.is_cpu(), gpus == 0);
    if (gpus > 0) {
      EXPECT_EQ(device.index(), local % gpus);
    }
  }
  EXPECT_THROW(local_device({{"LOCAL_RANK", "first"}}), Error);
}

TEST(DdpParts, ValuesAndRowsOfAllRanks) {
  run_ranks(3, [](ProcessGroup& group) {
    const int rank = group.rank();
    EXPECT_DOUBLE_EQ(reduce_value(group, rank), 1);
    // Weights 0, 1, 2: a rank with weight 0 may have any value.
    const double value = rank == 0 ? std::numeric_limits<double>::quiet_NaN() : rank * 3;
    EXPECT_DOUBLE_EQ(reduce_value(group, value, rank), 5);
    const at::Tensor mean = reduce_value(group, torch::full({2}, rank, torch::kFloat32));
    EXPECT_TRUE(torch::equal(mean, torch::ones({2})));
    for (const auto dtype : {torch::kBool, torch::kLong, torch::kFloat32}) {
      const at::Tensor rows = torch::full({rank, 2}, rank, torch::kLong).to(dtype);
      const at::Tensor all = all_gather_rows(group, rows);
      const at::Tensor want = torch::tensor({{1, 1}, {2, 2}, {2, 2}}).to(dtype);
      EXPECT_TRUE(torch::equal(all, want));
    }
  });
}

TEST(DdpParts, BadInput_values_without_weight) {
  run_ranks(2, [](ProcessGroup& group) {
    for (const double weight : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
      try {
        (void)reduce_value(group, 1, group.rank() == 0 && weight != 0 ? 1 : weight);
        ADD_FAILURE() << weight;
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
      }
    }
    EXPECT_THROW((void)all_gather_rows(group, torch::tensor(1)), Error);
    EXPECT_DOUBLE_EQ(reduce_value(group, 4), 4);
  });
}

}  // namespace
}  // namespace weft::testing
