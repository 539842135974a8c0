#ifndef WEFT_EXAMPLES_PIPELINE_TEXT_MODEL_H_
#define WEFT_EXAMPLES_PIPELINE_TEXT_MODEL_H_

// A small character transformer, and any part of it as a stage. What the first stage embeds goes to
// the last one, too, which adds it before its head: a skip over all stages between.
//
// The first values of a layer are a function of the seed and its number alone, so that they do not
// depend on how the layers are divided.

#include <cstdint>
#include <vector>

#include <torch/nn/module.h>

#include "ATen/core/Tensor.h"

namespace pipeline_text {

struct ModelSizes {
  int64_t symbols = 0;   // different characters
  int64_t context = 32;  // characters of a sequence, at most
  int64_t width = 64;
  int64_t heads = 4;
  int64_t layers = 4;
};

// Layers `first` to `last - 1` of the transformer; with the embedding if it has the first of all,
// and with the head if it has the last.
class StageImpl : public torch::nn::Module {
 public:
  StageImpl(int64_t first, int64_t last, int64_t symbols, int64_t context, int64_t width,
            int64_t heads, int64_t layers, int64_t seed);

  // The first stage takes characters, int64 [sequence, time], and gives [sequence, time, width] and
  // its embedding; a middle one takes and gives the former; the last one takes both and gives
  // logits [sequence, time, symbols]. A stage that is all of them gives the logits.
  std::vector<at::Tensor> forward(std::vector<at::Tensor> inputs);

 private:
  struct Layer {
    at::Tensor norm1, qkv, out, norm2, up, down;
  };
  at::Tensor parameter(const std::string& name, at::IntArrayRef sizes, double scale, int64_t seed);
  at::Tensor run(const Layer& layer, const at::Tensor& x) const;

  const ModelSizes sizes_;
  const bool is_first_;
  const bool is_last_;
  int64_t drawn_ = 0;
  std::vector<Layer> layers_;
  at::Tensor embedding_, places_, head_norm_, head_;
};

// The mean cross entropy of logits with int64 [sequence, time].
at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace pipeline_text

#endif  // WEFT_EXAMPLES_PIPELINE_TEXT_MODEL_H_
