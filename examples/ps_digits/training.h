#ifndef WEFT_EXAMPLES_PS_DIGITS_TRAINING_H_
#define WEFT_EXAMPLES_PS_DIGITS_TRAINING_H_

// One training of the digits' classifier on a table: what each trainer does, and what comes of it.
// One thread.

#include <cstdint>
#include <string>
#include <vector>

#include "weft/examples/async_ps/digits.h"
#include "weft/weft.h"

namespace ps_digits {

struct Mode {
  std::string text{};  // as on the command line
  weft::ps::Consistency consistency{};
  bool hogwild = false;  // no table: parameters in memory of this host, which all trainers write
};
// "asp", "bsp", "ssp:S", "batch:K", "hogwild". Throws std::invalid_argument.
Mode parse_mode(const std::string& text, int trainers);

struct Plan {
  int trainers = 1;
  int trainer = 0;  // this one
  int64_t epochs = 30;
  uint64_t seed = 1;
  uint32_t replicas = 1;
  // In mid-training trainer 0 has this server's process killed, once; "": none.
  std::string victim{};
  // Trainer 0 writes snapshots to this folder, four in the course of a training and one at its end; "": none.
  std::string snapshots{};
  // Steps that this trainer had behind it in the snapshot that is resumed.
  int64_t first = 0;
};

struct Result {
  std::string mode{};
  double seconds = 0;
  double accuracy = 0;  // on the held-out images
  double mean_behind = 0;
  double most_behind = 0;
  double most_lag = 0;
  double dropped = 0;
  double pushes = 0;
  uint64_t moves = 0;  // owners that this trainer has found anew
};

// What servers offer: to end like one whose machine has lost its power.
weft::Library library();

// Puts the table of the newest snapshot in `folder` in place, at any number of servers. All trainers call it;
// gives each how many of its steps are in there: all, when it had ended. Throws when there is no such
// snapshot, or it is of more trainers.
int64_t resume(const weft::ps::Client& client, const Mode& mode, const Plan& plan,
               const async_ps::Split& split, const std::string& folder);

// Trains with all other trainers, and gives the same result to each.
Result train(const weft::Worker& worker, const weft::ps::Client& client, const Mode& mode,
             const Plan& plan, const async_ps::Split& split);

// Head and lines of the comparison.
std::string table_of(const std::vector<Result>& results);

}  // namespace ps_digits

#endif  // WEFT_EXAMPLES_PS_DIGITS_TRAINING_H_
