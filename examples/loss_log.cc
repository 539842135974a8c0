#include "weft/examples/loss_log.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "absl/strings/str_format.h"

namespace examples {

LossLog::LossLog(const weft::Worker& worker, int64_t steps, int64_t every)
    : worker_(worker), steps_(steps), every_(every), begun_(worker.now()) {}

void LossLog::add(double loss) {
  if (taken_++ == 0) first_ = loss;
  recent_.push_back(loss);
  if (recent_.size() > 10) recent_.pop_front();
  if (taken_ % every_ != 0 && taken_ != steps_) return;
  const double seconds = std::max(absl::ToDoubleSeconds(worker_.now() - begun_), 1e-3);
  const double rate = static_cast<double>(taken_) / seconds;
  absl::PrintF("step %d/%d  loss %.4f  %.0f steps/s  ETA %.0f s\n", taken_, steps_, last(), rate,
               static_cast<double>(steps_ - taken_) / rate);
  std::fflush(stdout);
}

double LossLog::last() const {
  return std::accumulate(recent_.begin(), recent_.end(), 0.0) /
         static_cast<double>(std::max<size_t>(recent_.size(), 1));
}

}  // namespace examples
