// Tables as users see them: dense and sparse, one server and several, on each transport.

#include <cmath>
#include <memory>
#include <optional>

#include "torch/types.h"
#include "weft/rpc/arena.h"
#include "weft/rpc/call.h"
#include "weft/rpc/library.h"
#include "weft/tests/ps/fixture.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

using ps::Table;

// A query beside the data: a named object at a server.
class Nearest {
 public:
  void serve(const Table& words) { words_ = words; }
  // The key among these whose row is nearest to that of `key`.
  int64_t of(int64_t key, const at::Tensor& among) const {
    const at::Tensor rows = words_->pull_rows(at::cat({torch::tensor({key}), among})).wait();
    const at::Tensor distances = (rows.slice(0, 1) - rows[0]).norm(2, 1);
    return among[distances.argmin().item<int64_t>()].item<int64_t>();
  }

 private:
  std::optional<Table> words_;
};

INSTANTIATE_TEST_SUITE_P(Nets, PsTest, ::testing::ValuesIn(nets()));

TEST_P(PsTest, ADenseTableIsPulledAndPushedTo) {
  PsJob job(3, 2, GetParam());
  auto definition = ps::dense({2, 5}, ps::rule<optim::SGD>({.lr = 0.5}));
  definition.init = ps::Init::constant(1);
  const Table a = job.clients[0].open_table("w", definition);
  const Table b = job.clients[1].open_table("w");
  EXPECT_EQ(b.definition(), definition);
  EXPECT_TRUE(torch::equal(a.pull().wait(), torch::ones({2, 5})));
  const at::Tensor gradient = torch::arange(10, torch::kFloat32).reshape({2, 5});
  EXPECT_FALSE(a.push(gradient).wait().dropped);
  EXPECT_TRUE(torch::equal(b.pull().wait(), torch::ones({2, 5}) - 0.5 * gradient));
  const at::Tensor next = b.push_pull(gradient, {.rate = 1.0}).wait();
  EXPECT_TRUE(torch::equal(next, torch::ones({2, 5}) - 1.5 * gradient));
  a.assign(torch::full({2, 5}, 7.0)).wait();
  EXPECT_TRUE(torch::equal(b.pull().wait(), torch::full({2, 5}, 7.0)));
  EXPECT_EQ(a.stats().pushes, 2U);
  EXPECT_EQ(b.stats().pulls, 3U);
}

TEST_P(PsTest, ASparseTableHasRowsByKey) {
  PsJob job(2, 2, GetParam());
  const auto definition = ps::sparse(3, ps::rule<optim::SGD>({.lr = 1.0}));
  const Table a = job.clients[0].open_table("e", definition);
  const Table b = job.clients[1].open_table("e", definition);
  const at::Tensor keys = keys_of({900, -1, 5, 900});
  const at::Tensor rows =
      torch::tensor({{1., 1., 1.}, {2., 2., 2.}, {3., 3., 3.}, {4., 4., 4.}}, torch::kFloat32);
  a.push_rows(keys, rows).wait();
  const at::Tensor got = b.pull_rows(keys_of({5, 6, 900, -1, 5})).wait();
  const at::Tensor want = torch::tensor(
      {{-3., -3., -3.}, {0., 0., 0.}, {-5., -5., -5.}, {-2., -2., -2.}, {-3., -3., -3.}},
      torch::kFloat32);
  EXPECT_TRUE(torch::equal(got, want)) << got;
  EXPECT_EQ(job.report(0, "e").rows + job.report(1, "e").rows, 3);  // a pull makes none
  const at::Tensor none = b.pull_rows(keys_of({})).wait();
  EXPECT_EQ(none.sizes(), (std::vector<int64_t>{0, 3}));
  const at::Tensor after = b.push_pull_rows(keys_of({6}), torch::ones({1, 3}), keys_of({6})).wait();
  EXPECT_TRUE(torch::equal(after, -torch::ones({1, 3})));
}

