#ifndef WEFT_DIST_OPTIM_UPDATE_RULE_H_
#define WEFT_DIST_OPTIM_UPDATE_RULE_H_

// UpdateRule: what one of weft::optim does to one parameter. Options travel as numbers in the order
// in which the tag visits them.
//
//   auto rule = make_update_rule("Adam");
//   PackedOptions options = pack_options<optim::Adam>({.lr = 1e-2});
//   if (!rule->prepared(options, state)) rule->prepare(options, parameter, &state);
//   rule->update(options, parameter, gradient, &state);
//
// For rows of a table (weft/ps): a matrix of the rows that a push touches, with the matching rows of
// the buffers, is updated as one parameter, when its rows have seen equally many steps. So rows that
// a push does not touch do not change: neither their values nor their buffers nor their step counts
// (the lazy rule), also under momentum, weight decay and Adam, where a dense parameter would.
//
// A rule has no state of its own. Calls for different parameters: any thread at once; for one
// parameter one at a time, but update() alone may be called by several when prepared() is true
// (hogwild), as far as LibTorch's own operators allow it.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/dist_optim/spi/messages.h"

namespace weft {

using internal::pack_options;
using internal::PackedOptions;

// State of one parameter. `buffers` are parallel to the rule's names, undefined until needed.
struct ParameterState {
  std::atomic<int64_t> steps{0};
  std::vector<at::Tensor> buffers{};
  // How many steps there had been when each buffer was made; 0 where there is no entry.
  std::vector<int64_t> made_after{};
};

class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  virtual std::string name() const = 0;                              // "Adam"
  virtual const std::vector<std::string>& option_names() const = 0;  // in order
  virtual const std::vector<std::string>& buffer_names() const = 0;  // in order
  // Kind invalid_argument, naming the option.
  virtual Status check_options(const PackedOptions& options) const = 0;
  // Whether it takes a sparse gradient, and a dense one.
  virtual Status check_sparse(const PackedOptions& options) const = 0;
  virtual Status check_dense(const PackedOptions& options) const = 0;
  // All that update() needs is there.
  virtual bool prepared(const PackedOptions& options, const ParameterState& state) const = 0;
  virtual void prepare(const PackedOptions& options, const at::Tensor& parameter,
                       ParameterState* state) const = 0;
  // Whether a buffer has one number for each row of the parameter (its first dimension) and not one
  // for each element. REQUIRES: 0 <= buffer < buffer_names().size().
  virtual bool by_row(size_t buffer) const = 0;
  // What an element of a buffer is before the first step; no value: these options need no such buffer.
  virtual std::optional<double> first_value(const PackedOptions& options, size_t buffer) const = 0;
  // REQUIRES: grad mode is off, prepared(); `gradient` has the parameter's shape and type. It is
  // not written to.
  virtual void update(const PackedOptions& options, at::Tensor parameter, at::Tensor gradient,
                      ParameterState* state) const = 0;
  // Whether a gradient may come with the values that it was computed with, which others have changed since.
  virtual bool compensates_delay() const = 0;
  // update() of such a gradient. REQUIRES: compensates_delay(); `then` has the parameter's shape and type, and is not
  // written to.
  virtual void update_delayed(const PackedOptions& options, at::Tensor parameter,
                              at::Tensor gradient, const at::Tensor& then,
                              ParameterState* state) const = 0;
  // Where update() is parameter.add_(gradient, by) with these options, whatever the step: `by`.
  virtual std::optional<double> plain_step(const PackedOptions& options) const = 0;
};

// Null: there is none of that name.
WEFT_API std::shared_ptr<const UpdateRule> make_update_rule(std::string_view name);
WEFT_API std::vector<std::string> update_rule_names();

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_UPDATE_RULE_H_
