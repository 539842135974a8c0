#ifndef WEFT_EXAMPLES_RL_POLICY_H_
#define WEFT_EXAMPLES_RL_POLICY_H_

// Policy: a network of 4, 64 and 3 units. Two of its outputs choose the action, the third estimates
// how much reward is still to come: the baseline of REINFORCE (R. Williams, 1992).
//
// right() from any thread, but not beside learn().

#include <cstdint>
#include <memory>

#include "ATen/core/Tensor.h"

namespace rl {

class Policy {
 public:
  explicit Policy(uint64_t seed);
  ~Policy();

  // For states [n, 4] the probability [n] of pushing to the right. Without a graph.
  at::Tensor right(const at::Tensor& states) const;
  // One step along the policy gradient: in states [n, 4], actions [n] (int64) were taken, and
  // returns [n] are the discounted rewards that came from there on.
  void learn(const at::Tensor& states, const at::Tensor& actions, const at::Tensor& returns);

 private:
  struct Parts;
  const std::unique_ptr<Parts> parts_;
};

}  // namespace rl

#endif  // WEFT_EXAMPLES_RL_POLICY_H_
