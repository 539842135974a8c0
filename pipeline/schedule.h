#ifndef WEFT_PIPELINE_SCHEDULE_H_
#define WEFT_PIPELINE_SCHEDULE_H_

// Schedules: functions from sizes to plans. Every one is complete and free of deadlock for any
// number of workers p >= 1 and micro-batches m >= 1; docs/pipeline.md says what each costs. Stages
// form a chain. They throw weft::Error, kind invalid_argument, for sizes below 1 or above the
// bounds of a plan. Pure; any thread.
//
//   name            stages per worker    live micro-batches at worker r
//   sequential      1                    1
//   gpipe           1                    m
//   1f1b            1                    min(m, p-r)
//   1f1b+k          1                    min(m, p-r+k), 1 on the last
//   interleaved     v                    p (1 + (p-1)/(p v)), counted in whole workers' shares
//   looped_bfs      v                    m
//   zb-h1           1                    min(m, p)
//   zb-h2           1                    min(m, 2p-1)
//   zb-v            2, as a V            min(m, p)
//   pipedream       1, asynchronous      min(m, p-r), with as many versions of the weights

#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/pipeline/plan.h"

namespace weft::pipeline {

WEFT_API Plan sequential(int workers, int micro_batches);
WEFT_API Plan gpipe(int workers, int micro_batches);
// `extra` warm-up micro-batches on every worker but the last: for networks with latency.
WEFT_API Plan one_f_one_b(int workers, int micro_batches, int extra = 0);
WEFT_API Plan interleaved(int workers, int micro_batches, int chunks = 2);
WEFT_API Plan looped_bfs(int workers, int micro_batches, int chunks = 2);
WEFT_API Plan zb_h1(int workers, int micro_batches);
WEFT_API Plan zb_h2(int workers, int micro_batches);
WEFT_API Plan zb_v(int workers, int micro_batches);
WEFT_API Plan pipedream(int workers, int micro_batches);

// The plan with a reduction of each stage before its step, for replicas. Those of tied stages, with
// their steps, go to the end of their worker's list, because they wait for each other. Kind
// invalid_argument for an asynchronous plan.
WEFT_API Plan with_reductions(Plan plan);
// The plan with groups of stages that have a weight in common, and reductions of these.
WEFT_API Plan with_tied(Plan plan, std::vector<std::vector<int>> groups);
// The plan with forwards that keep nothing but their inputs and run again before their backward: of
// the given stages, all without any; of every micro-batch, or `except_last` of all but the last. The
// last stage never, since its backward follows its forward. Kind invalid_argument for a stage that
// is not there.
WEFT_API Plan with_recompute(Plan plan, const std::vector<int>& stages = {},
                             bool except_last = false);
// The plan with backwards in two parts, one directly after the other, where another worker waits for
// the gradient of the inputs: it leaves before the weights' gradient is computed. Order, live
// micro-batches, messages and gradients stay, a step loses (p-1) W of its drain. The plan is called
// "...+split", its transfers are put in anew. Kind invalid_argument for a plan without a whole backward, or an
// asynchronous one.
WEFT_API Plan with_split_backwards(Plan plan);

// By name: those above, "1f1b+2", "interleaved:4", "looped_bfs:4", and with "+split" behind it any that
// has whole backwards. Kind invalid_argument, listing the names, for another one.
WEFT_API StatusOr<Plan> make_schedule(std::string_view name, int workers, int micro_batches);
// One of each, with two chunks where there are chunks, and with split backwards 1f1b.
WEFT_API std::vector<std::string> schedule_names();

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_SCHEDULE_H_
