// Ours, as a driver of the `collectives` suite, through the public API alone.
//
//   --backend shm|tcp    of the group
//   --alone 1            every rank takes commands of its own; see survive()
//
// Commands besides those of driver.h:
//
//   roof BYTES ROUNDS    two pinned threads add and copy on two buffers of BYTES, as a registered
//                        all_reduce of two ranks does            {"us": [...]}
//   survive BYTES        with --alone: all_reduce until the group fails, rebuild, one all_reduce.
//                        {"going": true} after the first one, then the moments in seconds of the
//                        monotonic clock: {"failed": s, "summed": s, "size": n, "kind": "..."}
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <sched.h>

#include <atomic>
#include <cstring>
#include <iomanip>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "weft/bench/collectives/driver.h"
#include "weft/bench/line_protocol.h"
#include "weft/collectives/process_group.h"

namespace weft::bench {
namespace {

at::Tensor make(const ProcessGroup& group, int64_t floats, bool registered) {
  return registered ? group.empty({floats}) : at::empty({floats});
}

// The traffic of one rank of two: its half of the sum, then the other half copied.
void add_and_copy(float* mine, const float* theirs, float* to, const float* from, int64_t half) {
#pragma GCC ivdep
  for (int64_t i = 0; i < half; ++i) mine[i] += theirs[i];
  std::memcpy(to, from, static_cast<size_t>(half) * sizeof(float));
}

std::string roof(const ProcessGroup& group, std::istream& in) {
  int64_t bytes = 0;
  int rounds = 0;
  if (!(in >> bytes >> rounds) || bytes < 8 || rounds < 1) {
    throw std::invalid_argument("roof BYTES ROUNDS");
  }
  const int64_t floats = bytes / static_cast<int64_t>(sizeof(float));
  const int64_t half = floats / 2;
  const at::Tensor a = group.empty({floats}).fill_(0);
  const at::Tensor b = group.empty({floats}).fill_(0);
  float* const x = a.mutable_data_ptr<float>();
  float* const y = b.mutable_data_ptr<float>();
  std::atomic<int> begun{0};
  std::atomic<int> done{0};
  const auto wait_for = [](const std::atomic<int>& count, int wanted) {
    while (count.load(std::memory_order_acquire) < wanted) {
    }
  };
  std::thread second([&] {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(1, &cores);
    (void)sched_setaffinity(0, sizeof cores, &cores);
    for (int round = 0; round < rounds; ++round) {
      wait_for(begun, round + 1);
      add_and_copy(y + half, x + half, y, x, half);
      done.fetch_add(1, std::memory_order_release);
    }
  });
  std::vector<double> us(static_cast<size_t>(rounds));
  for (int round = 0; round < rounds; ++round) {
    us[static_cast<size_t>(round)] = 1e6 * timed([&] {
                                       begun.fetch_add(1, std::memory_order_release);
                                       add_and_copy(x, y, x + half, y + half, half);
                                       wait_for(done, round + 1);
                                     });
  }
  second.join();
  return "{\"us\":" + json_array(us) + "}";
}

std::string survive(ProcessGroup* group, std::istream& in) {
  int64_t bytes = 0;
  if (!(in >> bytes) || bytes < 4) throw std::invalid_argument("survive BYTES");
  const at::Tensor t = at::full({bytes / static_cast<int64_t>(sizeof(float))}, 1.0F);
  const auto now = [] {
    return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  };
  Status failed = group->try_all_reduce(t, {.op = ReduceOp::kMax});
  say("{\"going\":true}");
  while (failed.ok()) failed = group->try_all_reduce(t, {.op = ReduceOp::kMax});
  const double failed_at = now();
  *group = group->rebuild();
  t.fill_(1);
  group->all_reduce(t);
  const double summed_at = now();
  if (!t.equal(at::full({t.numel()}, static_cast<float>(group->size())))) {
    throw std::runtime_error("the rebuilt group gives a wrong sum");
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(6) << "{\"failed\":" << failed_at
      << ",\"summed\":" << summed_at << ",\"size\":" << group->size()
      << ",\"kind\":" << quoted(kind_name(error_kind(failed))) << "}";
  return out.str();
}

int run(int argc, char** argv) {
  at::set_num_threads(1);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  ProcessGroupOptions options;
  options.rank = std::stoi(option(argc, argv, "--rank", "0"));
  options.size = std::stoi(option(argc, argv, "--world", "2"));
  options.rendezvous = "file://" + option(argc, argv, "--path", "") + ".store?run_id=bench";
  options.backend = option(argc, argv, "--backend", "shm") == "tcp" ? Backend::kTcp : Backend::kShm;
  options.timeout = absl::Hours(1);
  options.init_timeout = absl::Minutes(1);
  ProcessGroup group = init_process_group(options);
  if (option(argc, argv, "--alone", "0") != "0") {
    Operations own;
    own.more["survive"] = [&](std::istream& in) { return survive(&group, in); };
    serve(&own);
  } else {
    CollectiveOperations operations;
    operations.broadcast = [&](const at::Tensor& t) { group.broadcast(t); };
    operations.all_reduce = [&](const at::Tensor& t) { group.all_reduce(t); };
    operations.by = [&](CollectiveCommand what, const at::Tensor& to, const at::Tensor& from,
                        uint8_t number) {
      const auto algorithm = static_cast<Algorithm>(number);
      switch (what) {
        case CollectiveCommand::kAllReduce: return group.all_reduce(to, {.algorithm = algorithm});
        case CollectiveCommand::kReduceScatter:
          return group.reduce_scatter_tensor(to, from, {.algorithm = algorithm});
        case CollectiveCommand::kAllGather:
          return group.all_gather_into_tensor(to, from, {.algorithm = algorithm});
        case CollectiveCommand::kBroadcast: return group.broadcast(to, {.algorithm = algorithm});
        case CollectiveCommand::kQuit: break;
      }
    };
    operations.reduce_scatter = [&](const at::Tensor& to, const at::Tensor& from) {
      group.reduce_scatter_tensor(to, from);
    };
    operations.make = [&](int64_t floats, bool registered) {
      return make(group, floats, registered);
    };
    operations.more["roof"] = [&](std::istream& in) { return roof(group, in); };
    CollectiveDriver(*options.rank, *options.size, std::move(operations)).run();
  }
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("weft", &weft::bench::run, argc, argv);
}
