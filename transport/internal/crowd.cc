#include "weft/transport/internal/crowd.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace weft::internal {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(2);
constexpr double kRunningWeight = 1.0 / 8;
// Threads per core, the asking one included. A pair of busy workers on two cores shows 1.2 while it
// only calls and 1.5 while it computes, too, spinning or not; four workers 2.1 (where spinning
// still pays), eight 3.6, and 4.5 when they sleep. The two bounds lie apart because the figure is
// noisy; but a poller that sleeps because of a moment's load must see a figure below the lower
// bound when that is over, or it sleeps for good.
constexpr double kCrowd = 2.5;
constexpr double kNoCrowd = 2.0;

int online_cores() { return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN))); }

// The fourth field of "0.20 0.18 0.12 3/480 11206": 3. -1: it cannot be read.
int running_threads(int file) {
  char text[128];
  const ssize_t n = pread(file, text, sizeof text - 1, 0);
  if (n <= 0) return -1;
  text[n] = '\0';
  const char* at = text;
  for (int i = 0; i < 3; ++i) {
    at = std::strchr(at, ' ');
    if (at == nullptr) return -1;
    ++at;
  }
  char* end = nullptr;
  const long running = std::strtol(at, &end, 10);
  return end != at && *end == '/' ? static_cast<int>(running) : -1;
}

}  // namespace

CrowdWatch::CrowdWatch(const std::string& path, int cores)
    : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)),
      cores_(cores > 0 ? cores : online_cores()),
      running_(cores_) {}

CrowdWatch::~CrowdWatch() {
  if (file_ >= 0) close(file_);
}

bool CrowdWatch::crowded(absl::Time now) {
  if (file_ < 0 || now < next_) return crowded_;
  next_ = now + kInterval;
  const int running = running_threads(file_);
  if (running < 0) return crowded_ = false;
  running_ += (running - running_) * kRunningWeight;
  crowded_ = running_ > (crowded_ ? kNoCrowd : kCrowd) * cores_;
  return crowded_;
}

}  // namespace weft::internal
