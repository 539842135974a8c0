// Parts that move to other servers while clients push, and servers that join.

#include <algorithm>
#include <set>

#include "torch/types.h"
#include "weft/ps/internal/move_wire.h"
#include "weft/tests/ps/moves_job.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

using ps::Table;
using Role = ps::internal::ReplicaProtocol::Role;
using namespace std::chrono_literals;  // NOLINT

TEST_F(PsTest, PS_10_APartMovesToAServerThatHasJoinedWhileClientsPush) {
  in_simulation(41, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(2, sim);
    const Table first = job.near[0].open_table("w", counters());
    const int64_t pushed = count_by_two(*sim, job, first, [&] {
      for (uint32_t part = 0; part < 3; ++part) {
        job.near[0].move_part("w", part, "ps3");
        EXPECT_EQ(job.owners("w", part), std::vector<std::string>{"ps3"});
      }
      sim->sleep(absl::Milliseconds(100));
      job.near[1].move_part("w", 1, "ps1");
      job.near[1].move_part("w", 1, "ps1");  // it is there
      EXPECT_EQ(job.owners("w", 1), std::vector<std::string>{"ps1"});
    });
    EXPECT_GE(first.stats().moves, 3U);
    const at::Tensor due = torch::full({6}, static_cast<double>(pushed));
    EXPECT_TRUE(torch::equal(first.pull().wait(), due)) << first.pull().wait();
    // One that knows nothing of it finds the parts.
    const Table late = job.near[1].open_table("w", {.observer = true});
    EXPECT_TRUE(torch::equal(late.pull().wait(), due));
    sim->sleep(absl::Seconds(30));  // a backup that was given up learns of it
    for (uint32_t part = 0; part < 3; ++part) {
      EXPECT_EQ(job.with_role("w", part, Role::kBackup).size(), 1U) << "part " << part;
    }
  });
}

TEST_F(PsTest, PS_10_AServerJoinsTakesItsShareAndIsDrainedAgain) {
  in_simulation(42, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(1, sim);
    auto definition = counters(24);
    definition.part_bytes = 8;  // 12 parts, 4 at each of three
    const Table t = job.near[0].open_table("w", definition);
    t.push(-torch::ones({24})).wait();
    EXPECT_EQ(job.servers[3]->join(job.listed), 3);
    EXPECT_EQ(job.servers[3]->join(job.listed), 3) << "it has its share";
    t.push(-torch::ones({24})).wait();
    EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({24}, 2.0)));
    sim->sleep(absl::Seconds(10));
    // It is a backup like any other: two of those of the list may go.
    (void)job.server(0).shutdown({.graceful = false});
    t.push(-torch::ones({24})).wait();
    sim->sleep(absl::Seconds(20));
    (void)job.server(1).shutdown({.graceful = false});
    t.push(-torch::ones({24})).wait();
    sim->sleep(absl::Seconds(20));
    job.servers[2]->drain(60s);
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

TEST_F(PsTest, PS_10_AClientFindsPartsOfWhichNoServerOfItsListKnows) {
  in_simulation(43, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(1, sim);
    const Table t = job.near[0].open_table("w", counters());
    t.push(-torch::ones({6})).wait();
    // ps3 joins, and has all; those of the list go, and the client has asked for nothing meanwhile.
    (void)job.servers[3]->join(job.listed);
    job.servers[0]->drain();
    sim->sleep(absl::Seconds(10));
    job.servers[1]->drain();
    sim->sleep(absl::Seconds(10));
    for (uint32_t part = 0; part < 3; ++part) job.near[0].move_part("w", part, "ps3");
    for (int s = 0; s < 3; ++s) (void)job.server(s).shutdown({.graceful = false});
    t.push(-torch::ones({6})).wait();
    EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({6}, 2.0)));
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

TEST_F(PsTest, PS_10_AMoveWhoseSourceOrTargetOrBackupDiesLosesNothing) {
  for (const int victim : {0, 3, 1}) {
    for (int after = 0; after < 16; after += fewer(1, 5)) {
      in_simulation(static_cast<uint64_t>(44 + after), [&](const std::shared_ptr<SimRuntime>& sim) {
        MovesJob job(2, sim);
        const Table t = job.near[0].open_table("w", counters());
        const auto [moved, pushed] = move_while_counting(*sim, job, t, 30s, [&] {
          sim->sleep(absl::Microseconds(200 * after));
          (void)job.server(victim).shutdown({.graceful = false});
          sim->sleep(absl::Seconds(15));
        });
        EXPECT_TRUE(moved.ok() || (victim == 3 && error_kind(moved) == ErrorKind::kPeerLost))
            << moved;
        EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({6}, static_cast<double>(pushed))))
            << "victim " << victim << " after " << after;
        job.cluster->shutdown_all({.graceful = false});
        job.cluster->forget();
      });
    }
  }
}

