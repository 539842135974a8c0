// CL-1: operations, types, reductions, ranks, sizes, layouts and algorithms against a serial
// reference; all ranks and two runs bit-identical.
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "weft/collectives/internal/operation.h"
#include "weft/collectives/internal/reduce.h"
#include "weft/common/mutex.h"
#include "weft/tests/collectives/world.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

struct Case {
  at::ScalarType type;
  ReduceOp op;
  int64_t n;
  int layout;  // 0: contiguous, 1: every second element, 2: transposed
  Algorithm algorithm;
};

constexpr at::ScalarType kScalars[] = {at::kBool,
                                       at::kByte,
                                       at::kChar,
                                       at::kShort,
                                       at::ScalarType::UInt16,
                                       at::kInt,
                                       at::ScalarType::UInt32,
                                       at::kLong,
                                       at::ScalarType::UInt64,
                                       at::kHalf,
                                       at::kBFloat16,
                                       at::kFloat,
                                       at::kDouble,
                                       at::ScalarType::ComplexHalf,
                                       at::kComplexFloat,
                                       at::kComplexDouble,
                                       at::ScalarType::Float8_e4m3fn,
                                       at::ScalarType::Float8_e5m2};

// Small whole numbers: exact in every type, sums of five of them too.
double value(int rank, int64_t i) { return static_cast<double>((i * 3 + rank * 5) % 3 + rank % 2); }

at::Tensor shaped(const Case& c) {
  const auto options = at::TensorOptions().dtype(c.type);
  if (c.layout == 1) return at::zeros({c.n * 2}, options).slice(0, 0, c.n * 2, 2);
  if (c.layout == 2) return at::zeros({c.n / 3, 3}, options).t();
  return at::zeros({c.n}, options);
}

at::Tensor input(const Case& c, int rank) {
  std::vector<double> numbers;
  at::Tensor out = shaped(c);
  for (int64_t i = 0; i < out.numel(); ++i) numbers.push_back(value(rank, i));
  out.copy_(at::tensor(numbers).view(out.sizes()).to(c.type));
  return out;
}

// In memory of their own: a tensor of one element may have any stride.
at::Tensor bytes_of(const at::Tensor& t) {
  return t.clone(at::MemoryFormat::Contiguous).view({-1}).view(at::kByte);
}

double combined(ReduceOp op, double a, double b) {
  const auto x = static_cast<uint64_t>(a);
  const auto y = static_cast<uint64_t>(b);
  switch (op.kind()) {
    case ReduceOp::kProd: return a * b;
    case ReduceOp::kMin: return std::min(a, b);
    case ReduceOp::kMax: return std::max(a, b);
    case ReduceOp::kBand: return static_cast<double>(x & y);
    case ReduceOp::kBor: return static_cast<double>(x | y);
    case ReduceOp::kBxor: return static_cast<double>(x ^ y);
    default: return a + b;
  }
}

double expected(const Case& c, int size, int64_t i) {
  const double factor = c.op.kind() == ReduceOp::kPremulSum ? c.op.factor() : 1;
  const auto at = [&](int rank) {
    const double v = value(rank, i);
    return c.type == at::kBool ? static_cast<double>(v != 0) : v * factor;
  };
  double out = at(0);
  for (int rank = 1; rank < size; ++rank) out = combined(c.op, out, at(rank));
  if (c.type == at::kBool) return out != 0;
  if (c.op.kind() != ReduceOp::kAvg) return out;
  return at::isIntegralType(c.type, true) ? std::trunc(out / size) : out / size;
}

bool has(const Case& c) {
  const auto type = internal::element_type_of(c.type);
  return type.ok() && internal::check_reduction(*type, c.op).ok();
}

