#ifndef WEFT_DIST_OPTIM_LOCAL_OPTIMIZER_H_
#define WEFT_DIST_OPTIM_LOCAL_OPTIMIZER_H_

// LocalOptimizer: one of weft::optim on parameters of this process and gradients that the caller
// has, without a context or another worker: for pipelines, whose stages sum their own gradients.
//
//   auto optimizer = LocalOptimizer::make("SGD", pack(options), module.parameters());
//   (*optimizer)->step(gradients);
//
// The same results as DistributedOptimizer's, bit for bit. One thread at a time.

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft {

class UpdateRule;
struct ParameterState;

// A rule by its name, with the numbers of its options in the order in which it visits them.
struct OptimizerChoice {
  std::string_view name{};  // "": none
  std::vector<double> options{};
};
// optimizer_choice<weft::optim::SGD>({.lr = 0.1})
template <class Tag>
OptimizerChoice optimizer_choice(const typename Tag::Options& options = {}) {
  OptimizerChoice choice{Tag::kName};
  Tag::visit(options, [&choice](const char*, auto value) {
    choice.options.push_back(static_cast<double>(value));
  });
  return choice;
}

class WEFT_API LocalOptimizer {
 public:
  // `names`: what state() calls the parameters; their numbers, if there are none. Kind
  // invalid_argument for an unknown rule, a bad option (named), or another number of names.
  static StatusOr<std::unique_ptr<LocalOptimizer>> make(std::string_view name,
                                                        std::vector<double> options,
                                                        std::vector<at::Tensor> parameters,
                                                        std::vector<std::string> names = {});
  ~LocalOptimizer();
  // One gradient for each parameter; an undefined one leaves its parameter. Kind invalid_argument
  // for another number of them.
  Status step(const std::vector<at::Tensor>& gradients);
  // From the next step on. Kind invalid_argument for a bad option (named), or another number of them.
  Status set_options(std::vector<double> options);
  // Copies of what it keeps: "0/steps", "0/momentum_buffer", or with names "layer1.weight/steps", of
  // each parameter that has stepped.
  std::map<std::string, at::Tensor> state() const;
  // Back to what state() gave. Kind invalid_argument, naming the first tensor that is missing,
  // unknown, or of another shape or type; nothing is changed then.
  Status load_state(const std::map<std::string, at::Tensor>& state);

 private:
  LocalOptimizer();

  std::shared_ptr<const UpdateRule> rule_;
  std::vector<double> options_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<ParameterState>> states_;
};

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_LOCAL_OPTIMIZER_H_
