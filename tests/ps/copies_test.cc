// Tables of two copies: a server that dies, one that is cut off, and what has no copy left.

#include "torch/types.h"
#include "weft/ps/internal/copy_wire.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/tests/ps/fixture.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using ps::Table;
using Role = ps::internal::ReplicaProtocol::Role;
using namespace std::chrono_literals;  // NOLINT

ps::TableDefinition two_copies(std::vector<int64_t> shape = {4}) {
  auto out = ps::dense(std::move(shape), ps::rule<optim::SGD>({.lr = 1}));
  out.copies = 2;
  return out;
}

// Role, epoch and digest of a part at a server; no role: it has none.
struct Seen {
  std::optional<Role> role{};
  ps::internal::RangeMap map{};
  uint64_t position = 0;
  uint64_t hash = 0;
};
Seen look(PsJob& job, int server, uint32_t index) {
  Seen out;
  const auto parts = ps::internal::PsService::of(job.server(server))->parts_by_name();
  const auto at = parts.find({"w", index});
  if (at == parts.end()) return out;
  const auto report = at->second->report();
  out.role = report.role;
  out.map = report.map;
  at->second->digest([&](uint64_t position, uint64_t hash) {
    out.position = position;
    out.hash = hash;
  });
  return out;
}

// Each part that is not at `without` has an owner and a backup that are equal.
void expect_pairs(PsJob& job, int without, uint32_t parts) {
  for (uint32_t part = 0; part < parts; ++part) {
    int owners = 0;
    std::vector<Seen> copies;
    for (int server = 0; server < 3; ++server) {
      const Seen seen = look(job, server, part);
      if (!seen.role.has_value() || *seen.role == Role::kGone) continue;
      EXPECT_NE(server, without) << "part " << part;
      owners += *seen.role == Role::kOwner ? 1 : 0;
      copies.push_back(seen);
    }
    EXPECT_EQ(owners, 1) << "part " << part;
    ASSERT_EQ(copies.size(), 2U) << "part " << part;
    EXPECT_EQ(copies[0].hash, copies[1].hash) << "part " << part;
  }
}

TEST_F(PsTest, PS_10_AServerIsDrainedWhileClientsPush) {
  in_simulation(31, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(3, 2, Net::kInproc, sim);
    constexpr int kPushes = 40;
    const auto push = [&](int client) {
      const Table t = job.clients[static_cast<size_t>(client)].open_table("w", two_copies({6}));
      for (int i = 0; i < kPushes; ++i) {
        t.push(-torch::ones({6})).wait();
        sim->sleep(absl::Milliseconds(10));
      }
    };
    side_by_side(*sim, {[&] { push(0); }, [&] { push(1); },
                        [&] {
                          sim->sleep(absl::Milliseconds(120));
                          job.servers[0]->drain();
                          const auto left = look(job, 0, 0);
                          EXPECT_EQ(left.role, Role::kGone);
                        }});
    sim->sleep(absl::Seconds(10));
    expect_pairs(job, 0, 3);
    // What it had is at others, so it may end.
    job.servers[0].reset();
    const Table t = job.clients[0].open_table("w", {.observer = true});
    EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({6}, 2.0 * kPushes)));
    // Another one on the same worker becomes a copy again.
    job.servers[0] = std::make_unique<ps::Server>(job.server(0));
    job.servers[1]->drain();
    sim->sleep(absl::Seconds(10));
    expect_pairs(job, 1, 3);
    EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({6}, 2.0 * kPushes)));
  });
}

