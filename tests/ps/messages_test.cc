// How operations become messages: small ones together, large ones in parts.

#include <limits>

#include "torch/types.h"
#include "weft/tests/ps/fixture.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using ps::Table;
using namespace std::chrono_literals;  // NOLINT

struct Counts {
  int64_t requests = 0;
  int64_t messages = 0;
};
// What a server has taken since `before`.
Counts taken(PsJob& job, const Counts& before = {}) {
  const auto info = job.server(0).debug_info();
  return {info.at("ps_requests") - before.requests, info.at("ps_messages") - before.messages};
}

TEST_F(PsTest, PS_6_SmallOperationsTravelTogetherWhileOneIsOnItsWay) {
  in_simulation(41, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    const Table t =
        job.clients[0].open_table("e", ps::sparse(4, ps::rule<optim::SGD>({.lr = 1.0})));
    const at::Tensor row = -torch::ones({1, 4});
    Counts before = taken(job);
    for (int64_t i = 0; i < 20; ++i) t.push_rows(keys_of({i}), row).wait();
    EXPECT_EQ(taken(job, before).requests, 20);
    EXPECT_EQ(taken(job, before).messages, 20) << "one that is alone leaves at once";
    before = taken(job);
    std::vector<Future<ps::PushResult>> pushes;
    std::vector<int64_t> keys;
    for (int64_t i = 0; i < 1000; ++i) {
      keys.push_back(i);
      pushes.push_back(t.push_rows(keys_of({i}), row));
    }
    for (const auto& push : pushes) push.wait();
    EXPECT_EQ(taken(job, before).requests, 1000);
    EXPECT_LE(taken(job, before).messages, 20);
    at::Tensor want = torch::ones({1000, 4});
    want.narrow(0, 0, 20).add_(1);
    EXPECT_TRUE(torch::equal(t.pull_rows(keys_of(keys)).wait(), want));
    EXPECT_EQ(t.stats().repeats, 0U);
  });
}

TEST_F(PsTest, EachOfSeveralThatTravelTogetherHasItsOwnAnswer) {
  in_simulation(42, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    const auto rule = ps::rule<optim::SGD>({.lr = 1.0});
    const Table a = job.clients[0].open_table("a", ps::sparse(2, rule));
    const Table b = job.clients[0].open_table("b", ps::dense({3}, rule));
    const auto first = b.push(torch::ones({3}));
    const auto bad =
        a.push_rows(keys_of({1}), torch::full({1, 2}, std::numeric_limits<double>::quiet_NaN()));
    const auto good = a.push_rows(keys_of({2}), torch::ones({1, 2}));
    const auto values = b.pull();
    first.wait();
    expect_ps_error(ps_error_of([&] { bad.wait(); }), ErrorKind::kInvalidArgument, {"table 'a'"});
    good.wait();
    EXPECT_TRUE(torch::equal(values.wait(), -torch::ones({3})));
    EXPECT_TRUE(torch::equal(a.pull_rows(keys_of({1, 2})).wait(),
                             torch::tensor({{0., 0.}, {-1., -1.}}, torch::kFloat32)));
  });
}

// A pull that waits for another client is no reason to keep that client's pushes back.
TEST_F(PsTest, APullThatWaitsHoldsUpNoOther) {
  in_simulation(43, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    auto definition = ps::dense({3}, ps::rule<optim::SGD>({.lr = 1.0}));
    definition.consistency = ps::Consistency::bsp(2);
    const Table a = job.clients[0].open_table("w", definition);
    std::vector<Table> other;
    other.push_back(job.clients[0].open_table("w", definition));
    const Table& b = other[0];
    const absl::Time begun = sim->now();
    a.advance().wait();
    const auto waits = a.pull();
    std::vector<Future<ps::PushResult>> pushes;
    for (int i = 0; i < 50; ++i) pushes.push_back(b.push(torch::ones({3})));
    for (const auto& push : pushes) push.wait();
    b.advance().wait();
    EXPECT_TRUE(torch::equal(waits.wait(), torch::full({3}, -25.0)));
    EXPECT_LE(sim->now() - begun, absl::Seconds(1));
  });
}

