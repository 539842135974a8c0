#ifndef WEFT_EXAMPLES_EMBEDDED_DIGITS_H_
#define WEFT_EXAMPLES_EMBEDDED_DIGITS_H_

// The classifier of remote_embedding and ddp_rpc_hybrid: a table of embeddings, which lies at a
// server, and dense layers above it, which each trainer has.
//
//   weft::RemoteModule<Table> table(worker, "ps0", kRows, kWidth);
//   torch::nn::Sequential dense = dense_layers();
//   at::Tensor logits = dense->forward(table.forward(tokens(images.pixels)));
//
// Modules are used by one thread at a time.

#include <cstdint>

#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "ATen/TensorOperators.h"
#include "ATen/core/Tensor.h"
#include "ATen/ops/arange.h"

namespace embedded_digits {

constexpr int64_t kPixels = 64;
constexpr int64_t kLevels = 17;  // of intensity: 0 to 16
constexpr int64_t kRows = kPixels * kLevels;
constexpr int64_t kWidth = 32;  // of a row of the table
constexpr int64_t kHidden = 32;
constexpr int64_t kClasses = 10;

constexpr int64_t kHeldOut = 360;
constexpr int64_t kBatchSize = 32;
constexpr double kRate = 0.05;
constexpr double kTarget = 0.1;  // the loss that counts as learned

// One row for each intensity that each pixel may have. An image is a bag of 64 of these tokens.
struct TableImpl : torch::nn::Module {
  TableImpl(int64_t rows, int64_t width) {
    auto options = torch::nn::EmbeddingBagOptions(rows, width).mode(torch::kSum).sparse(true);
    bag = register_module("bag", torch::nn::EmbeddingBag(options));
    // Small, because rows that no image of the training asks for stay as they are.
    torch::nn::init::normal_(bag->weight, /*mean=*/0, /*std=*/0.01);
  }
  // Tokens (image x pixel) to the sum of their rows (image x width).
  at::Tensor forward(const at::Tensor& tokens) { return bag(tokens); }

  torch::nn::EmbeddingBag bag = nullptr;
};
TORCH_MODULE(Table);

// Returns the number of the row for each pixel: image x pixel.
inline at::Tensor tokens(const at::Tensor& pixels) {
  return pixels.to(at::kLong) + at::arange(0, kRows, kLevels);
}

// Returns the layers above the table, with parameters drawn from LibTorch's default generator.
inline torch::nn::Sequential dense_layers() {
  return torch::nn::Sequential(torch::nn::Linear(kWidth, kHidden), torch::nn::ReLU(),
                               torch::nn::Linear(kHidden, kClasses));
}

}  // namespace embedded_digits

#endif  // WEFT_EXAMPLES_EMBEDDED_DIGITS_H_
