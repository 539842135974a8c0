// CL-1: operations, types, reductions, ranks, sizes, layouts and algorithms against a serial
// reference; all ranks and two runs bit-identical.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/view_as_real.h"
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

// Small whole numbers: exact in every type, sums of five of them too. Elements that lie any distance apart
// differ somewhere: what is reduced in a wrong place shows.
double value(int rank, int64_t i) {
  return static_cast<double>((i + i / 7 + i / 1009 + rank * 5) % 3 + rank % 2);
}

at::Tensor shaped(const Case& c) {
  const auto options = at::TensorOptions().dtype(c.type);
  if (c.layout == 1) return at::empty({c.n * 2}, options).slice(0, 0, c.n * 2, 2);
  if (c.layout == 2) return at::empty({c.n / 3, 3}, options).t();
  return at::empty({c.n}, options);
}

// What one rank gives. It keeps the elements of the last type and size: the full matrix asks for the same
// many times in a row.
class Inputs {
 public:
  explicit Inputs(int rank) : rank_(rank) {}
  at::Tensor operator()(const Case& c) {
    for (auto i = static_cast<int64_t>(numbers_.size()); i < c.n; ++i) {
      numbers_.push_back(value(rank_, i));
    }
    if (!flat_.defined() || flat_.scalar_type() != c.type || flat_.numel() != c.n) {
      flat_ =
          at::tensor(c10::ArrayRef<double>(numbers_).slice(0, static_cast<size_t>(c.n))).to(c.type);
    }
    at::Tensor out = shaped(c);
    return out.copy_(flat_.slice(0, 0, out.numel()).view(out.sizes()));
  }

 private:
  const int rank_;
  std::vector<double> numbers_;
  at::Tensor flat_;
};

bool have_same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return x.nbytes() == y.nbytes() &&
         (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
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

bool are_of_same_elements(const Case& a, const Case& b) {
  return a.type == b.type && a.op.kind() == b.op.kind() && a.n == b.n;
}

// What the ranks' elements give. It keeps what the last case gave, as `Inputs` does.
class Reference {
 public:
  explicit Reference(int size) : size_(size) {}

  // `result` is flat.
  void expect_reduced(const Case& c, const at::Tensor& result) {
    if (!last_.has_value() || !are_of_same_elements(*last_, c)) {
      std::vector<double> numbers;
      for (int64_t k = 0; k < c.n; ++k) numbers.push_back(expected(c, size_, k));
      wanted_ = at::tensor(numbers, at::kDouble);
      right_ = at::Tensor();
      last_ = c;
    }
    // What has the bits of a result that was right is right, too.
    if (right_.defined() && result.numel() <= right_.numel() &&
        have_same_bits(right_.slice(0, 0, result.numel()), result)) {
      return;
    }
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
    const at::Tensor parts = at::view_as_real(result.to(at::kComplexDouble));
    const at::Tensor wanted = wanted_.slice(0, 0, result.numel());
    const at::Tensor bounds = (wanted + size_) * (exact && !tiny ? 0 : size_ * unit);
    // Not "greater": what is no number is wrong, too.
    const at::Tensor wrong = ((parts.select(1, 0) - wanted).abs() <= bounds)
                                 .logical_and(parts.select(1, 1) == 0)
                                 .logical_not()
                                 .nonzero();
    if (wrong.numel() != 0) {
      const auto k = wrong.flatten()[0].item<int64_t>();
      FAIL() << "element " << k << " of rank 0 is " << parts[k][0].item<double>() << " + "
             << parts[k][1].item<double>() << "i, not " << wanted[k].item<double>() << "; "
             << wrong.numel() << " elements are wrong";
    }
    right_ = result;
  }

 private:
  const int size_;
  std::optional<Case> last_;
  at::Tensor wanted_;
  at::Tensor right_;  // a result of the last case that was looked at element by element
};

// `inputs` has one of each rank.
void run_cases(const Setting& backend, const std::vector<Case>& all, std::vector<Inputs>* inputs,
               Reference* reference) {
  const size_t size = inputs->size();
  std::vector<std::vector<at::Tensor>> results(size);
  World(backend, static_cast<int>(size)).run([&](ProcessGroup& group) {
    Inputs& input = (*inputs)[static_cast<size_t>(group.rank())];
    for (const Case& c : all) {
      at::Tensor t = input(c);
      group.all_reduce(t, {.op = c.op, .algorithm = c.algorithm});
      at::Tensor again = input(c);
      group.all_reduce(again, {.op = c.op, .algorithm = c.algorithm});
      ASSERT_TRUE(have_same_bits(t, again));
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
      ASSERT_TRUE(have_same_bits(of_rank[i], first));
    }
    reference->expect_reduced(c, first);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST_P(CollectiveMatrix, CL_1_all_reduce) {
  const auto [backend, size] = GetParam();
  const std::vector<Case> all = cases(backend.backend, size);
  EXPECT_GT(all.size(), fewer(250u, 100u));
  // So many elements are kept at a time.
  constexpr int64_t kMost = 8 << 20;
  std::vector<Inputs> inputs;
  for (int rank = 0; rank < size; ++rank) inputs.emplace_back(rank);
  Reference reference(size);
  std::vector<Case> next;
  int64_t elements = 0;
  for (const Case& c : all) {
    next.push_back(c);
    elements += c.n;
    if (elements < kMost) continue;
    run_cases(backend, next, &inputs, &reference);
    if (HasFailure()) return;
    next.clear();
    elements = 0;
  }
  run_cases(backend, next, &inputs, &reference);
}

// Element i of what `from` gives to `to`.
double element_for(int from, int to, int64_t i) {
  return from * 3 + to * 7 + static_cast<double>((i + i / 7) % 5);
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
