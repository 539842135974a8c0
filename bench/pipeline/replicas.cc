#include "weft/bench/pipeline/replicas.h"

#include <ATen/ops/zeros.h>

#include <array>
#include <chrono>
#include <istream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "weft/bench/line_protocol.h"
#include "weft/collectives/service.h"
#include "weft/common/mutex.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/reducer.h"
#include "weft/pipeline/schedule.h"
#include "weft/rpc/call.h"
#include "weft/rpc/call_context.h"
#include "weft/tests/testing/vcompute.h"

namespace weft::bench {
namespace {

constexpr int kBuckets = 4;
constexpr int kMicroBatches = 4;

// What this process sleeps, and the group of its stage; without one it has no replica.
struct Here {
  Mutex mutex;
  int64_t us ABSL_GUARDED_BY(mutex) = 0;
  int64_t bytes ABSL_GUARDED_BY(mutex) = 0;
  bool late ABSL_GUARDED_BY(mutex) = false;  // nothing is reduced before the stage's last gradient
  ProcessGroup group ABSL_GUARDED_BY(mutex);
};
Here& here() {
  static Here* const one = new Here;
  return *one;
}

std::vector<at::Tensor> buckets_of(int64_t bytes) {
  std::vector<at::Tensor> out;
  for (int k = 0; k < kBuckets; ++k) out.push_back(at::zeros({bytes / kBuckets / 4}));
  return out;
}

class Replica final : public testing::VCompute {
 public:
  Replica(std::shared_ptr<Runtime> runtime, int64_t us, std::vector<at::Tensor> buckets,
          std::shared_ptr<pipeline::GradReducer> reducer, bool late)
      : VCompute(std::move(runtime), {.forward = us * 1000, .input_grad = us * 1000}),
        ns_(us * 1000),
        buckets_(std::move(buckets)),
        reducer_(std::move(reducer)),
        late_(late) {}

  Status weight_grad(int64_t step, int micro_batch) override {
    return weight_grads(step, {micro_batch}, [](int) { return Status(); });
  }
  Status weight_grads(int64_t step, const std::vector<int>& micro_batches,
                      absl::FunctionRef<Status(int micro_batch)> at) override {
    for (const at::Tensor& bucket : buckets_) {
      for (const int i : micro_batches) {
        WEFT_RETURN_IF_ERROR(at(i));
        wait(ns_ / kBuckets);
      }
      if (reducer_ != nullptr && !late_ && micro_batches.back() == kMicroBatches - 1) {
        WEFT_RETURN_IF_ERROR(reducer_->ready(bucket));
      }
    }
    for (const int i : micro_batches) WEFT_RETURN_IF_ERROR(VCompute::weight_grad(step, i));
    return absl::OkStatus();
  }
  Status reduce(int64_t step, absl::Duration time_left) override {
    (void)step;
    for (const at::Tensor& bucket : buckets_) {
      if (late_) WEFT_RETURN_IF_ERROR(reducer_->ready(bucket));
    }
    return reducer_->finish(time_left);
  }