// MOVE-1: at no time has the part less than two copies that are in the map and ready.
TEST_F(PsTest, PS_8_APartHasTwoCopiesWhileItMovesAndWhileItsServerDrains) {
  in_simulation(47, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(1, sim);
    const Table t = job.near[0].open_table("w", counters());
    bool stop = false;
    int64_t pushed = 0;
    int64_t looks = 0;
    std::set<std::string> alone;
    side_by_side(*sim, {[&] { pushed = count_up(*sim, t, stop); },
                        [&] {
                          (void)job.servers[3]->join(job.listed);  // it may be any part's backup
                          job.near[0].move_part("w", 0, "ps3");
                          job.near[0].move_part("w", 0, "ps2");
                          job.servers[2]->drain();
                          job.servers[0]->drain();
                          stop = true;
                        },
                        [&] {
                          while (!stop) {
                            ++looks;
                            for (const auto& map : job.maps("w", 3)) {
                              if (!map.ready) alone.insert(ps::internal::to_string(map));
                            }
                            sim->sleep(absl::Microseconds(100));
                          }
                        }});
    EXPECT_GT(looks, 100);
    EXPECT_EQ(alone, std::set<std::string>());
    EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({6}, static_cast<double>(pushed))));
  });
}

// Also one that is to be the backup, and one that has become the owner a moment ago.
TEST_F(PsTest, PS_8_AServerThatDrainsWhileAPartMovesToItLeavesTwoCopies) {
  for (int after = 0; after < 24; ++after) {
    in_simulation(static_cast<uint64_t>(48 + after), [&](const std::shared_ptr<SimRuntime>& sim) {
      MovesJob job(2, sim);
      const Table t = job.near[0].open_table("w", counters());
      bool stop = false;
      int64_t pushed = 0;
      Status moved;
      std::set<std::string> alone;
      side_by_side(*sim, {[&] { pushed = count_up(*sim, t, stop); },
                          [&] { moved = job.near[1].try_move_part("w", 0, "ps3", 10s); },
                          [&] {
                            sim->sleep(absl::Microseconds(100 * after));
                            job.servers[3]->drain(5s);
                            stop = true;
                          },
                          [&] {
                            while (!stop) {
                              for (const auto& map : job.maps("w", 3)) {
                                if (!map.ready) alone.insert(ps::internal::to_string(map));
                              }
                              sim->sleep(absl::Microseconds(100));
                            }
                          }});
      EXPECT_TRUE(moved.ok() || error_kind(moved) == ErrorKind::kState) << moved;
      EXPECT_EQ(alone, std::set<std::string>()) << "after " << after;
      EXPECT_EQ(job.with_role("w", 0, Role::kOwner).size(), 1U);
      EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({6}, static_cast<double>(pushed))))
          << "after " << after;
    });
  }
}

TEST_F(PsTest, PS_10_TwoMovesOfAPartAtOnceEndOneAfterTheOther) {
  in_simulation(46, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(2, sim);
    const Table t = job.near[0].open_table("w", counters());
    t.push(-torch::ones({6})).wait();
    Status moved[2];
    side_by_side(*sim, {[&] { moved[0] = job.near[0].try_move_part("w", 0, "ps3"); },
                        [&] { moved[1] = job.near[1].try_move_part("w", 0, "ps2"); }});
    EXPECT_TRUE(moved[0].ok()) << moved[0];
    EXPECT_TRUE(moved[1].ok()) << moved[1];
    EXPECT_EQ(job.owners("w", 0).size(), 1U);
    EXPECT_TRUE(torch::equal(t.pull().wait(), torch::ones({6})));
  });
}

