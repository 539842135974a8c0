#ifndef WEFT_STORE_SPAWN_H_
#define WEFT_STORE_SPAWN_H_

// weft::spawn: a program starts its own ranks, as torch.multiprocessing.spawn does in Python.
//
//   int main(int argc, char** argv) {
//     const Options options = parse(argc, argv);
//     weft::spawn(4, [&](int rank) {
//       weft::ProcessGroup group = weft::init_process_group();  // or weft::join(): rank `rank` of 4
//       train(group, options);
//     });
//     std::puts("all four are done");  // in the first process alone
//   }
//
// Each rank is a process of its own, which runs the same program with the same arguments from the
// beginning of main(). When it comes to the call of spawn() that started it, it runs the function and
// ends: with 0 when the function returns, with 1 when it throws. What stands before the call thus runs
// in every process, and nothing after it runs in the ranks. The ranks find the variables of a launcher
// (docs/launch.md): RANK, WORLD_SIZE, WEFT_STORE and so on.
//
// A program may call spawn() several times. A call is known by its place in the sources, the number of
// ranks and SpawnOptions::name; a rank passes the calls that did not start it as if they had done
// their work. A loop whose rounds differ in anything else gives each round a name of its own.
//
// Threads: from any thread, one call at a time. Signals, handlers and other children of the program are
// left alone.

#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft {

struct SpawnOptions {  // how ranks are started and ended
  // Tells calls of spawn() at one place apart; at most 1,000 bytes, no control characters.
  std::string name = {};
  // After a failure the other ranks get SIGTERM, and SIGKILL after so long.
  absl::Duration grace = absl::Seconds(10);
  // Lines that ranks print stand behind the name of their process: "[worker1] loss 0.31".
  bool prefix_output = true;
  // Where the ranks meet, as a URL (docs/stores.md); "": a file in a directory of this call alone,
  // which is removed at its end.
  std::string store = {};
};

// A rank has failed. What its function threw keeps its code, kind, payload and trace; a rank that was
// killed or ended in another way is code unavailable, kind peer_lost. The message names the rank, its
// process and how it ended, and has its last lines where it did not say why itself.
class WEFT_API SpawnError : public Error {
 public:
  SpawnError(Status status, int rank, int exit_code, int signal)
      : Error(std::move(status)), rank_(rank), exit_code_(exit_code), signal_(signal) {}

  int rank() const { return rank_; }  // of the first that failed
  // 128 + signal after a signal.
  int exit_code() const { return exit_code_; }
  int signal() const { return signal_; }  // that killed it; 0: none

 private:
  int rank_ = 0;
  int exit_code_ = 0;
  int signal_ = 0;
};

namespace internal {

struct SpawnCall {  // one call in the sources
  const char* file = "";
  int line = 0;
};

// spawn() for a function that returns the exit code of its rank.
WEFT_API void spawn_ranks(int nprocs, const std::function<int(int rank)>& function,
                          const SpawnOptions& options, SpawnCall call);

}  // namespace internal

// Starts `nprocs` processes (1 to 4096), waits until all of them, and whatever they have started,
// have ended. `function(int rank)` runs in them, with ranks from 0; it returns nothing, or an int: the
// exit code of its rank, where anything but 0 is a failure. The last two arguments are the compiler's.
//
// Throws SpawnError when a rank fails: its function throws, it ends otherwise than with 0, is killed,
// or ends with 0 before its function has returned. The other ranks are ended then. Throws Error:
// invalid_argument for a number of ranks or an option that is not possible, resource_exhausted when
// not all ranks could be started (those that were are ended), failed_precondition inside of a function
// that spawn() runs, cancelled when the output of this program has no reader any more.
//
// The ranks end with the thread that called spawn(), at once and however that ends.
template <class Function>
void spawn(int nprocs, Function&& function, const SpawnOptions& options = {},
           const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  using Result = std::invoke_result_t<Function&, int>;
  static_assert(std::is_void_v<Result> || std::is_same_v<Result, int>,
                "the function of weft::spawn takes a rank and returns nothing, or an exit code");
  const auto run = [&function](int rank) {
    if constexpr (std::is_void_v<Result>) {
      function(rank);
      return 0;
    } else {
      return function(rank);
    }
  };
  internal::spawn_ranks(nprocs, run, options, {file, line});
}

}  // namespace weft

#endif  // WEFT_STORE_SPAWN_H_