 private:
  const pipeline::Ticks ns_;
  const std::vector<at::Tensor> buckets_;
  const std::shared_ptr<pipeline::GradReducer> reducer_;
  const bool late_;
};

void join_group(CallContext& call, int64_t us, int64_t bytes, std::vector<std::string> members) {
  ProcessGroup group =
      init_process_group(call.worker(), {.name = "replicas of " + members[0]}, members);
  MutexLock lock(&here().mutex);
  here().us = us;
  here().bytes = bytes;
  here().group = std::move(group);
}
void set_late(bool late) {
  MutexLock lock(&here().mutex);
  here().late = late;
}
void leave_group() {
  MutexLock lock(&here().mutex);
  here().group = {};
}

// Microseconds.
double reduce_once() {
  ProcessGroup group;
  int64_t bytes = 0;
  {
    MutexLock lock(&here().mutex);
    group = here().group;
    bytes = here().bytes;
  }
  const auto reducer = pipeline::group_reducer(group, {.bucket_bytes = 1});
  const std::vector<at::Tensor> buckets = buckets_of(bytes);
  group.barrier();
  return timed([&] {
           for (const at::Tensor& bucket : buckets) throw_if_error(reducer->ready(bucket));
           throw_if_error(reducer->finish(absl::Seconds(60)));
         }) *
         1e6;
}

std::string name_of(int rank) { return "w" + std::to_string(rank); }

std::array<pipeline::Pipeline, 2> make_pipelines(const Worker& worker, const pipeline::Plan& plan) {
  const auto one = [&](int first) {
    std::vector<pipeline::Stage> stages;
    for (int s = 0; s < 2; ++s) stages.emplace_back(worker.get_worker_info(name_of(first + s)));
    return pipeline::Pipeline(worker, std::move(stages), plan);
  };
  return {one(0), one(2)};
}

double step_us(std::array<pipeline::Pipeline, 2>* pipes) {
  const std::vector<pipeline::Tensors> inputs(kMicroBatches, {at::zeros({1})});
  const std::vector<double> weights(kMicroBatches, 1.0);
  return timed([&] {
           auto first = (*pipes)[0].step_async(inputs, {}, weights);
           auto second = (*pipes)[1].step_async(inputs, {}, weights);
           first.wait();
           second.wait();
         }) *
         1e6;
}

}  // namespace

void def_replicas(Library* library) {
  library->def("join_group", &join_group);
  library->def("leave_group", &leave_group);
  library->def("set_late", &set_late);
  library->def("reduce_once", &reduce_once);
}

std::shared_ptr<pipeline::StageCompute> make_replica(const ServiceContext& context,
                                                     const pipeline::Plan& plan, int stage) {
  MutexLock lock(&here().mutex);
  if (!here().group.valid()) return nullptr;
  const auto& list = plan.workers[static_cast<size_t>(plan.placement[static_cast<size_t>(stage)])];
  std::shared_ptr<pipeline::GradReducer> reducer;
  for (const pipeline::Action& a : list) {
    if (a.kind == pipeline::ActionKind::kReduce && reducer == nullptr) {
      reducer = pipeline::group_reducer(here().group, {.bucket_bytes = 1});
    }
  }
  return std::make_shared<Replica>(context.runtime, here().us, buckets_of(here().bytes), reducer,
                                   here().late);
}

std::string replicas(const Worker& worker, std::istream& in) {
  int64_t us = 0;
  int64_t bytes = 0;
  int count = 0;
  if (!(in >> us >> bytes >> count) || us < 1 || bytes < 16 || count < 1) {
    throw std::invalid_argument("replicas U_US BYTES COUNT");
  }
  std::vector<Future<void>> joining;
  for (int rank = 0; rank < 4; ++rank) {
    joining.push_back(
        rpc_async(worker, name_of(rank), &join_group, us, bytes,
                  std::vector<std::string>{name_of(rank % 2), name_of(2 + rank % 2)}));
  }
  for (auto& one : joining) one.wait();
  const pipeline::Plan plan = pipeline::zb_h1(2, kMicroBatches);
  auto without = make_pipelines(worker, plan);
  auto with = make_pipelines(worker, pipeline::with_reductions(plan));
  for (int rank = 0; rank < 4; ++rank) rpc_sync(worker, name_of(rank), &set_late, true);
  auto late = make_pipelines(worker, pipeline::with_reductions(plan));
  for (int rank = 0; rank < 4; ++rank) rpc_sync(worker, name_of(rank), &set_late, false);
  std::array<std::vector<double>, 4> taken;
  for (int k = -1; k < count; ++k) {  // once to warm up
    const double one = step_us(&without);
    const double other = step_us(&with);
    const double at_end = step_us(&late);
    auto there = rpc_async(worker, name_of(2), &reduce_once);
    const double reduce = rpc_sync(worker, name_of(0), &reduce_once);
    there.wait();
    if (k < 0) continue;
    taken[0].push_back(one);
    taken[1].push_back(other);
    taken[2].push_back(reduce);
    taken[3].push_back(at_end);
  }
  for (auto* both : {&without, &with, &late}) {
    for (pipeline::Pipeline& pipe : *both) pipe.close();
  }
  for (int rank = 0; rank < 4; ++rank) rpc_sync(worker, name_of(rank), &leave_group);
  return "{\"without\":" + json_array(taken[0]) + ",\"with\":" + json_array(taken[1]) +
         ",\"reduce\":" + json_array(taken[2]) + ",\"late\":" + json_array(taken[3]) + "}";
}

}  // namespace weft::bench