// What is pulled is written where the client reads it, once, and is the client's own.
TEST_P(PsTest, PS_11_APullIsWrittenIntoTheArenaAndNotCopiedThere) {
  const bool shares = GetParam() == Net::kGrpc;
  PsJob job(1, 1, GetParam(), nullptr, [&](int, JoinOptions* o) {
    if (shares) o->transport = grpc_transport();
  });
  const auto counter = [&](const char* name) {
    return shares ? job.server(0).debug_info().at(name) : 1;
  };
  constexpr int64_t kElements = 256 << 10;
  const Table w =
      job.clients[0].open_table("w", ps::dense({kElements}, ps::rule<optim::SGD>({.lr = 1})));
  const Table e = job.clients[0].open_table("e", ps::sparse(64, ps::rule<optim::SGD>({.lr = 1})));
  const at::Tensor keys = torch::arange(1000, torch::kLong);
  // Once the two share memory.
  while (counter("arena_zero_copies") == 0) w.pull().wait();
  const int64_t copies = counter("arena_copies");
  const int64_t written = counter("arena_zero_copies");
  at::Tensor values = w.push_pull(-torch::ones({kElements})).wait();
  EXPECT_TRUE(torch::equal(values, torch::ones({kElements})));
  values.fill_(7);
  at::Tensor rows = e.push_pull_rows(keys, -torch::ones({1000, 64}), keys).wait();
  EXPECT_TRUE(torch::equal(rows, torch::ones({1000, 64})));
  rows.fill_(7);
  EXPECT_TRUE(torch::equal(w.pull().wait(), torch::ones({kElements})));
  EXPECT_TRUE(torch::equal(e.pull_rows(keys).wait(), torch::ones({1000, 64})));
  EXPECT_EQ(counter("arena_zero_copies"), written + (shares ? 4 : 0));
  EXPECT_EQ(counter("arena_copies"), copies);
}

// Its memory is used again by the next pull, where ordinary memory has new pages each time.
TEST_P(PsTest, PS_1_WhatIsPulledFromSeveralPartsLiesInTheClientsArena) {
  constexpr int64_t kLong = 1 << 18;
  const bool shares = GetParam() == Net::kGrpc;
  PsJob job(1, 1, GetParam(), nullptr, [&](int, JoinOptions* o) {
    if (shares) o->transport = grpc_transport();
  });
  auto definition = ps::dense({kLong}, ps::rule<optim::SGD>({.lr = 1}));
  definition.part_bytes = kLong;  // four parts
  const Table t = job.clients[0].open_table("w", definition);
  t.push(-torch::ones({kLong})).wait();
  const auto bytes = [&] { return shares ? job.worker(0).debug_info().at("arena_bytes") : 0; };
  at::Tensor values = t.pull().wait();
  EXPECT_TRUE(torch::equal(values, torch::ones({kLong})));
  const int64_t held = bytes();
  EXPECT_GE(held, shares ? static_cast<int64_t>(values.nbytes()) : 0);
  values.add_(1);  // the caller's own
  EXPECT_TRUE(torch::equal(t.pull().wait(), torch::ones({kLong})));
  values = at::Tensor();
  if (shares) EXPECT_LE(bytes(), held - (int64_t{1} << 20)) << "and given back with the tensor";
}

// Their memory holds the negatives of their values.
TEST_P(PsTest, NegativeViewsArePushed) {
  PsJob job(1, 1, GetParam());
  const at::Tensor values = torch::tensor({{1., -2., 3.}}, torch::kFloat32);
  const at::Tensor view = at::_neg_view(-values);
  ASSERT_TRUE(view.is_neg() && view.is_contiguous());
  const Table a =
      job.clients[0].open_table("w", ps::dense({1, 3}, ps::rule<optim::SGD>({.lr = 1})));
  a.push(view).wait();
  EXPECT_TRUE(torch::equal(a.pull().wait(), -values));
  a.assign(view).wait();
  EXPECT_TRUE(torch::equal(a.pull().wait(), values));
  const Table b = job.clients[0].open_table("e", ps::sparse(3, ps::rule<optim::SGD>({.lr = 1})));
  b.push_rows(keys_of({900}), view).wait();
  EXPECT_TRUE(torch::equal(b.pull_rows(keys_of({900})).wait(), -values));
}

