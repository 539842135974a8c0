// What must not compile of optimizers, and in which words it is refused: read by
// compile_fail.py, as the cases in rpc.cc. Each fits in one line, for it is
// found by its line.

#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>

#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/user_optimizer.h"

namespace dist_optim_cases {
namespace {

using torch::optim::LBFGS;
using weft::DistributedOptimizer;
using weft::Library;
using weft::optimizer_;
using weft::Worker;
using Parameters = std::vector<weft::RRef<at::Tensor>>;

struct NoOptimizer {
  explicit NoOptimizer(const std::vector<at::Tensor>&) {}
};

}  // namespace

void good(const Worker& worker, Library& lib, const Parameters& parameters) {
  optimizer_<torch::optim::Adam, double>(lib, "Adam");
  DistributedOptimizer<torch::optim::Adam> theirs(worker, parameters, {}, 0.1);
  DistributedOptimizer<weft::optim::SGD> ours(worker, parameters, {.lr = 0.1});
}

#ifdef WEFT_BAD_CASES
void bad(const Worker& worker, Library& lib, const Parameters& parameters) {
  DistributedOptimizer<LBFGS> a(worker, parameters);  // bad: LBFGS evaluates the loss again
  optimizer_<LBFGS>(lib, "LBFGS");                    // bad: LBFGS evaluates the loss again
  optimizer_<NoOptimizer>(lib, "NoOptimizer");  // bad: an optimizer is a torch::optim::Optimizer
}
#endif

}  // namespace dist_optim_cases
