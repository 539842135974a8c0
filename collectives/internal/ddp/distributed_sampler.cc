#include "weft/collectives/ddp/distributed_sampler.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include <torch/serialize/archive.h>

#include "ATen/ops/tensor.h"
#include "absl/strings/str_cat.h"
#include "weft/common/error.h"
#include "weft/common/mutex.h"

namespace weft {
namespace {

// 0 to n - 1 in an order that depends on the seed alone, on every system.
std::vector<size_t> permutation(size_t n, uint64_t seed) {
  std::vector<size_t> out(n);
  std::iota(out.begin(), out.end(), size_t{0});
  std::mt19937_64 random(seed);
  for (size_t i = n; i > 1; --i) std::swap(out[i - 1], out[random() % i]);
  return out;
}

}  // namespace

struct DistributedSampler::State {
  mutable Mutex mutex;
  DistributedSamplerOptions options{};
  size_t samples ABSL_GUARDED_BY(mutex) = 0;
  int64_t epoch ABSL_GUARDED_BY(mutex) = 0;
  size_t position ABSL_GUARDED_BY(mutex) = 0;
  bool resumed ABSL_GUARDED_BY(mutex) = false;        // the next reset() keeps the position
  std::vector<size_t> mine ABSL_GUARDED_BY(mutex){};  // of this epoch; empty: not drawn yet

  size_t ranks() const { return static_cast<size_t>(options.size); }
  size_t per_rank() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return options.drop_last ? samples / ranks() : (samples + ranks() - 1) / ranks();
  }
  void draw() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const uint64_t seed = options.seed + static_cast<uint64_t>(epoch);
    std::vector<size_t> all(samples);
    std::iota(all.begin(), all.end(), size_t{0});
    if (options.shuffle) all = permutation(samples, seed);
    mine.clear();
    for (size_t i = 0; i < per_rank(); ++i) {
      // Padding repeats the permutation, as often as it takes.
      mine.push_back(all[(static_cast<size_t>(options.rank) + i * ranks()) % samples]);
    }
  }
};

DistributedSampler::DistributedSampler(size_t samples, const DistributedSamplerOptions& options)
    : state_(std::make_shared<State>()) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    throw_error(
        make_error(ErrorKind::kInvalidArgument,
                   absl::StrCat("DistributedSampler: rank ", options.rank, " of ", options.size)));
  }
  if (samples == 0 || (options.drop_last && samples < static_cast<size_t>(options.size))) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("DistributedSampler: ", samples, " samples for ", options.size, " ranks")));
  }
  MutexLock lock(&state_->mutex);
  state_->options = options;
  state_->samples = samples;
}

DistributedSampler::~DistributedSampler() = default;
DistributedSampler::DistributedSampler(const DistributedSampler&) = default;
DistributedSampler& DistributedSampler::operator=(const DistributedSampler&) = default;

void DistributedSampler::set_epoch(int64_t epoch) {
  MutexLock lock(&state_->mutex);
  state_->epoch = epoch;
  state_->position = 0;
  state_->resumed = false;
  state_->mine.clear();
}

int64_t DistributedSampler::epoch() const {
  MutexLock lock(&state_->mutex);
  return state_->epoch;
}

size_t DistributedSampler::size() const {
  MutexLock lock(&state_->mutex);
  return state_->per_rank();
}

size_t DistributedSampler::position() const {
  MutexLock lock(&state_->mutex);
  return state_->position;
}

size_t DistributedSampler::unrepeated() const {
  MutexLock lock(&state_->mutex);
  const size_t rank = static_cast<size_t>(state_->options.rank);
  const size_t ranks = state_->ranks();
  const size_t without = state_->samples > rank ? (state_->samples - rank - 1) / ranks + 1 : 0;
  return std::min(state_->per_rank(), without);
}

void DistributedSampler::load_position(int64_t epoch, size_t position) {
  MutexLock lock(&state_->mutex);
  if (position > state_->per_rank()) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("DistributedSampler: position ", position, " of ",
                                        state_->per_rank(), " samples")));
  }
  state_->epoch = epoch;
  state_->position = position;
  state_->resumed = true;
  state_->mine.clear();
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  MutexLock lock(&state_->mutex);
  if (new_size.has_value() && *new_size != state_->samples) {
    if (*new_size == 0) {
      throw_error(make_error(ErrorKind::kInvalidArgument, "DistributedSampler: 0 samples"));
    }
    state_->samples = *new_size;
    state_->mine.clear();
  }
  if (!std::exchange(state_->resumed, false)) state_->position = 0;
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  State& state = *state_;
  MutexLock lock(&state.mutex);
  if (state.mine.empty()) state.draw();
  state.resumed = false;
  const size_t left = state.mine.size() - std::min(state.position, state.mine.size());
  if (left == 0 || batch_size == 0) return std::nullopt;
  const auto begin = state.mine.begin() + static_cast<int64_t>(state.position);
  const auto count = std::min(left, batch_size);
  state.position += count;
  return std::vector<size_t>(begin, begin + static_cast<int64_t>(count));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  MutexLock lock(&state_->mutex);
  archive.write("epoch", at::tensor(state_->epoch), /*is_buffer=*/true);
  archive.write("position", at::tensor(static_cast<int64_t>(state_->position)), true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  at::Tensor epoch = at::tensor(int64_t{0});
  at::Tensor position = at::tensor(int64_t{0});
  archive.read("epoch", epoch, /*is_buffer=*/true);
  archive.read("position", position, true);
  load_position(epoch.item<int64_t>(), static_cast<size_t>(position.item<int64_t>()));
}

}  // namespace weft
