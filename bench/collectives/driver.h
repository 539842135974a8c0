#ifndef WEFT_BENCH_COLLECTIVES_DRIVER_H_
#define WEFT_BENCH_COLLECTIVES_DRIVER_H_

// What the C++ drivers of the `collectives` suite share. Rank 0 reads the line protocol
// (line_protocol.h); it tells the other ranks what comes by a broadcast of the group that is
// measured, and all of them do it. Commands:
//
//   op NAME MEMORY BYTES COUNT   COUNT operations one after another, each timed at rank 0
//                                {"us": [...]}
//   NAME                         all_reduce, or reduce_scatter of a buffer of BYTES
//   MEMORY                       plain (a tensor of LibTorch) or registered (one of the group)
//
// An operation is checked once before it is timed: a wrong result is an error of the command.
//
// Threads: one.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "weft/bench/line_protocol.h"

namespace weft::bench {

struct CollectiveOperations {
  std::function<void(const at::Tensor&)> broadcast;  // from rank 0
  std::function<void(const at::Tensor&)> all_reduce;
  std::function<void(const at::Tensor& output, const at::Tensor& input)> reduce_scatter;
  std::function<at::Tensor(int64_t floats, bool registered)> make;
  std::map<std::string, std::function<std::string(std::istream&)>> more;  // of one rank alone
};

enum class CollectiveCommand : int64_t { kQuit, kAllReduce, kReduceScatter };

class CollectiveDriver {
 public:
  // `says_ready`: every rank has lines of its own with the runner, which waits for its first one.
  CollectiveDriver(int rank, int size, CollectiveOperations operations, bool says_ready = true)
      : rank_(rank), size_(size), says_ready_(says_ready), operations_(std::move(operations)) {}

  void run() {
    if (rank_ != 0) {
      if (says_ready_) say(kReady);
      follow();
      return;
    }
    Operations lead;
    lead.more = operations_.more;
    lead.more["op"] = [this](std::istream& in) { return lead_operation(in); };
    tell(CollectiveCommand::kAllReduce, false, sizeof(float), 1);
    serve(&lead);
    announce(CollectiveCommand::kQuit, false, 0, 0);
  }

 private:
  static constexpr int64_t kMostWarmUps = 300;

  void announce(CollectiveCommand what, bool registered, int64_t bytes, int64_t count) {
    int64_t words[] = {static_cast<int64_t>(what), registered ? 1 : 0, bytes, count};
    const at::Tensor message = at::empty({4}, at::TensorOptions().dtype(at::kLong));
    std::copy(std::begin(words), std::end(words), message.mutable_data_ptr<int64_t>());
    operations_.broadcast(message);
  }

  std::vector<double> tell(CollectiveCommand what, bool registered, int64_t bytes, int64_t count) {
    announce(what, registered, bytes, count);
    return perform(what, registered, bytes, count);
  }

  std::string lead_operation(std::istream& in) {
    std::string name;
    std::string memory;
    int64_t bytes = 0;
    int64_t count = 0;
    const bool complete(in >> name >> memory >> bytes >> count);
    const bool named = (name == "all_reduce" || name == "reduce_scatter") &&
                       (memory == "plain" || memory == "registered");
    if (!complete || !named || bytes < 4 || count < 1) {
      throw std::invalid_argument("op all_reduce|reduce_scatter plain|registered BYTES COUNT");
    }
    const auto what =
        name == "all_reduce" ? CollectiveCommand::kAllReduce : CollectiveCommand::kReduceScatter;
    return "{\"us\":" + json_array(tell(what, memory == "registered", bytes, count)) + "}";
  }

  void follow() {
    const at::Tensor message = at::empty({4}, at::TensorOptions().dtype(at::kLong));
    while (true) {
      operations_.broadcast(message);
      const int64_t* const words = message.const_data_ptr<int64_t>();
      const auto what = static_cast<CollectiveCommand>(words[0]);
      if (what == CollectiveCommand::kQuit) return;
      perform(what, words[1] != 0, words[2], words[3]);
    }
  }

  std::vector<double> perform(CollectiveCommand what, bool registered, int64_t bytes,
                              int64_t count) {
    const int64_t floats = bytes / static_cast<int64_t>(sizeof(float));
    const at::Tensor input = operations_.make(floats, registered);
    input.fill_(1);
    at::Tensor output = input;
    std::function<void()> call = [&] { operations_.all_reduce(input); };
    if (what == CollectiveCommand::kReduceScatter) {
      output = operations_.make(floats / size_, registered);
      call = [&] { operations_.reduce_scatter(output, input); };
    }
    call();
    if (!output.equal(at::full({output.numel()}, static_cast<float>(size_)))) {
      throw std::runtime_error("the sum of ones is not the number of ranks");
    }
    input.fill_(0);
    const int64_t warm_ups = std::min(kMostWarmUps, count / 4 + 2);
    for (int64_t i = 0; i < warm_ups; ++i) call();
    std::vector<double> us(static_cast<size_t>(count));
    for (double& sample : us) sample = timed(call) * 1e6;
    return us;
  }

  const int rank_;
  const int size_;
  const bool says_ready_;
  const CollectiveOperations operations_;
};

}  // namespace weft::bench

#endif  // WEFT_BENCH_COLLECTIVES_DRIVER_H_
