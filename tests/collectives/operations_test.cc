// What every backend does alike: operations on tensors, one test per operation and promise.
#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/_efficientzerotensor.h"
#include "ATen/ops/_neg_view.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/conj.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "c10/util/complex.h"
#include "weft/tests/collectives/world.h"

namespace weft::testing {
namespace {

class Collectives : public ::testing::TestWithParam<Setting> {
 protected:
  static at::Tensor floats(std::vector<float> values) {
    return at::tensor(at::ArrayRef<float>(values));
  }
  static at::Tensor filled(int64_t n, double value, at::ScalarType type = at::kFloat) {
    return at::full({n}, value, at::TensorOptions().dtype(type));
  }
};

#define EXPECT_TENSOR(a, b) EXPECT_TRUE(at::equal((a), (b))) << (a) << "\nis not\n" << (b)

TEST_P(Collectives, AllReduceOfEverySize) {
  for (const int size : {1, 2, 3, 4, 5}) {
    World(GetParam(), size).run([size](ProcessGroup& group) {
      EXPECT_EQ(group.size(), size);
      for (const int64_t n : {0, 1, 2, 3, 7, 1023, 1024, 1025, 100'003}) {
        at::Tensor t = at::arange(n, at::kFloat) + group.rank();
        group.all_reduce(t);
        EXPECT_TENSOR(t, at::arange(n, at::kFloat) * size + size * (size - 1) / 2);
      }
      EXPECT_EQ(group.sequence(), 9u);
    });
  }
}

TEST_P(Collectives, G1_a_strided_sum) {
  World(GetParam(), 2).run([](ProcessGroup& group) {
    at::Tensor base = at::arange(8, at::kFloat);
    group.all_reduce(base.slice(0, 0, 8, 2));
    EXPECT_TENSOR(base, floats({0, 1, 4, 3, 8, 5, 12, 7}));
    at::Tensor matrix = at::arange(6, at::kFloat).view({2, 3});
    group.all_reduce(matrix.t());
    EXPECT_TENSOR(matrix, at::arange(6, at::kFloat).view({2, 3}) * 2);
    at::Tensor one = at::arange(8, at::kFloat);
    group.reduce(one.slice(0, 1, 8, 2), {.root = 1});
    const bool root = group.rank() == 1;
    EXPECT_TENSOR(one, root ? floats({0, 2, 2, 6, 4, 10, 6, 14}) : at::arange(8, at::kFloat));
  });
}

TEST_P(Collectives, G2_a_strided_broadcast) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    at::Tensor base = group.rank() == 1 ? at::arange(8, at::kFloat) : at::zeros({8});
    group.broadcast(base.slice(0, 0, 8, 2), {.root = 1});
    EXPECT_TENSOR(base.slice(0, 0, 8, 2), floats({0, 2, 4, 6}));
    if (group.rank() != 1) {
      EXPECT_TENSOR(base.slice(0, 1, 8, 2), at::zeros({4}));
    }
  });
}

// Views whose memory holds other values than they have, on one rank only.
TEST_P(Collectives, G1_and_G2_conjugate_and_negative_views) {
  using C = c10::complex<double>;
  World(GetParam(), 2).run([](ProcessGroup& group) {
    const bool lazy = group.rank() == 0;
    const auto values = [] { return at::tensor(std::vector<C>{C(1, 2), C(3, -5)}); };
    const at::Tensor conjugates = at::tensor(std::vector<C>{C(1, -2), C(3, 5)});
    const auto mine = [&] { return lazy ? conjugates.clone().conj() : values(); };
    at::Tensor t = mine();
    EXPECT_EQ(t.is_conj(), lazy);
    group.all_reduce(t);
    EXPECT_TENSOR(t, values() * 2);
    t = mine();
    group.reduce(t, {.root = 0});
    EXPECT_TENSOR(t, lazy ? values() * 2 : values());
    for (const int root : {0, 1}) {
      t = group.rank() == root ? mine() : mine() * 7;
      group.broadcast(t, {.root = root});
      EXPECT_TENSOR(t, values());
    }
    TensorList all{mine() * 0, mine() * 0};
    group.all_gather(all, mine());
    EXPECT_TENSOR(all[0], values());
    EXPECT_TENSOR(all[1], values());
    at::Tensor half = (mine() * 0).slice(0, 0, 1);
    group.reduce_scatter_tensor(half, mine());
    EXPECT_TENSOR(half, values().slice(0, group.rank(), group.rank() + 1) * 2);
    t = mine() * 0;
    group.all_to_all_single(t, mine());
    EXPECT_TENSOR(t[0], values()[group.rank()]);
    EXPECT_TENSOR(t[1], values()[group.rank()]);
    t = lazy ? mine() : mine() * 7;
    const auto from = [&](int sender) {
      t = group.rank() == sender ? mine() : mine() * 7;
      if (group.rank() == sender) {
        group.send(t, 1 - sender);
      } else {
        EXPECT_EQ(group.recv(t, sender), sender);
      }
      EXPECT_TENSOR(t, values());
    };
    from(0);
    from(1);
    // One element is contiguous whatever its stride.
    t = lazy ? at::_neg_view(floats({-3})) : floats({4});
    EXPECT_EQ(t.is_neg(), lazy);
    group.all_reduce(t);
    EXPECT_TENSOR(t, floats({7}));
  });
}

