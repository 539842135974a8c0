#ifndef WEFT_BENCH_DDP_DRIVER_H_
#define WEFT_BENCH_DDP_DRIVER_H_

// What the ranks of the `ddp` suite compute, with the same figures as peer_torch_ddp.py:
//
//   wide    2048-2048-2048-10, batch 64
//   deep    eight layers of 1024, batch 256
//   small   64-64-10, batch 32
//
// each with ReLU between its layers, cross entropy, and SGD.
//
// Threads: one.

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <functional>
#include <istream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weft/collectives/process_group.h"
#include "weft/rpc/library.h"
#include "weft/rpc/worker.h"

namespace weft::bench {

struct DdpModel {
  torch::nn::Sequential net = nullptr;
  at::Tensor x{};
  at::Tensor y{};
};

// Throws std::invalid_argument.
DdpModel make_ddp_model(std::string_view name);

// The group of all drivers; `listen`: of tcp.
ProcessGroup make_ddp_group(const std::string& path, int rank, int size, const std::string& backend,
                            const std::string& listen);

// A step of training, to be done again and again. `how`: ddp (with its own buckets), mib (buckets
// of 1 MiB), one (a single bucket), alone (no other rank takes part).
std::function<void()> make_ddp_step(const DdpModel& model, const ProcessGroup& group,
                                    std::string_view how);

// The hybrid: this trainer's step, with an embedding at worker "w2", whose functions these are.
Library hybrid_library();
std::function<void()> make_hybrid_step(const Worker& worker, const ProcessGroup& trainers);

// The largest part of Adam's state that a rank has with ZeroRedundancyOptimizer, after a step.
double zero_share(const DdpModel& model, const ProcessGroup& group);

// A process of a job that a launcher has started: a line for each of its first steps to a file.
int live(const std::string& log);

}  // namespace weft::bench

#endif  // WEFT_BENCH_DDP_DRIVER_H_