// The norm is that of the whole push, whatever the number of parts.
TEST_P(PsTest, AGradientIsClippedToItsNorm) {
  PsJob job(2, 1, GetParam());
  const auto rule = ps::rule<optim::SGD>({.lr = 1});
  const ps::Table dense = job.clients[0].open_table("d", ps::dense({4}, rule));
  const at::Tensor gradient = torch::tensor({3.F, 0.F, 0.F, 4.F});
  const auto values = [&](double max_norm) {
    return dense.push_pull(gradient, {.max_norm = max_norm}).wait().clone();
  };
  const at::Tensor half = values(2.5);
  EXPECT_TRUE(torch::allclose(half, -gradient / 2)) << half;
  EXPECT_TRUE(torch::allclose(values(5), half - gradient)) << "it is not above its bound";
  const ps::Table rows = job.clients[0].open_table("r", ps::sparse(2, rule));
  const at::Tensor of_rows = torch::tensor({{3.F, 0.F}, {0.F, 4.F}});
  rows.push_rows(keys_of({7, 1 << 20}), of_rows, {.max_norm = 1}).wait();
  EXPECT_TRUE(torch::allclose(rows.pull_rows(keys_of({7, 1 << 20})).wait(), -of_rows / 5));
  for (const double wrong : {0.0, -1.0, std::nan("")}) {
    expect_ps_error(dense.push(gradient, {.max_norm = wrong}).try_wait().status(),
                    ErrorKind::kInvalidArgument, {"table 'd'", "max_norm"});
  }
  expect_ps_error(dense.assign(gradient, {.max_norm = 1}).try_wait(), ErrorKind::kInvalidArgument,
                  {"max_norm is of gradients"});
  expect_ps_error(dense.push(gradient * INFINITY, {.max_norm = 1}).try_wait().status(),
                  ErrorKind::kInvalidArgument, {"not finite"});
}

TEST_P(PsTest, ManyAtOnceFromManyClients) {
  PsJob job(2, 3, GetParam());
  const auto definition = ps::dense({1001}, ps::rule<optim::SGD>({.lr = 1.0}));
  std::vector<Table> tables;
  for (ps::Client& client : job.clients) tables.push_back(client.open_table("w", definition));
  std::vector<Future<ps::PushResult>> pushes;
  const at::Tensor one = -torch::ones({1001});
  for (int i = 0; i < 100; ++i) {
    for (const Table& table : tables) pushes.push_back(table.push(one));
  }
  for (auto& push : pushes) push.wait();
  EXPECT_TRUE(torch::equal(tables[0].pull().wait(), torch::full({1001}, 300.0)));
  // What is settled is forgotten: a client's next push says so.
  for (const Table& table : tables) table.push(one).wait();
  EXPECT_LE(job.report(0, "w").remembered, 3U);
}

// A server sees what lies in a client's arena where it lies. What it has acknowledged and keeps for its
// step does not change with it.
TEST_P(PsTest, AGradientThatIsWrittenToAfterItsPushCountsAsItWas) {
  constexpr int64_t kLong = 1 << 18;
  PsJob job(1, 2, GetParam());
  auto dense = ps::dense({kLong}, ps::rule<optim::SGD>({.lr = 2.0}));
  auto sparse = ps::sparse(kLong, ps::rule<optim::SGD>({.lr = 2.0}));
  dense.consistency = sparse.consistency = ps::Consistency::bsp(2);
  const at::Tensor key = keys_of({7});
  std::vector<Table> w;
  std::vector<Table> e;
  for (auto& client : job.clients) {
    w.push_back(client.open_table("w", dense));
    e.push_back(client.open_table("e", sparse));
  }
  at::Tensor gradient = move_to_arena(job.worker(0), torch::ones({1, kLong}));
  w[0].push(gradient[0], {.advance = true}).wait();
  e[0].push_rows(key, gradient, {.advance = true}).wait();
  gradient.fill_(100);
  const at::Tensor zeros = torch::zeros({1, kLong});
  const at::Tensor want = -torch::ones({1, kLong});
  EXPECT_TRUE(torch::equal(w[1].push_pull(zeros[0], {.advance = true}).wait(), want[0]));
  EXPECT_TRUE(torch::equal(e[1].push_pull_rows(key, zeros, key, {.advance = true}).wait(), want));
  EXPECT_TRUE(torch::equal(gradient, torch::full({1, kLong}, 100))) << "nor is it written to";
}

