#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_ANOMALY_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_ANOMALY_H_

// What LibTorch's engine does in anomaly mode (torch::autograd::DetectAnomalyGuard), for nodes that
// we call ourselves. The mode is one of the process, so each worker has its own; what it finds
// travels in the error of the pass. All threads.

#include "torch/csrc/autograd/variable.h"
#include "weft/common/error.h"
#include "weft/dist_autograd/internal/torch_compat.h"

namespace weft::internal {

// `why`, with the calls that made the node in its text, when the mode was on then and is now.
Status with_forward_calls(Node* node, Status why);
// Throws when the mode looks for NaN and one of `gradients`, which the node gave, has one.
void check_nan(const Node& node, const torch::autograd::variable_list& gradients);

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_ANOMALY_H_
