#ifndef WEFT_DIST_OPTIM_INTERNAL_FUNCTIONAL_H_
#define WEFT_DIST_OPTIM_INTERNAL_FUNCTIONAL_H_

// FunctionalOptimizer: an owner's part that computes with one of weft::optim.

#include <memory>
#include <string>
#include <vector>

#include "weft/dist_optim/spi/owner_part.h"
#include "weft/dist_optim/update_rule.h"

namespace weft::internal {

class WEFT_API FunctionalOptimizer final : public OwnerOptimizer {
 public:
  // "SGD"; throws, kind not_found.
  explicit FunctionalOptimizer(const std::string& rule);

 private:
  void added(const std::vector<Slot>& slots, size_t first, const PackedOptions& options) override;
  void removed(size_t first) override;
  void check_options(const PackedOptions& options) const override;
  Status check_gradient(const Slot& slot, const at::Tensor& gradient,
                        const PackedOptions& options) const override;
  Status update(const std::vector<Slot>& slots, const std::vector<Update>& updates,
                const Options& options, Isolation isolation, int64_t* touched) override;
  bool one_by_one() const override { return true; }
  OwnerStateDict save(const std::vector<Slot>& slots) override;
  void load(const std::vector<Slot>& slots, const OwnerStateDict& state, bool commit) override;

  ParameterState* state_of(size_t slot);
  // By slot.
  struct Loaded {
    std::vector<int64_t> steps{};
    std::vector<std::vector<at::Tensor>> buffers{};
  };
  // Throws what is missing, unknown or wrong.
  Loaded look_at(const std::vector<Slot>& slots, const OwnerStateDict& state) const;

  const std::shared_ptr<const UpdateRule> rule_;
  Mutex states_mutex_;
  // By slot; a state stays where it is.
  std::vector<std::unique_ptr<ParameterState>> states_ ABSL_GUARDED_BY(states_mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_FUNCTIONAL_H_
