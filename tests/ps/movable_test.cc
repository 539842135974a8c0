// Tables of one copy whose parts may move.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "torch/types.h"
#include "weft/tests/ps/moves_job.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

using ps::Table;
using Role = ps::internal::ReplicaProtocol::Role;
using namespace std::chrono_literals;  // NOLINT

ps::TableDefinition movable(int64_t elements = 6) {
  auto out = ps::dense({elements}, ps::rule<optim::SGD>({.lr = 1}));
  out.movable = true;
  return out;
}
at::Tensor so_many(double pushes, int64_t elements = 6) { return torch::full({elements}, pushes); }

TEST_F(PsTest, PS_10_APartOfOneCopyMovesWhileClientsPush) {
  in_simulation(61, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(2, sim);
    const Table first = job.near[0].open_table("w", movable());
    const int64_t pushed = count_by_two(*sim, job, first, [&] {
      for (const char* to : {"ps3", "ps1", "ps3", "ps0"}) {
        for (uint32_t part = 0; part < 3; ++part) {
          job.near[0].move_part("w", part, to);
          EXPECT_EQ(job.owners("w", part), std::vector<std::string>{to});
        }
      }
    });
    EXPECT_GE(first.stats().moves, 3U);
    const auto all = static_cast<double>(pushed);
    EXPECT_TRUE(torch::equal(first.pull().wait(), so_many(all))) << first.pull().wait() << all;
    const Table late = job.near[1].open_table("w", {.observer = true});
    EXPECT_TRUE(torch::equal(late.pull().wait(), so_many(all)));
    sim->sleep(absl::Seconds(30));
    // MOVE-3: nothing is left of the second copies, and no server has become a backup.
    for (uint32_t part = 0; part < 3; ++part) {
      EXPECT_EQ(job.with_role("w", part, Role::kBackup).size(), 0U) << "part " << part;
      EXPECT_EQ(job.owners("w", part).size(), 1U);
      EXPECT_TRUE(job.maps("w", 3)[part].backup.empty());
    }
  });
}

TEST_F(PsTest, PS_10_AServerJoinsAndAllOthersDrainWithTablesOfOneCopy) {
  in_simulation(62, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(1, sim);
    auto definition = movable(24);
    definition.part_bytes = 8;  // 12 parts, 4 at each of three
    const Table t = job.near[0].open_table("w", definition);
    auto rows = ps::sparse(2, ps::rule<optim::Adagrad>({.lr = 0.5}));
    rows.movable = true;
    const Table words = job.near[0].open_table("words", rows);
    const at::Tensor keys = torch::arange(40);
    const auto push = [&] {
      t.push(-torch::ones({24})).wait();
      return words.push_pull_rows(keys, torch::ones({40, 2}), keys).wait().clone();
    };
    (void)push();
    EXPECT_GE(job.servers[3]->join(job.listed), 1);
    const at::Tensor before = push();
    for (int s = 0; s < 3; ++s) {
      job.servers[static_cast<size_t>(s)]->drain();
      (void)job.server(s).shutdown({.graceful = false});
      EXPECT_TRUE(torch::equal(words.pull_rows(keys).wait(), before)) << s;
    }
    EXPECT_TRUE(torch::equal(t.pull().wait(), so_many(2, 24)));
    for (uint32_t part = 0; part < 12; ++part) {
      EXPECT_EQ(job.owners("w", part), std::vector<std::string>{"ps3"});
    }
    // There is no other server any more.
    expect_ps_error(job.servers[3]->try_drain(2s), ErrorKind::kDeadline,
                    {"'ps3'", "is here still"});
    (void)push();
    EXPECT_TRUE(torch::equal(t.pull().wait(), so_many(3, 24)));
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

// MOVE-2: a target that dies costs nothing; with its source a part is lost, or it has moved before.
TEST_F(PsTest, PS_10_AMoveOfOneCopyWhoseTargetDiesLosesNothing) {
  for (const int victim : {3, 0}) {
    for (int after = 0; after < 16; after += fewer(1, 5)) {
      in_simulation(static_cast<uint64_t>(63 + after), [&](const std::shared_ptr<SimRuntime>& sim) {
        MovesJob job(2, sim);
        const Table t = job.near[0].open_table("w", movable());
        int64_t pushed = 0;
        Status moved;
        Status ended;
        bool stop = false;
        side_by_side(*sim,
                     {[&] {
                        while (!stop && ended.ok()) {
                          ended = t.push(-torch::ones({6}), {.deadline = 20s}).try_wait().status();
                          pushed += ended.ok() ? 1 : 0;
                          sim->sleep(absl::Milliseconds(pushed < 300 ? 3 : 100));
                        }
                      },
                      [&] { moved = job.near[1].try_move_part("w", 0, "ps3", 30s); },
                      [&] {
                        sim->sleep(absl::Microseconds(200 * after));
                        (void)job.server(victim).shutdown({.graceful = false});
                        sim->sleep(absl::Seconds(15));
                        stop = true;
                      }});
        const std::string where = absl::StrCat("victim ", victim, " after ", after);
        const StatusOr<at::Tensor> now = t.pull(5s).try_wait();
        if (victim == 3 && !now.ok()) {
          // It had moved before, and went with it.
          EXPECT_TRUE(moved.ok()) << where << now.status();
        } else if (now.ok()) {
          EXPECT_TRUE(ended.ok()) << where << ended;
          EXPECT_TRUE(torch::equal(*now, so_many(static_cast<double>(pushed)))) << where << *now;
        }
        if (!now.ok()) {
          expect_ps_error(now.status(), ErrorKind::kPeerLost, {"table 'w'"});
        }
        job.cluster->shutdown_all({.graceful = false});
        job.cluster->forget();
      });
    }
  }
}

TEST_F(PsTest, PS_9_ARestoreTakesPartsOfOneCopyBackFromWhereTheyWent) {
  in_simulation(64, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(1, sim);
    const Table t = job.near[0].open_table("w", movable());
    t.push(-torch::ones({6})).wait();
    job.near[0].move_part("w", 1, "ps0");
    job.near[0].snapshot("/snapshots");
    t.push(-torch::ones({6})).wait();
    job.near[0].move_part("w", 2, "ps0");
    job.near[0].restore("/snapshots");
    expect_ps_error(t.push(-torch::ones({6})).try_wait().status(), ErrorKind::kState, {"restored"});
    const Table again = job.near[0].open_table("w", movable());
    EXPECT_TRUE(torch::equal(again.push_pull(-torch::ones({6})).wait(), so_many(2)));
    for (uint32_t part = 0; part < 3; ++part) {
      EXPECT_EQ(job.owners("w", part), std::vector<std::string>{job.listed[part]});
    }
  });
}

TEST_F(PsTest, BadInput_a_table_that_was_made_movable_and_is_opened_otherwise) {
  PsJob job(2, 1);
  const Table t = job.clients[0].open_table("w", movable());
  auto other = movable();
  other.movable = false;
  expect_ps_error(ps_error_of([&] { (void)job.clients[0].open_table("w", other); }),
                  ErrorKind::kInvalidArgument, {"movable is true there and false here"});
}

}  // namespace
}  // namespace weft::testing
