#ifndef WEFT_TESTS_DIST_AUTOGRAD_RANDOM_GRAPH_H_
#define WEFT_TESTS_DIST_AUTOGRAD_RANDOM_GRAPH_H_

// RandomGraph: a computation drawn from a seed, to be run through several workers and on one. All
// its numbers are small integers, so sums do not depend on their order and results are equal bit by
// bit.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/library.h"

namespace weft::testing {

class RandomGraph {
 public:
  // Parameters by worker.
  using Parameters = std::vector<std::vector<at::Tensor>>;

  RandomGraph(uint64_t seed, int workers);

  static Parameters make_parameters(int workers);
  // What the graph calls; `parameters` are at the workers of the same number.
  static Library library(const Parameters& parameters);

  // Its losses, some of which share nodes. `worker`: the calls are made from there.
  std::vector<at::Tensor> through(const Worker& worker, const Parameters& parameters) const;
  std::vector<at::Tensor> alone(const Parameters& parameters) const;

  size_t losses() const { return losses_.size(); }

 private:
  struct Step {
    enum class How { kHere, kCall, kAsync, kRemote } how = How::kHere;
    std::vector<int64_t> path{};  // workers, one calling the next; each applies the operation
    int64_t op = 0;
    int64_t a = 0;
    int64_t b = 0;
  };
  std::vector<at::Tensor> run(const Parameters& parameters,
                              const std::function<std::vector<at::Tensor>(
                                  const Step&, const at::Tensor&, const at::Tensor&)>& apply) const;

  std::vector<Step> steps_;
  std::vector<int64_t> losses_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_DIST_AUTOGRAD_RANDOM_GRAPH_H_
