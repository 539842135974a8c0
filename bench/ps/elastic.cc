#include "weft/bench/ps/elastic.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <signal.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "weft/bench/line_protocol.h"
#include "weft/rpc/worker.h"

namespace weft::bench {
namespace {

constexpr int64_t kTableRows = 1'000'000;
constexpr int64_t kRowLength = 64;
constexpr int64_t kRowsAtOnce = 10'000;
constexpr int64_t kPushRows = 1024;
constexpr int64_t kWays = 64;  // sets of keys
constexpr int kWarm = 20;
constexpr double kBefore = 2;  // seconds
constexpr double kStep = 0.01;
constexpr uint64_t kCap = uint64_t{64} << 20;  // bytes
constexpr uint64_t kTimesCap = 10;

// Both at once; what `work` throws is thrown when `other` has ended.
void beside(const std::function<void()>& work, const std::function<void()>& other) {
  std::exception_ptr failed;
  std::thread thread([&] {
    try {
      work();
    } catch (...) {
      failed = std::current_exception();
    }
  });
  {
    const absl::Cleanup ended = [&] { thread.join(); };
    other();
  }
  if (failed != nullptr) std::rethrow_exception(failed);
}

std::vector<std::string> servers(int first, int count) {
  std::vector<std::string> out;
  for (int i = first; i < first + count; ++i) out.push_back("w" + std::to_string(i));
  return out;
}

}  // namespace

std::string Elastic::failover(std::istream& in) const {
  int victim = 0;
  pid_t pid = 0;
  if (!(in >> victim >> pid)) throw std::invalid_argument("failover VICTIM PID");
  const ps::Client client(worker_, {.servers = servers(victim, 3)});
  auto definition = ps::dense({3 * kPushRows}, ps::rule<optim::SGD>({.lr = kStep}));
  definition.copies = 2;
  const ps::Table table = client.open_table("victim" + std::to_string(victim), definition);
  const at::Tensor gradient = at::ones({3 * kPushRows});
  const ps::Client of_others(worker_, {.servers = servers(victim + 1, 2)});
  const ps::Table others = of_others.open_table("others" + std::to_string(victim), definition);
  const auto second = [&] {
    int64_t count = 0;
    const auto start = Clock::now();
    for (; seconds_since(start) < 1; ++count) others.push(gradient).wait();
    return static_cast<double>(count) / seconds_since(start);
  };
  for (int i = 0; i < kWarm; ++i) table.push(gradient).wait();
  const double before = second();
  double after = 0;
  double taken = 0;
  beside(
      [&] {
        const auto start = Clock::now();
        if (::kill(pid, SIGKILL) != 0) {
          throw std::runtime_error("cannot kill " + std::to_string(pid));
        }
        table.push(gradient).wait();
        taken = seconds_since(start);
      },
      [&] { after = second(); });
  std::ostringstream out;
  out << "{\"ms\":" << taken * 1e3 << ",\"others\":" << after / before << "}";
  return out.str();
}

std::string Elastic::evict() {
  const ps::Client client(worker_, {.servers = servers(1, 1)});
  auto definition = ps::sparse(kRowLength, ps::rule<optim::SGD>({.lr = kStep}));
  definition.max_bytes = kCap;
  definition.eviction = ps::Eviction::kLru;
  const ps::Table table = client.open_table("capped" + std::to_string(evictions_++), definition);
  const at::Tensor values = at::rand({kRowsAtOnce, kRowLength});
  auto push = [&, key = int64_t{0}](uint64_t bytes) mutable {
    for (uint64_t done = 0; done < bytes; done += values.nbytes()) {
      table.push_rows(at::arange(key, key + kRowsAtOnce, at::kLong), values).wait();
      key += kRowsAtOnce;
    }
  };
  push(kCap);  // some have gone by then, and all that come now make others go
  const auto start = Clock::now();
  push(kTimesCap * kCap);
  std::ostringstream out;
  out << "{\"kib_ms\":"
      << static_cast<double>(kTimesCap * kCap) / 1024 / (seconds_since(start) * 1e3) << "}";
  return out.str();
}

ps::Table Elastic::fill(const ps::Client& client, const std::string& name, uint32_t copies) const {
  auto definition = ps::sparse(kRowLength, ps::rule<optim::SGD>({.lr = kStep}));
  definition.copies = copies;
  ps::Table table = client.open_table(name, definition);
  const at::Tensor values = at::rand({kRowsAtOnce, kRowLength});
  for (int64_t begin = 0; begin < kTableRows; begin += kRowsAtOnce) {
    table.push_rows(at::arange(begin, begin + kRowsAtOnce, at::kLong), values).wait();
  }
  return table;
}

Elastic::Waits Elastic::push(const ps::Table& table,
                             const std::function<bool(double seconds)>& enough) const {
  std::vector<at::Tensor> keys;
  for (int64_t i = 0; i < kWays; ++i)
    keys.push_back(at::randint(kTableRows, {kPushRows}, at::kLong));
  const at::Tensor gradient = at::ones({kPushRows, kRowLength});
  Waits out;
  int64_t count = 0;
  const auto start = Clock::now();
  while (!enough(seconds_since(start))) {
    const auto began = Clock::now();
    table.push_rows(keys[static_cast<size_t>(count % kWays)], gradient).wait();
    out.longest = std::max(out.longest, seconds_since(began));
    ++count;
  }
  out.rate = static_cast<double>(count) / seconds_since(start);
  return out;
}

Elastic::Waits Elastic::push_beside(const ps::Table& table,
                                    const std::function<void()>& work) const {
  std::atomic<bool> done{false};
  Waits out;
  beside(
      [&] {
        const absl::Cleanup over = [&] { done = true; };
        work();
      },
      [&] { out = push(table, [&](double) { return done.load(); }); });
  return out;
}

std::string Elastic::move() {
  const ps::Client client(worker_, {.servers = servers(1, 2)});
  if (!moving_.has_value()) moving_ = fill(client, "moving", 2);
  const Waits before = push(*moving_, [](double seconds) { return seconds >= kBefore; });
  // Each part goes to the server of the three that has no copy of it: what had it before is its backup.
  constexpr int kTargets[2][3] = {{3, 2, 1}, {3, 1, 2}};
  const size_t turn = moves_++ % 3;
  const auto start = Clock::now();
  const Waits during = push_beside(*moving_, [&] {
    for (size_t part = 0; part < 2; ++part) {
      client.move_part("moving", part, "w" + std::to_string(kTargets[part][turn]));
    }
  });
  const double seconds = seconds_since(start);
  std::ostringstream out;
  out << "{\"before\":" << before.rate << ",\"during\":" << during.rate
      << ",\"before_ms\":" << before.longest * 1e3 << ",\"ms\":" << during.longest * 1e3
      << ",\"seconds\":" << seconds << "}";
  return out.str();
}

std::string Elastic::cut() {
  const ps::Client client(worker_, {.servers = servers(1, 2)});
  if (!cut_.has_value()) {
    cut_ = fill(client, "cut", 1);
    std::filesystem::create_directories(path_ + ".snapshots");
  }
  const Waits before = push(*cut_, [](double seconds) { return seconds >= kBefore; });
  double held = 0;
  const Waits during = push_beside(*cut_, [&] {
    held = absl::ToDoubleMilliseconds(client.snapshot(path_ + ".snapshots").held);
  });
  std::ostringstream out;
  out << "{\"before_ms\":" << before.longest * 1e3 << ",\"ms\":" << during.longest * 1e3
      << ",\"held_ms\":" << held << "}";
  return out.str();
}

}  // namespace weft::bench
