#include "weft/collectives/internal/nccl/engine.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "c10/core/InferenceMode.h"
#include "c10/cuda/CUDACachingAllocator.h"
#include "c10/cuda/CUDAException.h"
#include "c10/cuda/CUDAGraphsC10Utils.h"
#include "c10/cuda/CUDAGuard.h"
#include "weft/collectives/internal/nccl/types.h"
#include "weft/collectives/internal/text.h"
#include "weft/rpc/plain_tensor.h"

namespace weft::internal {
namespace {

using c10::cuda::CUDAEvent;
using c10::cuda::CUDAStream;

// What the end of a group waits for its peers.
constexpr absl::Duration kFinishTime = absl::Seconds(5);

CUDAStream make_stream(int device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  cudaStream_t made = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  return c10::cuda::getStreamFromExternal(made, static_cast<c10::DeviceIndex>(device));
}

// The reader's current stream comes after the end of an operation.
class EndGuard : public ValueGuard {
 public:
  EndGuard(std::shared_ptr<CUDAEvent> end, Logger log)
      : end_(std::move(end)), log_(std::move(log)) {}
  void before_use() override {
    try {
      end_->block(c10::cuda::getCurrentCUDAStream(end_->device_index()));
    } catch (const c10::Error& e) {
      // Such an error sticks to its device: whatever is done with the tensors shows it as well.
      WEFT_LOG(log_, kError) << "waiting for NCCL: " << e.what_without_backtrace();
    }
  }
  std::shared_ptr<ValueGuard> derive() override {
    const c10::DeviceIndex device = end_->device_index();
    auto later = std::make_shared<CUDAEvent>();
    later->record(c10::cuda::getCurrentCUDAStream(device));
    return std::make_shared<EndGuard>(std::move(later), log_);
  }

 private:
  const std::shared_ptr<CUDAEvent> end_;
  const Logger log_;
};

uint64_t bytes_in(const at::Tensor& t) {
  return static_cast<uint64_t>(t.numel()) * t.element_size();
}

bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

// Rows of a tensor for each rank, as flat pieces of it.
std::vector<at::Tensor> pieces(const at::Tensor& flat, const at::Tensor& whole,
                               const std::vector<int64_t>& splits, int size) {
  const int64_t rows = whole.dim() == 0 ? 1 : whole.size(0);
  const int64_t row = rows == 0 ? 0 : whole.numel() / rows;
  std::vector<at::Tensor> out;
  int64_t at = 0;
  for (int r = 0; r < size; ++r) {
    const int64_t n = splits.empty() ? whole.numel() / size : splits[static_cast<size_t>(r)] * row;
    out.push_back(flat.narrow(0, at, n));
    at += n;
  }
  return out;
}

}  // namespace

// One operation on its way to the GPU: contiguous tensors in, results to where the caller sees them.
class NcclEngine::Call {
 public:
  Call(NcclEngine* engine, const Operation& o, cudaStream_t stream, absl::Time deadline)
      : engine_(*engine), api_(engine->comm_->api()), o_(o), stream_(stream), deadline_(deadline) {}

  Status run() {
    switch (o_.kind) {
      case OpKind::kBarrier: return barrier();
      case OpKind::kAllReduce: return all_reduce();
      case OpKind::kBroadcast: return broadcast();
      case OpKind::kReduce: return reduce();
      case OpKind::kAllGather: return all_gather();
      case OpKind::kGather: return gather();
      case OpKind::kScatter: return scatter();
      case OpKind::kReduceScatter: return reduce_scatter();
      case OpKind::kAllToAll: return all_to_all();
      default:
        return make_error(ErrorKind::kUnimplemented, cat(o_.name, ": backend nccl has no such"));
    }
  }
  // Several sends and receives, none of which waits for another one.
  static Status run_together(std::vector<Call>* calls) {
    std::vector<at::Tensor> tensors;
    for (Call& one : *calls) {
      tensors.push_back(one.o_.receives ? one.output(one.o_.outputs[0], false)
                                        : one.input(one.o_.inputs[0]));
      if (one.o_.source != nullptr) *one.o_.source = one.o_.root;
    }
    Status done = calls->front().call([&](ncclComm_t comm, cudaStream_t stream) {
      for (size_t i = 0; i < calls->size(); ++i) {
        const Call& one = (*calls)[i];
        const ncclResult_t queued = one.queue_point(tensors[i], comm, stream);
        if (queued != ncclSuccess) return queued;
      }
      return ncclSuccess;
    });
    for (Call& one : *calls) {
      if (one.o_.receives) done = one.deliver(done);
    }
    return done;
  }
  // All memory that the GPU uses for it.
  std::vector<at::Tensor> take_kept() {
    for (const at::Tensor& t : o_.outputs) kept_.push_back(t);
    for (const at::Tensor& t : o_.inputs) kept_.push_back(t);
    return std::move(kept_);
  }

