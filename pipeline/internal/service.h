#ifndef WEFT_PIPELINE_INTERNAL_SERVICE_H_
#define WEFT_PIPELINE_INTERNAL_SERVICE_H_

// PipelineService: the parts of pipelines at one worker, and the methods by which workers speak
// about them. Any thread; its mutex guards tables alone.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/pipeline/internal/call_sums.h"
#include "weft/pipeline/internal/module_compute.h"
#include "weft/pipeline/internal/runner.h"
#include "weft/pipeline/service.h"
#include "weft/rpc/spi/device_order.h"
#include "weft/rpc/spi/service.h"
#include "weft/rref/remote_module.h"

namespace weft::pipeline::internal {

// Stage `stage` of pipeline `pipeline`, as the key under which its module is handed over.
inline int64_t host_key(uint64_t pipeline, int stage) {
  return static_cast<int64_t>(pipeline * kMaxStages + static_cast<uint64_t>(stage));
}

class WEFT_API PipelineService final : public Service,
                                       public weft::internal::ModuleHost,
                                       public std::enable_shared_from_this<PipelineService> {
 public:
  PipelineService(ServiceContext context, PipelineServiceOptions options)
      : context_(std::move(context)), options_(std::move(options)) {}
  ~PipelineService() override;

  const ServiceContext& context() const { return context_; }
  const std::shared_ptr<CallSums>& sums() const { return sums_; }
  // What its part is of; kind not_found when it has none.
  StatusOr<PartDigest> digest(uint64_t pipeline) const;

  std::vector<Method> methods() override;
  void on_worker_gone(const WorkerInfo& worker, const Status& why) override;
  void on_shutdown(const Status& why) override;
  void put_debug_info(std::map<std::string, int64_t>* out) const override;
  void put_inspection(Inspection* out) const override;

  void host(int64_t key, weft::internal::LocalModule module) override;

  // For the maker of a pipeline, until unwatch(): a worker whose process has ended, as another one knows.
  using OnEnded = std::function<void(const WorkerInfo& worker, const Status& why)>;
  void watch(uint64_t pipeline, OnEnded on_ended);
  void unwatch(uint64_t pipeline);

 private:
  struct Part {
    std::shared_ptr<Runner> runner;
    std::map<int, std::shared_ptr<ModuleCompute>> modules;
    std::shared_ptr<StateCopies> copies;  // of all parts of the pipeline at this process
    WorkerInfo maker;
  };
  // Pipeline, worker of its plan.
  using PartName = std::pair<uint64_t, int64_t>;

  template <class Message>
  Method method(std::string_view name, bool inline_ok,
                void (PipelineService::*handle)(CallContext&, Message, ReplyFn));
  void on_open(CallContext& call, OpenMessage message, ReplyFn reply);
  void on_touch(CallContext& call, PipelineMessage message, ReplyFn reply);
  void on_begin(CallContext& call, BeginMessage message, ReplyFn reply);
  void on_put(CallContext& call, PutMessage message, ReplyFn reply);
  void on_fail(CallContext& call, FailMessage message, ReplyFn reply);
  void on_probe(CallContext& call, PipelineMessage message, ReplyFn reply);
  void on_ended_told(CallContext& call, EndedMessage message, ReplyFn reply);
  void on_fetch(CallContext& call, FetchMessage message, ReplyFn reply);
  void on_keep(CallContext& call, KeepMessage message, ReplyFn reply);
  void on_survey(CallContext& call, PipelineMessage message, ReplyFn reply);
  void on_close(CallContext& call, PipelineMessage message, ReplyFn reply);
  // call_reducer.cc
  void on_sum(CallContext& call, SumMessage message, ReplyFn reply);
  void on_sum_fail(CallContext& call, SumFailMessage message, ReplyFn reply);

  StatusOr<Part> make_part(const WorkerInfo& maker, const OpenMessage& message);
  void connect(const std::shared_ptr<Runner>& runner, ReplyFn reply);
  void abandon(const Part& part);
  // What a transport knows for certain, without waiting for the lease.
  void on_ended(const WorkerInfo& worker, const Status& why);
  void ask_whether_gone(const std::vector<WorkerInfo>& workers);
  void reap();
  StatusOr<Part> find(uint64_t pipeline, int64_t worker) const;
  // Never empty; kind not_found when the pipeline has no part here.
  StatusOr<std::vector<Part>> find_all(uint64_t pipeline) const;
  std::vector<Part> parts() const;
  Status missing(uint64_t pipeline) const;
  StatusOr<std::map<std::string, at::Tensor>> copy_of(uint64_t pipeline,
                                                      const FetchMessage& message) const;

  const ServiceContext context_;
  const PipelineServiceOptions options_;
  const std::shared_ptr<CallSums> sums_ = std::make_shared<CallSums>();

  mutable Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<PipelineMetrics> metrics_ ABSL_GUARDED_BY(mutex_);  // once there is a part
  std::map<PartName, Part> parts_ ABSL_GUARDED_BY(mutex_);
  std::set<WorkerInfo> gone_
      ABSL_GUARDED_BY(mutex_);  // that have ended; of pipelines with parts here
  std::set<WorkerInfo> asking_ ABSL_GUARDED_BY(mutex_);  // whether they have
  std::map<uint64_t, OnEnded> makers_ ABSL_GUARDED_BY(mutex_);
  struct Hosted {
    weft::internal::LocalModule module;
    weft::internal::GuardRef made;  // by kernels that may be under way
  };
  std::map<int64_t, Hosted> modules_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Runner>> ended_ ABSL_GUARDED_BY(mutex_);  // to be joined
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_SERVICE_H_
