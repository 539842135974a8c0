#ifndef WEFT_BENCH_COLLECTIVES_DRIVER_H_
#define WEFT_BENCH_COLLECTIVES_DRIVER_H_

// What the C++ drivers of the `collectives` suite share. Rank 0 reads the line protocol
// (line_protocol.h); it tells the other ranks what comes by a broadcast of the group that is
// measured, and all of them do it. Commands:
//
//   op NAME MEMORY BYTES COUNT   COUNT operations one after another, each timed at rank 0
//                                {"us": [...]}
//   NAME                         all_reduce, reduce_scatter, all_gather or broadcast, BYTES being the
//                                whole buffer; all_reduce/6: by the algorithm of that number. The last
//                                two, and algorithms, where the driver has them
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

enum class CollectiveCommand : int64_t {
  kQuit,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast
};

// An operation by an algorithm; where it has one buffer, that is both. 0: as the group chooses.
using CollectiveBy = std::function<void(CollectiveCommand, const at::Tensor& output,
                                        const at::Tensor& input, uint8_t algorithm)>;

struct CollectiveOperations {
  std::function<void(const at::Tensor&)> broadcast;  // from rank 0
  std::function<void(const at::Tensor&)> all_reduce;
  CollectiveBy by{};  // null: not known
  std::function<void(const at::Tensor& output, const at::Tensor& input)> reduce_scatter;
  std::function<at::Tensor(int64_t floats, bool registered)> make;
  std::map<std::string, std::function<std::string(std::istream&)>> more;  // of one rank alone
};

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
    tell({CollectiveCommand::kAllReduce, 0, false, sizeof(float), 1});
    serve(&lead);
    announce({});
  }

 private:
  static constexpr int64_t kMostWarmUps = 300;

  struct Task {
    CollectiveCommand what = CollectiveCommand::kQuit;
    uint8_t algorithm = 0;
    bool registered = false;
    int64_t bytes = 0;
    int64_t count = 0;
  };
  static constexpr int64_t kWords = 5;

  void announce(const Task& task) {
    int64_t words[kWords] = {static_cast<int64_t>(task.what), task.algorithm,
                             task.registered ? 1 : 0, task.bytes, task.count};
    const at::Tensor message = at::empty({kWords}, at::TensorOptions().dtype(at::kLong));
    std::copy(std::begin(words), std::end(words), message.mutable_data_ptr<int64_t>());
    operations_.broadcast(message);
  }

  std::vector<double> tell(const Task& task) {
    announce(task);
    return perform(task);
  }

  std::string lead_operation(std::istream& in) {
    std::string name;
    std::string memory;
    Task task;
    const bool complete(in >> name >> memory >> task.bytes >> task.count);
    if (const size_t slash = name.find('/'); slash != std::string::npos) {
      task.algorithm = static_cast<uint8_t>(std::stoul(name.substr(slash + 1)));
      name.resize(slash);
    }
    task.what = command_of(name);
    const bool known = task.what == CollectiveCommand::kAllReduce ||
                       task.what == CollectiveCommand::kReduceScatter;
    if (operations_.by == nullptr && (task.algorithm != 0 || !known)) {
      throw std::invalid_argument(
          "this driver has all_reduce and reduce_scatter, and no algorithms");
    }
    if (!complete || (memory != "plain" && memory != "registered") || task.bytes < 4 ||
        task.count < 1) {
      throw std::invalid_argument("op NAME plain|registered BYTES COUNT");
    }
    task.registered = memory == "registered";
    return "{\"us\":" + json_array(tell(task)) + "}";
  }

  static CollectiveCommand command_of(const std::string& name) {
    if (name == "all_reduce") return CollectiveCommand::kAllReduce;
    if (name == "reduce_scatter") return CollectiveCommand::kReduceScatter;
    if (name == "all_gather") return CollectiveCommand::kAllGather;
    if (name == "broadcast") return CollectiveCommand::kBroadcast;
    throw std::invalid_argument("no operation " + name);
  }

  void follow() {
    const at::Tensor message = at::empty({kWords}, at::TensorOptions().dtype(at::kLong));
    while (true) {
      operations_.broadcast(message);
      const int64_t* const words = message.const_data_ptr<int64_t>();
      const auto what = static_cast<CollectiveCommand>(words[0]);
      if (what == CollectiveCommand::kQuit) return;
      perform({what, static_cast<uint8_t>(words[1]), words[2] != 0, words[3], words[4]});
    }
  }

  std::vector<double> perform(const Task& task) {
    const int64_t floats = task.bytes / static_cast<int64_t>(sizeof(float));
    // A scatter has the whole as its input, a gather as its output; each rank has a part.
    const bool gathers = task.what == CollectiveCommand::kAllGather;
    const bool scatters = task.what == CollectiveCommand::kReduceScatter;
    const at::Tensor input = operations_.make(gathers ? floats / size_ : floats, task.registered);
    const at::Tensor output =
        gathers || scatters
            ? operations_.make(scatters ? floats / size_ : input.numel() * size_, task.registered)
            : input;
    const bool broadcasts = task.what == CollectiveCommand::kBroadcast;
    input.fill_(broadcasts && rank_ != 0 ? 0 : 1);
    std::function<void()> call = [&] { operations_.by(task.what, output, input, task.algorithm); };
    if (operations_.by == nullptr) {
      call = [&] {
        if (scatters) return operations_.reduce_scatter(output, input);
        operations_.all_reduce(input);
      };
    }
    call();
    const auto wanted = static_cast<float>(gathers || broadcasts ? 1 : size_);
    if (!output.equal(at::full({output.numel()}, wanted))) {
      throw std::runtime_error("ones did not become " + std::to_string(wanted));
    }
    input.fill_(0);
    const int64_t warm_ups = std::min(kMostWarmUps, task.count / 4 + 2);
    for (int64_t i = 0; i < warm_ups; ++i) call();
    std::vector<double> us(static_cast<size_t>(task.count));
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
