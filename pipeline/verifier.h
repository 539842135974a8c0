#ifndef WEFT_PIPELINE_VERIFIER_H_
#define WEFT_PIPELINE_VERIFIER_H_

// verify(): a proof that a plan is right, or what is wrong with it, before anything runs.
//
//   const Verdict v = verify(plan);
//   if (!v.ok()) ...          // v.problems: each names the cycle or the first wrong action
//   puts(v.certificate());    // what was proved, as text
//
// What is proved, in this order (a later one is asked only when it can be answered):
//
//   VERIFY-1  every send has its receive, at the workers of its edge, and the other way round.
//   VERIFY-2  no deadlock, with buffers of 0, 1 and any number of messages between two workers,
//             with sends that wait and sends that do not.
//   VERIFY-3  every stage has one forward and one backward (whole, or split) of each micro-batch,
//             at its worker, after what it needs; every gradient is in before its reduction and its
//             step, once.
//   VERIFY-4  no worker holds more activations than the cap.
//   VERIFY-5  the gradients are those of the model without a pipeline: the plan is executed over a
//             prime field with random linear stages, skips and shared weights included.
//
// A worker's list is executed in its order and transfers are matched by what they carry, so what
// one execution reaches, every one does: the proof of VERIFY-2 needs only one per rule of buffers.
// Pure; any thread.

#include <cstdint>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/pipeline/plan.h"

namespace weft::pipeline {

struct VerifyOptions {  // what the plan is held against
  // Live activations (whole stages' micro-batches) that a worker may hold; 0: any number.
  int64_t memory_cap = 0;
  uint64_t seed = 1;  // of the random stages
};

struct Problem {     // one thing that is wrong with a plan
  std::string rule;  // "VERIFY-2"
  std::string text;
  friend bool operator==(const Problem&, const Problem&) = default;
};

struct WEFT_API Verdict {
  std::vector<Problem> problems;  // the first of each rule that is broken
  int64_t sends = 0;
  int64_t actions = 0;
  std::vector<int64_t> peak_activations;  // by worker
  std::string schedule;
  int stages = 0;
  int micro_batches = 0;

  bool ok() const { return problems.empty(); }
  // OK, or kind invalid_argument with the first problem.
  Status status() const;
  // A few lines: what was proved, or the problems.
  std::string certificate() const;
};

WEFT_API Verdict verify(const Plan& plan, const VerifyOptions& options = {});

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_VERIFIER_H_
