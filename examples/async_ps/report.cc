#include "weft/examples/async_ps/report.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_format.h"

namespace async_ps {
namespace {

constexpr absl::Duration kOnTerminal = absl::Milliseconds(100);
constexpr absl::Duration kElsewhere = absl::Milliseconds(500);

}  // namespace

ProgressLine::ProgressLine(absl::Time now)
    : terminal_(isatty(STDOUT_FILENO) == 1), begun_(now), shown_(now) {}

absl::Duration ProgressLine::interval() const { return terminal_ ? kOnTerminal : kElsewhere; }

void ProgressLine::show(const Progress& progress, absl::Time now) {
  if (!started_) {
    // The rate counts from the first trainer on, not from the start of the programs.
    started_ = progress.started;
    begun_ = shown_ = now;
    return;
  }
  if (now - shown_ < interval() * 0.9) return;
  shown_ = now;
  print(progress, now);
}

void ProgressLine::end(const Progress& progress, absl::Time now) {
  if (printed_ != progress.version) print(progress, now);
  if (terminal_) std::fputc('\n', stdout);
  std::fflush(stdout);
}

void ProgressLine::print(const Progress& progress, absl::Time now) {
  printed_ = progress.version;
  const double seconds = std::max(absl::ToDoubleSeconds(now - begun_), 1e-3);
  const double rate = static_cast<double>(progress.version) / seconds;
  const std::string eta =
      rate > 0
          ? absl::StrFormat("%.1f s", static_cast<double>(progress.total - progress.version) / rate)
          : "?";
  absl::PrintF("%sstep %d/%d (%d%%)  %.0f updates/s  loss %.4f  ETA %s%s", terminal_ ? "\r" : "",
               progress.version, progress.total, 100 * progress.version / progress.total, rate,
               progress.loss, eta, terminal_ ? "\x1b[K" : "\n");
  std::fflush(stdout);
}

std::string closing_block(const Progress& progress, absl::Duration taken) {
  std::string text = absl::StrFormat("trained %d updates in %.1f s\n", progress.version,
                                     absl::ToDoubleSeconds(taken));
  int64_t greatest = 0;
  for (const auto& [name, record] : progress.trainers) {
    const auto updates = static_cast<double>(std::max<int64_t>(record.updates, 1));
    absl::StrAppendFormat(&text, "  %-10s updates=%d mean_staleness=%.1f greatest_staleness=%d\n",
                          name, record.updates,
                          static_cast<double>(record.sum_of_staleness) / updates,
                          record.greatest_staleness);
    greatest = std::max(greatest, record.greatest_staleness);
  }
  absl::StrAppendFormat(&text, "greatest staleness: %d\n", greatest);
  return text;
}

}  // namespace async_ps