TEST_P(Collectives, BroadcastAndReduceOfEveryRoot) {
  for (const int size : {1, 2, 3, 5}) {
    World(GetParam(), size).run([size](ProcessGroup& group) {
      for (int root = 0; root < size; ++root) {
        at::Tensor t = filled(1025, group.rank());
        group.broadcast(t, {.root = root});
        EXPECT_TENSOR(t, filled(1025, root));
        t = filled(1025, group.rank() + 1);
        group.reduce(t, {.root = root});
        const double sum = size * (size + 1) / 2;
        EXPECT_TENSOR(t, filled(1025, group.rank() == root ? sum : group.rank() + 1));
      }
    });
  }
}

TEST_P(Collectives, Coalesced) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    TensorList tensors{filled(3, group.rank()), filled(0, 0),
                       at::arange(8, at::kFloat).view({2, 4}).t()};
    group.all_reduce_coalesced(tensors);
    EXPECT_TENSOR(tensors[0], filled(3, 3));
    EXPECT_TENSOR(tensors[2], at::arange(8, at::kFloat).view({2, 4}).t() * 3);
    group.broadcast_coalesced(tensors, {.root = 2});
    EXPECT_EQ(group.sequence(), 2u);
  });
}

TEST_P(Collectives, G6_gather_and_scatter_uneven) {
  for (const int size : {1, 2, 3, 5}) {
    World(GetParam(), size).run([size](ProcessGroup& group) {
      const int rank = group.rank();
      TensorList outputs;
      for (int r = 0; r < size; ++r) outputs.push_back(at::zeros({r}));
      group.all_gather(outputs, filled(rank, rank));
      for (int r = 0; r < size; ++r) EXPECT_TENSOR(outputs[static_cast<size_t>(r)], filled(r, r));
      at::Tensor into = at::zeros({size, 2});
      group.all_gather_into_tensor(into, filled(2, rank));
      for (int r = 0; r < size; ++r) EXPECT_TENSOR(into[r], filled(2, r));
      // In place: the input is this rank's part of the output.
      into = at::zeros({size, 2});
      into[rank].fill_(rank + 1);
      group.all_gather_into_tensor(into, into[rank]);
      for (int r = 0; r < size; ++r) EXPECT_TENSOR(into[r], filled(2, r + 1));
      for (int root = 0; root < size; ++root) {
        TensorList at_root;
        for (int r = 0; r < size && rank == root; ++r) at_root.push_back(at::zeros({r + 1}));
        group.gather(at_root, filled(rank + 1, rank), {.root = root});
        for (size_t r = 0; r < at_root.size(); ++r) {
          EXPECT_TENSOR(at_root[r], filled(static_cast<int64_t>(r) + 1, static_cast<double>(r)));
        }
        at::Tensor mine = at::zeros({rank + 1});
        group.scatter(mine, at_root, {.root = root});
        EXPECT_TENSOR(mine, filled(rank + 1, rank));
      }
    });
  }
}

TEST_P(Collectives, ReduceScatter) {
  for (const int size : {1, 2, 3, 5}) {
    World(GetParam(), size).run([size](ProcessGroup& group) {
      const int rank = group.rank();
      TensorList inputs;
      for (int r = 0; r < size; ++r) inputs.push_back(filled(r + 1, rank + r));
      at::Tensor out = at::zeros({rank + 1});
      group.reduce_scatter(out, inputs);
      EXPECT_TENSOR(out, filled(rank + 1, size * (size - 1) / 2 + size * rank));
      EXPECT_TENSOR(inputs[0], filled(1, rank));  // inputs keep their values
      const at::Tensor input = at::arange(size * 3, at::kFloat);
      at::Tensor part = at::zeros({3});
      group.reduce_scatter_tensor(part, input, {.op = ReduceOp::kAvg});
      EXPECT_TENSOR(part, input.slice(0, rank * 3, rank * 3 + 3));
    });
  }
}