std::vector<Future<ps::PushResult>> push_each(const Table& t, int64_t from, int64_t to,
                                              Timeout deadline = {}) {
  std::vector<Future<ps::PushResult>> out;
  for (int64_t i = from; i < to; ++i) {
    out.push_back(t.push_rows(keys_of({i}), -torch::ones({1, 2}), {.deadline = deadline}));
  }
  return out;
}
at::Tensor rows_of(const Table& t, int64_t count) {
  return t.pull_rows(torch::arange(count, torch::kLong)).wait();
}
const ps::TableDefinition kRows = ps::sparse(2, ps::rule<optim::SGD>({.lr = 1.0}));

// What waits for a message of one table of two copies waits for its backup, and holds up no others.
TEST_F(PsTest, TablesOfTwoCopiesHoldUpNoneOfOneCopy) {
  in_simulation(45, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(45);
    PsJob job(2, 1, Net::kInproc, sim,
              [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    auto two = kRows;
    two.copies = 2;
    const Table a = job.clients[0].open_table("a", two);
    const Table b = job.clients[0].open_table("b", kRows);
    plan->add({.fault = Fault::kDelay, .from = "ps0", .to = "ps1", .delay = absl::Seconds(2)});
    plan->add({.fault = Fault::kDelay, .from = "ps1", .to = "ps0", .delay = absl::Seconds(2)});
    const absl::Time then = sim->now();
    const auto slow = push_each(a, 0, 20);
    for (const auto& push : push_each(b, 0, 20)) push.wait();
    EXPECT_LE(sim->now() - then, absl::Seconds(1));
    for (const auto& push : slow) push.wait();
    EXPECT_GE(sim->now() - then, absl::Seconds(2));
    EXPECT_TRUE(torch::equal(rows_of(a, 20), torch::ones({20, 2})));
  });
}

TEST_F(PsTest, MessagesOfSeveralThatComeTwiceOrAreLostAreDoneOnce) {
  for (const Fault fault :
       {Fault::kDuplicate, Fault::kFailAfter, Fault::kLoseUnsent, Fault::kDrop}) {
    in_simulation(46, [&](const std::shared_ptr<SimRuntime>& sim) {
      const auto plan = std::make_shared<FaultPlan>(46);
      PsJob job(1, 1, Net::kInproc, sim,
                [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
      const Table t = job.clients[0].open_table("e", kRows);
      const int requests = plan->add(
          {.fault = fault, .kind = FrameKind::kRequest, .from = "c0", .skip = 1, .times = 1});
      const int answers = plan->add(
          {.fault = fault, .kind = FrameKind::kResponse, .to = "c0", .skip = 2, .times = 1});
      for (int round = 0; round < 4; ++round) {
        for (const auto& push : push_each(t, 0, 100)) push.wait();
      }
      EXPECT_EQ(plan->hits(requests) + plan->hits(answers), 2) << fault_name(fault);
      EXPECT_TRUE(torch::equal(rows_of(t, 100), torch::full({100, 2}, 4.0))) << fault_name(fault);
    });
  }
}

// The one message has another deadline than what waits for it.
TEST_F(PsTest, OneOfSeveralEndsAtItsOwnDeadline) {
  in_simulation(47, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(47);
    PsJob job(1, 1, Net::kInproc, sim,
              [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    const Table t = job.clients[0].open_table("e", kRows);
    const absl::Time then = sim->now();
    const int late =
        plan->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "c0", .to = "ps0"});
    const auto long_ones = push_each(t, 0, 10, 60s);
    const auto short_ones = push_each(t, 10, 20, 3s);
    const auto middle = push_each(t, 20, 30, 15s);
    for (const auto& push : short_ones) {
      expect_ps_error(ps_error_of([&] { push.wait(); }), ErrorKind::kDeadline, {"table 'e'"});
    }
    EXPECT_EQ(sim->now() - then, absl::Seconds(3));
    for (const auto& push : middle) {
      expect_ps_error(ps_error_of([&] { push.wait(); }), ErrorKind::kDeadline, {"table 'e'"});
    }
    EXPECT_EQ(sim->now() - then, absl::Seconds(15));
    plan->remove(late);
    for (const auto& push : long_ones) push.wait();
    EXPECT_LE(sim->now() - then, absl::Seconds(40));
    at::Tensor want = torch::zeros({30, 2});
    want.narrow(0, 0, 10).fill_(1);
    EXPECT_TRUE(torch::equal(rows_of(t, 30), want));
    EXPECT_EQ(job.worker(0).debug_info().at("ps_waiting_bytes"), 0);
  });
}

TEST_F(PsTest, AFutureThatIsCancelledTakesNoOthersAlong) {
  in_simulation(48, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("e", kRows);
    auto pushes = push_each(t, 0, 50);
    pushes[7].cancel();
    for (size_t i = 0; i < pushes.size(); ++i) {
      if (i != 7) pushes[i].wait();
    }
    EXPECT_TRUE(torch::equal(rows_of(t, 50).narrow(0, 8, 42), torch::ones({42, 2})));
  });
}

// 8 MiB wait for a message; what comes beyond is sent alone, and the call's own budgets count.
TEST_F(PsTest, WhatWaitsForAMessageHasABudget) {
  in_simulation(49, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(49);
    PsJob job(1, 1, Net::kInproc, sim,
              [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    const int64_t length = 7000;
    const Table t =
        job.clients[0].open_table("w", ps::dense({length}, ps::rule<optim::SGD>({.lr = 1})));
    plan->add({.fault = Fault::kDelay,
               .kind = FrameKind::kRequest,
               .from = "c0",
               .times = 1,
               .delay = absl::Seconds(1)});
    const Counts before = taken(job);
    std::vector<Future<ps::PushResult>> pushes;
    for (int i = 0; i < 600; ++i) pushes.push_back(t.push(-torch::ones({length})));
    const int64_t waiting = job.worker(0).debug_info().at("ps_waiting_bytes");
    EXPECT_GT(waiting, (8 << 20) - (64 << 10));
    EXPECT_LE(waiting, 8 << 20);
    for (const auto& push : pushes) push.wait();
    EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({length}, 600.0)));
    const Counts now = taken(job, before);
    EXPECT_EQ(now.requests, 601);
    EXPECT_GT(now.messages, 200) << "those beyond the budget came alone";
    EXPECT_LT(now.messages, 400) << "the others in messages of a MiB";
  });
}

