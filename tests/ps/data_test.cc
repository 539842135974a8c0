// What tables compute: rules against torch.optim's C++ classes and a plain reference, sparse rows
// against dense ones, and results that do not depend on the number of servers. And which keys are pushed to.

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "torch/optim.h"
#include "torch/types.h"
#include "weft/ps/internal/add_scaled.h"
#include "weft/ps/internal/hot_keys.h"
#include "weft/ps/internal/key_places.h"
#include "weft/ps/internal/part_data.h"
#include "weft/rpc/inspection.h"
#include "weft/tests/ps/fixture.h"

namespace weft::testing {
namespace {

using ps::Table;

at::Tensor wave(int64_t n, int step) {
  return (torch::arange(n, torch::kFloat64) * 1.7 + 0.3 * step).sin();
}

// 100 steps of a dense table over three servers against torch::optim.
TEST_F(PsTest, PS_3_DenseRulesEqualTorchOptim) {
  PsJob job(3, 1);
  const auto compare = [&](const std::string& name, const ps::RuleChoice& rule, auto make) {
    SCOPED_TRACE(name);
    auto definition = ps::dense({7, 3}, rule);
    definition.init = ps::Init::uniform(-1, 1, 5);
    const Table t = job.clients[0].open_table(name, definition);
    at::Tensor w = t.pull().wait().clone().set_requires_grad(true);
    auto optimizer = make(std::vector<at::Tensor>{w});
    for (int step = 0; step < 100; ++step) {
      const at::Tensor g = wave(21, step).to(torch::kFloat32).reshape({7, 3});
      w.mutable_grad() = g;
      optimizer.step();
      t.push(g).wait();
    }
    const at::Tensor want = w.detach();
    const at::Tensor error = (t.pull().wait() - want).abs() / want.abs().clamp_min(1);
    EXPECT_LE(error.max().item<double>(), 1e-6);
  };
  using namespace torch::optim;  // NOLINT: the other side of the comparison
  compare("sgd", ps::rule<weft::optim::SGD>({.lr = 0.05}),
          [](const auto& p) { return torch::optim::SGD(p, SGDOptions(0.05)); });
  compare("nesterov", ps::rule<weft::optim::SGD>({.lr = 0.05, .momentum = 0.9, .nesterov = true}),
          [](const auto& p) {
            return torch::optim::SGD(p, SGDOptions(0.05).momentum(0.9).nesterov(true));
          });
  compare("adagrad", ps::rule<weft::optim::Adagrad>({.lr = 0.05}),
          [](const auto& p) { return torch::optim::Adagrad(p, AdagradOptions(0.05)); });
  compare("adam", ps::rule<weft::optim::Adam>({.lr = 0.05}),
          [](const auto& p) { return torch::optim::Adam(p, AdamOptions(0.05)); });
  compare("adamw", ps::rule<weft::optim::AdamW>({.lr = 0.05}),
          [](const auto& p) { return torch::optim::AdamW(p, AdamWOptions(0.05)); });
  compare("rmsprop", ps::rule<weft::optim::RMSprop>({.lr = 0.05}),
          [](const auto& p) { return torch::optim::RMSprop(p, RMSpropOptions(0.05)); });
}

// Against sums in double precision.
TEST_F(PsTest, PS_3_RowWiseAdagradEqualsItsFormula) {
  PsJob job(2, 1);
  auto definition = ps::sparse(5, ps::rule<optim::RowWiseAdagrad>({.lr = 0.1}));
  definition.dtype = torch::kFloat64;
  definition.init = ps::Init::uniform(-1, 1, 9);
  const Table t = job.clients[0].open_table("e", definition);
  const at::Tensor keys = keys_of({3, 1000, 77});
  at::Tensor want = t.pull_rows(keys).wait().clone();
  at::Tensor sums = torch::zeros({3}, torch::kFloat64);
  for (int step = 0; step < 50; ++step) {
    const at::Tensor g = wave(15, step).reshape({3, 5});
    for (int64_t row = 0; row < 3; ++row) {
      double squares = 0;
      for (int64_t c = 0; c < 5; ++c) squares += std::pow(g[row][c].item<double>(), 2);
      sums[row] += squares / 5;
      want[row] -= 0.1 * g[row] / (sums[row].sqrt() + 1e-10);
    }
    t.push_rows(keys, g).wait();
  }
  const at::Tensor got = t.pull_rows(keys).wait();
  EXPECT_LE((got - want).abs().max().item<double>(), 1e-10) << got << want;
}

// Rows that are touched in every step see what the rows of a dense table see, bit by bit; rows that are
// touched now and then see only their own steps (the lazy rule).
TEST_F(PsTest, PS_3_SparseRowsEqualDenseOnesWhereTheyAreTouched) {
  const auto compare = [](const ps::RuleChoice& rule) {
    SCOPED_TRACE(rule.name);
    PsJob job(3, 1);
    constexpr int64_t kLength = 16;
    auto rows = ps::sparse(kLength, rule);
    rows.init = ps::Init::constant(0.5);
    const Table sparse = job.clients[0].open_table("s", rows);
    std::vector<Table> dense;
    for (int key = 0; key < 4; ++key) {
      auto definition = ps::dense({kLength}, rule);
      definition.init = ps::Init::constant(0.5);
      dense.push_back(job.clients[0].open_table(absl::StrCat("d", key), definition));
    }
    for (int step = 0; step < 20; ++step) {
      std::vector<int64_t> keys;
      std::vector<at::Tensor> gradients;
      for (int key = 0; key < 4; ++key) {
        if (key > 0 && step % (key + 1) != 0) continue;
        keys.push_back(key);
        gradients.push_back(wave(kLength, step * 4 + key).to(torch::kFloat32));
        dense[static_cast<size_t>(key)].push(gradients.back()).wait();
      }
      sparse.push_rows(keys_of(keys), torch::stack(gradients)).wait();
    }
    const at::Tensor got = sparse.pull_rows(keys_of({0, 1, 2, 3})).wait();
    for (int64_t key = 0; key < 4; ++key) {
      const at::Tensor want = dense[static_cast<size_t>(key)].pull().wait();
      EXPECT_TRUE(torch::equal(got[key], want)) << "key " << key << "\n" << got[key] << want;
    }
  };
  compare(ps::rule<optim::SGD>({.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}));
  compare(ps::rule<optim::Adagrad>({.lr = 0.1}));
  compare(ps::rule<optim::Adam>({.lr = 0.1}));
}

// First values, duplicates, order of keys and number of servers: bit by bit the same.
TEST_F(PsTest, PS_4_SparseResultsDoNotDependOnTheNumberOfServers) {
  std::vector<at::Tensor> results;
  for (const int servers : {1, 3}) {
    PsJob job(servers, 1);
    auto definition = ps::sparse(7, ps::rule<optim::Adam>({.lr = 0.1}));
    definition.init = ps::Init::uniform(-0.1, 0.1, 42);
    const Table t = job.clients[0].open_table("e", definition);
    std::mt19937_64 random(1);
    for (int step = 0; step < 30; ++step) {
      std::vector<int64_t> keys;
      for (int i = 0; i < 50; ++i) keys.push_back(static_cast<int64_t>(random() % 200));
      t.push_rows(keys_of(keys), wave(350, step).to(torch::kFloat32).reshape({50, 7})).wait();
    }
    std::vector<int64_t> all;
    for (int64_t key = 0; key < 250; ++key) all.push_back(key);
    results.push_back(t.pull_rows(keys_of(all)).wait());
  }
  EXPECT_TRUE(torch::equal(results[0], results[1]));
  EXPECT_GT(results[0].abs().max().item<double>(), 0.1);
}

TEST_F(PsTest, PS_4_ARowTakesLittleMoreThanItsPayload) {
  // Values and the rule's sum are 260 bytes; what the part counts is what it may hold.
  auto definition = ps::sparse(64, ps::rule<optim::RowWiseAdagrad>());
  auto data = ps::internal::make_sparse_data(definition, "e", int64_t{1} << 40, nullptr);
  ASSERT_TRUE(data.ok());
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 1000; ++key) keys.push_back(key * 7919);
  ASSERT_TRUE(
      (*data)->accept({.number = 1, .floor = 1}, {keys_of(keys), torch::ones({1000, 64})}).ok());
  EXPECT_EQ((*data)->rows(), 1000);
  EXPECT_LE((*data)->bytes(), 325 * 1000);
  EXPECT_GE((*data)->bytes(), 260 * 1000);
}

// ---- the distinct keys of a push ---------------------------------------------------------------

TEST(PsKeyPlaces, DistinctKeysHaveTheirNumbersInTheOrderInWhichTheyComeFirst) {
  std::mt19937_64 random(5);
  for (const size_t count : {0, 1, 2, 3, 64, 1000, 4096}) {
    for (const uint64_t of :
         {uint64_t{1}, uint64_t{2}, uint64_t{50}, uint64_t{3000}, ~uint64_t{0}}) {
      SCOPED_TRACE(absl::StrCat(count, " of ", of));
      ps::internal::KeyPlaces<uint64_t> distinct(count);
      std::map<uint64_t, uint32_t> want;
      std::vector<uint64_t> order;
      for (size_t i = 0; i < count; ++i) {
        const uint64_t key = random() % of;
        const auto [at, fresh] = want.emplace(key, static_cast<uint32_t>(order.size()));
        if (fresh) order.push_back(key);
        ASSERT_EQ(distinct.place_of(key), at->second);
      }
      EXPECT_EQ(distinct.keys(), order);
    }
  }
}

// What a row of a table gets is what a tensor gets.
TEST(PsAddScaled, PS_3_ASumOfRowsHasTheBitsOfLibTorch) {
  const auto compare = []<class T>(T by) {
    const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value);
    for (int64_t length = 1; length <= 100; ++length) {
      const at::Tensor from = torch::randn({length}, options);
      at::Tensor to = torch::randn({length}, options);
      const at::Tensor want = to.clone().add_(from, by);
      ps::internal::AddScaled()(to.mutable_data_ptr<T>(), from.const_data_ptr<T>(), by,
                                static_cast<size_t>(length));
      EXPECT_TRUE(torch::equal(to, want)) << length;
    }
  };
  torch::manual_seed(4);
  compare(-0.01F);
  compare(-0.01);
}

