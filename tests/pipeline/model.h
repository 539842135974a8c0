#ifndef WEFT_TESTS_PIPELINE_MODEL_H_
#define WEFT_TESTS_PIPELINE_MODEL_H_

// What the tests of the runtime share: a model in layers, in one process and as stages, and workers
// that list the services.

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "weft/dist_optim/optim.h"
#include "weft/dist_optim/service.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/service.h"
#include "weft/rref/remote_module.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {

constexpr int64_t kWidth = 6;

// Linear, LayerNorm by hand, tanh; `shared` uses the weights a second time on the way. The values
// are a function of `index`.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t index, bool shared);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
  at::Tensor bias;
  at::Tensor scale;
  bool shared;
  // Throws at the n-th forward from now; 0: never.
  int64_t throws_in = 0;
  void throw_in(int64_t n) { throws_in = n; }
  // What it gives from now on has no gradient.
  void detach() { detached = true; }
  bool detached = false;
  // Its parameters are not trained from now on.
  void freeze() {
    for (at::Tensor& p : parameters()) p.set_requires_grad(false);
  }
  // Forwards, and of these the ones that recorded a graph.
  std::vector<int64_t> counts() const { return {forwards, graphs}; }
  int64_t forwards = 0;
  int64_t graphs = 0;
};

// cos(0), cos(factor), ... as n rows of kWidth.
at::Tensor numbers(int64_t n, double factor);
// A stage's state_dict().
using State = std::map<std::string, at::Tensor>;
void expect_equal(const std::vector<State>& a, const std::vector<State>& b);

at::Tensor squares(const at::Tensor& output, const at::Tensor& target);
at::Tensor constant(const at::Tensor& output, const at::Tensor& target);  // without a gradient
Library model_library();
void add_pipeline_services(JoinOptions* join);

// `stages` blocks, placed as the plan says, and a pipeline over them; worker 0 makes it. `device`: of each
// worker, where its blocks are.
struct World {
  explicit World(pipeline::Plan plan, pipeline::PipelineOptions options = {}, bool shared = false,
                 std::function<void(int, JoinOptions*)> adjust = {},
                 const std::string& device = "cpu");
  ~World();
  pipeline::Pipeline make(pipeline::PipelineOptions options);
  void expect_nothing_left();

  pipeline::Plan plan;
  std::unique_ptr<Cluster> cluster;
  std::vector<RemoteModule<BlockImpl>> blocks;
  std::unique_ptr<pipeline::Pipeline> pipe;
};

// The same model in this process.
struct Local {
  explicit Local(int stages, bool shared = false, const std::string& device = "cpu");
  // Sums the gradients of the micro-batches in their order; the loss of the batch.
  double step(const at::Tensor& x, const at::Tensor& y, int micro_batches);
  std::vector<std::shared_ptr<BlockImpl>> blocks;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_PIPELINE_MODEL_H_