// Every type with every reduction; sizes, layouts and algorithms take turns, so that each pair of
// two of them comes up, and a large size with one algorithm for each backend and odd number of ranks.
// With WEFT_COLLECTIVES_MATRIX=all: all of them together.
std::vector<Case> cases(Backend backend, int ranks) {
  constexpr int64_t kLarge = (1 << 20) + 3;
  constexpr int64_t kSizes[] = {0, 1, 2, 3, 7, 1023, 1024, 1025};
  constexpr Algorithm kAll[] = {Algorithm::kAuto,
                                Algorithm::kNaive,
                                Algorithm::kStar,
                                Algorithm::kReduceBroadcast,
                                Algorithm::kRecursiveDoubling,
                                Algorithm::kHalvingDoubling,
                                Algorithm::kRing,
                                Algorithm::kSegmentedRing,
                                Algorithm::kTorus,
                                Algorithm::kHierarchicalRing,
                                Algorithm::kTorus3D,
                                Algorithm::kMesh,
                                Algorithm::kDoubleTree};
  std::vector<Case> out;
  const char* const asked = std::getenv("WEFT_COLLECTIVES_MATRIX");
  const bool wants_all = asked != nullptr && std::string(asked) == "all";
  if (!wants_all && ranks > 1 && ranks % 2 == 1 && !kSanitizer) {
    const size_t turn = static_cast<size_t>(ranks) * 3 + static_cast<size_t>(backend);
    out.push_back({at::kFloat, ReduceOp::kSum, kLarge, static_cast<int>(turn % 3),
                   kAll[turn % std::size(kAll)]});
  }
  size_t turn = 0;
  for (const at::ScalarType type : kScalars) {
    for (uint8_t kind = 0; kind <= ReduceOp::kBxor; ++kind) {
      ReduceOp op(static_cast<ReduceOp::Kind>(kind));
      if (op.kind() == ReduceOp::kPremulSum) op = ReduceOp::premul_sum(2);
      std::vector<int64_t> sizes(std::begin(kSizes), std::end(kSizes));
      sizes.push_back(kLarge);
      for (size_t i = 0; wants_all && i < sizes.size() * std::size(kAll) * 3; ++i) {
        const Case c{type, op, sizes[i / 3 / std::size(kAll)], static_cast<int>(i % 3),
                     kAll[i / 3 % std::size(kAll)]};
        if (has(c)) out.push_back(c);
      }
      for (int repeat = 0; repeat < fewer(3, 1) && !wants_all; ++repeat, ++turn) {
        const Case c{type, op, kSizes[(turn * 5) % std::size(kSizes)], static_cast<int>(turn % 3),
                     kAll[turn % std::size(kAll)]};
        if (has(c)) out.push_back(c);
      }
    }
  }
  return out;
}

std::string setting_and_size(const ::testing::TestParamInfo<std::tuple<Setting, int>>& info) {
  return setting_text(std::get<0>(info.param)) + std::to_string(std::get<1>(info.param));
}

class CollectiveMatrix : public ::testing::TestWithParam<std::tuple<Setting, int>> {};

void run_cases(const Setting& backend, int size, const std::vector<Case>& all) {
  std::vector<std::vector<at::Tensor>> results(static_cast<size_t>(size));
  World(backend, size).run([&](ProcessGroup& group) {
    for (const Case& c : all) {
      at::Tensor t = input(c, group.rank());
      group.all_reduce(t, {.op = c.op, .algorithm = c.algorithm});
      at::Tensor again = input(c, group.rank());
      group.all_reduce(again, {.op = c.op, .algorithm = c.algorithm});
      const at::Tensor bytes = bytes_of(t);
      ASSERT_TRUE(at::equal(bytes, bytes_of(again)));
      results[static_cast<size_t>(group.rank())].push_back(t.contiguous().view({-1}));
    }
  });
  for (size_t i = 0; i < all.size(); ++i) {
    const Case& c = all[i];
    SCOPED_TRACE(std::string(c10::toString(c.type)) + " " +
                 std::string(reduction_name(c.op.kind())) + " x " + std::to_string(c.n) + " " +
                 std::string(algorithm_name(static_cast<uint8_t>(c.algorithm))) + " layout " +
                 std::to_string(c.layout));
    ASSERT_GT(results[0].size(), i);
    const at::Tensor first = results[0][i];
    for (const auto& of_rank : results) {
      ASSERT_GT(of_rank.size(), i);
      ASSERT_TRUE(at::equal(bytes_of(of_rank[i]), bytes_of(first)));
    }
    const at::Tensor wide = first.to(at::kComplexDouble);
    const auto* const got = static_cast<const c10::complex<double>*>(wide.const_data_ptr());
    // Whole numbers are exact; what an average divides is not, nor are products of ten in 3 bits.
    const bool exact = c.op.kind() != ReduceOp::kAvg || at::isIntegralType(c.type, true);
    const double unit = c.type == at::ScalarType::Float8_e5m2                          ? 0.25
                        : c.type == at::ScalarType::Float8_e4m3fn                      ? 0.125
                        : c.type == at::kBFloat16                                      ? 0.01
                        : c.type == at::kHalf || c.type == at::ScalarType::ComplexHalf ? 0.002
                        : c.type == at::kDouble || c.type == at::kComplexDouble        ? 1e-14
                                                                                       : 1e-6;
    const bool tiny =
        c.type == at::ScalarType::Float8_e5m2 || c.type == at::ScalarType::Float8_e4m3fn;
    for (int64_t k = 0; k < first.numel(); ++k) {
      const double want = expected(c, size, k);
      const double bound = exact && !tiny ? 0 : size * unit * (want + size);
      ASSERT_LE(std::abs(got[k].real() - want), bound) << "element " << k << " of rank 0";
      ASSERT_EQ(got[k].imag(), 0);
    }
  }
}

