#ifndef WEFT_EXAMPLES_ASYNC_PS_SERVER_H_
#define WEFT_EXAMPLES_ASYNC_PS_SERVER_H_

// ParameterServer: holds the parameters; trainers call enlist, pull, push and finish on it.
//
// A pull gives the newest version. A push is applied at once, whatever was applied since that
// trainer's pull: the number of versions in between is the push's staleness.
//
// Methods from any thread: it locks for itself (registered `concurrent`).

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/future.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/async_ps/layer.h"
#include "weft/examples/async_ps/model.h"
#include "weft/rpc/library.h"
#include "weft/rref/rref.h"

namespace async_ps {

// What a trainer is to do.
struct Task {
  at::Tensor pixels;
  at::Tensor labels;
  int64_t steps = 0;
  int64_t batch_size = 0;
  uint64_t seed = 0;
  int64_t index = 0;  // of the trainer
};
WEFT_STRUCT(Task, pixels, labels, steps, batch_size, seed, index);

struct Snapshot {
  int64_t version = 0;
  Parameters parameters;
};
WEFT_STRUCT(Snapshot, version, parameters);

struct Push {
  int64_t version = 0;  // of the snapshot that the gradients were computed with
  double loss = 0;
  std::vector<at::Tensor> gradients;
};
WEFT_STRUCT(Push, version, loss, gradients);

// --mode autograd: a step that has been applied.
struct Report {
  double loss = 0;
  int64_t staleness = 0;
};
WEFT_STRUCT(Report, loss, staleness);

struct TrainerRecord {
  int64_t updates = 0;
  int64_t greatest_staleness = 0;
  int64_t sum_of_staleness = 0;
  bool finished = false;
};

struct Progress {
  int64_t version = 0;  // updates applied
  int64_t total = 0;
  double loss = 0;  // of the last few batches
  bool started = false;
  std::map<std::string, TrainerRecord> trainers;
};

struct ServerOptions {
  int trainers = 2;
  int64_t epochs = 30;
  uint64_t seed = 1;
};

class ParameterServer {
 public:
  ParameterServer(const Images& train, const ServerOptions& options);

  // ---- called by trainers, with --mode autograd -------------------------------------------------
  weft::RRef<Layer> hidden(weft::CallContext& context) const;
  // The output layer as it begins; the trainer of index 0 makes it, and says where it is.
  std::vector<at::Tensor> first_output() const;
  void offer_output(const weft::RRef<Layer>& output);
  // Complete when that has been said.
  weft::Future<weft::RRef<Layer>> output() const { return output_.future(); }
  void report(weft::CallContext& context, const Report& report);

  // ---- called by trainers ----------------------------------------------------------------------
  // The caller's share of the training images. Every trainer calls it once.
  Task enlist(weft::CallContext& context);
  Snapshot pull() const;
  // Throws std::invalid_argument when it does not fit the model.
  void push(weft::CallContext& context, const Push& push);
  // The caller has pushed all it will.
  void finish(weft::CallContext& context);

  // ---- called where it lives --------------------------------------------------------------------
  // Complete when every trainer has finished, with an error when one never will.
  weft::Future<void> finished() const { return finished_.future(); }
  void trainer_lost(const std::string& name, const std::string& why);
  Progress progress() const;
  Parameters parameters() const;
  // --mode autograd, when it is finished and before the trainers leave: fetched from where they
  // are.
  Parameters take_layers();

 private:
  void count(TrainerRecord* record, double loss, int64_t staleness);

  const ServerOptions options_;
  std::vector<Task> tasks_;
  int64_t total_ = 0;
  weft::Promise<void> finished_;
  weft::Promise<weft::RRef<Layer>> output_;
  std::shared_ptr<Layer> hidden_;

  mutable std::mutex mutex_;
  // Every version is made of new tensors, so a pull hands out handles and copies nothing.
  Parameters parameters_;
  Adam optimizer_;
  int64_t version_ = 0;
  double loss_ = 0;
  std::map<std::string, TrainerRecord> trainers_;
  bool ended_ = false;  // finished_ is complete, or is just being completed
};

// What trainers may call, with `server` as the instance "digits" (null at the trainers).
weft::Library library(std::shared_ptr<ParameterServer> server);

inline constexpr char kServer[] = "ps0";       // the worker
inline constexpr char kInstance[] = "digits";  // its object

}  // namespace async_ps

#endif  // WEFT_EXAMPLES_ASYNC_PS_SERVER_H_
