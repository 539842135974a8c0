#include "weft/store/internal/launch/output_queue.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/condition.h"
#include "weft/store/internal/launch/system.h"

namespace weft::launch {
namespace {

constexpr size_t kHighWater = 1 << 20;
constexpr size_t kPiece = 64 * 1024;

// How much of `text` was written, 0 when the reader has gone. Waits for the reader.
size_t write_piece(int fd, absl::string_view text) {
  while (true) {
    const ssize_t n = write(fd, text.data(), std::min(kPiece, text.size()));
    if (n > 0) return static_cast<size_t>(n);
    if (n < 0 && errno == EAGAIN) {  // a program before this one changed the mode
      pollfd room = {.fd = fd, .events = POLLOUT, .revents = 0};
      poll(&room, 1, -1);
    } else if (n == 0 || errno != EINTR) {
      return 0;
    }
  }
}

bool one_file(int a, int b) {
  struct stat first;
  struct stat second;
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace

struct OutputQueue::State {
  State(int fd_in, UniqueFd progress_in)
      : fd(fd_in), progress(std::move(progress_in)), runtime(make_system_runtime()) {}

  void run();
  void tell_progress() const {
    const uint64_t one = 1;
    while (write(progress.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  const int fd;
  const UniqueFd progress;
  const std::shared_ptr<Runtime> runtime;
  mutable Mutex mutex;
  Condition changed{runtime.get()};
  std::string pending ABSL_GUARDED_BY(mutex);   // not taken by the thread yet
  size_t unwritten ABSL_GUARDED_BY(mutex) = 0;  // with what the thread has taken
  bool broken ABSL_GUARDED_BY(mutex) = false;
  bool closing ABSL_GUARDED_BY(mutex) = false;
};

void OutputQueue::State::run() {
  // A reader that has gone is an error of write() here and not the end of the process.
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  std::string text;
  MutexLock lock(&mutex);
  while (true) {
    while (pending.empty() && !closing) {
      changed.wait_until(&mutex, absl::InfiniteFuture()).IgnoreError();  // woken, or asks again
    }
    if (closing || broken) return;
    text.clear();
    std::swap(text, pending);
    absl::string_view left = text;
    while (!left.empty() && !closing) {
      lock.unlock();
      const size_t written = write_piece(fd, left);
      lock.lock();
      const bool was_full = unwritten > kHighWater;
      left.remove_prefix(written);
      unwritten -= written;
      if (written == 0) {
        broken = true;
        pending.clear();
        unwritten = 0;
        tell_progress();
        return;
      }
      if (unwritten == 0 || (was_full && unwritten <= kHighWater)) tell_progress();
    }
  }
}

OutputQueue::OutputQueue(std::shared_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<OutputQueue>> OutputQueue::make(int fd) {
  UniqueFd progress(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!progress.valid()) return os_error(errno, "eventfd");
  return std::unique_ptr<OutputQueue>(
      new OutputQueue(std::make_shared<State>(fd, std::move(progress))));
}

OutputQueue::~OutputQueue() {
  bool waits_for_reader = false;
  {
    MutexLock lock(&state_->mutex);
    state_->closing = true;
    waits_for_reader = state_->unwritten > 0;
  }
  state_->changed.notify_all();
  MutexLock lock(&mutex_);
  if (thread_ == nullptr) return;
  // Joining would be the wait for the reader.
  if (waits_for_reader) {
    static_cast<void>(thread_.release());
  } else {
    thread_->join();
  }
}

void OutputQueue::add(absl::string_view text) {
  if (text.empty()) return;
  {
    MutexLock lock(&state_->mutex);
    if (state_->broken) return;
    state_->pending.append(text.data(), text.size());
    state_->unwritten += text.size();
  }
  state_->changed.notify_all();
  MutexLock lock(&mutex_);
  if (thread_ == nullptr) {
    thread_ = state_->runtime->spawn("weft-output", [state = state_] { state->run(); });
  }
}

int OutputQueue::progress_fd() const { return state_->progress.get(); }

void OutputQueue::clear_progress() {
  uint64_t count = 0;
  while (read(state_->progress.get(), &count, sizeof(count)) < 0 && errno == EINTR) {
  }
}

bool OutputQueue::empty() const {
  MutexLock lock(&state_->mutex);
  return state_->unwritten == 0;
}

bool OutputQueue::full() const {
  MutexLock lock(&state_->mutex);
  return state_->unwritten > kHighWater;
}

bool OutputQueue::broken() const {
  MutexLock lock(&state_->mutex);
  return state_->broken;
}

absl::StatusOr<std::unique_ptr<Outputs>> Outputs::open() {
  std::unique_ptr<Outputs> outputs(new Outputs());
  absl::StatusOr<std::unique_ptr<OutputQueue>> out = OutputQueue::make(STDOUT_FILENO);
  if (!out.ok()) return out.status();
  outputs->out_ = *std::move(out);
  if (!one_file(STDOUT_FILENO, STDERR_FILENO)) {
    absl::StatusOr<std::unique_ptr<OutputQueue>> err = OutputQueue::make(STDERR_FILENO);
    if (!err.ok()) return err.status();
    outputs->err_ = *std::move(err);
  }
  return outputs;
}

void Outputs::say(absl::string_view text) { err().add(absl::StrCat("weftrun: ", text, "\n")); }

void Outputs::flush(int signal_fd, absl::Duration bound) {
  const absl::Duration deadline = monotonic_now() + bound;
  while (!given_up_ && !written()) {
    int timeout = -1;
    if (deadline < absl::InfiniteDuration()) {
      const absl::Duration left = deadline - monotonic_now();
      if (left <= absl::ZeroDuration()) return give_up();
      timeout = static_cast<int>(absl::ToInt64Milliseconds(left)) + 1;
    }
    pollfd fds[3] = {
        {signal_fd, POLLIN, 0}, {out().progress_fd(), POLLIN, 0}, {err().progress_fd(), POLLIN, 0}};
    poll(fds, 3, timeout);
    out().clear_progress();
    err().clear_progress();
    signalfd_siginfo info;
    while (fds[0].revents != 0 &&
           read(signal_fd, &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (is_stop_signal(signal)) give_up();
      if (signal == SIGTSTP) raise(SIGSTOP);
    }
  }
}

}  // namespace weft::launch