TEST_P(CollectiveMatrix, CL_1_all_reduce) {
  const auto [backend, size] = GetParam();
  const std::vector<Case> all = cases(backend.backend, size);
  EXPECT_GT(all.size(), fewer(250u, 100u));
  // So many elements are kept at a time.
  constexpr int64_t kMost = 8 << 20;
  std::vector<Case> next;
  int64_t elements = 0;
  for (const Case& c : all) {
    next.push_back(c);
    elements += c.n;
    if (elements < kMost) continue;
    run_cases(backend, size, next);
    if (HasFailure()) return;
    next.clear();
    elements = 0;
  }
  run_cases(backend, size, next);
}

// Element i of what `from` gives to `to`.
double element_for(int from, int to, int64_t i) {
  return from * 3 + to * 7 + static_cast<double>(i % 5);
}

void expect_elements(const at::Tensor& got, const std::function<double(int64_t)>& wanted) {
  const at::Tensor flat = got.contiguous().view({-1}).to(at::kDouble);
  for (int64_t i = 0; i < flat.numel(); ++i) {
    ASSERT_EQ(flat.const_data_ptr<double>()[i], wanted(i)) << "element " << i;
  }
}

at::Tensor given(at::ScalarType type, int64_t n, const std::function<double(int64_t)>& element) {
  std::vector<double> numbers;
  for (int64_t i = 0; i < n; ++i) numbers.push_back(element(i));
  return at::tensor(numbers).to(type);
}

// Blocks of n elements each; `type` and `n` take turns.
void every_algorithm_of_the_others(ProcessGroup& group, at::ScalarType type, int64_t n) {
  const int size = group.size();
  const int me = group.rank();
  const auto mine = [&](int to) {
    return given(type, n, [&](int64_t i) { return element_for(me, to, i); });
  };
  const auto zeros = [&](int64_t count) {
    return at::zeros({count}, at::TensorOptions().dtype(type));
  };
  const int64_t block = std::max<int64_t>(n, 1);
  const auto gathered = [&](int64_t i) {
    return element_for(static_cast<int>(i / block), 0, i % block);
  };
  for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kRing, Algorithm::kBruck,
                                    Algorithm::kRecursiveDoubling, Algorithm::kDirect}) {
    SCOPED_TRACE(algorithm_name(static_cast<uint8_t>(algorithm)));
    const at::Tensor all = zeros(n * size);
    group.all_gather_into_tensor(all, mine(0), {.algorithm = algorithm});
    expect_elements(all, gathered);
  }
  for (const Algorithm algorithm :
       {Algorithm::kAuto, Algorithm::kRing, Algorithm::kRecursiveHalving}) {
    SCOPED_TRACE(algorithm_name(static_cast<uint8_t>(algorithm)));
    const at::Tensor in = given(type, n * size, [&](int64_t i) {
      return element_for(me, static_cast<int>(i / block), i % block);
    });
    const at::Tensor out = zeros(n);
    group.reduce_scatter_tensor(out, in, {.algorithm = algorithm});
    expect_elements(out, [&](int64_t i) {
      double sum = 0;
      for (int r = 0; r < size; ++r) sum += element_for(r, me, i);
      return sum;
    });
  }
  for (const Algorithm algorithm :
       {Algorithm::kAuto, Algorithm::kBinomialTree, Algorithm::kScatterAllGather}) {
    SCOPED_TRACE(algorithm_name(static_cast<uint8_t>(algorithm)));
    const at::Tensor t = me == size - 1 ? mine(0) : zeros(n);
    group.broadcast(t, {.root = size - 1, .algorithm = algorithm});
    expect_elements(t, [&](int64_t i) { return element_for(size - 1, 0, i); });
  }
  for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kPairwise, Algorithm::kBruck}) {
    SCOPED_TRACE(algorithm_name(static_cast<uint8_t>(algorithm)));
    TensorList in;
    TensorList out;
    for (int r = 0; r < size; ++r) {
      in.push_back(mine(r));
      out.push_back(zeros(n));
    }
    group.all_to_all(out, in, {.algorithm = algorithm});
    for (int r = 0; r < size; ++r) {
      expect_elements(out[static_cast<size_t>(r)],
                      [&](int64_t i) { return element_for(r, me, i); });
    }
    // In place: rows go out before others come in.
    const at::Tensor rows = at::cat(in).view({size, n});
    group.all_to_all_single(rows, rows, {.algorithm = algorithm});
    expect_elements(
        rows, [&](int64_t i) { return element_for(static_cast<int>(i / block), me, i % block); });
  }
  for (const Algorithm algorithm :
       {Algorithm::kAuto, Algorithm::kDirect, Algorithm::kBinomialTree}) {
    SCOPED_TRACE(algorithm_name(static_cast<uint8_t>(algorithm)));
    const int root = size / 2;
    TensorList at_root;
    for (int r = 0; r < size && me == root; ++r) at_root.push_back(zeros(n));
    group.gather(at_root, mine(0), {.root = root, .algorithm = algorithm});
    if (me == root) expect_elements(at::cat(at_root), gathered);
    const at::Tensor out = zeros(n);
    for (int r = 0; r < size && me == root; ++r) at_root[static_cast<size_t>(r)].copy_(mine(r));
    group.scatter(out, at_root, {.root = root, .algorithm = algorithm});
    expect_elements(out, [&](int64_t i) { return element_for(root, me, i); });
  }
}