TEST_F(PsTest, BadInput_a_drain_without_another_server_for_what_is_here) {
  in_simulation(32, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(2, 1, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("w", two_copies());
    job.servers[0]->drain();
    expect_ps_error(job.servers[0]->try_drain(), ErrorKind::kState, {"drains already"});
    expect_ps_error(job.servers[1]->try_drain(5s), ErrorKind::kDeadline,
                    {"drain of 'ps1'", "table 'w', part 0", "goes on serving"});
    t.push(-torch::ones({4})).wait();
    EXPECT_TRUE(torch::equal(t.pull().wait(), torch::ones({4})));
  });
  PsJob job(1, 1);
  const Table t = job.clients[0].open_table("w", ps::dense({2}, ps::rule<optim::SGD>({.lr = 1})));
  expect_ps_error(job.servers[0]->try_drain(), ErrorKind::kState,
                  {"table 'w', part 0", "one copy"});
  EXPECT_TRUE(torch::equal(t.push_pull(torch::ones({2})).wait(), -torch::ones({2})));
}

TEST_F(PsTest, PS_9_ARestoreTakesThePlaceOfBothCopies) {
  in_simulation(33, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(3, 2, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("w", two_copies({6}));
    for (int i = 0; i < 3; ++i) t.push(-torch::ones({6})).wait();
    job.clients[1].snapshot("/snapshots");
    t.push(-torch::ones({6})).wait();
    job.clients[1].restore("/snapshots");
    for (int i = 0; i < 2; ++i) {  // every time, also when it has been told
      expect_ps_error(ps_error_of([&] { t.push(-torch::ones({6})).wait(); }), ErrorKind::kState,
                      {"table 'w'", "pushes up to 3", "open it again"});
    }
    const Table again = job.clients[0].open_table("w", two_copies({6}));
    EXPECT_TRUE(torch::equal(again.push_pull(-torch::ones({6})).wait(), torch::full({6}, 4)));
    sim->sleep(absl::Seconds(10));
    expect_pairs(job, -1, 3);
    // What was restored survives the death of a server as anything else.
    (void)job.server(1).shutdown({.graceful = false});
    EXPECT_TRUE(torch::equal(again.push_pull(-torch::ones({6})).wait(), torch::full({6}, 5)));
    expect_ps_error(ps_error_of([&] { job.clients[1].restore("/snapshots"); }),
                    ErrorKind::kPeerLost, {"restore at 'ps1'"});
    const ps::Client one(job.worker(0), {.servers = {"ps0"}});
    expect_ps_error(ps_error_of([&] { one.restore("/snapshots"); }), ErrorKind::kInvalidArgument,
                    {"table 'w'"});
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

TEST_F(PsTest, PSR_12_ABackupHasWhatIsAcknowledgedBitByBit) {
  in_simulation(21, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(2, 1, Net::kInproc, sim);
    auto definition = two_copies({3, 5});
    definition.rule = ps::rule<optim::Adam>({.lr = 0.01});
    definition.init = ps::Init::uniform(-1, 1, 7);
    const Table t = job.clients[0].open_table("w", definition);
    for (int i = 0; i < 5; ++i) t.push(torch::full({3, 5}, i + 0.25)).wait();
    for (uint32_t part = 0; part < 2; ++part) {
      const Seen owner = look(job, static_cast<int>(part), part);
      const Seen backup = look(job, 1 - static_cast<int>(part), part);
      EXPECT_EQ(owner.role, Role::kOwner);
      EXPECT_EQ(backup.role, Role::kBackup);
      EXPECT_TRUE(owner.map.ready);
      EXPECT_EQ(owner.position, backup.position);
      EXPECT_EQ(owner.hash, backup.hash);
    }
  });
}

TEST_F(PsTest, PSR_10_ABackupTakesOverAndAnotherServerBecomesTheCopy) {
  in_simulation(22, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(3, 1, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("w", two_copies());
    t.push(torch::ones({4})).wait();
    (void)job.server(0).shutdown({.graceful = false});
    const absl::Time then = sim->now();
    t.push(torch::ones({4})).wait();
    EXPECT_LE(sim->now() - then, absl::Seconds(4));
    EXPECT_EQ(t.pull().wait().sum().item<double>(), -8);
    EXPECT_GE(t.stats().moves, 1U);
    sim->sleep(absl::Seconds(20));
    EXPECT_EQ(look(job, 1, 0).role, Role::kOwner);
    EXPECT_TRUE(look(job, 1, 0).map.ready);
    EXPECT_EQ(look(job, 2, 0).role, Role::kBackup) << "another server is the copy";
    EXPECT_EQ(look(job, 1, 0).hash, look(job, 2, 0).hash);
    // The copy of the copy.
    (void)job.server(1).shutdown({.graceful = false});
    t.push(torch::ones({4})).wait();
    EXPECT_EQ(t.pull().wait().sum().item<double>(), -12);
    // A client that comes later finds the owners, too.
    const Table late = ps::Client(job.worker(0), {.servers = job.server_names})
                           .open_table("w", two_copies(), {.deadline = 20s});
    EXPECT_EQ(late.pull().wait().sum().item<double>(), -12);
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

// PSR-1 over a fail-over: the answer is lost with its server, and the push comes again at the other.
TEST_F(PsTest, PSR_1_APushThatIsRepeatedAfterAFailOverIsAppliedOnce) {
  in_simulation(23, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(23);
    PsJob job(2, 1, Net::kInproc, sim,
              [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    const ps::Client client(job.worker(0), {.servers = job.server_names, .attempt_timeout = 2s});
    const Table t = client.open_table("w", two_copies());
    plan->add({.fault = Fault::kDrop, .kind = FrameKind::kResponse, .from = "ps0", .to = "c0"});
    const auto pushed = t.push(torch::ones({4}));
    sim->sleep(absl::Seconds(1));
    (void)job.server(0).shutdown({.graceful = false});
    pushed.wait();
    EXPECT_EQ(t.pull().wait().sum().item<double>(), -4);
    EXPECT_EQ(job.server(1).metrics().snapshot().at("weft_ps_copies_total{table=\"w\"}"), 1);
    EXPECT_EQ(job.server(1).metrics().snapshot().at("weft_ps_takeovers_total{table=\"w\"}"), 1);
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

// PSR-11: an owner that nobody reaches does not know that it is none any more. When it is reached again
// it has answered nothing, and learns of its successor.
TEST_F(PsTest, PSR_11_AnOwnerThatWasCutOffAnswersNothing) {
  in_simulation(24, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(24);
    PsJob job(2, 2, Net::kInproc, sim,
              [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    const ps::Client near(job.worker(1), {.servers = job.server_names, .attempt_timeout = 100s});
    const ps::Client far(job.worker(0), {.servers = job.server_names, .attempt_timeout = 1s});
    const Table here = near.open_table("w", two_copies());
    const Table there = far.open_table("w", two_copies());
    here.push(torch::ones({4})).wait();
    // Cut off from all but c1.
    for (const FrameKind kind : {FrameKind::kRequest, FrameKind::kResponse}) {
      for (const char* other : {"ps1", "c0"}) {
        plan->add({.fault = Fault::kDrop, .kind = kind, .from = "ps0", .to = other});
        plan->add({.fault = Fault::kDrop, .kind = kind, .from = other, .to = "ps0"});
      }
    }
    const Future<at::Tensor> old = here.pull(90s);
    const auto pushed = there.push(torch::ones({4}), {.deadline = 60s});
    pushed.wait();
    EXPECT_EQ(look(job, 1, 0).role, Role::kOwner) << "it has taken over";
    plan->clear();
    const at::Tensor seen = old.wait();
    // Part by part: the second push came while it waited.
    EXPECT_TRUE(((seen == -2) | (seen == -1)).all().item<bool>()) << seen;
    EXPECT_EQ(here.pull().wait().sum().item<double>(), -8);
    sim->sleep(absl::Seconds(20));
    EXPECT_EQ(look(job, 0, 0).role, Role::kBackup) << "it is the copy of its successor";
    EXPECT_EQ(look(job, 0, 0).hash, look(job, 1, 0).hash);
  });
}

// Its parts are at the servers that live, and with one server left at that one.
TEST_F(PsTest, PSR_10_ATableIsMadeAfterTheDeathOfAServer) {
  in_simulation(26, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(3, 2, Net::kInproc, sim);
    (void)job.server(0).shutdown({.graceful = false});
    const ps::Client& client = job.clients[0];
    // A client that only knows the name waits for the table, whichever server dies.
    side_by_side(*sim, {[&] {
                          const Table late = job.clients[1].open_table("v", {.observer = true});
                          EXPECT_EQ(late.pull().wait().numel(), 6);
                        },
                        [&] {
                          sim->sleep(absl::Seconds(2));
                          client.open_table("v", two_copies({6}));
                        }});
    const Table w = client.open_table("w", two_copies({6}));
    w.push(torch::ones({6})).wait();
    EXPECT_EQ(w.pull().wait().sum().item<double>(), -6);
    EXPECT_EQ(look(job, 1, 0).role, Role::kOwner) << "the next in the list has the part of ps0";
    EXPECT_EQ(look(job, 1, 0).hash, look(job, 2, 0).hash);
    (void)job.server(2).shutdown({.graceful = false});
    const Table alone = client.open_table("x", two_copies({6}));
    alone.push(torch::ones({6})).wait();
    w.push(torch::ones({6})).wait();
    EXPECT_EQ(alone.pull().wait().sum().item<double>(), -6);
    EXPECT_EQ(w.pull().wait().sum().item<double>(), -12);
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

TEST_F(PsTest, BadInput_a_part_without_any_copy_left) {
  in_simulation(25, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(3, 1, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("w", two_copies({6}));
    t.push(torch::ones({6})).wait();
    // Both copies of part 0 at once: ps0 and the next of the list.
    EXPECT_EQ(look(job, 1, 0).role, Role::kBackup);
    side_by_side(*sim, {[&] { (void)job.server(0).shutdown({.graceful = false}); },
                        [&] { (void)job.server(1).shutdown({.graceful = false}); }});
    const absl::Time then = sim->now();
    expect_ps_error(ps_error_of([&] { t.push(torch::ones({6})).wait(); }), ErrorKind::kPeerLost,
                    {"table 'w'", "elements 0 to 2", "no copy"});
    EXPECT_LE(sim->now() - then, absl::Seconds(40));
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

TEST_F(PsTest, BadInput_copies_that_cannot_be) {
  PsJob job(1, 1);
  expect_ps_error(ps_error_of([&] { job.clients[0].open_table("w", two_copies()); }),
                  ErrorKind::kInvalidArgument, {"'w'", "two copies", "two servers", "1"});
  auto three = two_copies();
  three.copies = 3;
  expect_ps_error(ps_error_of([&] { job.clients[0].open_table("w", three); }),
                  ErrorKind::kInvalidArgument, {"copies is 3"});
}

TEST_F(PsTest, BadInput_messages_about_copies_that_make_no_sense) {
  using namespace ps::internal;  // NOLINT
  std::vector<at::Tensor> tensors;
  EXPECT_EQ(error_kind(decode_copy("\xff", &tensors).status()), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(decode_copy("", &tensors).status()), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(decode_find("").status()), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(decode_map("").status()), ErrorKind::kProtocol);
  CopyRequest request{"w", 0, RangeMap{2, {"a", 1}, {"b", 2}, false}, 1};
  request.entries.push_back({.tensors = {torch::ones({1})}});
  EXPECT_EQ(error_kind(decode_copy(encode(request), &tensors).status()), ErrorKind::kProtocol)
      << "the tensor is missing";
  tensors = {torch::ones({1}), torch::ones({1})};
  EXPECT_EQ(error_kind(decode_copy(encode(request), &tensors).status()), ErrorKind::kProtocol)
      << "one too many";
  tensors.pop_back();
  const auto good = decode_copy(encode(request), &tensors);
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(good->map, request.map);
  EXPECT_EQ(good->entries.size(), 1U);
}

}  // namespace
}  // namespace weft::testing
