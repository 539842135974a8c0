#ifndef WEFT_RPC_SERVICE_H_
#define WEFT_RPC_SERVICE_H_

// Service: a part of the framework (or of a program) that answers calls of its own on every worker
// that lists it at join, before the transport accepts, so that no peer can call one that is not
// there yet. A call for a service that the callee did not list is answered `unimplemented`, naming
// it.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/runtime.h"
#include "weft/rpc/untyped_call.h"

namespace weft {

class WEFT_API Service {
 public:
  virtual ~Service() = default;
  // Their names begin with '@' and the service's name: "@group.report".
  virtual std::vector<Method> methods() = 0;
  // A worker died or left. On a thread of the worker; short.
  virtual void on_worker_gone(const WorkerInfo& worker, const Status& why) {
    (void)worker, (void)why;
  }
  // The worker leaves: fail what waits. Called once.
  virtual void on_shutdown(const Status& why) { (void)why; }
};

struct ServiceContext {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Executor> executor;
  std::shared_ptr<const Worker> worker;  // owns nothing
};

// Copyable, so that join options are; called once per join.
using ServiceFactory = std::function<std::shared_ptr<Service>(const ServiceContext& context)>;

}  // namespace weft

#endif  // WEFT_RPC_SERVICE_H_