TEST_P(CollectiveMatrix, CL_1_the_other_operations_by_every_algorithm) {
  const auto [backend, size] = GetParam();
  World(backend, size).run([](ProcessGroup& group) {
    size_t turn = 0;
    for (const int64_t n : {0, 1, 3, 3000}) {
      constexpr at::ScalarType kTypes[] = {at::kFloat, at::kInt, at::kDouble};
      const at::ScalarType type = kTypes[turn++ % std::size(kTypes)];
      SCOPED_TRACE(std::to_string(n) + " elements of " + c10::toString(type));
      every_algorithm_of_the_others(group, type, n);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CollectiveMatrix,
                         ::testing::Combine(::testing::Values(Backend::kInproc, Backend::kShm,
                                                              Backend::kTcp),
                                            ::testing::Values(1, 2, 3, 4, 5)),
                         setting_and_size);
// What carries the same schedules in other ways.
INSTANTIATE_TEST_SUITE_P(Ways, CollectiveMatrix,
                         ::testing::Values(std::tuple(Setting::tls(), 3),
                                           std::tuple(Setting::hosts(), 4)),
                         setting_and_size);

// The definitions of 1.2 that whole numbers do not show.
TEST(Reductions, AnAverageOfHalvesDoesNotOverflow) {
  World(Backend::kInproc, 2).run([](ProcessGroup& group) {
    for (const Algorithm algorithm : {Algorithm::kStar, Algorithm::kRing}) {
      at::Tensor t = at::full({3}, 60000, at::TensorOptions().dtype(at::kHalf));
      group.all_reduce(t, {.op = ReduceOp::kAvg, .algorithm = algorithm});
      EXPECT_EQ(t[1].item<double>(), 60000);
    }
  });
}

TEST(Reductions, IntegersWrapAndAveragesTruncateTowardZero) {
  World(Backend::kInproc, 2).run([](ProcessGroup& group) {
    at::Tensor t = at::full({1}, 200, at::TensorOptions().dtype(at::kByte));
    group.all_reduce(t);
    EXPECT_EQ(t.item<int>(), 144);
    t = at::full({1}, group.rank() == 0 ? -4 : -3, at::TensorOptions().dtype(at::kInt));
    group.all_reduce(t, {.op = ReduceOp::kAvg});
    EXPECT_EQ(t.item<int>(), -3);
    t = at::full({1}, group.rank() == 0 ? 70000 : 3, at::TensorOptions().dtype(at::kInt));
    group.all_reduce(t, {.op = ReduceOp::kProd});
    EXPECT_EQ(t.item<int>(), 210000);
    t = at::full({1}, 65535, at::TensorOptions().dtype(at::ScalarType::UInt16));
    group.all_reduce(t, {.op = ReduceOp::kProd});
    EXPECT_EQ(t.to(at::kInt).item<int>(), 1);
  });
}

TEST(Reductions, AComplexProductIsOne) {
  World(Backend::kInproc, 2).run([](ProcessGroup& group) {
    at::Tensor t =
        at::full({1}, c10::complex<double>(1, 2), at::TensorOptions().dtype(at::kComplexDouble));
    group.all_reduce(t, {.op = ReduceOp::kProd});
    EXPECT_EQ(t.item<c10::complex<double>>(), c10::complex<double>(-3, 4));
  });
}

TEST(Reductions, NaNIsKept) {
  World(Backend::kInproc, 3).run([](ProcessGroup& group) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum}) {
      at::Tensor t = at::full({2}, group.rank() == 1 ? std::nan("") : 1.0);
      group.all_reduce(t, {.op = op});
      EXPECT_TRUE(std::isnan(t[0].item<double>()));
    }
  });
}

TEST(Reductions, EveryRankGivesAFactorOfItsOwn) {
  World(Backend::kInproc, 3).run([](ProcessGroup& group) {
    at::Tensor t = at::full({4}, 2.0);
    group.all_reduce(t, {.op = ReduceOp::premul_sum(group.rank() + 1)});
    EXPECT_EQ(t[0].item<double>(), 12);
  });
}

}  // namespace
}  // namespace weft::testing
