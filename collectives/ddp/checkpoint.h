#ifndef WEFT_COLLECTIVES_DDP_CHECKPOINT_H_
#define WEFT_COLLECTIVES_DDP_CHECKPOINT_H_

// Checkpoints of a training with replicas: rank 0 writes one file, and all ranks go on from it.
//
//   weft::TrainingState state{.module = net.get(), .optimizer = &optimizer, .sampler = &sampler,
//                             .generators = {{"dropout", generator}}};
//   if (const auto loaded = weft::load_checkpoint(group, path, &state)) ...  // state.step is set
//   weft::DistributedDataParallel ddp(net, group);
//   ...
//   state.step = step;
//   weft::save_checkpoint(group, path, state);
//
// `path` is replaced in one step, and the checkpoint before it is kept as `path`.previous: a file
// that is cut, or of another model, is named, and the one before it is used.
//
// Two formats; both have the same contents, and load_checkpoint() tells them apart by itself:
//   kSafetensors  the module's tensors under their names ("conv1.weight"), those of the optimizer as
//                 "optimizer/conv1.weight/momentum_buffer", the generators of all ranks as
//                 "generator/NAME"; numbers in the metadata. Python's package `safetensors` reads it.
//   kArchive      LibTorch's own: archives "model", "optimizer", "sampler" and "generators", and
//                 "step"; a program without weft loads "model" into its module.
//
// Threads: as the group; nothing of the state may be in use.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "ATen/core/Generator.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace weft {

class DistributedSampler;

// What a checkpoint holds. A pointer that is null is left out; what a checkpoint has besides is not
// loaded. The same parts on all ranks.
struct TrainingState {
  torch::nn::Module* module = nullptr;  // required
  torch::optim::Optimizer* optimizer = nullptr;
  DistributedSampler* sampler = nullptr;
  // Each rank has states of its own, and gets those again.
  std::map<std::string, at::Generator> generators{};
  int64_t step = 0;
  // The program's own: a few short texts.
  std::map<std::string, std::string> notes{};
};

// What a file is: see above.
enum class CheckpointFormat { kSafetensors, kArchive };

// How save_checkpoint() writes.
struct CheckpointOptions {
  CheckpointFormat format = CheckpointFormat::kSafetensors;  // of the new file
  // Keep the checkpoint that was there as PATH.previous.
  bool keep_previous = true;
};

// What load_checkpoint() has loaded.
struct LoadedCheckpoint {
  std::string path{};  // which file it was
  // Why a newer one was not used; "" when this is the newest.
  std::string refused{};
};

// All ranks call it; rank 0 writes through its runtime's Files, and when it returns, at any rank, the
// file is there. Throws weft::Error on every rank when rank 0 could not write it (a full disk, a
// tensor that the format does not have); then the file that was there is as it was.
WEFT_API void save_checkpoint(ProcessGroup& group, std::string_view path,
                              const TrainingState& state, const CheckpointOptions& options = {});

// All ranks call it; rank 0 reads and gives the contents to all, so the others need no such file.
// Tensors go to the devices where the module has its parameters. Nothing: there is no checkpoint.
// Throws weft::Error, on every rank, with nothing loaded:
//   invalid_argument  no file is whole and of this model: why, for each; or a rank's module,
//                     optimizer, sampler or generators are others than those of the checkpoint
WEFT_API std::optional<LoadedCheckpoint> load_checkpoint(ProcessGroup& group, std::string_view path,
                                                         TrainingState* state);

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_CHECKPOINT_H_
