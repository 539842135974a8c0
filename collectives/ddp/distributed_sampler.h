#ifndef WEFT_COLLECTIVES_DDP_DISTRIBUTED_SAMPLER_H_
#define WEFT_COLLECTIVES_DDP_DISTRIBUTED_SAMPLER_H_

// DistributedSampler: which samples of a data set this rank takes in an epoch. All ranks draw the
// same permutation, from the seed and the number of the epoch, and each takes every size-th of it.
//
//   weft::DistributedSampler sampler(dataset.size(), {.rank = group.rank(), .size = group.size()});
//   for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     while (const auto batch = sampler.next(32)) ... (*batch)[i] ...
//   }
//   auto loader = torch::data::make_data_loader(dataset, sampler, 32);   // works, too
//
// Copies share their state: a loader copies its sampler, and set_epoch() on the program's own still
// counts, from the loader's next begin() on.
//
// Threads: set_epoch() and position() from any; next() from one at a time.
//
// Includes LibTorch's header for samplers.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "torch/data/samplers/base.h"
#include "weft/common/api.h"

namespace weft {

struct DistributedSamplerOptions {  // as PyTorch's
  int rank = 0;
  int size = 1;
  // Off: the samples in their own order.
  bool shuffle = true;
  uint64_t seed = 0;  // the same on all ranks
  // Ranks have equally many samples in an epoch. True: no rank takes the samples that are left
  // over. False: the first ones of the permutation are taken again, until all have equally many.
  bool drop_last = false;
};

class WEFT_API DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  // Throws weft::Error, invalid_argument: no samples, or a rank that is not below the size.
  DistributedSampler(size_t samples, const DistributedSamplerOptions& options = {});
  ~DistributedSampler() override;
  DistributedSampler(const DistributedSampler&);
  DistributedSampler& operator=(const DistributedSampler&);

  // Begins that epoch.
  void set_epoch(int64_t epoch);
  int64_t epoch() const;
  // Samples of this rank in an epoch...
  size_t size() const;
  // ...and how many of them next() has given. After load_position() it goes on there.
  size_t position() const;
  void load_position(int64_t epoch, size_t position);
  // How many of this rank's samples of an epoch, counted from the first, are no repetitions:
  // evaluations leave the others out.
  size_t unrepeated() const;

  // Begins the epoch again, or goes on where load_position() said; with a new number of samples if
  // there is one.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // Up to `batch_size` of this rank's samples, or nothing: the epoch is over.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_DISTRIBUTED_SAMPLER_H_
