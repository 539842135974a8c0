// What is wrong with what a client asks, and what happens to it when a server or a client goes.

#include <limits>

#include "torch/types.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/tests/ps/fixture.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using ps::Table;
using namespace std::chrono_literals;  // NOLINT

const ps::TableDefinition kSmall = ps::dense({3}, ps::rule<optim::SGD>({.lr = 1}));

TEST_F(PsTest, BadInput_another_definition_of_a_table) {
  PsJob job(2, 2);
  const Table t = job.clients[0].open_table("w", kSmall);
  auto other = kSmall;
  other.shape = {4};
  expect_ps_error(ps_error_of([&] { job.clients[1].open_table("w", other); }),
                  ErrorKind::kInvalidArgument, {"'w'", "'ps0'", "shape is [3] there and [4] here"});
  other = kSmall;
  other.rule.options[0] = 2;
  expect_ps_error(ps_error_of([&] { job.clients[1].open_table("w", other); }),
                  ErrorKind::kInvalidArgument, {"rule is SGD(1,", "SGD(2,"});
  other = kSmall;
  other.consistency = ps::Consistency::ssp(3, 2);
  expect_ps_error(ps_error_of([&] { job.clients[1].open_table("w", other); }),
                  ErrorKind::kInvalidArgument, {"consistency is asp there and ssp 3 of 2 here"});
  const ps::Client fewer(job.worker(1), {.servers = {"ps0"}});
  expect_ps_error(ps_error_of([&] { fewer.open_table("w", kSmall); }), ErrorKind::kInvalidArgument,
                  {"servers are ps0, ps1 there and ps0 here"});
  t.push(torch::ones({3})).wait();  // nothing of that has touched it
  EXPECT_EQ(t.pull().wait().sum().item<double>(), -3);
}

TEST_F(PsTest, BadInput_a_wrong_definition) {
  PsJob job(1, 1);
  const auto refused = [&](const std::function<void(ps::TableDefinition*)>& spoil,
                           const std::string& word) {
    auto d = kSmall;
    spoil(&d);
    expect_ps_error(ps_error_of([&] { job.clients[0].open_table("w", d); }),
                    ErrorKind::kInvalidArgument, {"'w'", word});
  };
  refused([](auto* d) { d->shape = {0}; }, "shape is [0]");
  refused([](auto* d) { d->shape = {int64_t{1} << 40, int64_t{1} << 40}; }, "elements");
  refused([](auto* d) { d->rule.name = "LBFGS"; }, "no update rule 'LBFGS'");
  refused([](auto* d) { d->rule.options[0] = -1; }, "lr is -1");
  refused([](auto* d) { d->rule = ps::rule<optim::RowWiseAdagrad>(); }, "by rows");
  refused([](auto* d) { d->dtype = torch::kLong; }, "dtype");
  refused([](auto* d) { d->consistency = ps::Consistency::bsp(0); }, "clients is 0");
  refused([](auto* d) { d->consistency = ps::Consistency::batch(3, 2); }, "batch of 3 of 2");
  refused([](auto* d) { d->init = ps::Init::uniform(1, -1, 0); }, "init is from 1 to -1");
  refused([](auto* d) { d->max_bytes = 5; }, "sparse tables only");
  expect_ps_error(ps_error_of([&] { job.clients[0].open_table("a b", kSmall); }),
                  ErrorKind::kInvalidArgument, {"'a b'"});
  expect_ps_error(ps_error_of([&] { ps::Client(job.worker(0), {}); }), ErrorKind::kInvalidArgument,
                  {"servers"});
  expect_ps_error(ps_error_of([&] { ps::Server(job.server(0)); }), ErrorKind::kState,
                  {"'ps0'", "already"});
}

TEST_F(PsTest, BadInput_a_table_that_nobody_makes_and_a_worker_that_serves_none) {
  in_simulation(1, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 2, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("w", kSmall);
    const absl::Time then = sim->now();
    expect_ps_error(ps_error_of([&] { job.clients[0].open_table("v", {.deadline = 2s}); }),
                    ErrorKind::kNotFound, {"no table 'v' at 'ps0'", "there are 1: w"});
    EXPECT_LE(sim->now() - then, absl::Seconds(3));
    const ps::Client wrong(job.worker(0), {.servers = {"ps0", "c1"}});
    expect_ps_error(ps_error_of([&] { wrong.open_table("x", kSmall, {.deadline = 2s}); }),
                    ErrorKind::kDeadline, {"'c1' serves no tables", "ps::Server"});
    const ps::Client nobody(job.worker(0), {.servers = {"ps7"}});
    expect_ps_error(ps_error_of([&] { nobody.open_table("x", kSmall, {.deadline = 2s}); }),
                    ErrorKind::kDeadline, {"'ps7'"});
  });
}