TEST_F(PsTest, PartsMayBeEmpty) {
  PsJob job(4, 1);
  const Table t = job.clients[0].open_table("b", ps::dense({2}, ps::rule<optim::SGD>({.lr = 1.0})));
  t.push(torch::ones({2}), {.advance = true}).wait();
  EXPECT_TRUE(torch::equal(t.pull().wait(), -torch::ones({2})));
  const Table s = job.clients[0].open_table("s", ps::dense({}, ps::rule<optim::Adam>()));
  EXPECT_EQ(s.push_pull(torch::ones({})).wait().dim(), 0);
}

// A table that another client makes later is waited for.
TEST_F(PsTest, OpeningWaitsForServersAndForWhoeverMakesTheTable) {
  in_simulation(7, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(2, 2, Net::kInproc, sim);
    job.servers[1].reset();
    side_by_side(*sim, {[&] {
                          const Table t = job.clients[0].open_table("w");
                          EXPECT_EQ(t.definition().shape, (std::vector<int64_t>{3}));
                        },
                        [&] {
                          sim->sleep(absl::Seconds(2));
                          job.clients[1].open_table("w", ps::dense({3}, ps::rule<optim::SGD>()));
                        },
                        [&] {
                          sim->sleep(absl::Seconds(5));
                          job.servers[1] = std::make_unique<ps::Server>(job.server(1));
                        }});
  });
}

TEST_F(PsTest, TheLastCopyOfATableLeavesIt) {
  PsJob job(1, 1);
  const auto definition = ps::dense({3}, ps::rule<optim::SGD>());
  {
    const Table t = job.clients[0].open_table("w", definition);
    const Table same = t;  // NOLINT(performance-unnecessary-copy-initialization): what is tested
    EXPECT_EQ(job.report(0, "w").clients, 1U);
  }
  const Table again = job.clients[0].open_table("w", definition);
  again.leave().wait();
  EXPECT_EQ(job.report(0, "w").clients, 0U);
  expect_ps_error(ps_error_of([&] { again.pull().wait(); }), ErrorKind::kState,
                  {"table 'w'", "pull", "has left"});
}

TEST_P(PsTest, AQueryRunsBesideTheData) {
  const auto nearest = std::make_shared<Nearest>();
  PsJob job(2, 1, GetParam(), nullptr, [&](int index, JoinOptions* o) {
    o->library = Library("queries");
    auto def = o->library.class_<Nearest>("Nearest");
    def.def("of", &Nearest::of);
    if (index == 0) o->library.instance("words", nearest);
  });
  const Table words =
      job.clients[0].open_table("words", ps::sparse(2, ps::rule<optim::SGD>({.lr = 1})));
  const at::Tensor keys = keys_of({1, 2, 3});
  words.push_rows(keys, torch::tensor({{0.F, 0.F}, {5.F, 5.F}, {1.F, 0.F}})).wait();
  const ps::Client beside(job.server(0), {.servers = job.server_names});
  nearest->serve(beside.open_table("words", {.observer = true}));
  EXPECT_EQ(rpc_sync(job.worker(0), "ps0", on("words", &Nearest::of), 1, keys_of({2, 3})), 3);
  words.push_rows(keys_of({2}), torch::tensor({{-5.F, -5.F}})).wait();
  EXPECT_EQ(rpc_sync(job.worker(0), "ps0", on("words", &Nearest::of), 1, keys_of({2, 3})), 2);
  nearest->serve(words);  // the client of the server's worker goes first
}

}  // namespace
}  // namespace weft::testing
