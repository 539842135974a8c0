#include "weft/collectives/c10d_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "weft/collectives/sparse.h"

namespace weft {
namespace {

using OurWork = weft::Work;
using TheirWork = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

std::exception_ptr exception_of(const Status& s) {
  try {
    throw_if_error(s);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// One or several operations of ours as one of c10d's.
class BridgeWork final : public c10d::Work {
 public:
  BridgeWork(int rank, c10d::OpType type, std::vector<OurWork> works, Tensors outputs)
      : c10d::Work(rank, type),
        works_(std::move(works)),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    if (works_.empty()) {
      future_->markCompleted(c10::IValue(outputs_));
      return;
    }
    // Operations of a group end in their order, and fail with those before them.
    (void)works_.back().then([future = future_, outputs = outputs_](Future<void> last) {
      if (const Status s = last.try_wait(); !s.ok()) {
        future->setError(exception_of(s));
      } else {
        future->markCompleted(c10::IValue(outputs));
      }
    });
  }

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const OurWork& one) { return one.is_completed(); });
  }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    for (const OurWork& one : works_) {
      if (one.has_error()) return exception_of(one.error());
    }
    return nullptr;
  }
  int sourceRank() const override { return works_.empty() ? -1 : works_.back().source_rank(); }
  Tensors result() override { return outputs_; }
  void synchronize() override {}
  // Without a timeout until the operation's own deadline.
  bool wait(std::chrono::milliseconds timeout) override {
    if (!works_.empty()) works_.back().wait(timeout == kNoTimeout ? Timeout() : Timeout(timeout));
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::vector<OurWork> works_;
  const Tensors outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

ReduceOp reduction_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return ReduceOp::kSum;
    case c10d::ReduceOp::AVG: return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::kProd;
    case c10d::ReduceOp::MIN: return ReduceOp::kMin;
    case c10d::ReduceOp::MAX: return ReduceOp::kMax;
    case c10d::ReduceOp::BAND: return ReduceOp::kBand;
    case c10d::ReduceOp::BOR: return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR: return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* const more =
          dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      TORCH_CHECK(more != nullptr, "Backend weft: PREMUL_SUM without its factor");
      return ReduceOp::premul_sum(more->tensor_factor.defined() ? more->tensor_factor.item<double>()
                                                                : more->double_factor);
    }
    default: TORCH_CHECK(false, "Backend weft does not support reduction ", int(op.op_));
  }
}

// c10d means one tensor per device of a process; here a process is one rank.
template <class T>
T& the_one(std::vector<T>& list, const char* operation) {
  TORCH_CHECK(list.size() == 1, "Backend weft: ", operation, " of ", list.size(),
              " lists or tensors; one is possible");
  return list[0];
}

class C10dBackend final : public c10d::Backend {
 public:
  explicit C10dBackend(ProcessGroup group)
      : c10d::Backend(group.rank(), group.size()), group_(std::move(group)) {}

