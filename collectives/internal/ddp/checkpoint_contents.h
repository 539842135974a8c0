#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_CHECKPOINT_CONTENTS_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_CHECKPOINT_CONTENTS_H_

// A checkpoint as tensors and texts by name: what a safetensors file is, and what rank 0 gives to the
// others, whichever format the file has.
//
// Threads: values.

#include <map>
#include <string>
#include <string_view>

#include "ATen/core/Tensor.h"
#include "weft/collectives/ddp/checkpoint.h"
#include "weft/common/error.h"
#include "weft/common/files.h"

namespace torch::serialize {
class InputArchive;
}

namespace weft::internal {

struct CheckpointContents {
  std::map<std::string, at::Tensor> tensors{};
  std::map<std::string, std::string> metadata{};
};

// `generators`: the states of all ranks, a row each. Throws, invalid_argument: a name of the module
// has a '/', with which the names of the optimizer's tensors are made.
CheckpointContents contents_of(const TrainingState& state,
                               const std::map<std::string, at::Tensor>& generators, int ranks);

// Whether the contents go into what `state` points to, at a rank of a group of `ranks`.
Status check_contents(const CheckpointContents& contents, const TrainingState& state, int ranks);
// REQUIRES: check_contents() found nothing. Throws what the optimizer's load() throws.
void apply_contents(const CheckpointContents& contents, TrainingState* state, int rank);

// LibTorch's archive of the same.
Status write_archive(const TrainingState& state, const CheckpointContents& contents,
                     FileAppender* file);
// The contents of an archive that write_archive() has written, for a state with these parts.
StatusOr<CheckpointContents> read_archive(LockedFile* file, const TrainingState& state);

// Steps and options of an optimizer, and its tensors by the names of the parameters.
void put_optimizer(const TrainingState& state, CheckpointContents* out);
// The reverse: an archive that has been read, into names.
void put_optimizer_archive(torch::serialize::InputArchive& archive, const TrainingState& state,
                           CheckpointContents* out);
Status check_optimizer(const CheckpointContents& contents, const TrainingState& state);
void load_optimizer(const CheckpointContents& contents, const TrainingState& state);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_CHECKPOINT_CONTENTS_H_
