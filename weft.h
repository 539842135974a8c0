#ifndef WEFT_WEFT_H_
#define WEFT_WEFT_H_

// weft: distributed training for C++ programs on LibTorch. This header has what programs name; those
// that want less include the modules' own headers. Three of these are not here, because they want LibTorch's modules and
// samplers, which take four times as long to compile: collectives/ddp/distributed_sampler.h,
// collectives/ddp/sync_batch_norm.h and dist_optim/user_rule.h.
//
//   int main() {
//     auto worker = weft::join({.library = library()});   // name, rank and store from the launcher
//     if (worker.rank() == 0) at::Tensor y = weft::rpc_sync(worker, "worker1", &forward, x);
//     worker.shutdown();
//   }

#include <utility>

#include "weft/collectives/broadcast_object.h"
#include "weft/collectives/ddp/checkpoint.h"
#include "weft/collectives/ddp/comm_hooks.h"
#include "weft/collectives/ddp/data_parallel.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/join.h"
#include "weft/collectives/ddp/mixed_precision.h"
#include "weft/collectives/ddp/zero_redundancy_optimizer.h"
#include "weft/collectives/point_operations.h"
#include "weft/collectives/process_group.h"
#include "weft/collectives/service.h"
#include "weft/collectives/sparse.h"
#include "weft/common/error.h"
#include "weft/common/future.h"
#include "weft/common/time.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/rref_backward.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/local_optimizer.h"
#include "weft/dist_optim/lr_cycles.h"
#include "weft/dist_optim/lr_scheduler.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/service.h"
#include "weft/dist_optim/user_optimizer.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/service.h"
#include "weft/pipeline/stage_optimizer.h"
#include "weft/ps/client.h"
#include "weft/ps/hogwild.h"
#include "weft/ps/layers.h"
#include "weft/ps/server.h"
#include "weft/ps/trainer.h"
#include "weft/rpc/arena.h"
#include "weft/rpc/call.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/group.h"
#include "weft/rpc/inspect.h"
#include "weft/rpc/library.h"
#include "weft/rpc/safetensors.h"
#include "weft/rpc/struct.h"
#include "weft/rpc/worker.h"
#include "weft/rref/remote_module.h"
#include "weft/rref/rref.h"
#include "weft/rref/service.h"
#include "weft/store/spawn.h"
#include "weft/store/store.h"
#include "weft/transport/grpc_transport.h"

// Handlers are written with torch::Tensor whether or not LibTorch's own (heavy) headers are
// included.
namespace torch {
using at::Tensor;
}

namespace weft {

// How the services that join() lists are set up.
struct ServiceOptions {
  RRefOptions rref{};                          // leases and bounds of RRefs
  DistAutogradServiceOptions dist_autograd{};  // bounds of contexts and passes
};

namespace internal {
inline JoinOptions with_all_services(JoinOptions options, const ServiceOptions& services) {
  options.library.merge(dist_optim_library());
  options.services.push_back(group_service());
  options.services.push_back(collectives_service());
  options.services.push_back(rref_service(services.rref));
  options.services.push_back(dist_autograd_service(services.dist_autograd));
  options.services.push_back(dist_optim_service());
  options.services.push_back(ps_service());
  options.services.push_back(pipeline_service());
  return options;
}
}  // namespace internal

// Worker::join with every service of the framework listed. See JoinOptions for what is read from
// the launcher's environment, and Worker::join for errors.
inline Worker join(JoinOptions options = {}, const ServiceOptions& services = {}) {
  return Worker::join(internal::with_all_services(std::move(options), services));
}
inline StatusOr<Worker> try_join(JoinOptions options = {}, const ServiceOptions& services = {}) {
  return Worker::try_join(internal::with_all_services(std::move(options), services));
}

}  // namespace weft

#endif  // WEFT_WEFT_H_