TEST_F(PsTest, BadInput_tensors_and_keys_that_do_not_fit_a_table) {
  PsJob job(2, 1);
  const Table d = job.clients[0].open_table("d", kSmall);
  const Table s = job.clients[0].open_table("s", ps::sparse(2, ps::rule<optim::SGD>({.lr = 1})));
  const auto refused = [](const std::function<void()>& fn, const std::vector<std::string>& words) {
    expect_ps_error(ps_error_of(fn), ErrorKind::kInvalidArgument, words);
  };
  refused([&] { d.push(torch::ones({4})).wait(); }, {"'d'", "push", "Float [4]", "Float [3]"});
  refused([&] { d.push(torch::ones({3}, torch::kFloat64)).wait(); }, {"Double [3]"});
  refused([&] { d.push(at::Tensor()).wait(); }, {"undefined"});
  refused([&] { d.push(torch::ones({3}).to_sparse()).wait(); }, {"not strided"});
  refused([&] { d.pull_rows(keys_of({1})).wait(); }, {"dense", "no rows"});
  refused([&] { s.pull().wait(); }, {"sparse", "keys"});
  refused([&] { s.push(torch::ones({2})).wait(); }, {"sparse", "keys"});
  refused([&] { s.push_rows(keys_of({1, 2}), torch::ones({1, 2})).wait(); }, {"[1, 2]", "[2, 2]"});
  refused([&] { s.pull_rows(torch::ones({2})).wait(); }, {"int64"});
  refused([&] { s.pull_rows(torch::ones({2, 2}, torch::kLong)).wait(); }, {"one dimension"});
  EXPECT_EQ(job.report(0, "d").version + job.report(1, "d").version, 0U);
}

TEST_F(PsTest, BadInput_values_that_are_not_finite) {
  PsJob job(1, 1);
  const Table d = job.clients[0].open_table("d", kSmall);
  const Table s = job.clients[0].open_table("s", ps::sparse(2, ps::rule<optim::SGD>({.lr = 1})));
  at::Tensor bad = torch::ones({3});
  bad[1] = std::numeric_limits<float>::quiet_NaN();
  bad[2] = std::numeric_limits<float>::infinity();
  expect_ps_error(ps_error_of([&] { d.push(bad).wait(); }), ErrorKind::kInvalidArgument,
                  {"2 of 3 values", "not finite", "row 1"});
  at::Tensor rows = torch::ones({3, 2});
  rows[2][1] = -std::numeric_limits<float>::infinity();
  expect_ps_error(ps_error_of([&] {
                    s.push_rows(keys_of({4, 5, 6}), rows).wait();
                  }),
                  ErrorKind::kInvalidArgument, {"1 of 6 values", "row 2, column 1"});
  EXPECT_EQ(d.pull().wait().sum().item<double>(), 0);
  EXPECT_EQ(job.report(0, "s").rows, 0);
  const auto counted = job.server(0).metrics().snapshot();
  EXPECT_EQ(counted.at("weft_ps_refused_total{table=\"d\"}"), 1);
  EXPECT_EQ(counted.at("weft_ps_refused_total{table=\"s\"}"), 1);
}

// One part would refuse such a push, and another take it.
TEST_F(PsTest, BadInput_values_that_are_not_finite_in_one_of_several_parts) {
  PsJob job(3, 1);
  const Table d = job.clients[0].open_table("d", kSmall);
  const Table s = job.clients[0].open_table("s", ps::sparse(2, ps::rule<optim::SGD>({.lr = 1})));
  at::Tensor bad = torch::ones({3});
  bad[2] = std::numeric_limits<float>::quiet_NaN();
  expect_ps_error(ps_error_of([&] { d.push(bad).wait(); }), ErrorKind::kInvalidArgument,
                  {"table 'd'", "push", "1 of 3 values", "row 2"});
  at::Tensor rows = torch::ones({64, 2});
  rows[63][0] = std::numeric_limits<float>::infinity();
  expect_ps_error(
      ps_error_of([&] { s.push_pull_rows(torch::arange(64), rows, keys_of({1})).wait(); }),
      ErrorKind::kInvalidArgument, {"table 's'", "1 of 128 values", "row 63"});
  EXPECT_EQ(d.pull().wait().sum().item<double>(), 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(job.report(i, "s").rows, 0);
    EXPECT_EQ(job.report(i, "d").version, 0U);
  }
}

