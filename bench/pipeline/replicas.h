#ifndef WEFT_BENCH_PIPELINE_REPLICAS_H_
#define WEFT_BENCH_PIPELINE_REPLICAS_H_

// Two replicas of two sleeping stages, ZB-H1: workers 0 and 1 are one, 2 and 3 the other. Each stage has
// four buckets of gradients, which are there at the quarters of its last weights' gradient.

#include <iosfwd>
#include <memory>
#include <string>

#include "weft/pipeline/service.h"
#include "weft/rpc/library.h"
#include "weft/rpc/worker.h"

namespace weft::bench {

// What all workers register, and what their pipeline service makes of a stage; null: no replicas.
void def_replicas(Library* library);
std::shared_ptr<pipeline::StageCompute> make_replica(const ServiceContext& context,
                                                     const pipeline::Plan& plan, int stage);

// At worker 0: "U_US BYTES COUNT"; a stage's gradients are so many bytes.
//   {"without": [us of a step], "with": [us of a step that is reduced], "late": [us of one in which nothing is
//    reduced before a stage has all of its gradients], "reduce": [us of a reduction of one stage by itself]}
std::string replicas(const Worker& worker, std::istream& in);

}  // namespace weft::bench

#endif  // WEFT_BENCH_PIPELINE_REPLICAS_H_
