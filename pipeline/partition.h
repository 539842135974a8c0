#ifndef WEFT_PIPELINE_PARTITION_H_
#define WEFT_PIPELINE_PARTITION_H_

// partition(): which layers of a model make up which stage, so that the slowest stage is as fast as
// possible. Layers stay in their order, every stage has at least one, and each layer is in exactly
// one stage.
//
//   const std::vector<LayerCost> layers = profile_layers(...);      // pipeline/profile.h
//   const Partition p = value_or_throw(partition({.layers = layers, .stages = 4}));
//   // stage s has the layers p.begins[s] to p.begins[s + 1] - 1
//
//   PART-1  `begins` has one entry more than there are stages; it begins with 0, ascends strictly and
//           ends with the number of layers: no layer is lost or repeated.
//   PART-2  no stage holds more than its cap, and no cut carries more than the bytes allowed.
//   PART-3  of all such partitions the slowest part (a stage's computing, or an edge's transfer) is
//           the shortest possible, and of those the bytes between stages are the fewest.
//
// A dynamic programme over (stages, layers): exact, at most stages x layers^2 / 2 looks. Pure; any
// thread.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/pipeline/simulator.h"

namespace weft::pipeline {

// One layer and one micro-batch.
struct LayerCost {
  std::string name{};      // for errors
  Ticks forward = 0;       // time of it
  Ticks input_grad = 0;    // time of its part of the backward
  Ticks weight_grad = 0;   // time of the other part
  int64_t parameters = 0;  // bytes: weights, their gradients and the optimizer's state
  int64_t activation = 0;  // bytes that are kept from the forward to the backward
  int64_t output = 0;      // bytes that go to the next layer
};

struct PartitionRequest {  // what is divided, and within which bounds
  std::vector<LayerCost> layers{};
  int stages = 0;
  // Bytes that a stage may hold: one per stage, or one for all; empty: any number.
  std::vector<int64_t> memory_caps{};
  // Micro-batches whose activations a stage holds at once: one per stage, or one for all; empty: 1.
  // Verdict::peak_activations has them for a plan with one stage per worker.
  std::vector<int64_t> live{};
  // How long an edge takes for its bytes, each way; 0: no time.
  int64_t bytes_per_kilotick = 0;
  int64_t edge_cap = 0;  // bytes that may go over an edge; 0: any number
};

struct Partition {
  std::vector<int> begins{};  // PART-1
  Ticks slowest = 0;
  int64_t edge_bytes = 0;  // of all edges, one way

  int stages() const { return static_cast<int>(begins.size()) - 1; }
};

inline constexpr int kMaxLayers = 4096;  // of one request

// Kind invalid_argument for fewer layers than stages, negative costs, or lists of another length;
// kind resource, naming the layer or the stages, when no partition keeps the caps.
WEFT_API StatusOr<Partition> partition(const PartitionRequest& request);

// What `begins` costs, and whether it is one: PART-1 and PART-2, or the error that names the first
// stage or layer that is wrong.
WEFT_API StatusOr<Partition> evaluate_partition(const PartitionRequest& request,
                                                std::vector<int> begins);

// By a text:
//
//   auto           partition()
//   uniform        the same number of layers everywhere, the first stages one more
//   3,2,2,1        so many layers, stage by stage; their sum is the number of layers
//   match:PATTERN  the layers whose name is like the pattern (* any text, ? any character) are
//                  divided evenly, the others weigh nothing
//
// Caps hold for all of them.
WEFT_API StatusOr<Partition> partition_by(std::string_view how, const PartitionRequest& request);

// Each stage's costs, for simulate(): sums over its layers.
WEFT_API std::vector<StageCost> stage_costs(const std::vector<LayerCost>& layers,
                                            const Partition& partition);

// For `weft-plan pipeline --profile`: a line for each layer, its name and the six numbers in their order,
// after the title "weft-layers 1"; lines that begin with # say nothing. Kind invalid_argument for a name
// with blanks, or naming the line and what was expected there.
WEFT_API StatusOr<std::string> layer_costs_to_text(const std::vector<LayerCost>& layers);
WEFT_API StatusOr<std::vector<LayerCost>> layer_costs_from_text(std::string_view text);

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_PARTITION_H_