TEST_F(PsTest, BadInput_more_rows_than_a_table_may_have) {
  PsJob job(1, 1);
  auto definition = ps::sparse(2, ps::rule<optim::SGD>({.lr = 1}));
  definition.max_bytes = 200;  // 4 rows of 48
  const Table t = job.clients[0].open_table("e", definition);
  t.push_rows(keys_of({1, 2, 3}), torch::ones({3, 2})).wait();
  expect_ps_error(ps_error_of([&] {
                    t.push_rows(keys_of({3, 4, 5}), torch::ones({3, 2})).wait();
                  }),
                  ErrorKind::kResource, {"2 new rows", "240 bytes", "the most are 200"});
  EXPECT_EQ(t.pull_rows(keys_of({3})).wait().sum().item<double>(), -2) << "nothing half applied";
  t.push_rows(keys_of({3, 4}), torch::ones({2, 2})).wait();
  EXPECT_EQ(job.report(0, "e").rows, 4);
}

TEST_F(PsTest, BadInput_more_than_a_server_may_hold) {
  PsJob job(1, 1);
  job.servers[0].reset();
  job.servers[0] = std::make_unique<ps::Server>(
      job.server(0), ps::ServerOptions{.table_bytes = 1000, .queue_bytes = 20});
  auto definition = ps::dense({200}, ps::rule<optim::Adam>());
  expect_ps_error(ps_error_of([&] { job.clients[0].open_table("w", definition); }),
                  ErrorKind::kResource, {"'w'", "2400 bytes", "table_bytes is 1000"});
  auto held = kSmall;
  held.consistency = ps::Consistency::bsp(2);
  const Table t = job.clients[0].open_table("h", held);
  t.push(torch::ones({3})).wait();
  expect_ps_error(ps_error_of([&] { t.push(torch::ones({3})).wait(); }), ErrorKind::kResource,
                  {"12 bytes", "queue_bytes is 20"});
}