  const std::string getBackendName() const override { return "weft"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(
        "weft",
        absl::ToChronoMilliseconds(timeout(c10d::kUnsetTimeout).value_or(group_.timeout())));
  }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }

  TheirWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    at::Tensor& tensor = the_one(tensors, "broadcast");
    return started(c10d::OpType::BROADCAST, tensors,
                   group_.broadcast_async(tensor, {.root = static_cast<int>(o.rootRank),
                                                   .timeout = timeout(o.timeout)}));
  }
  TheirWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    at::Tensor& tensor = the_one(tensors, "allreduce");
    if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, o);
    return started(c10d::OpType::ALLREDUCE, tensors,
                   group_.all_reduce_async(tensor, reducing(o.reduceOp, o.timeout)));
  }
  TheirWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    at::Tensor& tensor = the_one(tensors, "allreduce_sparse");
    TORCH_CHECK(tensor.layout() == at::kSparse,
                "Backend weft: allreduce_sparse wants a sparse (COO) tensor");
    const at::NoGradGuard no_grad;
    tensor.copy_(
        value_or_throw(try_all_reduce_sparse(group_, tensor, reducing(o.reduceOp, o.timeout))));
    return c10::make_intrusive<BridgeWork>(rank_, c10d::OpType::_ALLREDUCE_SPARSE,
                                           std::vector<OurWork>(), tensors);
  }
  TheirWork allreduce_coalesced(Tensors& tensors,
                                const c10d::AllreduceCoalescedOptions& o) override {
    return started(c10d::OpType::ALLREDUCE_COALESCED, tensors,
                   group_.all_reduce_coalesced_async(tensors, reducing(o.reduceOp, o.timeout)));
  }
  TheirWork reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    at::Tensor& tensor = the_one(tensors, "reduce");
    return started(c10d::OpType::REDUCE, tensors,
                   group_.reduce_async(tensor, {.root = static_cast<int>(o.rootRank),
                                                .op = reduction_of(o.reduceOp),
                                                .timeout = timeout(o.timeout)}));
  }
  TheirWork allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                      const c10d::AllgatherOptions& o) override {
    Tensors& out = the_one(outputs, "allgather");
    return started(c10d::OpType::ALLGATHER, out,
                   group_.all_gather_async(out, the_one(inputs, "allgather"),
                                           {.timeout = timeout(o.timeout)}));
  }
  TheirWork _allgather_base(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& o) override {
    return started(
        c10d::OpType::_ALLGATHER_BASE, {output},
        group_.all_gather_into_tensor_async(output, input, {.timeout = timeout(o.timeout)}));
  }
  // outputs[rank][tensor]
  TheirWork allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(static_cast<int>(outputs.size()) == size_, "Backend weft: allgather_coalesced of ",
                outputs.size(), " output lists in a group of ", size_);
    for (const Tensors& one : outputs) expect_as_many("allgather_coalesced", one, inputs);
    std::vector<OurWork> works;
    Tensors all;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors of_ranks;
      for (const Tensors& one : outputs) of_ranks.push_back(one[i]);
      works.push_back(
          group_.all_gather_async(of_ranks, inputs[i], {.timeout = timeout(o.timeout)}));
      all.insert(all.end(), of_ranks.begin(), of_ranks.end());
    }
    return several(c10d::OpType::ALLGATHER_COALESCED, std::move(works), std::move(all));
  }
  TheirWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& o) override {
    expect_as_many("allgather_into_tensor_coalesced", outputs, inputs);
    std::vector<OurWork> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(group_.all_gather_into_tensor_async(outputs[i], inputs[i],
                                                          {.timeout = timeout(o.timeout)}));
    }
    return several(c10d::OpType::COALESCED, std::move(works), outputs);
  }
  TheirWork gather(std::vector<Tensors>& outputs, Tensors& inputs,
                   const c10d::GatherOptions& o) override {
    const Tensors out = o.rootRank == rank_ ? the_one(outputs, "gather") : Tensors();
    return started(
        c10d::OpType::GATHER, out,
        group_.gather_async(out, the_one(inputs, "gather"),
                            {.root = static_cast<int>(o.rootRank), .timeout = timeout(o.timeout)}));
  }
  TheirWork scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                    const c10d::ScatterOptions& o) override {
    at::Tensor& output = the_one(outputs, "scatter");
    const Tensors in = o.rootRank == rank_ ? the_one(inputs, "scatter") : Tensors();
    return started(
        c10d::OpType::SCATTER, outputs,
        group_.scatter_async(
            output, in, {.root = static_cast<int>(o.rootRank), .timeout = timeout(o.timeout)}));
  }
  TheirWork reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& o) override {
    at::Tensor& output = the_one(outputs, "reduce_scatter");
    return started(
        c10d::OpType::REDUCE_SCATTER, outputs,
        group_.reduce_scatter_async(output, the_one(inputs, "reduce_scatter"), scattering(o)));
  }
  TheirWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& o) override {
    return started(c10d::OpType::_REDUCE_SCATTER_BASE, {output},
                   group_.reduce_scatter_tensor_async(output, input, scattering(o)));
  }
  TheirWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& o) override {
    expect_as_many("reduce_scatter_tensor_coalesced", outputs, inputs);
    std::vector<OurWork> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(group_.reduce_scatter_tensor_async(outputs[i], inputs[i], scattering(o)));
    }
    return several(c10d::OpType::COALESCED, std::move(works), outputs);
  }
  TheirWork alltoall_base(at::Tensor& output, at::Tensor& input,
                          std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                          const c10d::AllToAllOptions& o) override {
    return started(c10d::OpType::ALLTOALL_BASE, {output},
                   group_.all_to_all_single_async(output, input,
                                                  {.output_splits = output_splits,
                                                   .input_splits = input_splits,
                                                   .timeout = timeout(o.timeout)}));
  }
  TheirWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) override {
    return started(c10d::OpType::ALLTOALL, outputs,
                   group_.all_to_all_async(outputs, inputs, {.timeout = timeout(o.timeout)}));
  }
  // All missing ranks are named, also where c10d asks for the first one.
  void monitoredBarrier(const c10d::BarrierOptions& o, bool /*wait_all_ranks*/) override {
    group_.monitored_barrier({.timeout = timeout(o.timeout)});
  }
  TheirWork barrier(const c10d::BarrierOptions& o) override {
    return started(c10d::OpType::BARRIER, {},
                   group_.barrier_async({.timeout = timeout(o.timeout)}));
  }
  TheirWork send(Tensors& tensors, int to, int tag) override {
    at::Tensor& tensor = the_one(tensors, "send");
    return started(c10d::OpType::SEND, tensors, group_.send_async(tensor, to, with_tag(tag)));
  }
  TheirWork recv(Tensors& tensors, int from, int tag) override {
    at::Tensor& tensor = the_one(tensors, "recv");
    return started(c10d::OpType::RECV, tensors, group_.recv_async(tensor, from, with_tag(tag)));
  }
  TheirWork recvAnysource(Tensors& tensors, int tag) override {
    at::Tensor& tensor = the_one(tensors, "recvAnysource");
    return started(c10d::OpType::RECVANYSOURCE, tensors,
                   group_.recv_async(tensor, kAnySource, with_tag(tag)));
  }

  // Each group numbers its operations from 1 on at all ranks.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_.sequence(); }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override {
    if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) return nullptr;
    NewGroupOptions more;
    if (options != nullptr) more.name = options->group_name;
    return c10d_backend(group_.new_group(ranks, more));
  }
  c10d::ErrorType getError() override {
    const Status s = group_.failure();
    if (s.ok()) return c10d::ErrorType::SUCCESS;
    return error_kind(s) == ErrorKind::kDeadline ? c10d::ErrorType::TIMEOUT
                                                 : c10d::ErrorType::COMM_ERROR;
  }
  void abort() override { group_.abort("c10d aborts its backend"); }
  // The group's other handles may go on: it is left with the last one.
  void shutdown() override {}

 private:
  static void expect_as_many(const char* operation, const Tensors& outputs, const Tensors& inputs) {
    TORCH_CHECK(outputs.size() == inputs.size(), "Backend weft: ", operation, " of ", inputs.size(),
                " inputs and ", outputs.size(), " outputs");
  }
  Timeout timeout(std::chrono::milliseconds given) const {
    const int64_t ms = given == c10d::kUnsetTimeout ? timeout_ms_.load() : given.count();
    return ms < 0 ? Timeout() : Timeout(absl::Milliseconds(ms));
  }
  AllReduceOptions reducing(const c10d::ReduceOp& op, std::chrono::milliseconds given) const {
    return {.op = reduction_of(op), .timeout = timeout(given)};
  }
  weft::ReduceScatterOptions scattering(const c10d::ReduceScatterOptions& o) const {
    return {.op = reduction_of(o.reduceOp), .timeout = timeout(o.timeout)};
  }
  PointOptions with_tag(int tag) const {
    return {.tag = tag, .timeout = timeout(c10d::kUnsetTimeout)};
  }
  TheirWork several(c10d::OpType type, std::vector<OurWork> works, Tensors outputs) const {
    return c10::make_intrusive<BridgeWork>(rank_, type, std::move(works), std::move(outputs));
  }
  TheirWork started(c10d::OpType type, Tensors outputs, OurWork work) const {
    return several(type, {std::move(work)}, std::move(outputs));
  }

  ProcessGroup group_;
  std::atomic<int64_t> timeout_ms_{-1};  // below 0: the group's
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> c10d_backend(ProcessGroup group) {
  return c10::make_intrusive<C10dBackend>(std::move(group));
}

}  // namespace weft
