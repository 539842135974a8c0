#ifndef WEFT_DIST_OPTIM_USER_OPTIMIZER_H_
#define WEFT_DIST_OPTIM_USER_OPTIMIZER_H_

// A torch::optim::Optimizer of your own in a DistributedOptimizer:
//
//   weft::Library lib("app");                                        // at every worker
//   weft::optimizer_<Lion, double, double>(lib, "Lion");             // Lion(parameters, lr, beta)
//   ...
//   weft::DistributedOptimizer<Lion> optimizer(worker, parameters, {}, 1e-4, 0.9);
//
// Each owner makes one over its parameters and calls step() without a closure, with gradients in
// `.grad` of aliases of the parameters; one step at a time. What its constructor or step() throws
// reaches the caller. LibTorch's own classes can be given, too; those of weft::optim need no lock
// and no registration.
//
// This header has LibTorch's for optimizers, which are large; weft.h does not include it.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch/optim/optimizer.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/spi/owner_part.h"
#include "weft/rpc/library.h"

namespace weft {
namespace internal {

// UserOptimizer: an owner's part around a torch::optim::Optimizer of the user. It is given aliases
// of the parameters, which share their memory and have gradients and versions of their own: so
// `.grad` of the parameters themselves is not touched (OPT-6), nothing stale is ever applied, and
// several optimizers do not meet in a `.grad`. A step holds the locks of all its parameters,
// whatever the isolation.
class WEFT_API UserOptimizer : public OwnerOptimizer {
 public:
  using Make =
      std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;
  explicit UserOptimizer(Make make);

 private:
  void added(const std::vector<Slot>& slots, size_t first, const PackedOptions& options) override;
  void removed(size_t first) override;
  void check_options(const PackedOptions& options) const override;
  Status check_gradient(const Slot& slot, const at::Tensor& gradient,
                        const PackedOptions& options) const override;
  Status update(const std::vector<Slot>& slots, const std::vector<Update>& updates,
                const Options& options, Isolation isolation, int64_t* touched) override;
  bool one_by_one() const override { return false; }
  OwnerStateDict save(const std::vector<Slot>& slots) override;
  void load(const std::vector<Slot>& slots, const OwnerStateDict& state, bool commit) override;

  const Make make_;
  // Guarded by the locks of all parameters.
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<at::Tensor> aliases_;  // by slot
  std::vector<int64_t> groups_;      // ours, of each of optimizer_'s
  // Whether tensors count what the class does to them: `p.sub_()` they do, `p.data().sub_()` they do
  // not. Its first step that succeeds shows it.
  enum class Counted : uint8_t { kUnknown, kYes, kNo };
  Counted counted_ = Counted::kUnknown;
};

template <class T>
class ServedOptimizer final : public UserOptimizer {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, T>,
                "weft: an optimizer is a torch::optim::Optimizer");
  static_assert(!IsLBFGS<T>::value,
                "weft: LBFGS evaluates the loss again within a step, by a closure; a loss over "
                "several workers cannot be evaluated from their owners. Use another optimizer");

 public:
  template <class... Args>
  explicit ServedOptimizer(Args... args) requires(
      std::is_constructible_v<T, std::vector<at::Tensor>, Args...>)
      : UserOptimizer([... args = std::move(args)](std::vector<at::Tensor> parameters) {
          return std::make_unique<T>(std::move(parameters), args...);
        }) {}
};

}  // namespace internal

// `Args`: what the constructor takes after the parameters. Throws as Library::class_ does.
template <class T, class... Args>
void optimizer_(Library& library, std::string_view name) {  // NOLINT
  auto def = library.class_<internal::ServedOptimizer<T>>(name, {.concurrent = true});
  def.template constructor<Args...>();
  internal::def_owner_methods(def);
}

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_USER_OPTIMIZER_H_
