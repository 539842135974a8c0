// Many small parameters: what an optimizer over them costs to make and to use.

#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/sgd.h>

#include <sstream>
#include <stdexcept>
#include <vector>

#include "weft/bench/autograd/models.h"
#include "weft/bench/line_protocol.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/rref/rref.h"

namespace weft::bench {
namespace {

constexpr int64_t kGroup = 2000;  // parameters: some 3,000 references go with one message

}  // namespace

std::string many_parameters(const Worker& worker, std::istream& in) {
  int64_t count = 0;
  if (!(in >> count) || count < 1) throw std::invalid_argument("many COUNT");
  std::vector<at::Tensor> leaves;
  std::vector<std::vector<RRef<at::Tensor>>> groups;
  for (int64_t i = 0; i < count; ++i) {
    if (i % kGroup == 0) groups.emplace_back();
    leaves.push_back(at::zeros({4}).set_requires_grad(true));
    groups.back().push_back(RRef<at::Tensor>::local(worker, leaves.back()));
  }
  auto start = Clock::now();
  DistributedOptimizer<optim::SGD> optimizer(worker, groups[0], {.lr = 1e-4});
  for (size_t g = 1; g < groups.size(); ++g) optimizer.add_param_group(groups[g], {.lr = 1e-4});
  const double made = seconds_since(start);

  DistAutogradContext context(worker);
  context.backward({at::cat(leaves).sum()});
  start = Clock::now();
  for (const at::Tensor& leaf : leaves) {
    if (!context.gradient(leaf).defined()) throw std::runtime_error("a gradient is missing");
  }
  const double gradients = seconds_since(start);
  optimizer.step(context);  // warm
  start = Clock::now();
  optimizer.step(context);
  const double step = seconds_since(start);

  torch::optim::SGD theirs(leaves, 1e-4);
  for (at::Tensor& leaf : leaves) leaf.mutable_grad() = at::ones({4});
  theirs.step();
  start = Clock::now();
  theirs.step();
  std::ostringstream out;
  out << "{\"made\":" << made * 1e3 << ",\"gradients\":" << gradients * 1e3
      << ",\"step\":" << step * 1e3 << ",\"torch_step\":" << seconds_since(start) * 1e3 << "}";
  return out.str();
}

}  // namespace weft::bench
