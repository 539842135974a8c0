// Update rules of users, at tables and for Hogwild.

#include <memory>
#include <string>
#include <vector>

#include "torch/types.h"
#include "weft/dist_optim/user_rule.h"
#include "weft/ps/hogwild.h"
#include "weft/tests/ps/fixture.h"

namespace weft::testing {
namespace {

using ps::Table;

// The sign of an average of gradients.
struct Signum {
  static constexpr std::string_view kName = "test.Signum";
  struct Options {
    double lr = 0.25;
    double momentum = 0.5;
  };
  template <class O, class F>
  static void visit(O& o, F f) {
    f("lr", o.lr), f("momentum", o.momentum);
  }
  static constexpr std::string_view kBuffers[] = {"average"};
  static Status check(const Options& o) {
    if (o.momentum >= 0 && o.momentum < 1) return absl::OkStatus();
    return make_error(ErrorKind::kInvalidArgument, "Signum: momentum must be in [0, 1)");
  }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t) {
    s->buffers[0].lerp_(g, 1 - o.momentum);
    p.add_(s->buffers[0].sign(), -o.lr);
  }
};

// Without a buffer; its step counts.
struct OneOverStep {
  static constexpr std::string_view kName = "test.OneOverStep";
  struct Options {
    double lr = 1;
  };
  template <class O, class F>
  static void visit(O& o, F f) {
    f("lr", o.lr);
  }
  static bool takes_sparse(const Options&) { return true; }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState*, int64_t step) {
    p.add_(g, -o.lr / static_cast<double>(step));
  }
};

// Another class of a name that there is.
struct Impostor : OneOverStep {
  static constexpr std::string_view kName = "Adam";
};

ps::UserRules both() { return {user_rule<Signum>(), user_rule<OneOverStep>()}; }

// Servers and clients that have the rules.
struct RulesJob {
  explicit RulesJob(int servers, std::shared_ptr<Runtime> runtime = nullptr)
      : job(servers, 1, Net::kInproc, std::move(runtime)),
        client(job.worker(0), {.servers = job.server_names, .rules = both()}) {
    job.servers.clear();
    for (int i = 0; i < servers; ++i) serve(i);
  }
  void serve(int i) {
    job.servers.push_back(
        std::make_unique<ps::Server>(job.server(i), ps::ServerOptions{.rules = both()}));
  }
  PsJob job;
  ps::Client client;
};

at::Tensor signs(int step) { return (torch::arange(6, torch::kFloat64) * 2.1 + step).sin(); }

TEST_F(PsTest, ARuleOfTheUserUpdatesDenseTablesAndRows) {
  RulesJob job(3);
  auto dense = ps::dense({6}, ps::rule<Signum>({.lr = 0.125}));
  dense.dtype = torch::kFloat64;
  auto sparse = ps::sparse(3, ps::rule<Signum>({.lr = 0.125}));
  sparse.dtype = torch::kFloat64;
  auto counted = ps::sparse(3, ps::rule<OneOverStep>());
  counted.dtype = torch::kFloat64;
  const Table d = job.client.open_table("d", dense);
  const Table s = job.client.open_table("s", sparse);
  const Table c = job.client.open_table("c", counted);
  const at::Tensor keys = keys_of({1, 1 << 20});
  at::Tensor want = torch::zeros({6}, torch::kFloat64);
  at::Tensor average = torch::zeros({6}, torch::kFloat64);
  at::Tensor want_counted = torch::zeros({2, 3}, torch::kFloat64);
  for (int step = 0; step < 10; ++step) {
    const at::Tensor g = signs(step);
    average = average.lerp(g, 0.5);
    const double lr = step < 5 ? 0.125 : 0.5;
    want = want - lr * average.sign();
    ps::PushOptions options;
    if (step >= 5) options.rate = lr;  // the option named lr
    d.push(g, options).wait();
    s.push_rows(keys, g.view({2, 3}), options).wait();
    // The second row sees every other step.
    const int64_t rows = step % 2 == 0 ? 2 : 1;
    c.push_rows(keys.narrow(0, 0, rows), g.view({2, 3}).narrow(0, 0, rows)).wait();
    want_counted[0] -= g.view({2, 3})[0] / (step + 1);
    if (rows == 2) want_counted[1] -= g.view({2, 3})[1] / (step / 2 + 1);
  }
  EXPECT_TRUE(torch::equal(d.pull().wait(), want));
  EXPECT_TRUE(torch::equal(s.pull_rows(keys).wait().reshape({-1}), want));
  EXPECT_TRUE(torch::allclose(c.pull_rows(keys).wait(), want_counted, 1e-12, 1e-13));
}