 private:
  using Queue = absl::FunctionRef<ncclResult_t(ncclComm_t, cudaStream_t)>;

  Status call(Queue queue) {
    return engine_.comm_->call(deadline_, [&](ncclComm_t comm) { return queue(comm, stream_); });
  }
  int rank() const { return engine_.member_.rank; }
  int size() const { return engine_.member_.size; }

  // The tensor, or what it holds as one piece of memory.
  at::Tensor input(const at::Tensor& t) {
    if (is_plain(t)) return t;
    kept_.push_back(plain(t));
    return kept_.back();
  }
  // Memory for a result, which deliver() copies to the tensor.
  at::Tensor output(const at::Tensor& t, bool read) {
    if (is_plain(t)) return t;
    kept_.push_back(read ? plain(t) : at::empty(t.sizes(), t.options().requires_grad(false)));
    late_.emplace_back(t, kept_.back());
    return kept_.back();
  }
  at::Tensor another_output(const at::Tensor& t) {
    kept_.push_back(at::empty(t.sizes(), t.options().requires_grad(false)));
    late_.emplace_back(t, kept_.back());
    return kept_.back();
  }
  at::Tensor copy_of(const at::Tensor& t) {
    kept_.push_back(at::empty(t.sizes(), t.options().requires_grad(false)));
    kept_.back().copy_(t);
    return kept_.back();
  }
  Status deliver(Status done) {
    if (!done.ok()) return done;
    for (const auto& [to, from] : late_) to.copy_(from);
    for (const at::Tensor& t : o_.outputs) {
      if (is_plain(t) && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    }
    return done;
  }

  // Queues the reduction of one tensor; a premultiplied sum has an operator of its own. One rank reduces
  // nothing: NCCL copies for it. Where it would scale as well, 2.28 leaves the last elements of a large
  // tensor as they were (seen: the last 3 of 100,003), so that is done by scale().
  template <class F>
  ncclResult_t reducing(ncclComm_t comm, const at::Tensor& t, F f) const {
    const ReduceOp::Kind kind = size() == 1 ? ReduceOp::kSum : o_.op.kind();
    const NcclReduction how =
        nccl_reduction(t.scalar_type(), kind, api_.version).value_or(NcclReduction());
    const uint64_t count = static_cast<uint64_t>(t.numel()) * how.parts;
    if (kind != ReduceOp::kPremulSum) return f(how.type, how.op, count);
    ncclRedOp_t op = ncclSum;
    alignas(8) char factor[8] = {};
    write_factor(how.type, o_.op.factor(), factor);
    const ncclResult_t made =
        api_.red_op_create_premul_sum(&op, factor, how.type, ncclScalarHostImmediate, comm);
    if (made != ncclSuccess) return made;
    const ncclResult_t queued = f(how.type, op, count);
    const ncclResult_t gone = api_.red_op_destroy(op, comm);
    return queued == ncclSuccess ? gone : queued;
  }

  // The factor of a premultiplied sum of one rank.
  Status scale(Status done, absl::Span<const at::Tensor> results) const {
    if (!done.ok() || size() > 1 || o_.op.kind() != ReduceOp::kPremulSum) return done;
    for (at::Tensor t : results) t.mul_(o_.op.factor());
    return done;
  }

  Status barrier() {
    if (!engine_.token_.defined()) {
      engine_.token_ =
          at::empty({1}, at::TensorOptions().dtype(at::kByte).device(
                             c10::kCUDA, static_cast<c10::DeviceIndex>(engine_.device_)));
    }
    void* const token = engine_.token_.mutable_data_ptr();
    return call([&](ncclComm_t comm, cudaStream_t stream) {
      return api_.all_reduce(token, token, 1, ncclUint8, ncclMax, comm, stream);
    });
  }

  Status all_reduce() {
    std::vector<at::Tensor> work;
    for (const at::Tensor& t : o_.outputs) work.push_back(output(t, true));
    const Status done = call([&](ncclComm_t comm, cudaStream_t stream) {
      for (const at::Tensor& t : work) {
        void* const data = t.mutable_data_ptr();
        const ncclResult_t r = reducing(comm, t, [&](auto type, auto op, uint64_t count) {
          return api_.all_reduce(data, data, count, type, op, comm, stream);
        });
        if (r != ncclSuccess) return r;
      }
      return ncclSuccess;
    });
    return deliver(scale(done, work));
  }

  Status broadcast() {
    std::vector<at::Tensor> work;
    const bool root = rank() == o_.root;
    for (const at::Tensor& t : o_.outputs) work.push_back(root ? input(t) : output(t, false));
    const Status done = call([&](ncclComm_t comm, cudaStream_t stream) {
      for (const at::Tensor& t : work) {
        void* const data = t.data_ptr();
        const ncclResult_t r =
            api_.broadcast(data, data, bytes_in(t), ncclUint8, o_.root, comm, stream);
        if (r != ncclSuccess) return r;
      }
      return ncclSuccess;
    });
    return root ? done : deliver(done);
  }

  Status reduce() {
    const bool root = rank() == o_.root;
    const at::Tensor work = root ? output(o_.outputs[0], true) : input(o_.outputs[0]);
    const Status done = call([&](ncclComm_t comm, cudaStream_t stream) {
      void* const data = work.data_ptr();
      return reducing(comm, work, [&](auto type, auto op, uint64_t count) {
        return api_.reduce(data, data, count, type, op, o_.root, comm, stream);
      });
    });
    return root ? deliver(scale(done, {work})) : done;
  }

  Status all_gather() {
    const at::Tensor in = input(o_.inputs[0]);
    if (o_.name == "all_gather_into_tensor") {
      const at::Tensor out = output(o_.outputs[0], false);
      const uint64_t bytes = bytes_in(in);
      // NCCL takes an input inside the output at its own place alone.
      const auto* const own = static_cast<const char*>(out.const_data_ptr()) + bytes * uint_rank();
      const bool apart = !same_storage(in, out) || in.const_data_ptr() == own;
      const at::Tensor from = apart ? in : copy_of(in);
      return deliver(call([&](ncclComm_t comm, cudaStream_t stream) {
        return api_.all_gather(from.const_data_ptr(), out.mutable_data_ptr(), bytes, ncclUint8,
                               comm, stream);
      }));
    }
    std::vector<at::Tensor> outs;
    for (const at::Tensor& t : o_.outputs) outs.push_back(output(t, false));
    return deliver(call([&](ncclComm_t comm, cudaStream_t stream) {
      for (int r = 0; r < size(); ++r) {
        const at::Tensor& out = outs[static_cast<size_t>(r)];
        const void* const from = r == rank() ? in.const_data_ptr() : out.const_data_ptr();
        const ncclResult_t queued =
            api_.broadcast(from, out.mutable_data_ptr(), bytes_in(out), ncclUint8, r, comm, stream);
        if (queued != ncclSuccess) return queued;
      }
      return ncclSuccess;
    }));
  }

  // Each pair of ranks by a send and a receive; what stays at this rank is copied.
  Status exchange(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
    const auto own = static_cast<size_t>(rank());
    if (own < to.size() && own < from.size()) from[own].copy_(to[own]);
    return deliver(call([&](ncclComm_t comm, cudaStream_t stream) {
      for (size_t r = 0; r < static_cast<size_t>(size()); ++r) {
        if (r == own) continue;
        const int peer = static_cast<int>(r);
        if (r < to.size() && to[r].defined() && to[r].numel() > 0) {
          const ncclResult_t sent =
              api_.send(to[r].const_data_ptr(), bytes_in(to[r]), ncclUint8, peer, comm, stream);
          if (sent != ncclSuccess) return sent;
        }
        if (r < from.size() && from[r].defined() && from[r].numel() > 0) {
          const ncclResult_t got = api_.recv(from[r].mutable_data_ptr(), bytes_in(from[r]),
                                             ncclUint8, peer, comm, stream);
          if (got != ncclSuccess) return got;
        }
      }
      return ncclSuccess;
    }));
  }

  Status gather() {
    std::vector<at::Tensor> to(static_cast<size_t>(size()));
    to[static_cast<size_t>(o_.root)] = input(o_.inputs[0]);
    std::vector<at::Tensor> from;
    for (const at::Tensor& t : o_.outputs) from.push_back(output(t, false));
    return exchange(to, from);
  }

  Status scatter() {
    std::vector<at::Tensor> to;
    for (const at::Tensor& t : o_.inputs) to.push_back(input(t));
    std::vector<at::Tensor> from(static_cast<size_t>(size()));
    from[static_cast<size_t>(o_.root)] = output(o_.outputs[0], false);
    return exchange(to, from);
  }

  Status all_to_all() {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
    if (o_.name == "all_to_all_single") {
      const bool same = same_storage(o_.inputs[0], o_.outputs[0]);
      const at::Tensor in = same ? copy_of(o_.inputs[0]) : input(o_.inputs[0]);
      const at::Tensor out = output(o_.outputs[0], false);
      to = pieces(in.view({-1}), o_.inputs[0], o_.input_splits, size());
      from = pieces(out.view({-1}), o_.outputs[0], o_.output_splits, size());
    } else {
      for (const at::Tensor& t : o_.inputs) to.push_back(input(t));
      for (const at::Tensor& t : o_.outputs) from.push_back(output(t, false));
    }
    return exchange(to, from);
  }

  Status reduce_scatter() {
    const at::Tensor& result = o_.outputs[0];
    bool shared = false;
    for (const at::Tensor& t : o_.inputs) shared = shared || same_storage(t, result);
    std::vector<at::Tensor> ins;
    for (const at::Tensor& t : o_.inputs) ins.push_back(input(t));
    const at::Tensor out = shared ? another_output(result) : output(result, false);
    const Status done = call([&](ncclComm_t comm, cudaStream_t stream) {
      void* const data = out.mutable_data_ptr();
      if (o_.name == "reduce_scatter_tensor") {
        return reducing(comm, out, [&](auto type, auto op, uint64_t count) {
          return api_.reduce_scatter(ins[0].const_data_ptr(), data, count, type, op, comm, stream);
        });
      }
      for (int r = 0; r < size(); ++r) {
        const at::Tensor& in = ins[static_cast<size_t>(r)];
        const ncclResult_t queued = reducing(comm, in, [&](auto type, auto op, uint64_t count) {
          return api_.reduce(in.const_data_ptr(), data, count, type, op, r, comm, stream);
        });
        if (queued != ncclSuccess) return queued;
      }
      return ncclSuccess;
    });
    return deliver(scale(done, {out}));
  }

  ncclResult_t queue_point(const at::Tensor& t, ncclComm_t comm, cudaStream_t stream) const {
    if (o_.receives) {
      return api_.recv(t.data_ptr(), bytes_in(t), ncclUint8, o_.root, comm, stream);
    }
    return api_.send(t.data_ptr(), bytes_in(t), ncclUint8, o_.root, comm, stream);
  }

  uint64_t uint_rank() const { return static_cast<uint64_t>(rank()); }

  NcclEngine& engine_;
  const NcclApi& api_;
  const Operation& o_;
  const cudaStream_t stream_;
  const absl::Time deadline_;
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> late_;  // to, from
};

NcclEngine::NcclEngine(std::shared_ptr<Runtime> runtime, std::unique_ptr<Comm> comm,
                       std::string group, const Membership& member, int device, Logger log)
    : runtime_(std::move(runtime)),
      comm_(std::move(comm)),
      group_(std::move(group)),
      member_(member),
      device_(device),
      log_(std::move(log)),
      stream_(make_stream(device)) {}

NcclEngine::~NcclEngine() {
  close();
  // A graph that was captured may still be launched; what it waits for on the stream stays.
  if (!captured_) (void)cudaStreamDestroy(stream_.stream());
}

bool NcclEngine::reduces(at::ScalarType type, ReduceOp::Kind kind) const {
  return nccl_reduction(type, kind, comm_->api().version).has_value();
}

void NcclEngine::start(DeviceHooks hooks) {
  watch_ = std::make_unique<Watch>(
      runtime_, comm_.get(), device_,
      cat(" in group '", group_, "' at rank ", member_.rank, " of ", member_.size),
      std::move(hooks));
}

StatusOr<DeviceQueued> NcclEngine::perform(const Turn& turn, absl::Span<const Operation> operations,
                                           DeviceOrder order) {
  try {
    return queue(turn, operations, order);
  } catch (...) {
    return status_from_current_exception();
  }
}

StatusOr<DeviceQueued> NcclEngine::queue(const Turn& turn, absl::Span<const Operation> operations,
                                         DeviceOrder order) {
  const at::NoGradGuard no_grad;
  const auto index = static_cast<c10::DeviceIndex>(device_);
  const c10::cuda::CUDAGuard device(index);
  const CUDAStream current = c10::cuda::getCurrentCUDAStream(index);
  const bool capturing =
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  const bool apart = capturing || order == DeviceOrder::kBesideCaller;
  const CUDAStream stream = apart ? stream_ : current;
  if (apart) {
    CUDAEvent begin;
    begin.record(current);
    begin.block(stream);
  }
  // An event outside a capture is nothing to wait for within it, and the other way round.
  if (last_end_ != nullptr && !capturing && last_stream_ != stream) last_end_->block(stream);
  std::vector<Call> calls;
  calls.reserve(operations.size());
  for (const Operation& one : operations) {
    calls.emplace_back(this, one, stream.stream(), turn.deadline);
  }
  {
    // Copies of tensors that are not contiguous, too.
    std::optional<c10::cuda::CUDAStreamGuard> own;
    if (apart) own.emplace(stream);
    WEFT_RETURN_IF_ERROR(operations.front().kind == OpKind::kSend ? Call::run_together(&calls)
                                                                  : calls.front().run());
  }
  std::shared_ptr<CUDAEvent> end = watch_->take_event();
  end->record(stream);
  DeviceQueued out;
  if (apart) out.guard = std::make_shared<EndGuard>(end, log_);
  std::vector<at::Tensor> kept;
  for (Call& one : calls) {
    for (at::Tensor& t : one.take_kept()) kept.push_back(std::move(t));
  }
  if (capturing) {
    // Nothing runs now, and what runs later is not followed.
    captured_ = true;
    for (const at::Tensor& t : kept) {
      c10::cuda::CUDACachingAllocator::recordStream(t.storage().data_ptr(), stream_);
    }
    return out;
  }
  last_end_ = end;
  last_stream_ = stream;
  out.ended = follow(turn, operations, std::move(end), std::move(kept));
  return out;
}

std::optional<Future<void>> NcclEngine::follow(const Turn& turn,
                                               absl::Span<const Operation> operations,
                                               std::shared_ptr<CUDAEvent> end,
                                               std::vector<at::Tensor> kept) {
  Followed followed;
  followed.name =
      operations.size() > 1 ? std::string_view("batch_isend_irecv") : operations.front().name;
  followed.sequence = turn.sequence;
  followed.deadline = turn.deadline;
  followed.end = std::move(end);
  followed.kept = std::move(kept);
  std::optional<Future<void>> ended;
  if (operations.front().kind == OpKind::kBarrier) {
    followed.ended.emplace();
    followed.ended->state()->set_default_wait(absl::InfiniteDuration());
    ended = followed.ended->future();
  }
  watch_->add(std::move(followed));
  return ended;
}

void NcclEngine::abort(const Status& cause) {
  if (watch_ != nullptr) watch_->abort(cause);
}

void NcclEngine::drain() {
  if (watch_ != nullptr) watch_->drain();
}

void NcclEngine::close() {
  if (watch_ == nullptr || std::exchange(closed_, true)) return;
  // It stays for who calls abort() at the same time.
  watch_->close();
  comm_->finish(runtime_->now() + kFinishTime);
}

}  // namespace weft::internal
