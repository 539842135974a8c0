#ifndef WEFT_EXAMPLES_ASYNC_PS_MODEL_H_
#define WEFT_EXAMPLES_ASYNC_PS_MODEL_H_

// The classifier: 64 pixels, 64 hidden units, 10 digits. Its parameters are a list of tensors, in
// the order of parameter_names(), so that they travel as they are.
//
//   Parameters p = initial_parameters(/*seed=*/1);
//   LossAndGradients g = loss_and_gradients(p, batch);   // by LibTorch's autograd
//   p = Adam(...).step(p, g.gradients);              // new tensors; the old ones stay as they are
//   save(p, "model.pt");
//
// Functions without state; Adam: one thread at a time.

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/examples/async_ps/digits.h"

namespace async_ps {

using Parameters = std::vector<at::Tensor>;

const std::vector<std::string>& parameter_names();
Parameters initial_parameters(uint64_t seed);

struct LossAndGradients {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};
LossAndGradients loss_and_gradients(const Parameters& parameters, const Images& batch);

// What the first layer is given, and what the last one's results cost.
at::Tensor inputs(const Images& batch);
at::Tensor loss_of(const at::Tensor& logits, const Images& batch);

// Part of the images whose digit is recognised, 0 to 1.
double accuracy(const Parameters& parameters, const Images& images);

// A file for torch.load of Python and torch::pickle_load of LibTorch: a tuple of (name, tensor)
// pairs. Throws std::runtime_error. A reader sees the whole file or none.
void save(const Parameters& parameters, const std::string& path);

// Settings of Adam below; with --mode autograd, of weft's AdamW.
struct AdamSettings {
  double rate = 5e-3;
  double weight_decay = 0.01;
  double beta1 = 0.9;
  // Shorter memory than usual: a run has little more than a thousand steps.
  double beta2 = 0.99;
};

// Adam with decoupled weight decay; the rate falls linearly to zero over `steps`.
class Adam {
 public:
  Adam(const Parameters& like, int64_t steps);
  Parameters step(const Parameters& parameters, const std::vector<at::Tensor>& gradients);

 private:
  const int64_t steps_;
  int64_t taken_ = 0;
  std::vector<at::Tensor> mean_;
  std::vector<at::Tensor> square_;
};

}  // namespace async_ps

#endif  // WEFT_EXAMPLES_ASYNC_PS_MODEL_H_
