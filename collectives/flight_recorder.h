#ifndef WEFT_COLLECTIVES_FLIGHT_RECORDER_H_
#define WEFT_COLLECTIVES_FLIGHT_RECORDER_H_

// FlightRecorder: the last operations of all groups of a program, as JSON: when a group fails, at a
// signal, or when the program asks. It shows after a failure, or while a job hangs, in which
// operation each rank is.
//
//   int main() {
//     auto recorder = weft::make_flight_recorder({.file = "/tmp/flight.%r.json",
//                                                 .signal = SIGUSR1});   // first: see `signal`
//     auto group = weft::init_process_group({.flight_recorder = recorder});
//     ...                                     // kill -USR1 PID writes the file, and so does a failure
//   }
//
// The file has one object: "groups", those that live, and "failed", the last 16 that failed, as they
// were at their failure. Each has its name, generation, rank, size, backend, failure and the last 256
// operations with number, algorithm, bytes, state and times; of the operation under way also the ranks
// that it waits for. A group that is made from another one (new_group, split, rebuild) is recorded too.
//
// Threads: all methods from anywhere. Groups hold the recorder; it keeps no group alive.

#include <memory>
#include <optional>
#include <string>

#include "weft/common/api.h"
#include "weft/common/config.h"
#include "weft/common/error.h"
#include "weft/common/log.h"
#include "weft/common/runtime.h"

namespace weft {

namespace internal {
class GroupCore;
}

struct FlightRecorderOptions {  // how much is kept, and where it goes
  // Where a failure, a signal and write() put the records, replacing what is there. "%r" stands for
  // the rank of this process as its launcher says it, "%p" for the process id. Empty: only json().
  std::string file{};
  // A signal at which the file is written; 0: none. It is blocked in the calling thread, and in the
  // threads that this one starts later: make the recorder first in main(), because a thread that
  // does not block the signal takes it, and its default action ends the process. It stays blocked
  // when the recorder is gone.
  int signal = 0;
  // Default: threads, files and the clock of the system. Signals need the system's.
  std::shared_ptr<Runtime> runtime = nullptr;
  Logger log{};
  // Default: that of the process.
  std::optional<Environment> environment = std::nullopt;
};

class WEFT_API FlightRecorder {
 public:
  virtual ~FlightRecorder() = default;

  virtual std::string json() const = 0;
  // Error, kind state: there is no file in the options; otherwise that of the file system.
  virtual Status try_write() = 0;
  void write() { throw_if_error(try_write()); }
  // Where write() writes; empty: nowhere.
  virtual const std::string& path() const = 0;

  // For groups.
  virtual void add(const std::shared_ptr<internal::GroupCore>& group) = 0;
  virtual void group_failed(const internal::GroupCore& group, std::string record) = 0;
};

// Errors: invalid_argument (a signal that cannot be taken, or without a file), resource_exhausted.
WEFT_API StatusOr<std::shared_ptr<FlightRecorder>> try_make_flight_recorder(
    const FlightRecorderOptions& options = {});
WEFT_API std::shared_ptr<FlightRecorder> make_flight_recorder(
    const FlightRecorderOptions& options = {});

}  // namespace weft

#endif  // WEFT_COLLECTIVES_FLIGHT_RECORDER_H_
