// What a launcher prints, on its way to standard output and standard error.
//
// The thread that looks after processes and signals must not wait for a reader of the output. write() to a descriptor in blocking mode can wait although poll() has reported room:
// the text of another descriptor or of another process may have filled the pipe in between, and a
// terminal with room for one byte counts as writable. The mode cannot be changed, because the shell
// that started the launcher shares the descriptor. So each file has a thread that writes.
//
//   absl::StatusOr<std::unique_ptr<Outputs>> outputs = Outputs::open();
//   (*outputs)->say("restart 1 of 3");
//   (*outputs)->flush(signal_fd);
#ifndef WEFT_STORE_INTERNAL_LAUNCH_OUTPUT_QUEUE_H_
#define WEFT_STORE_INTERNAL_LAUNCH_OUTPUT_QUEUE_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft::launch {

// Text for one file, written in the order of add() by a thread that starts with the first text.
// Threads: all methods from anywhere; none waits for the reader.
class OutputQueue {
 public:
  // `fd` must stay open for as long as the process lives. Error: no descriptor is left.
  static absl::StatusOr<std::unique_ptr<OutputQueue>> make(int fd);
  OutputQueue(const OutputQueue&) = delete;
  OutputQueue& operator=(const OutputQueue&) = delete;
  // Text that its reader has not taken is dropped. The thread that still writes it ends with the
  // process.
  ~OutputQueue();

  void add(absl::string_view text);

  // Becomes readable when empty(), full() or broken() have changed.
  int progress_fd() const;
  void clear_progress();

  // Everything has been written.
  bool empty() const;
  // More than 1 MiB waits: read no more from the processes until the reader has caught up.
  bool full() const;
  // The reader has gone. What was queued is dropped, and what is added later.
  bool broken() const;

 private:
  struct State;
  explicit OutputQueue(std::shared_ptr<State> state);

  const std::shared_ptr<State> state_;  // the thread holds it as well
  Mutex mutex_;
  std::unique_ptr<Thread> thread_ ABSL_GUARDED_BY(mutex_);
};

// The two queues of a launcher. Threads: as OutputQueue; flush() on the thread that looks after the
// processes.
class Outputs {
 public:
  // Error: no descriptor is left.
  static absl::StatusOr<std::unique_ptr<Outputs>> open();

  OutputQueue& out() { return *out_; }
  // The same queue as out() where both descriptors are one file: lines then keep their order and
  // are never mixed.
  OutputQueue& err() { return err_ != nullptr ? *err_ : *out_; }
  bool written() { return out().empty() && err().empty(); }

  // Prints "weftrun: TEXT" and a line end to standard error.
  void say(absl::string_view text);

  // Waits until everything is written. Gives up at a stop signal read from `signal_fd`, and after
  // `bound`.
  void flush(int signal_fd, absl::Duration bound = absl::InfiniteDuration());
  // flush() waits no more.
  void give_up() { given_up_ = true; }

 private:
  Outputs() = default;

  std::unique_ptr<OutputQueue> out_;
  std::unique_ptr<OutputQueue> err_;  // null: one file
  bool given_up_ = false;             // by the thread of flush()
};

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_OUTPUT_QUEUE_H_