TEST_P(Collectives, G6_all_to_all_of_lists_and_of_uneven_rows) {
  for (const int size : {1, 2, 3, 5}) {
    World(GetParam(), size).run([size](ProcessGroup& group) {
      const int rank = group.rank();
      TensorList inputs;
      TensorList outputs;
      for (int r = 0; r < size; ++r) {
        inputs.push_back(filled(rank + 2 * r, 10 * rank + r));
        outputs.push_back(at::zeros({r + 2 * rank}));
      }
      group.all_to_all(outputs, inputs);
      for (int r = 0; r < size; ++r) {
        EXPECT_TENSOR(outputs[static_cast<size_t>(r)], filled(r + 2 * rank, 10 * r + rank));
      }
      at::Tensor rows = at::arange(size * 2, at::kFloat).view({size, 2}) + 100 * rank;
      at::Tensor got = at::zeros({size, 2});
      group.all_to_all_single(got, rows);
      for (int r = 0; r < size; ++r) {
        EXPECT_TENSOR(got[r], at::arange(2, at::kFloat) + (2 * rank + 100 * r));
      }
      // Rank r gives one row more to each next rank.
      std::vector<int64_t> in(static_cast<size_t>(size));
      std::vector<int64_t> out(static_cast<size_t>(size), rank);
      int64_t total = 0;
      for (int r = 0; r < size; ++r) total += in[static_cast<size_t>(r)] = r;
      at::Tensor uneven = at::zeros({size * rank, 3});
      group.all_to_all_single(uneven, at::full({total, 3}, static_cast<double>(rank)),
                              {.output_splits = out, .input_splits = in});
      for (int r = 0; r < size; ++r) {
        EXPECT_TENSOR(uneven.slice(0, r * rank, (r + 1) * rank), at::full({rank, 3}, double(r)));
      }
    });
  }
}

TEST_P(Collectives, SendAndReceive) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    const int rank = group.rank();
    if (rank != 0) {
      group.send(filled(5, rank), 0, {.tag = 7});
      group.send(at::arange(6, at::kLong).view({2, 3}), 0, {.tag = 8});
    } else {
      int seen = 0;
      for (int i = 0; i < 2; ++i) {
        at::Tensor t = at::zeros({5});
        const int from = group.recv(t, kAnySource, {.tag = 7});
        EXPECT_TENSOR(t, filled(5, from));
        seen += from;
      }
      EXPECT_EQ(seen, 3);
      for (const int from : {2, 1}) {
        EXPECT_TENSOR(group.recv_any_shape(from, {.tag = 8}),
                      at::arange(6, at::kLong).view({2, 3}));
      }
    }
    // All send first and receive then, tensors that no buffer of a system holds.
    const int next = (rank + 1) % 3;
    Work sent = group.send_async(filled(1'000'000, rank), next);
    at::Tensor t = at::zeros({1'000'000});
    Work got = group.recv_async(t, (rank + 2) % 3);
    got.wait();
    sent.wait();
    EXPECT_EQ(got.source_rank(), (rank + 2) % 3);
    EXPECT_TENSOR(t, filled(1'000'000, (rank + 2) % 3));
    EXPECT_EQ(group.sequence(), 0u);
    group.barrier();
  });
}

TEST_P(Collectives, AsynchronousInTheOrderOfTheCalls) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(filled(1000, i));
      works.push_back(group.all_reduce_async(tensors.back()));
    }
    at::Tensor last = filled(1, 1);
    group.all_reduce(last);  // behind them, on this thread
    EXPECT_TENSOR(last, filled(1, 3));
    for (int i = 0; i < 20; ++i) {
      const auto at = static_cast<size_t>(i);
      EXPECT_TRUE(works[at].is_completed());
      EXPECT_TRUE(works[at].try_wait().ok());
      EXPECT_TENSOR(tensors[at], filled(1000, 3 * i));
    }
  });
}

Future<void> twice(ProcessGroup group, at::Tensor t) {
  const Work first = group.all_reduce_async(t);
  co_await first;
  const Work second = group.all_reduce_async(t);
  co_await second;
}

TEST_P(Collectives, ThenAndCoroutines) {
  World(GetParam(), 2).run([](ProcessGroup& group) {
    at::Tensor t = filled(3, 1);
    // A continuation may use its own group.
    const Future<double> sum = group.all_reduce_async(t).then([group, t]() mutable {
      group.all_reduce(t);
      return t.sum().item<double>();
    });
    EXPECT_EQ(sum.wait(), 12);
    t = filled(3, 1);
    twice(group, t).wait();
    EXPECT_TENSOR(t, filled(3, 4));
  });
}

