#include "weft/collectives/flight_recorder.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <deque>
#include <utility>

#include "absl/strings/str_replace.h"
#include "weft/collectives/internal/group_core.h"
#include "weft/collectives/internal/group_registry.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/files.h"
#include "weft/common/launch_info.h"
#include "weft/common/mutex.h"
#include "weft/common/posix.h"

namespace weft {

using internal::system_error;
using internal::UniqueFd;

namespace {

// Records of failed groups that are kept.
constexpr size_t kFailed = 16;

class FlightRecorderImpl final : public FlightRecorder {
 public:
  FlightRecorderImpl(const FlightRecorderOptions& options, std::shared_ptr<Runtime> runtime,
                     std::string path, UniqueFd signals, UniqueFd stop)
      : log_(options.log),
        runtime_(std::move(runtime)),
        path_(std::move(path)),
        signals_(std::move(signals)),
        stop_(std::move(stop)) {
    if (signals_.valid()) thread_ = runtime_->spawn("weft-flight", [this] { watch(); });
  }

  ~FlightRecorderImpl() override {
    const uint64_t one = 1;
    if (stop_.valid()) (void)!::write(stop_.get(), &one, sizeof one);
    if (thread_ != nullptr) thread_->join();
  }

  std::string json() const override {
    std::string out = internal::cat("{\"pid\":", ::getpid(), ",\"groups\":[");
    const char* between = "";
    for (const auto& group : groups_.groups()) {
      internal::cat_to(&out, between, group->flight_record());
      between = ",\n";
    }
    out += "],\n\"failed\":[";
    MutexLock lock(&mutex_);
    between = "";
    for (const std::string& one : failed_) {
      internal::cat_to(&out, between, one);
      between = ",\n";
    }
    return out + "]}\n";
  }

  Status try_write() override {
    if (path_.empty()) {
      return make_error(ErrorKind::kState,
                        "the flight recorder has no file; set FlightRecorderOptions::file");
    }
    // One at a time, so that the file ends as the last of them.
    MutexLock lock(&writing_);
    return annotate(runtime_->files().write_atomic(path_, json()),
                    internal::cat("flight record ", path_));
  }

  const std::string& path() const override { return path_; }

  void add(const std::shared_ptr<internal::GroupCore>& group) override { groups_.add(group); }

  void group_failed(const internal::GroupCore& group, std::string record) override {
    {
      MutexLock lock(&mutex_);
      failed_.push_back(std::move(record));
      if (failed_.size() > kFailed) failed_.pop_front();
    }
    if (path_.empty()) return;
    write_and_log(internal::cat("group '", group.options().name, "' has failed"));
  }

 private:
  void write_and_log(const std::string& why) {
    if (const Status written = try_write(); !written.ok()) {
      WEFT_LOG(log_, kError) << why << "; " << written;
    } else {
      WEFT_LOG(log_, kInfo) << why << "; flight record written to " << path_;
    }
  }

  void watch() {
    while (true) {
      pollfd fds[] = {{stop_.get(), POLLIN, 0}, {signals_.get(), POLLIN, 0}};
      if (::poll(fds, 2, -1) < 0) continue;
      if (fds[0].revents != 0) return;
      signalfd_siginfo info;
      if (::read(signals_.get(), &info, sizeof info) != sizeof info) continue;
      write_and_log(internal::cat("signal ", info.ssi_signo));
    }
  }

  Logger log_;
  const std::shared_ptr<Runtime> runtime_;
  const std::string path_;
  const UniqueFd signals_;
  const UniqueFd stop_;
  internal::GroupRegistry groups_;
  Mutex writing_;
  mutable Mutex mutex_;
  std::deque<std::string> failed_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Thread> thread_;  // null: no signal
};

Status bad_recorder(std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument, internal::cat("flight recorder: ", why));
}

// Blocks the signal here, and in threads to come.
StatusOr<UniqueFd> take_signal(int signal) {
  sigset_t set;
  sigemptyset(&set);
  const bool catchable = signal > 0 && signal != SIGKILL && signal != SIGSTOP;
  if (!catchable || sigaddset(&set, signal) != 0) {
    return bad_recorder(
        internal::cat("signal ", signal, " cannot be taken; use SIGUSR1 or SIGUSR2"));
  }
  UniqueFd out(::signalfd(-1, &set, SFD_CLOEXEC));
  if (!out.valid()) {
    return make_error(ErrorKind::kResource,
                      internal::cat("flight recorder: no signalfd: ", system_error(errno)));
  }
  if (const int error = ::pthread_sigmask(SIG_BLOCK, &set, nullptr); error != 0) {
    return bad_recorder(internal::cat("cannot block signal ", signal, ": ", system_error(error)));
  }
  return out;
}

}  // namespace

StatusOr<std::shared_ptr<FlightRecorder>> try_make_flight_recorder(
    const FlightRecorderOptions& options) {
  const auto runtime = options.runtime != nullptr ? options.runtime : make_system_runtime();
  UniqueFd signals;
  UniqueFd stop;
  if (options.signal != 0) {
    if (options.file.empty()) return bad_recorder("a signal without a file to write");
    if (runtime->simulated()) return bad_recorder("a simulation has no signals");
    stop.reset(::eventfd(0, EFD_CLOEXEC));
    if (!stop.valid()) {
      return make_error(ErrorKind::kResource,
                        internal::cat("flight recorder: no eventfd: ", system_error(errno)));
    }
    WEFT_ASSIGN_OR_RETURN(signals, take_signal(options.signal));
  }
  const Environment environment =
      options.environment.has_value() ? *options.environment : process_environment();
  WEFT_ASSIGN_OR_RETURN(const Config config, Config::from_environment(environment));
  WEFT_ASSIGN_OR_RETURN(const LaunchInfo launch, launch_info(config, environment));
  const std::string path = absl::StrReplaceAll(
      options.file, {{"%r", absl::StrCat(launch.rank)}, {"%p", absl::StrCat(::getpid())}});
  return std::shared_ptr<FlightRecorder>(std::make_shared<FlightRecorderImpl>(
      options, runtime, path, std::move(signals), std::move(stop)));
}

std::shared_ptr<FlightRecorder> make_flight_recorder(const FlightRecorderOptions& options) {
  return value_or_throw(try_make_flight_recorder(options));
}

}  // namespace weft
