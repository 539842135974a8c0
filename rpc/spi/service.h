#ifndef WEFT_RPC_SPI_SERVICE_H_
#define WEFT_RPC_SPI_SERVICE_H_

// Service: a part of the framework (or of a program) that answers calls of its own on every worker
// that lists it at join, before the transport accepts, so that no peer can call one that is not
// there yet. A call for a service that the callee did not list is answered `unimplemented`, naming
// it.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/runtime.h"
#include "weft/common/wait_driver.h"
#include "weft/rpc/inspection.h"
#include "weft/rpc/spi/interceptor.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft {

class WEFT_API Service {
 public:
  virtual ~Service() = default;
  // Their names begin with '@' and the service's name: "@group.report".
  virtual std::vector<Method> methods() = 0;
  // Null: none. Asked once.
  virtual std::shared_ptr<Interceptor> interceptor() { return nullptr; }
  // A connection to this worker was lost and is there again: what was sent may not have arrived. On
  // a thread of the transport; short.
  virtual void on_reconnected(const WorkerInfo& worker) { (void)worker; }
  // A worker died or left. On a thread of the worker; short.
  virtual void on_worker_gone(const WorkerInfo& worker, const Status& why) {
    (void)worker, (void)why;
  }
  // The worker leaves, or the group has declared it dead: fail what waits, own nothing any more. Called once, before
  // shutdown() returns; after it, calls may still arrive.
  virtual void on_shutdown(const Status& why) { (void)why; }
  // Adds its numbers to Worker::debug_info().
  virtual void put_debug_info(std::map<std::string, int64_t>* out) const { (void)out; }
  // Adds tables of what it holds for an observer of the worker (weft-inspect). On a thread of the
  // transport, so that a worker whose handlers are all stuck can be looked at; short.
  virtual void put_inspection(Inspection* out) const { (void)out; }

  // ---- a graceful shutdown of a static group ----
  struct Load {            // what a shutdown waits for
    uint64_t pending = 0;  // messages of its own that are to be answered yet: waited for
    uint64_t live = 0;     // what sweep() would give back
  };
  virtual Load load() const { return {}; }  // now
  // All workers have arrived and no call is under way anywhere. Called on every worker when `live`
  // is not zero on one of them, and again once all have done it and are still: the first time ask
  // about what is not confirmed yet, the second time note what is alive, the third time give back
  // what is held at others.
  virtual void sweep() {}
  // The drain is over: an error of the shutdown, or OK.
  virtual Status drained() { return absl::OkStatus(); }
};

struct ServiceContext {                          // what a service is given at join
  std::shared_ptr<Runtime> runtime;              // the worker's
  std::shared_ptr<Executor> executor;            // the worker's pool
  std::shared_ptr<const Worker> worker;          // owns nothing
  std::shared_ptr<WaitDriver> driver = nullptr;  // of the transport; it may have none
};

// Copyable, so that join options are; called once per join.
using ServiceFactory = std::function<std::shared_ptr<Service>(const ServiceContext& context)>;

}  // namespace weft

#endif  // WEFT_RPC_SPI_SERVICE_H_