TEST_P(Collectives, AContinuationMayDropTheLastHandle) {
  World world(GetParam(), 2);
  world.run_ranks([&](int rank) {
    auto group = std::make_shared<ProcessGroup>(init_process_group(world.options(rank)));
    at::Tensor t = filled(3, 1);
    const Work work = group->all_reduce_async(t);
    const Future<void> dropped = work.then([group]() mutable { group.reset(); });
    group.reset();
    dropped.wait();
    EXPECT_TENSOR(t, filled(3, 2));
  });
}

TEST_P(Collectives, BadInput_arguments_end_nothing) {
  World(GetParam(), 2).run([](ProcessGroup& group) {
    const auto refused = [](const Status& s, std::vector<std::string> words) {
      expect_error(s, ErrorKind::kInvalidArgument, words);
    };
    const at::Tensor t = at::zeros({4});
    refused(group.try_all_reduce(at::zeros({1}).expand({4})), {"overlaps itself"});
    refused(group.try_all_reduce(at::_efficientzerotensor({4}, at::kFloat)), {"without memory"});
    refused(group.try_all_reduce(t, {.op = ReduceOp::kBand}), {"float32", "band"});
    refused(group.try_all_reduce(at::zeros({4}, at::kComplexFloat), {.op = ReduceOp::kMax}),
            {"complex64", "max"});
    refused(group.try_all_reduce(at::zeros({4}, at::kInt), {.op = ReduceOp::premul_sum(2)}),
            {"int32", "premul_sum"});
    refused(group.try_all_reduce(at::Tensor()), {"undefined"});
    refused(group.try_all_reduce_coalesced({t, at::zeros({4}, at::kDouble)}), {"types"});
    refused(group.try_all_reduce_coalesced({t, t}), {"overlap"});
    refused(group.try_broadcast(t, {.root = 2}), {"root 2", "group of 2"});
    refused(group.try_broadcast(t, {.root = -1}), {"root -1"});
    refused(group.try_all_gather({t}, t), {"1 output tensors", "wanted are 2"});
    refused(group.try_all_gather_into_tensor(t, t), {"4", "elements"});
    refused(group.try_reduce_scatter_tensor(t, t), {"4 elements"});
    refused(group.try_all_to_all_single(t, t, {.output_splits = {1, 2}, .input_splits = {2, 2}}),
            {"output splits"});
    refused(group.try_all_to_all_single(at::zeros({3}), at::zeros({3})), {"3 rows"});
    refused(group.try_send(t, 2), {"rank 2"});
    refused(group.try_send(t, group.rank()), {"itself"});
    refused(group.try_recv(t, -2).status(), {"rank -2"});
    EXPECT_TRUE(group.all_reduce_async(at::Tensor()).has_error());
    // The group lives on.
    at::Tensor sum = filled(4, 1);
    group.all_reduce(sum);
    EXPECT_TENSOR(sum, filled(4, 2));
    EXPECT_EQ(group.sequence(), 1u);
  });
}

TEST_P(Collectives, GradientsAreNotRecorded) {
  World(GetParam(), 2).run([](ProcessGroup& group) {
    at::Tensor leaf = filled(4, 1).requires_grad_(true);
    const int64_t version = leaf._version();
    group.all_reduce(leaf);
    EXPECT_TENSOR(leaf, filled(4, 2));
    EXPECT_TRUE(leaf.is_leaf());
    EXPECT_GT(leaf._version(), version);
  });
}

// Two messages that wait at the receiver were taken by one recv(), and the first was lost.
TEST_P(Collectives, MessagesThatWaitAreReceivedOneByOne) {
  World(GetParam(), 2).run([](ProcessGroup& group) {
    constexpr int kMessages = 5;
    if (group.rank() == 1) {
      for (int i = 0; i < kMessages; ++i) group.send(at::full({2}, i), 0);
      group.send(at::full({2}, -1), 0, {.tag = 7});
      return;
    }
    at::Tensor t = at::full({2}, 99);
    // When it has come, all those before it wait.
    group.recv(t, 1, {.tag = 7});
    for (int i = 0; i < kMessages; ++i) {
      ASSERT_EQ(group.recv(t, i % 2 == 0 ? 1 : kAnySource, {.timeout = absl::Seconds(30)}), 1);
      EXPECT_EQ(t[1].item<double>(), i);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, Collectives, ::testing::ValuesIn(all_settings()),
                         [](const auto& info) { return setting_text(info.param); });

}  // namespace
}  // namespace weft::testing
