#ifndef WEFT_BENCH_PIPELINE_STAGES_H_
#define WEFT_BENCH_PIPELINE_STAGES_H_

// The stages whose backward is taken whole and in two parts: a, a chain of Linear, ReLU, LayerNorm,
// Linear, Tanh and Linear; b, the same with one Linear three times on one path; c, the chain with
// residual skips.

#include <string>
#include <utility>
#include <vector>

namespace weft::bench {

// Microseconds of `count` backwards, whole and in two parts, in turns.
std::pair<std::vector<double>, std::vector<double>> time_split(const std::string& stage, int count);

}  // namespace weft::bench

#endif  // WEFT_BENCH_PIPELINE_STAGES_H_
