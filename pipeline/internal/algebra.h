#ifndef WEFT_PIPELINE_INTERNAL_ALGEBRA_H_
#define WEFT_PIPELINE_INTERNAL_ALGEBRA_H_

// A plan executed over a prime field: stage s gives y = a_s * (sum of its inputs, each times a
// factor of its edge) + b_s, and a stage without inputs has an x of its own per micro-batch. Every
// result and every gradient then has a value that a wrong order, a lost or doubled gradient, or one
// of another micro-batch does not hit but by a chance of 2^-61. Pure; any thread.

#include <cstdint>
#include <optional>
#include <string>

#include "weft/pipeline/plan.h"

namespace weft::pipeline::internal {

// What is wrong with the gradients of a plan that runs to its end, or nothing. Tied stages share a.
// An asynchronous plan's are those of the weights that the forward used.
std::optional<std::string> find_wrong_gradient(const Plan& plan, uint64_t seed);

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_ALGEBRA_H_