TEST_F(PsTest, BadInput_a_server_that_dies) {
  in_simulation(2, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(2, 1, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("w", kSmall);
    (void)job.server(1).shutdown({.graceful = false});
    const absl::Time then = sim->now();
    expect_ps_error(ps_error_of([&] { t.pull().wait(); }), ErrorKind::kPeerLost,
                    {"table 'w'", "elements 1 to 3", "'ps1'", "pull"});
    EXPECT_LE(sim->now() - then, absl::Seconds(10));
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

TEST_F(PsTest, BadInput_a_server_that_ends_while_a_pull_waits) {
  in_simulation(3, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    auto definition = kSmall;
    definition.consistency = ps::Consistency::bsp(2);
    const Table t = job.clients[0].open_table("w", definition);
    const Future<at::Tensor> waits = t.push_pull(torch::ones({3}), {.advance = true});
    sim->sleep(absl::Seconds(1));
    EXPECT_EQ(job.report(0, "w").parked, 1U);
    job.servers[0].reset();
    const auto ended = waits.try_wait();
    expect_ps_error(ended.status(), ErrorKind::kState,
                    {"table 'w'", "server of the table has ended"});
    expect_ps_error(ps_error_of([&] { t.pull().wait(); }), ErrorKind::kNotFound,
                    {"its server has ended"});
  });
}

TEST_F(PsTest, BadInput_a_client_that_leaves_while_it_waits) {
  in_simulation(4, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 2, Net::kInproc, sim);
    auto definition = kSmall;
    definition.consistency = ps::Consistency::bsp(2);
    const Table t = job.clients[0].open_table("w", definition);
    const Future<at::Tensor> waits = t.push_pull(torch::ones({3}), {.advance = true});
    const Future<at::Tensor> behind = t.pull();
    sim->sleep(absl::Seconds(1));
    (void)job.worker(0).shutdown({.graceful = false});
    EXPECT_FALSE(waits.try_wait().ok());
    EXPECT_FALSE(behind.try_wait().ok());
    EXPECT_FALSE(t.pull().try_wait().ok());
    sim->sleep(absl::Seconds(20));
    EXPECT_EQ(job.report(0, "w").clients, 0U);
    EXPECT_EQ(job.report(0, "w").parked, 0U) << "what its caller has given up is forgotten";
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

// CLIENT-1: also of what waits behind a step that does not end.
TEST_F(PsTest, WhatWaitsBehindAStepEndsWithItsDeadline) {
  in_simulation(5, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    auto definition = kSmall;
    definition.consistency = ps::Consistency::bsp(2);
    const Table t = job.clients[0].open_table("w", definition);
    const absl::Time then = sim->now();
    const Future<at::Tensor> waits =
        t.push_pull(torch::ones({3}), {.advance = true, .deadline = 8s});
    expect_ps_error(ps_error_of([&] { t.pull(2s).wait(); }), ErrorKind::kDeadline, {"'w'", "pull"});
    EXPECT_EQ(sim->now() - then, absl::Seconds(2));
    expect_ps_error(waits.try_wait().status(), ErrorKind::kDeadline,
                    {"push_pull 1", "elements 0 to 3"});
    EXPECT_LE(sim->now() - then, absl::Seconds(9));
    EXPECT_EQ(t.clock(), 1U);
  });
}

// Requests and answers that vanish: what is acknowledged is in, once.
TEST_F(PsTest, LostMessagesAreSentAgainAndNothingIsAppliedTwice) {
  in_simulation(6, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(6);
    PsJob job(1, 1, Net::kInproc, sim,
              [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    const ps::Client client(job.worker(0), {.servers = {"ps0"}, .attempt_timeout = 2s});
    const Table t = client.open_table("w", kSmall);
    plan->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "c0", .times = 1});
    plan->add({.fault = Fault::kDrop, .kind = FrameKind::kResponse, .from = "ps0", .times = 2});
    t.push(torch::ones({3})).wait();
    EXPECT_EQ(t.pull().wait().sum().item<double>(), -3);
    EXPECT_EQ(plan->hits(), 3);
    EXPECT_EQ(t.stats().repeats, 3U);
    EXPECT_EQ(job.server(0).metrics().snapshot().at("weft_ps_copies_total{table=\"w\"}"), 2);
  });
}

// Bytes that no client of ours sends.
TEST_F(PsTest, BadInput_messages_of_parameter_servers_that_make_no_sense) {
  PsJob job(1, 1);
  const Table t = job.clients[0].open_table("w", kSmall);
  const auto send = [&](std::string bytes, std::vector<at::Tensor> tensors) {
    UntypedCall c;
    c.method = std::string(ps::internal::kCallMethod);
    c.signature = ps::internal::kCallSignature;
    c.arguments = *ps::internal::pack({std::move(bytes), std::move(tensors)});
    Promise<ps::internal::Results> promise;
    const Future<ps::internal::Results> done = promise.future();
    start_call(job.worker(0), "ps0", std::move(c),
               [p = std::move(promise)](StatusOr<Payload> r) mutable {
                 if (!r.ok()) return (void)p.try_set(r.status());
                 auto parcel = *ps::internal::unpack(*std::move(r));
                 p.try_set(ps::internal::decode_results(parcel.bytes, std::move(parcel.tensors)));
               });
    return done.try_wait();
  };
  const auto call = [&](const ps::internal::Request& request, std::vector<at::Tensor> tensors) {
    const auto results = send(encode(ps::internal::Batch{{request, tensors}}), tensors);
    return results.ok() ? results->at(0).said.status() : results.status();
  };
  using ps::internal::Request;
  EXPECT_EQ(error_kind(send("\xff\xff", {}).status()), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(send("", {}).status()), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(call(Request{.part = 99, .client = 1}, {})), ErrorKind::kNotFound);
  Request request{.part = 1, .client = 1};
  request.push.emplace();
  request.push->number = 5;
  request.push->floor = 1;
  EXPECT_EQ(error_kind(call(request, {})), ErrorKind::kProtocol) << "a tensor is missing";
  EXPECT_EQ(error_kind(call(request, {at::Tensor()})), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_kind(call(request, {torch::ones({3})})), ErrorKind::kInvalidArgument)
      << "the number stands for what was said of it first";
  request.push->number = 1 << 20;
  EXPECT_EQ(error_kind(call(request, {torch::ones({3})})), ErrorKind::kProtocol);
  request.push.reset();
  request.client = 77;
  request.advance = 5;
  EXPECT_EQ(error_kind(call(request, {})), ErrorKind::kState);
  EXPECT_EQ(t.pull().wait().sum().item<double>(), 0);
}

TEST_F(PsTest, BadInput_a_worker_that_no_rule_lets_push_or_pull) {
  PsJob job(1, 2, Net::kInproc, nullptr, [](int index, JoinOptions* o) {
    if (index == 0) o->access = {{"@ps.call", {"c0"}}};
  });
  const Table t = job.clients[0].open_table("w", kSmall);
  t.push(torch::ones({3})).wait();
  expect_ps_error(ps_error_of([&] { job.clients[1].open_table("w", kSmall); }),
                  ErrorKind::kPermission, {"'w'", "'c1'"});
  // Also of several that travel together.
  const Table other = job.clients[1].open_table("w", kSmall, {.observer = true});
  std::vector<Future<at::Tensor>> pulls;
  for (int i = 0; i < 20; ++i) pulls.push_back(other.pull());
  for (const auto& pull : pulls) {
    expect_ps_error(ps_error_of([&] { pull.wait(); }), ErrorKind::kPermission, {"'w'", "'c1'"});
  }
  EXPECT_EQ(job.server(0).debug_info().at("ps_requests"), 2);
}

}  // namespace
}  // namespace weft::testing
