#ifndef WEFT_TESTS_SIM_PS_SCHEDULE_H_
#define WEFT_TESTS_SIM_PS_SCHEDULE_H_

// What a schedule of the simulation of parameter servers meets and gives, and how many of them a test runs.

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "weft/common/error.h"
#include "weft/tests/testing/environment.h"

namespace weft::testing {

enum class Trouble {
  kNone,
  kOrder,
  kLoss,
  kConnections,
  kDeath,
  kDisk,
  kServer,
  kCut,
  kServersCut,
  kDrain,
  kJoin,
  kMovesAndDeath,
  kMovesAndLoss
};
// With one copy of each part. Half of the schedules without a trouble have a trouble of the disk instead.
constexpr int kTroubles = 5;
inline constexpr std::array kNames = {"none",
                                      "order",
                                      "loss",
                                      "connections",
                                      "death",
                                      "disk",
                                      "server dies",
                                      "cut",
                                      "cut between servers",
                                      "drain",
                                      "join, moves, drain",
                                      "moves and a death",
                                      "moves and loss"};
inline Trouble trouble_of(uint64_t seed, uint32_t copies) {
  if (copies == 1 || seed / 3 % 3 == 0) {
    // With each consistency, which is seed / kTroubles % 4.
    const auto one = static_cast<Trouble>(seed % kTroubles);
    return one == Trouble::kNone && seed / (4 * kTroubles) % 2 == 1 ? Trouble::kDisk : one;
  }
  if (seed / 9 % 4 == 1) {
    return static_cast<Trouble>(static_cast<uint64_t>(Trouble::kJoin) + seed % 3);
  }
  if (seed / 9 % 4 == 3) return Trouble::kDrain;
  return static_cast<Trouble>(static_cast<uint64_t>(Trouble::kServer) + seed % 3);
}

// With one copy of each part, which may move.
inline Trouble trouble_of_movable(uint64_t seed) {
  constexpr std::array kAll = {Trouble::kJoin,  Trouble::kDrain, Trouble::kMovesAndLoss,
                               Trouble::kOrder, Trouble::kLoss,  Trouble::kConnections};
  return kAll[seed % kAll.size()];
}

struct Outcome {
  Status status;
  uint64_t hash = 0;
  int64_t hits = 0;
  int64_t acknowledged = 0;
  int64_t failed = 0;
  int64_t pulls = 0;
  int64_t repeats = 0;
  int64_t dropped = 0;
  int64_t moves = 0;        // owners that were found anew
  int64_t parts_moved = 0;  // joins, moves and drains that were done
  int64_t together = 0;     // requests that came in a message with others
  int64_t cuts = 0;         // snapshots
  int64_t inside = 0;       // of clients that had pushed some, and not all
  int64_t given_up = 0;     // cuts
  int64_t restored = 0;
  int64_t stood_still = 0;  // operations that waited for a disk that did
  std::vector<std::string> events;
};

// Sums over schedules.
struct Cuts {
  void add(const Outcome& out) {
    taken += out.cuts;
    inside += out.inside;
    given_up += out.given_up;
    restored += out.restored;
  }
  void expect_some() const {
    std::printf("%d snapshots with %d clients in mid-training, %d cuts given up, %d restored\n",
                static_cast<int>(taken), static_cast<int>(inside), static_cast<int>(given_up),
                static_cast<int>(restored));
    EXPECT_GT(taken, 0);
    if (taken < 20) return;  // a sanitizer runs few schedules
    EXPECT_GT(inside, 0);
    EXPECT_GT(restored, 0);
  }
  int64_t taken = 0;
  int64_t inside = 0;
  int64_t given_up = 0;
  int64_t restored = 0;
};

// How many events of one schedule are printed.
inline uint64_t events_shown() { return environment_number<uint64_t>("WEFT_SIM_EVENTS", 3000); }

// How many schedules a test runs: as many as the environment says, or a least number and more while there
// is time.
class Share {
 public:
  explicit Share(uint64_t least)
      : given_(environment_number<uint64_t>("WEFT_PS_SIM_SCHEDULES", 0)),
        least_(least),
        end_(absl::Now() + absl::Seconds(4)) {}
  bool goes_on(uint64_t done) const {
    if (given_ != 0) return done < given_;
    return done < least_ || absl::Now() < end_;
  }

 private:
  const uint64_t given_;
  const uint64_t least_;
  const absl::Time end_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_SIM_PS_SCHEDULE_H_