TEST_F(PsTest, BadInput_moves_that_cannot_be) {
  in_simulation(45, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(1, sim);
    const ps::Client& client = job.near[0];
    const Table t = client.open_table("w", counters());
    t.push(-torch::ones({6})).wait();
    expect_ps_error(client.try_move_part("w", 0, "ps9"), ErrorKind::kNotFound, {"ps9"});
    expect_ps_error(client.try_move_part("v", 0, "ps3"), ErrorKind::kNotFound,
                    {"table 'v', part 0", "'ps3'", "no server has it"});
    expect_ps_error(client.try_move_part("w", 3, "ps3"), ErrorKind::kNotFound, {"part 3"});
    expect_ps_error(client.try_move_part("w", ps::kMostParts, "ps3"), ErrorKind::kInvalidArgument,
                    {"part 4096"});
    expect_ps_error(client.try_move_part("w", 0, "c0", 5s), ErrorKind::kState,
                    {"table 'w', part 0", "'c0'", "serves no tables"});
    auto one_copy = counters();
    one_copy.copies = 1;
    const Table alone = client.open_table("alone", one_copy);
    expect_ps_error(client.try_move_part("alone", 1, "ps3"), ErrorKind::kState,
                    {"table 'alone', part 1", "'ps3'", "has one copy and is not movable"});
    EXPECT_EQ(job.owners("alone", 1), std::vector<std::string>{"ps1"});
    job.servers[3]->drain();
    expect_ps_error(client.try_move_part("w", 0, "ps3"), ErrorKind::kState,
                    {"table 'w', part 0", "'ps3' drains"});
    expect_ps_error(job.servers[3]->try_join(job.listed).status(), ErrorKind::kState, {"drains"});
    EXPECT_TRUE(torch::equal(t.push_pull(-torch::ones({6})).wait(), torch::full({6}, 2.0)));
    EXPECT_EQ(job.owners("w", 0).size(), 1U);
  });
}

TEST_F(PsTest, BadInput_messages_about_moves_that_make_no_sense) {
  using namespace ps::internal;  // NOLINT
  EXPECT_EQ(error_kind(decode_move("\xff").status()), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(decode_move("").status()), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(decode_move(encode(MoveRequest{"w", 0, {"a", 1}, 0})).status()),
            ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(decode_move(encode(MoveRequest{"w", 0, {}, 1})).status()),
            ErrorKind::kProtocol);
  const auto move = decode_move(encode(MoveRequest{"w", 7, {"a", 1}, 5}));
  ASSERT_TRUE(move.ok()) << move.status();
  EXPECT_EQ(move->index, 7U);
  EXPECT_EQ(error_kind(decode_listed("\xff").status()), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(decode_listed(encode({ListedPart{"", 0, 1, 1}})).status()),
            ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(decode_listed(encode({ListedPart{"w", 0, ~uint64_t{0}, 1}})).status()),
            ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(decode_servers("\xff").status()), ErrorKind::kProtocol);
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{"b", "a"}, {"a", "a"}, {"", "a"}}) {
    EXPECT_EQ(error_kind(decode_servers(encode_servers(names)).status()), ErrorKind::kProtocol);
  }
  EXPECT_EQ(decode_servers(encode_servers({"a", "b"})).value(),
            (std::vector<std::string>{"a", "b"}));
}

TEST(PsMoves, PS_1_AServerThatJoinsTakesAShareAndMovesNothingBetweenOthers) {
  using ps::internal::OwnedPart;
  using ps::internal::share_of;
  std::vector<OwnedPart> parts;
  for (uint32_t i = 0; i < 12; ++i) parts.push_back({i < 6 ? "a" : "b", {"w", i, 100, true}});
  const auto share = share_of("c", parts);
  EXPECT_EQ(share.size(), 4U);
  EXPECT_EQ(
      std::count_if(share.begin(), share.end(), [](const auto& s) { return s.server == "a"; }), 2);
  for (const OwnedPart& one : share) EXPECT_NE(one.server, "c");
  // The order in which the parts are told of says nothing.
  std::reverse(parts.begin(), parts.end());
  const auto again = share_of("c", parts);
  ASSERT_EQ(again.size(), share.size());
  for (size_t i = 0; i < share.size(); ++i) EXPECT_EQ(again[i].part.index, share[i].part.index);
  // One part alone is not moved, as nothing were won; a part that is too large stays, others go.
  EXPECT_TRUE(share_of("c", {{"a", {"w", 0, 100, true}}}).empty());
  const auto small = share_of("c", {{"a", {"w", 0, 100, true}}, {"a", {"w", 1, 10, true}}});
  ASSERT_EQ(small.size(), 1U);
  EXPECT_EQ(small[0].part.index, 0U);
  EXPECT_TRUE(share_of("a", {}).empty());
}

}  // namespace
}  // namespace weft::testing
