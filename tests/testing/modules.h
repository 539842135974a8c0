#ifndef WEFT_TESTS_TESTING_MODULES_H_
#define WEFT_TESTS_TESTING_MODULES_H_

// copy_of(net): another module of its class, with parameters of its own that have the same values.

#include <memory>

#include "torch/nn/module.h"
#include "torch/utils.h"

namespace weft::testing {

template <class ModuleImpl>
std::shared_ptr<ModuleImpl> copy_of(const std::shared_ptr<ModuleImpl>& from) {
  auto to = std::make_shared<ModuleImpl>();
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < from->parameters().size(); ++i) {
    to->parameters()[i].copy_(from->parameters()[i]);
  }
  return to;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_MODULES_H_