// ---- which keys are pushed to most ---------------------------------------------------------------

using ps::internal::HotKeys;

// Ten keys in a push, sorted as a client sends them: one of twenty with probability 1/2, and else one of a million.
TEST(PsHotKeys, PS_12_TheKeysThatArePushedToMostAreFoundInBoundedMemory) {
  constexpr int kPushes = 200'000;
  constexpr uint64_t kHot = 20;
  HotKeys hot;
  std::map<uint64_t, int64_t> pushed;
  std::mt19937_64 random(3);
  for (int i = 0; i < kPushes; ++i) {
    std::vector<uint64_t> keys;
    for (int k = 0; k < 10; ++k) {
      const uint64_t draw = random();
      keys.push_back(draw % 2 == 0 ? (draw >> 1) % kHot : kHot + (draw >> 1) % 1'000'000);
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    for (const uint64_t key : keys) ++pushed[key];
    hot.note(keys);
  }
  EXPECT_EQ(hot.top(HotKeys::kKeys * 2).size(), HotKeys::kKeys);
  const std::vector<HotKeys::Key> top = hot.top(kHot);
  ASSERT_EQ(top.size(), kHot);
  for (const HotKeys::Key& one : top) {
    EXPECT_LT(one.key, kHot);
    // The sample has about 780 of each, so that a fifth is more than five of its deviations.
    const auto about = static_cast<double>(pushed[one.key]);
    EXPECT_LE(static_cast<double>(one.pushes - one.excess), 1.2 * about) << one.key;
    EXPECT_GE(static_cast<double>(one.pushes), 0.8 * about) << one.key;
  }
}

TEST(PsHotKeys, PS_12_EqualPushesAreSampledAtEachOfTheirPlaces) {
  HotKeys hot;
  std::vector<uint64_t> keys(HotKeys::kOneOf);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = 7 * i;
  for (int i = 0; i < 1000; ++i) hot.note(keys);
  EXPECT_EQ(hot.top(HotKeys::kKeys).size(), keys.size());
  int64_t all = 0;
  for (const HotKeys::Key& one : hot.top(HotKeys::kKeys)) all += one.pushes;
  EXPECT_NEAR(static_cast<double>(all), 1000.0 * HotKeys::kOneOf, 100.0 * HotKeys::kOneOf);
}

// Both copies count, so that a fail-over loses little of it; the greatest count comes first.
TEST_F(PsTest, PS_12_AServerShowsTheKeysThatArePushedToMost) {
  PsJob job(2, 1);
  auto definition = ps::sparse(2, ps::rule<optim::SGD>({.lr = 1.0}));
  definition.copies = 2;
  const ps::Table t = job.clients[0].open_table("e", definition);
  const at::Tensor rows = torch::ones({2, 2});
  const int64_t hot = 123'456;
  std::vector<Future<ps::PushResult>> pushes;
  for (int64_t i = 0; i < 2000; ++i) {
    pushes.push_back(t.push_rows(keys_of({hot, 1'000'000 + i}), rows));
  }
  for (const auto& push : pushes) push.wait();
  for (int s = 0; s < 2; ++s) {
    Inspection seen(1000);
    job.server(s).service<ps::internal::PsService>()->put_inspection(&seen);
    const auto& tables = seen.tables();
    const auto keys = std::find_if(tables.begin(), tables.end(),
                                   [](const auto& one) { return one.name() == "ps_keys"; });
    ASSERT_NE(keys, tables.end());
    std::map<int64_t, int> by_part;
    bool found = false;
    for (const auto& row : keys->rows()) {
      const int64_t part = std::get<int64_t>(row[1]);
      const bool first = by_part[part]++ == 0;
      if (std::get<std::string>(row[2]) != "123456") continue;
      found = true;
      EXPECT_TRUE(first) << "another key comes before it";
      EXPECT_EQ(std::get<std::string>(row[0]), "e");
      EXPECT_GT(std::get<int64_t>(row[3]), 1000);
    }
    EXPECT_TRUE(found) << "at ps" << s;
    for (const auto& [part, rows_of_it] : by_part) EXPECT_LE(rows_of_it, 20) << part;
  }
}

// Which server has what, and which client is how far.
TEST_F(PsTest, PS_12_AServerShowsItsRangesAndClients) {
  PsJob job(2, 2);
  auto definition = ps::dense({2}, ps::rule<optim::SGD>());
  definition.copies = 2;
  definition.consistency = ps::Consistency::ssp(5, 2);
  std::vector<ps::Table> tables;
  for (auto& client : job.clients) tables.push_back(client.open_table("t", definition));
  for (int i = 0; i < 3; ++i) tables[0].push(torch::ones({2}), {.advance = true}).wait();
  const auto rows = [&](int server, const char* name) {
    Inspection seen(1000);
    job.server(server).service<ps::internal::PsService>()->put_inspection(&seen);
    for (const auto& table : seen.tables()) {
      if (table.name() == name) return table.rows();
    }
    ADD_FAILURE() << "no table " << name;
    return std::decay_t<decltype(seen.tables()[0].rows())>{};
  };
  // A push is acknowledged when both copies have it; that the map says so comes a moment later.
  for (int server = 0; server < 2; ++server) {
    for (int i = 0; i < 10'000 && !job.report(server, "t").map.ready; ++i) tables[1].pull().wait();
  }
  int owners = 0;
  int backups = 0;
  for (int server = 0; server < 2; ++server) {
    for (const auto& row : rows(server, "ps_ranges")) {
      const bool owns = std::get<std::string>(row[2]) == "owner";
      (owns ? owners : backups) += 1;
      EXPECT_EQ(std::get<std::string>(row[owns ? 4 : 5]),
                job.server_names[static_cast<size_t>(server)]);
      if (owns) EXPECT_EQ(std::get<int64_t>(row[6]), 1) << "both copies are there";
    }
    std::map<std::string, std::pair<int64_t, int64_t>> clocks;  // with how far it is behind
    for (const auto& row : rows(server, "ps_clients")) {
      clocks[std::get<std::string>(row[2])] = {std::get<int64_t>(row[4]),
                                               std::get<int64_t>(row[5])};
    }
    ASSERT_EQ(clocks.size(), 2U);
    EXPECT_EQ(clocks["c0"], (std::pair<int64_t, int64_t>(3, 0)));
    EXPECT_EQ(clocks["c1"], (std::pair<int64_t, int64_t>(0, 3)));
  }
  EXPECT_EQ(owners, 2);
  EXPECT_EQ(backups, 2);
}

}  // namespace
}  // namespace weft::testing
