#ifndef WEFT_DIST_OPTIM_INTERNAL_UPDATE_RULE_H_
#define WEFT_DIST_OPTIM_INTERNAL_UPDATE_RULE_H_

// UpdateRule: what one of weft::optim does to one parameter. Options travel as numbers in the order
// in which the tag visits them.
//
// A rule has no state of its own. Calls for different parameters: any thread at once; for one
// parameter one at a time, but update() alone may be called by several when prepared() is true
// (hogwild), as far as LibTorch's own operators bear it.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/dist_optim/messages.h"

namespace weft::internal {

// Of one parameter. `buffers` are parallel to the rule's names, undefined until they are needed.
struct ParameterState {
  std::atomic<int64_t> steps{0};
  std::vector<at::Tensor> buffers{};
};

class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  virtual std::string name() const = 0;
  virtual const std::vector<std::string>& option_names() const = 0;
  virtual const std::vector<std::string>& buffer_names() const = 0;
  // Kind invalid_argument, naming the option.
  virtual Status check_options(const PackedOptions& options) const = 0;
  // Whether it can deal with a sparse gradient.
  virtual Status check_sparse(const PackedOptions& options) const = 0;
  // All that update() needs is there.
  virtual bool prepared(const PackedOptions& options, const ParameterState& state) const = 0;
  virtual void prepare(const PackedOptions& options, const at::Tensor& parameter,
                       ParameterState* state) const = 0;
  // REQUIRES: grad mode is off, prepared(); `gradient` has the parameter's shape and type. It is
  // not written to.
  virtual void update(const PackedOptions& options, at::Tensor parameter, at::Tensor gradient,
                      ParameterState* state) const = 0;
};

// Null: there is none of that name.
WEFT_API std::shared_ptr<const UpdateRule> make_update_rule(std::string_view name);
WEFT_API std::vector<std::string> update_rule_names();

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_UPDATE_RULE_H_