// The backup has the rule, too, and a snapshot its state.
TEST_F(PsTest, ARuleOfTheUserSurvivesAFailOverAndARestore) {
  in_simulation(51, [](const std::shared_ptr<SimRuntime>& sim) {
    RulesJob job(3, sim);
    auto definition = ps::dense({6}, ps::rule<Signum>());
    definition.dtype = torch::kFloat64;
    definition.copies = 2;
    const Table table = job.client.open_table("t", definition);
    at::Tensor want = torch::zeros({6}, torch::kFloat64);
    at::Tensor average = torch::zeros({6}, torch::kFloat64);
    const auto step = [&](const Table& at, int number) {
      at.push(signs(number)).wait();
      average = average.lerp(signs(number), 0.5);
      want = want - 0.25 * average.sign();
      EXPECT_TRUE(torch::equal(at.pull().wait(), want)) << number;
    };
    for (int i = 0; i < 5; ++i) step(table, i);
    job.client.snapshot("/snapshots");
    const at::Tensor at_snapshot = want;
    const at::Tensor average_at_snapshot = average;
    for (int i = 5; i < 10; ++i) step(table, i);
    job.client.restore("/snapshots");
    want = at_snapshot;
    average = average_at_snapshot;
    const Table again = job.client.open_table("t", definition);
    for (int i = 20; i < 25; ++i) step(again, i);
    job.job.servers[0]->drain();  // its parts go to other servers
    for (int i = 25; i < 30; ++i) step(again, i);
  });
}

TEST_F(PsTest, HogwildTakesARuleOfTheUser) {
  const at::Tensor parameter = torch::zeros({4});
  const ps::Hogwild hogwild({parameter}, ps::rule<OneOverStep>({.lr = 2}), both());
  hogwild.push({torch::ones({4})});
  hogwild.push({torch::ones({4})});
  EXPECT_TRUE(torch::equal(parameter, torch::full({4}, -3.F)));
}

TEST_F(PsTest, BadInput_rules_of_users) {
  const auto wrong = ErrorKind::kInvalidArgument;
  RulesJob job(1);
  PsJob& plain = job.job;
  // A client without the rule, and a server without it.
  const auto definition = ps::dense({2}, ps::rule<OneOverStep>());
  expect_ps_error(ps_error_of([&] { (void)plain.clients[0].open_table("t", definition); }), wrong,
                  {"table 't'", "no update rule 'test.OneOverStep'", "there are SGD"});
  PsJob other(1, 1);
  const ps::Client client(other.worker(0), {.servers = other.server_names, .rules = both()});
  expect_ps_error(ps_error_of([&] { (void)client.open_table("t", definition); }), wrong,
                  {"'ps0'", "no update rule 'test.OneOverStep'"});
  // One that knows the table's name alone opens it all the same: the rule is the servers'.
  const Table made = job.client.open_table("t", definition);
  const Table found = plain.clients[0].open_table("t");
  found.push(torch::ones({2})).wait();
  EXPECT_TRUE(torch::equal(made.pull().wait(), torch::full({2}, -1.F)));
  // Options.
  expect_ps_error(ps_error_of([&] {
                    (void)job.client.open_table("o",
                                                ps::dense({2}, ps::rule<Signum>({.momentum = 1})));
                  }),
                  wrong, {"momentum must be in [0, 1)"});
  expect_ps_error(ps_error_of([&] {
                    (void)job.client.open_table(
                        "o", ps::dense({2}, ps::rule<OneOverStep>({.lr = INFINITY})));
                  }),
                  wrong, {"test.OneOverStep", "lr is inf, it must be finite"});
  // Names.
  for (const ps::UserRules& rules : {ps::UserRules{user_rule<Impostor>()}, ps::UserRules{nullptr},
                                     ps::UserRules{user_rule<Signum>(), user_rule<Signum>()}}) {
    expect_ps_error(
        ps_error_of([&] { ps::Client c(plain.worker(0), {.servers = {"ps0"}, .rules = rules}); }),
        wrong, {"ps::Client", "rules:"});
    expect_ps_error(
        ps_error_of([&] { ps::Hogwild h({torch::ones({2})}, ps::rule<optim::SGD>(), rules); }),
        wrong, {"Hogwild", "rules:"});
  }
  PsJob none(1, 1);
  none.servers.clear();
  expect_ps_error(
      ps_error_of([&] { ps::Server server(none.server(0), {.rules = {user_rule<Impostor>()}}); }),
      wrong, {"ps::Server", "another one named 'Adam'"});
}

}  // namespace
}  // namespace weft::testing