// Several are more than the most bytes of a message, each alone is not.
TEST_F(PsTest, SeveralThatFitIntoNoMessageTogetherAreSentAlone) {
  in_simulation(50, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim, [](int index, JoinOptions* o) {
      if (index == 1) o->environment = Environment{{"WEFT_MAX_MESSAGE_BYTES", "512KiB"}};
    });
    const Table t =
        job.clients[0].open_table("w", ps::dense({2000}, ps::rule<optim::SGD>({.lr = 1})));
    std::vector<Future<ps::PushResult>> pushes;
    for (int i = 0; i < 200; ++i) pushes.push_back(t.push(-torch::ones({2000})));
    for (const auto& push : pushes) push.wait();
    EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({2000}, 200.0)));
  });
}

// A server dies while a message of several is on its way: each is in once, at the owner that is found.
TEST_F(PsTest, PS_8_MessagesOfSeveralGoToTheNextOwner) {
  in_simulation(51, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(3, 1, Net::kInproc, sim);
    auto two = kRows;
    two.copies = 2;
    const Table t = job.clients[0].open_table("e", two);
    auto pushes = push_each(t, 0, 300);
    (void)job.server(0).shutdown({.graceful = false});
    for (const auto& push : push_each(t, 300, 600)) push.wait();
    for (const auto& push : pushes) push.wait();
    EXPECT_TRUE(torch::equal(rows_of(t, 600), torch::ones({600, 2})));
    EXPECT_GE(t.stats().moves, 1U);
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

// With one copy the operations on the part that died fail, each with its name.
TEST_F(PsTest, OperationsThatWaitForAServerThatDiesEndWithIt) {
  in_simulation(52, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("e", kRows);
    auto pushes = push_each(t, 0, 300);
    (void)job.server(0).shutdown({.graceful = false});
    int failed = 0;
    for (const auto& push : pushes) {
      const Status s = ps_error_of([&] { push.wait(); });
      if (s.ok()) continue;
      ++failed;
      expect_ps_error(s, ErrorKind::kPeerLost, {"table 'e'", "'ps0'"});
    }
    EXPECT_GT(failed, 0);
    EXPECT_EQ(job.worker(0).debug_info().at("ps_waiting_bytes"), 0);
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

TEST_F(PsTest, PS_1_LargeDenseTablesHavePartsWhosePushesOverlapTheirPulls) {
  in_simulation(44, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(44);
    PsJob job(1, 1, Net::kInproc, sim,
              [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    const int64_t count = 3 * (1 << 20) + 17;  // a little above three parts
    const Table t =
        job.clients[0].open_table("w", ps::dense({count}, ps::rule<optim::SGD>({.lr = 0.5})));
    const Counts before = taken(job);
    const at::Tensor gradient = torch::arange(count, torch::kFloat32);
    plan->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "c0", .times = 1});
    const auto values = t.push_pull(gradient);
    sim->sleep(absl::Seconds(1));
    EXPECT_EQ(job.server(0).metrics().snapshot().at("weft_ps_pulls_total{table=\"w\"}"), 3)
        << "while the push of one part is on its way the others are answered";
    EXPECT_TRUE(torch::equal(values.wait(), -0.5 * gradient));
    EXPECT_EQ(taken(job, before).requests, 4);
    EXPECT_EQ(taken(job, before).messages, 4);
    EXPECT_EQ(t.stats().pushes, 1U);
    EXPECT_EQ(t.stats().repeats, 1U);
  });
}

TEST_F(PsTest, PartsOfATableAddUpToWhatOneWouldHold) {
  PsJob job(3, 1);
  for (const uint64_t bytes : {4, 12, 20, 1 << 20}) {
    auto definition = ps::dense({7, 5}, ps::rule<optim::SGD>({.lr = 0.5}));
    definition.init = ps::Init::uniform(-1, 1, 3);
    definition.part_bytes = bytes;
    const Table t = job.clients[0].open_table("t" + std::to_string(bytes), definition);
    auto whole = definition;
    whole.part_bytes = 4 << 20;
    const ps::Client one(job.worker(0), {.servers = {"ps0"}});
    const Table w = one.open_table("w" + std::to_string(bytes), whole);
    w.assign(t.pull().wait()).wait();
    for (int i = 0; i < 3; ++i) {
      const at::Tensor gradient = torch::rand({7, 5});
      EXPECT_TRUE(torch::equal(t.push_pull(gradient).wait(), w.push_pull(gradient).wait()));
    }
  }
}

TEST_F(PsTest, BadInput_parts_of_a_table) {
  PsJob job(1, 2);
  const auto rule = ps::rule<optim::SGD>({.lr = 1});
  auto definition = ps::dense({8}, rule);
  definition.part_bytes = 8;
  const Table t = job.clients[0].open_table("w", definition);
  auto other = definition;
  other.part_bytes = 16;
  expect_ps_error(ps_error_of([&] { job.clients[1].open_table("w", other); }),
                  ErrorKind::kInvalidArgument, {"'w'", "part_bytes is 8 there and 16 here"});
  other.part_bytes = 0;
  expect_ps_error(ps_error_of([&] { job.clients[1].open_table("v", other); }),
                  ErrorKind::kInvalidArgument, {"'v'", "part_bytes is 0", "from 4"});
  auto sparse = ps::sparse(2, rule);
  sparse.part_bytes = 8;
  expect_ps_error(ps_error_of([&] { job.clients[1].open_table("v", sparse); }),
                  ErrorKind::kInvalidArgument, {"dense tables only"});
  // No part is made for a table that does not fit.
  job.servers[0].reset();
  job.servers[0] =
      std::make_unique<ps::Server>(job.server(0), ps::ServerOptions{.table_bytes = 24});
  expect_ps_error(ps_error_of([&] { job.clients[1].open_table("w", definition); }),
                  ErrorKind::kResource, {"'w'", "32 bytes"});
  EXPECT_EQ(job.report(0, "w").bytes, 0);
}

}  // namespace
}  // namespace weft::testing
