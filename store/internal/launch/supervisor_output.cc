// What the processes write, and the report of the first failure.

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/store/internal/launch/supervisor.h"

namespace weft::launch {

absl::Status Supervisor::open_streams(Rank& rank) {
  const SupervisorOptions& options = setup_.options;
  bool printed = options.log_dir.empty() || options.tee;
  for (Stream* stream : {&rank.out, &rank.err}) {
    bool is_out = stream == &rank.out;
    stream->queue = is_out ? &out_ : &err_;
    bool color = is_out ? color_out_ : color_err_;
    const bool named = options.prefix_output;
    std::string first = named ? line_prefix(rank.plan.name, rank.plan.rank, color, false) : "";
    std::string next = named ? line_prefix(rank.plan.name, rank.plan.rank, color, true) : "";
    auto sink = [&rank, queue = stream->queue, printed, first, next](absl::string_view line,
                                                                     bool continued) {
      rank.last.add(line);
      if (printed) queue->add(absl::StrCat(continued ? next : first, line, "\n"));
    };
    stream->splitter = std::make_unique<LineSplitter>(std::move(sink));
    if (!options.log_dir.empty()) {
      std::string path =
          absl::StrCat(options.log_dir, "/", rank.plan.name, is_out ? ".out" : ".err");
      const int how = setup_.restart_count == 0 ? O_TRUNC : O_APPEND;
      stream->log.reset(open(path.c_str(), O_WRONLY | O_CREAT | how | O_CLOEXEC, 0644));
      if (!stream->log.valid()) return os_error(errno, absl::StrCat("cannot open ", path));
    }
  }
  return absl::OkStatus();
}

void Supervisor::read_stream(Stream& stream) {
  std::array<char, 64 * 1024> buffer;
  ssize_t n = read(stream.fd.get(), buffer.data(), buffer.size());
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    stream.splitter->finish();
    stream.fd.reset();
    return;
  }
  absl::string_view bytes(buffer.data(), static_cast<size_t>(n));
  stream.splitter->feed(bytes);
  while (stream.log.valid() && !bytes.empty()) {
    ssize_t written = write(stream.log.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      say(absl::StrCat("writing to ", setup_.options.log_dir, ": ", strerror(errno),
                       "; this file ends here"));
      stream.log.reset();
      break;
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

// What is in the pipe now; a process that the rank has left behind may write on, to no reader.
void Supervisor::close_stream(Stream& stream) {
  constexpr int kMostReads = 32;  // of 64 KiB each: more than a pipe holds
  for (int i = 0; i < kMostReads && stream.fd.valid(); ++i) {
    pollfd probe = {.fd = stream.fd.get(), .events = POLLIN, .revents = 0};
    if (poll(&probe, 1, 0) <= 0) break;
    read_stream(stream);
  }
  if (!stream.fd.valid()) return;
  stream.splitter->finish();
  stream.fd.reset();
}

void Supervisor::drain_output() {
  // No process writes into the pipes any more: read what is in them, then wait for our own reader.
  for (auto& rank : ranks_) {
    for (Stream* stream : {&rank->out, &rank->err}) {
      while (stream->fd.valid()) {
        pollfd probe = {.fd = stream->fd.get(), .events = POLLIN, .revents = 0};
        if (poll(&probe, 1, 0) <= 0) {
          stream->splitter->finish();
          stream->fd.reset();
        } else {
          read_stream(*stream);
        }
      }
    }
  }
  deadline_.reset();
  // After a stop signal the reader has the grace, as the processes had.
  if (user_signal_ != 0) deadline_ = monotonic_now() + setup_.options.grace;
  while (!give_up_output_ && !setup_.outputs->written()) {
    wait_for_events();
    // A stop signal while a slow reader is waited for: it gets the grace, too.
    if (deadline_ && monotonic_now() >= *deadline_) give_up_output_ = true;
  }
  if (give_up_output_) setup_.outputs->give_up();
}

void Supervisor::report() {
  if (remote_ && first_ == nullptr) {
    say(absl::StrCat("first failure, on another node: ", remote_->text));
    return;
  }
  if (first_ == nullptr) return;
  bool by_request = user_signal_ != 0 && exit_code_of(first_->wait_status) == 128 + user_signal_;
  if (by_request) {
    note(absl::StrCat("stopped by ", signal_name(user_signal_)));
    return;
  }
  say(absl::StrCat("first failure: ", describe(*first_), ": ", end_of(first_->wait_status)));
  std::vector<std::string> lines = first_->last.lines();
  if (lines.empty()) {
    say("it wrote nothing");
  } else {
    say(absl::StrCat("its last ", lines.size() == 1 ? "line" : absl::StrCat(lines.size(), " lines"),
                     ":"));
    for (const std::string& line : lines) say(absl::StrCat("| ", line));
  }
  for (const Rank* rank : also_failed_) {
    say(absl::StrCat("failed at the same time: ", describe(*rank), ": ",
                     end_of(rank->wait_status)));
  }
  std::vector<std::string> words;
  for (const std::string& word : setup_.options.program) words.push_back(shell_quote(word));
  say(absl::StrCat("command: ", absl::StrJoin(words, " ")));
  if (!setup_.options.log_dir.empty()) {
    say(absl::StrCat("logs: ", setup_.options.log_dir, "/", first_->plan.name, ".out and .err"));
  }
}

}  // namespace weft::launch
