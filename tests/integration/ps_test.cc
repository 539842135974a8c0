// Tables of two copies between real processes, of which servers are killed, stopped beyond their lease,
// or cut off, one after the other at random moments, while clients push: every counter is exactly what
// its client was acknowledged.

#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/job.h"
#include "weft/tests/testing/environment.h"

namespace weft::integration {
namespace {

constexpr int kClients = 2;
constexpr int kServers = 3;
constexpr int kTables = 2;

int rounds() { return weft::testing::environment_number("WEFT_PS_ROUNDS", 5); }
int requests() { return weft::testing::environment_number("WEFT_PS_REQUESTS", 10'000); }

enum class Relays { kNone, kOne };  // before each process

class PsProcesses {
 public:
  explicit PsProcesses(Relays relays = Relays::kOne) {
    if (relays == Relays::kOne) job_.environment = short_lease();
    // The store is in worker0, a client: one that is stopped in the lock of a file holds up the others.
    job_.host_store();
    if (relays == Relays::kNone) {
      job_.start_group(kClients + kServers);
    } else {
      relays_ = job_.start_group_behind_relays(kClients + kServers);
    }
    for (int i = 0; i < kClients + kServers; ++i) players_.push_back(&job_[static_cast<size_t>(i)]);
    for (int s = 0; s < kServers; ++s) expect_ok(server(s), "ps serve");
    EXPECT_EQ(::mkdir(folder().c_str(), 0700), 0);
  }

  Player& client(int c) { return *players_[static_cast<size_t>(c)]; }
  Player& server(int s) { return *players_[static_cast<size_t>(kClients + s)]; }
  RelayProcess& relay(int s) { return *relays_[static_cast<size_t>(kClients + s)]; }

  static void expect_ok(Player& player, const std::string& line) {
    const Answer answer = player.ask(line);
    EXPECT_TRUE(answer.ok) << player.name() << ": " << line << ": " << answer;
  }
  static int64_t number(Player& player, const std::string& line) {
    const Answer answer = player.ask(line);
    int64_t value = -1;
    EXPECT_TRUE(answer.ok && absl::SimpleAtoi(answer.text, &value))
        << player.name() << ": " << line << ": " << answer;
    return value;
  }

  // The tables' list has the first `listed` servers.
  void open_all(int listed = kServers) {
    listed_ = listed;
    for (int c = 0; c < kClients; ++c) {
      client(c).say(absl::StrCat("ps open ", kClients, " ", c, " ", names()));
    }
    for (int c = 0; c < kClients; ++c) {
      const Answer answer = client(c).answer();
      ASSERT_TRUE(answer.ok) << answer;
    }
  }
  // Each client's pushes are acknowledged so often from now on.
  void expect_progress(int64_t by) {
    for (int c = 0; c < kClients; ++c) {
      const int64_t from = number(client(c), "ps count");
      EXPECT_TRUE(eventually([&] { return number(client(c), "ps count") >= from + by; }))
          << client(c).name() << " stands at " << from << ": " << client(c).ask("ps halt");
    }
  }
  // Both clients at once, so many rounds each.
  void do_many(int64_t rounds) {
    for (int c = 0; c < kClients; ++c) client(c).say(absl::StrCat("ps many ", rounds));
    for (int c = 0; c < kClients; ++c) {
      const Answer answer = client(c).answer(std::chrono::minutes(60));
      ASSERT_TRUE(answer.ok) << client(c).name() << ": " << answer;
    }
  }
  // The state of each process, by rank, taken while it has no call under way. A check that a peer lives is a call.
  struct Rest {
    int64_t resident_kib = 0;
    Info info{};
  };
  std::vector<Rest> rests() const {
    std::vector<Rest> out;
    for (Player* player : players_) {
      EXPECT_TRUE(player->eventually([](const Info& i) {
        return i.at("calls_pending") == 0 && i.at("handlers_running") == 0;
      })) << player->name();
      out.push_back({player->process().resident_kib(), player->info()});
    }
    return out;
  }
  // Every part has its second copy again. `dead`: a server that is not asked.
  void expect_pairs(int dead = -1) {
    int64_t paired = 0;
    EXPECT_TRUE(eventually([&] {
      paired = 0;
      for (int s = 0; s < kServers; ++s) {
        if (s != dead) paired += number(server(s), "ps paired");
      }
      return paired == kTables * listed_;
    })) << paired
        << " parts have two copies";
  }

  void kill(int s) {
    server(s).process().send_signal(SIGKILL);
    ASSERT_EQ(server(s).process().wait_exit(), 128 + SIGKILL);
    expect_progress(5);
    replace(s);
  }
  // The same while one snapshot after the other is written: what was being cut then is whole or is not
  // there.
  void kill_in_a_cut(int s, int64_t cuts) {
    expect_ok(client(0), "ps cut " + folder());
    EXPECT_TRUE(eventually([&] { return number(client(0), "ps cuts") >= cuts; }));
    server(s).process().send_signal(SIGKILL);
    ASSERT_EQ(server(s).process().wait_exit(), 128 + SIGKILL);
    const Answer cut = client(0).ask("ps uncut");
    EXPECT_TRUE(cut.ok) << cut;
    std::cout << "snapshots, and those that were given up: " << cut.text << std::endl;
    const int64_t before = number(client(1), "ps look " + folder());
    EXPECT_GE(before, cuts);
    expect_progress(5);
    // Nothing of the cut is in the way of the next, with two servers of three.
    expect_ok(client(0), "ps cut " + folder());
    EXPECT_TRUE(eventually([&] { return number(client(0), "ps cuts") >= 1; }));
    expect_ok(client(0), "ps uncut");
    EXPECT_GT(number(client(1), "ps look " + folder()), before);
    replace(s);
  }
  // Beyond its lease; when it goes on it is out, and its name is another's.
  void stop(int s) {
    ASSERT_TRUE(server(s).process().stop());
    // By its name of now: the one before it may have died, too.
    EXPECT_TRUE(
        eventually([&] { return client(0).ask("who " + server(s).name()).kind == "peer_lost"; }));
    expect_progress(5);
    server(s).process().send_signal(SIGCONT);
    ASSERT_TRUE(server(s).eventually(
        [&](const Info&) { return server(s).ask("call worker0 bump 1 60000 0").kind == "state"; }));
    expect_progress(5);
    EXPECT_EQ(number(server(s), "ps paired"), 0) << "it was evicted, and says that it owns a part";
    server(s).leave();
    replace(s);
  }
  // All connections break, and for a while no one can dial the server: it can dial others, so its backup
  // may hear of it and leave it the parts, and clients that cannot reach it wait.
  void cut(int s) {
    relay(s).tell("refuse");
    for (const auto& relay : relays_) relay->tell("reset_all");
    for (int i = 0; i < kServers; ++i) number(server(i), "ps paired");
    relay(s).tell("accept");
    expect_progress(5);
  }

  // It takes some parts over from those of the list.
  void join(int s) {
    EXPECT_GT(number(server(s), "ps join " + names()), 0);
    EXPECT_GT(number(server(s), "ps paired"), 0);
    expect_progress(5);
  }
  // And then it ends at once: nothing is there any more that could be lost.
  void drain(int s) {
    expect_ok(server(s), "ps drain");
    EXPECT_EQ(number(server(s), "ps paired"), 0);
    server(s).process().send_signal(SIGKILL);
    ASSERT_EQ(server(s).process().wait_exit(), 128 + SIGKILL);
    expect_progress(5);
  }

  // Another process with the name and rank of one that has ended. It waits for the old one's lease.
  void replace(int s) {
    const int rank = kClients + s;
    Player& next = job_.start({.name = server(s).name(),
                               .rank = rank,
                               .world_size = kClients + kServers,
                               .arguments = {"--ask-address"}});
    relays_[static_cast<size_t>(rank)] = job_.relay_for(&next);
    const Answer joined = next.joined();
    ASSERT_TRUE(joined.ok) << joined;
    players_[static_cast<size_t>(rank)] = &next;
    // stop() asks client 0 for the death of this process, not of the one before it.
    EXPECT_TRUE(eventually([&] {
      return client(0).ask("who " + next.name()).text == next.identity();
    })) << next.name();
    expect_ok(next, "ps serve");
  }

  void finish() {
    std::vector<int64_t> counts;
    for (int c = 0; c < kClients; ++c) counts.push_back(number(client(c), "ps halt"));
    for (int c = 0; c < kClients; ++c) {
      expect_ok(client(c), absl::StrCat("ps check ", absl::StrJoin(counts, " ")));
    }
    std::cout << "acknowledged: " << absl::StrJoin(counts, ", ") << std::endl;
    for (Player* player : players_) player->say("shutdown");
    for (Player* player : players_) (void)player->answer();  // what became of the dead is in it
    for (Player* player : players_) player->say("exit");
    for (Player* player : players_) EXPECT_EQ(player->leave(), 0) << player->name();
  }

 private:
  std::string folder() const { return job_.path("snapshots"); }
  std::string names() {
    std::vector<std::string> out;
    for (int s = 0; s < listed_; ++s) out.push_back(server(s).name());
    return absl::StrJoin(out, " ");
  }

  int listed_ = kServers;
  Job job_;
  std::vector<std::unique_ptr<RelayProcess>> relays_;  // by rank
  std::vector<Player*> players_;                       // by rank: the one that has it now
};

TEST(IntegrationPs, PS_8_ServersThatAreKilledStoppedAndCutLoseNoAcknowledgedPush) {
  const auto seed = static_cast<uint32_t>(std::random_device()());
  std::cout << "seed " << seed << std::endl;
  std::mt19937 random(seed);
  PsProcesses job;
  ASSERT_NO_FATAL_FAILURE(job.open_all());
  for (int c = 0; c < kClients; ++c) PsProcesses::expect_ok(job.client(c), "ps run");
  for (int round = 0; round < rounds() && !::testing::Test::HasFailure(); ++round) {
    job.expect_progress(1 + random() % 40);
    const int victim = static_cast<int>(random() % kServers);
    const char* const kinds[] = {"kill", "stop", "cut"};
    std::cout << "round " << round << ": " << kinds[round % 3] << " " << victim << std::endl;
    switch (round % 3) {
      case 0: ASSERT_NO_FATAL_FAILURE(job.kill(victim)); break;
      case 1: ASSERT_NO_FATAL_FAILURE(job.stop(victim)); break;
      default: job.cut(victim);
    }
    job.expect_pairs();
  }
  job.finish();
}

TEST(IntegrationPs, PS_10_ServersThatJoinAndDrainLoseNoAcknowledgedPush) {
  PsProcesses job;
  ASSERT_NO_FATAL_FAILURE(job.open_all(kServers - 1));
  for (int c = 0; c < kClients; ++c) PsProcesses::expect_ok(job.client(c), "ps run");
  job.expect_progress(5);
  job.expect_pairs();
  job.join(2);
  ASSERT_NO_FATAL_FAILURE(job.drain(0));
  job.expect_pairs(0);  // at two servers, one of which is in no list
  ASSERT_NO_FATAL_FAILURE(job.replace(0));
  job.join(0);
  ASSERT_NO_FATAL_FAILURE(job.drain(1));
  job.expect_pairs(1);
  ASSERT_NO_FATAL_FAILURE(job.replace(1));
  job.finish();
}

// Memory grows neither at a client nor at a server, which sends each request on to the second copy.
TEST(IntegrationPs, PS_12_ManyRequestsTakeNoMemory) {
  constexpr int64_t kMostKib = 8 << 10;
  // A part remembers the pushes that are under way: a few hundred of each client, in both tables' copies.
  constexpr int64_t kMostRemembered = 4096;
  constexpr const char* kObjects[] = {"arena_blocks",
                                      "arena_leases",
                                      "calls_waiting_for_connection",
                                      "connections",
                                      "peers",
                                      "receive_bytes",
                                      "ps_tables",
                                      "ps_clients",
                                      "ps_rows",
                                      "ps_bytes",
                                      "ps_waiting_bytes",
                                      "ps_waiting_pulls",
                                      "ps_held_pushes"};
  PsProcesses job(Relays::kNone);
  ASSERT_NO_FATAL_FAILURE(job.open_all());
  // What is there once and for all: connections, pools of threads, arenas, windows, and what malloc() keeps for
  // each of the threads that come to have answers, of which the last few come late.
  const int rounds = requests() / (kClients * kTables);
  ASSERT_NO_FATAL_FAILURE(job.do_many(std::max(2'000, rounds / 5)));
  const auto before = job.rests();
  ASSERT_NO_FATAL_FAILURE(job.do_many(rounds));
  const auto after = job.rests();
  int64_t served = 0;
  for (size_t rank = 0; rank < after.size(); ++rank) {
    const auto& [resident, info] = after[rank];
    std::cout << "rank " << rank << ": " << before[rank].resident_kib << " KiB, " << resident
              << std::endl;
    EXPECT_LT(resident - before[rank].resident_kib, kMostKib) << "rank " << rank;
    for (const char* name : kObjects) {
      EXPECT_EQ(info.at(name), before[rank].info.at(name)) << name << " of rank " << rank;
    }
    // A bulk lane for each peer, made when a message did not fit into the arena.
    EXPECT_LE(info.at("descriptors_open"),
              before[rank].info.at("descriptors_open") + info.at("peers"))
        << "rank " << rank;
    EXPECT_LE(info.at("answers_kept"), info.at("peers")) << "rank " << rank;
    EXPECT_LE(info.at("ps_remembered"), kMostRemembered) << "rank " << rank;
    served += info.at("ps_requests") - before[rank].info.at("ps_requests");
  }
  EXPECT_GE(served, requests());
  job.finish();
}

// A table at its cap, whose rows make room for others: what the server takes for it, at any moment.
TEST(IntegrationPs, PS_4_AServerTakesNoMoreThanTheCapOfItsTable) {
  constexpr int64_t kCapMib = 256;
  PsProcesses job(Relays::kNone);
  ASSERT_NO_FATAL_FAILURE(job.open_all());
  const auto overfill = [&](int64_t mib) {
    return PsProcesses::number(job.client(0),
                               absl::StrCat("ps overfill ", job.server(0).name(), " ", mib, " 10"));
  };
  // What such pushes need whatever the table: pools of threads, arenas, and what malloc() keeps for each thread.
  overfill(16);
  Process& server = job.server(0).process();
  const int64_t before = server.resident_kib();
  server.forget_peak();
  const int64_t rows = overfill(kCapMib);
  const int64_t grown = server.peak_kib() - before;
  std::cout << rows << " rows of 256 bytes: " << grown / 1024 << " MiB" << std::endl;
  EXPECT_GT(grown, (kCapMib << 10) / 2) << "it has hardly been filled";
  EXPECT_LE(grown, (kCapMib << 10) * 11 / 10);
  job.finish();
}

// Servers and clients start one by one in any order, and none waits for another before it does its part.
TEST(IntegrationPs, PS_10_ProcessesThatStartInAnyOrderMeet) {
  constexpr int kServersOfAll = 3;
  const int starts = weft::testing::environment_number("WEFT_PS_STARTS", 1);
  const int size = weft::testing::environment_number("WEFT_PS_STARTS_PROCESSES", 10);
  const auto seed = static_cast<uint32_t>(std::random_device()());
  std::cout << "seed " << seed << std::endl;
  std::mt19937 random(seed);
  for (int start = 0; start < starts && !::testing::Test::HasFailure(); ++start) {
    std::vector<int> order;
    for (int rank = 0; rank < size; ++rank) order.push_back(rank);
    std::shuffle(order.begin(), order.end(), random);
    Job job;
    std::vector<Player*> players(static_cast<size_t>(size));
    // The last ranks serve.
    const int clients = size - kServersOfAll;
    std::string servers;
    for (int rank = clients; rank < size; ++rank) absl::StrAppend(&servers, " worker", rank);
    for (const int rank : order) {
      Player& player =
          job.start({.name = absl::StrCat("worker", rank), .rank = rank, .world_size = size});
      players[static_cast<size_t>(rank)] = &player;
      player.say(rank < clients ? absl::StrCat("ps open ", clients, " ", rank, servers)
                                : std::string("ps serve"));
    }
    for (Player* player : players) {
      const Answer joined = player->joined();
      ASSERT_TRUE(joined.ok) << player->name() << ": " << joined;
      const Answer begun = player->answer();
      ASSERT_TRUE(begun.ok) << player->name() << ": " << begun;
    }
    for (int c = 0; c < clients; ++c) players[static_cast<size_t>(c)]->say("ps many 3");
    for (int c = 0; c < clients; ++c) {
      const Answer done = players[static_cast<size_t>(c)]->answer();
      ASSERT_TRUE(done.ok) << players[static_cast<size_t>(c)]->name() << ": " << done;
    }
    const std::vector<int> counts(static_cast<size_t>(clients), 3);
    PsProcesses::expect_ok(*players[0], absl::StrCat("ps check ", absl::StrJoin(counts, " ")));
    job.shut_down();
  }
}

// What its rows have, and what others do, does not depend on a process that ends in the middle of an update.
TEST(IntegrationPs, HogwildGoesOnWhenAProcessIsKilledWhileItWrites) {
  constexpr int kProcesses = 3;
  Job job;
  job.environment = short_lease();
  job.start_group(kProcesses);
  const auto row = [&](int asked, int number) {
    const Answer answer = job[static_cast<size_t>(asked)].ask(absl::StrCat("hogwild row ", number));
    const std::vector<std::string> words = absl::StrSplit(answer.text, ' ');
    std::pair<int64_t, int64_t> out{-1, -1};
    EXPECT_TRUE(answer.ok && words.size() == 2 && absl::SimpleAtoi(words[0], &out.first) &&
                absl::SimpleAtoi(words[1], &out.second))
        << answer;
    return out;
  };
  const auto count = [&](int p) {
    return PsProcesses::number(job[static_cast<size_t>(p)], "hogwild count");
  };
  for (int p = 0; p < kProcesses; ++p) {
    PsProcesses::expect_ok(job[static_cast<size_t>(p)],
                           absl::StrCat("hogwild share 3", p == 0 ? "" : " worker0"));
  }
  std::vector<int64_t> told(kProcesses);
  for (int p = 0; p < kProcesses; ++p) {
    PsProcesses::expect_ok(job[static_cast<size_t>(p)], absl::StrCat("hogwild run ", p));
  }
  // First one of those that came, then the one that made the memory.
  for (const int victim : {2, 0}) {
    for (int p = 0; p < kProcesses; ++p) {
      if (victim == 0 && p == 2) continue;
      const int64_t from = count(p);
      EXPECT_TRUE(
          eventually([&] { return (told[static_cast<size_t>(p)] = count(p)) > from + 100; }));
    }
    Player& dead = job[static_cast<size_t>(victim)];
    dead.process().send_signal(SIGKILL);
    ASSERT_EQ(dead.process().wait_exit(), 128 + SIGKILL);
    const auto [least, greatest] = row(1, victim);
    EXPECT_GE(least, told[static_cast<size_t>(victim)]);
    EXPECT_LE(greatest, least + 1);  // the update in whose middle it was
    const int64_t from = count(1);
    EXPECT_TRUE(eventually([&] { return count(1) > from + 100; }));
    EXPECT_EQ(row(1, victim), std::make_pair(least, greatest));
  }
  const int64_t all = PsProcesses::number(job[1], "hogwild halt");
  EXPECT_EQ(row(1, 1), std::make_pair(all, all));
}

TEST(IntegrationPs, PS_9_AServerThatIsKilledInACutLeavesAWholeSnapshot) {
  const auto seed = static_cast<uint32_t>(std::random_device()());
  std::cout << "seed " << seed << std::endl;
  std::mt19937 random(seed);
  PsProcesses job;
  ASSERT_NO_FATAL_FAILURE(job.open_all());
  for (int c = 0; c < kClients; ++c) PsProcesses::expect_ok(job.client(c), "ps run");
  for (int round = 0; round < rounds() / 2 && !::testing::Test::HasFailure(); ++round) {
    ASSERT_NO_FATAL_FAILURE(
        job.kill_in_a_cut(static_cast<int>(random() % kServers), 1 + random() % 5));
    job.expect_pairs();
  }
  job.finish();
}

}  // namespace
}  // namespace weft::integration
