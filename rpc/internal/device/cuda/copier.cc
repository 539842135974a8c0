#include "weft/rpc/internal/device/cuda/copier.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ATen/ops/empty_strided.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "c10/cuda/CUDAException.h"
#include "c10/cuda/CUDAGuard.h"

namespace weft::internal {
namespace {

// Between two looks at events: the first is short because a copy of a slot takes 20 us and more.
constexpr absl::Duration kShortestNap = absl::Microseconds(10);
constexpr absl::Duration kLongestNap = absl::Microseconds(200);
// What the copies under way may take at the end; they are at most the slots.
constexpr absl::Duration kDrainTime = absl::Seconds(5);

}  // namespace

struct Copier::Transfer {
  bool to_host = false;
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  std::shared_ptr<const StreamMark> after;  // to the host, or given
  std::vector<c10::Device> targets;         // to devices
  bool given = false;  // `to` was there, and there is no work: done when the copies are
  std::shared_ptr<CudaWork> work;
  HostMemory memory;  // to the host; may be null
  Copied done;

  bool begun = false;
  size_t tensor = 0;  // the next piece
  size_t offset = 0;
  size_t pieces = 0;   // under way
  bool ended = false;  // `done` has been called

  bool all_started() const { return tensor == from.size(); }
};

struct Copier::Piece {
  TransferRef transfer;
  c10::cuda::CUDAEvent event;
  char* slot = nullptr;
  char* target = nullptr;  // to the host
  size_t bytes = 0;
  bool queued = false;  // the device may use the slot
  bool recorded =
      false;  // else the event says nothing about the copy, and would say that it is done
};

Copier::Copier(std::shared_ptr<Runtime> runtime)
    : runtime_(std::move(runtime)), parker_(runtime_->make_parker()) {}

Copier::~Copier() {
  shutdown(make_error(ErrorKind::kState, "the worker is gone"));
  MutexLock lock(&mutex_);
  for (const auto& [device, lanes] : lanes_) {
    (void)cudaStreamDestroy(lanes.out.stream());
    (void)cudaStreamDestroy(lanes.in.stream());
  }
}

Copier::Lanes Copier::lanes(c10::Device device) {
  MutexLock lock(&mutex_);
  const auto known = lanes_.find(device.index());
  if (known != lanes_.end()) return known->second;
  const c10::cuda::CUDAGuard guard(device);
  cudaStream_t out = nullptr;
  cudaStream_t in = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&out, cudaStreamNonBlocking));
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&in, cudaStreamNonBlocking));
  const Lanes made{c10::cuda::getStreamFromExternal(out, device.index()),
                   c10::cuda::getStreamFromExternal(in, device.index())};
  lanes_.emplace(device.index(), made);
  return made;
}

Status Copier::prepare(const std::vector<c10::Device>& devices) {
  const CaptureElsewhere allowed;
  for (const c10::Device device : devices) {
    WEFT_RETURN_IF_ERROR(guarded("preparing " + device.str(), [&] { lanes(device); }));
  }
  MutexLock lock(&start_mutex_);
  if (started_.load(std::memory_order_acquire) || devices.empty()) return absl::OkStatus();
  StatusOr<std::unique_ptr<SlotPool>> slots =
      make_error(ErrorKind::kInternal, "no slots were made");
  WEFT_RETURN_IF_ERROR(
      guarded("pinning memory", [&] { slots = SlotPool::make(devices.front().index()); }));
  WEFT_RETURN_IF_ERROR(slots.status());
  slots_ = *std::move(slots);
  thread_ = runtime_->spawn("weft-cuda", [this] { run(); });
  started_.store(true, std::memory_order_release);
  return absl::OkStatus();
}

void Copier::to_host(std::vector<at::Tensor> sources, std::shared_ptr<const StreamMark> after,
                     HostMemory memory, Copied done) {
  auto transfer = std::make_shared<Transfer>();
  transfer->to_host = true;
  transfer->from = std::move(sources);
  transfer->after = std::move(after);
  transfer->memory = std::move(memory);
  transfer->done = std::move(done);
  submit(std::move(transfer));
}

void Copier::to_devices(std::vector<at::Tensor> hosts, std::vector<c10::Device> targets,
                        std::shared_ptr<CudaWork> work, Copied done) {
  auto transfer = std::make_shared<Transfer>();
  transfer->from = std::move(hosts);
  transfer->targets = std::move(targets);
  transfer->work = std::move(work);
  transfer->done = std::move(done);
  submit(std::move(transfer));
}

void Copier::copy(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                  std::shared_ptr<const StreamMark> after, Copied done) {
  auto transfer = std::make_shared<Transfer>();
  transfer->to_host = !to.empty() && to.front().is_cpu();
  transfer->given = true;
  for (const at::Tensor& target : to) {
    if (!transfer->to_host) transfer->targets.push_back(target.device());
  }
  if (to.empty()) transfer->targets = after->devices();
  transfer->from = std::move(from);
  transfer->to = std::move(to);
  transfer->after = std::move(after);
  transfer->done = std::move(done);
  submit(std::move(transfer));
}

void Copier::submit(TransferRef transfer) {
  // One that only receives may be reached before anything of its own has named a device.
  std::vector<c10::Device> devices = transfer->targets;
  for (const at::Tensor& source : transfer->from) {
    if (transfer->to_host) devices.push_back(source.device());
  }
  Status refused = started_.load(std::memory_order_acquire) ? absl::OkStatus() : prepare(devices);
  if (refused.ok()) {
    MutexLock lock(&mutex_);
    if (stopping_) {
      refused = why_;
    } else {
      fresh_.push_back(transfer);
    }
  }
  if (!refused.ok()) return transfer->done(refused);
  parker_->unpark();
}

void Copier::shutdown(const Status& why) {
  {
    MutexLock lock(&mutex_);
    if (!stopping_) why_ = why;
    stopping_ = true;
  }
  parker_->unpark();
  std::unique_ptr<Thread> thread;
  {
    MutexLock lock(&start_mutex_);
    thread = std::move(thread_);
  }
  if (thread != nullptr) thread->join();
}

void Copier::run() {
  // To the end of the thread. Without it, asking for an event would fail while an application thread
  // captures a graph in CUDA's global mode, and break the capture.
  const CaptureElsewhere allowed;
  absl::Duration nap = kShortestNap;
  absl::Time end = absl::InfiniteFuture();
  while (true) {
    bool moved = take_new();
    bool stopping = false;
    Status why;
    {
      MutexLock lock(&mutex_);
      stopping = stopping_;
      why = why_;
    }
    if (stopping) {
      if (end == absl::InfiniteFuture()) end = parker_->now() + kDrainTime;
      for (const TransferRef& transfer : open_) finish(transfer.get(), why);
      open_.clear();
    }
    moved = end_some() || moved;
    if (!stopping) moved = start_some() || moved;
    if (stopping && (under_way_.empty() || parker_->now() >= end)) break;
    if (moved) {
      nap = kShortestNap;
      continue;
    }
    const bool idle = open_.empty() && under_way_.empty();
    parker_->park_until(idle ? absl::InfiniteFuture() : parker_->now() + nap);
    nap = idle ? kShortestNap : std::min(2 * nap, kLongestNap);
  }
  for (Piece& piece : under_way_) finish(piece.transfer.get(), why_now());
  under_way_.clear();
}

Status Copier::why_now() {
  MutexLock lock(&mutex_);
  return why_;
}

bool Copier::take_new() {
  std::deque<TransferRef> fresh;
  {
    MutexLock lock(&mutex_);
    fresh.swap(fresh_);
  }
  for (TransferRef& transfer : fresh) open_.push_back(std::move(transfer));
  return !fresh.empty();
}

// Host memory, or memory of the targets that belongs to the streams of the copies.
void Copier::begin(Transfer* transfer) {
  transfer->begun = true;
  if (transfer->given) return;
  const c10::InferenceMode not_inference(false);
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < transfer->from.size(); ++i) {
    const at::Tensor& from = transfer->from[i];
    if (transfer->to_host) {
      transfer->to.push_back(empty_on_host(from, transfer->memory));
      continue;
    }
    const c10::cuda::CUDAStreamGuard guard(lanes(transfer->targets[i]).in);
    const at::TensorOptions options =
        at::TensorOptions().dtype(from.scalar_type()).device(transfer->targets[i]);
    transfer->to.push_back(at::empty_strided(from.sizes(), from.strides(), options));
  }
}

bool Copier::start_some() {
  bool moved = false;
  // One piece of each in turn, so that a large message does not hold up a small one.
  for (size_t turns = open_.size(); turns > 0; --turns) {
    const TransferRef transfer = std::move(open_.front());
    open_.pop_front();
    bool more = true;
    const Status status = guarded("copying", [&] {
      if (transfer->after != nullptr && !transfer->after->reached()) return;
      if (!transfer->begun) begin(transfer.get());
      while (!transfer->all_started() && transfer->from[transfer->tensor].nbytes() == 0) {
        ++transfer->tensor;
      }
      char* slot = nullptr;
      if (!transfer->all_started() && slots_->usable() == 0) {
        throw std::runtime_error(
            "no pinned memory is left, each part was in use by a copy that failed");
      }
      if (!transfer->all_started() && taken_[transfer->to_host] < slots_of_one_direction()) {
        slot = slots_->take();
      }
      if (slot != nullptr) {
        ++taken_[transfer->to_host];
        moved = true;
        start_piece(transfer, slot);
      }
      more = !transfer->all_started();
    });
    if (!status.ok()) {
      finish(transfer.get(), status);
    } else if (more) {
      open_.push_back(transfer);
    } else if ((!transfer->to_host && !transfer->given) || transfer->pieces == 0) {
      finish(transfer.get(), absl::OkStatus());
      moved = true;
    }
  }
  return moved;
}

void Copier::start_piece(const TransferRef& transfer, char* slot) {
  const at::Tensor& from = transfer->from[transfer->tensor];
  const at::Tensor& to = transfer->to[transfer->tensor];
  const size_t offset = transfer->offset;
  // In the list first: whatever throws below, end_some() finds the slot.
  Piece& piece = under_way_.emplace_back();
  piece.transfer = transfer;
  ++transfer->pieces;
  piece.slot = slot;
  piece.bytes = std::min(SlotPool::kSlotBytes, from.nbytes() - offset);
  const c10::Device device = transfer->to_host ? from.device() : to.device();
  const Lanes streams = lanes(device);
  const c10::cuda::CUDAStream stream = transfer->to_host ? streams.out : streams.in;
  const char* const source = static_cast<const char*>(from.const_data_ptr()) + offset;
  char* const target = static_cast<char*>(to.mutable_data_ptr()) + offset;
  const c10::cuda::CUDAGuard guard(device);
  if (transfer->to_host) {
    piece.target = target;
    piece.queued = true;
    C10_CUDA_CHECK(
        cudaMemcpyAsync(slot, source, piece.bytes, cudaMemcpyDeviceToHost, stream.stream()));
  } else {
    std::memcpy(slot, source, piece.bytes);
    piece.queued = true;
    C10_CUDA_CHECK(
        cudaMemcpyAsync(target, slot, piece.bytes, cudaMemcpyHostToDevice, stream.stream()));
  }
  piece.event.record(stream);
  piece.recorded = true;
  transfer->offset += piece.bytes;
  if (transfer->offset == from.nbytes()) {
    transfer->offset = 0;
    ++transfer->tensor;
  }
}

bool Copier::end_some() {
  bool moved = false;
  for (auto it = under_way_.begin(); it != under_way_.end();) {
    bool reached = false;
    // One that was not recorded belongs to a transfer that has failed.
    Status status = it->recorded ? guarded("copying", [&] { reached = it->event.query(); })
                                 : make_error(ErrorKind::kInternal, "CUDA, copying: not recorded");
    if (status.ok() && !reached) {
      ++it;
      continue;
    }
    moved = true;
    end_piece(&*it, std::move(status));
    it = under_way_.erase(it);
  }
  return moved;
}

void Copier::end_piece(Piece* piece, Status status) {
  Transfer* const transfer = piece->transfer.get();
  if (transfer->to_host && status.ok() && !transfer->ended) {
    std::memcpy(piece->target, piece->slot, piece->bytes);
  }
  if (status.ok() || !piece->queued) {
    slots_->give_back(piece->slot);
  } else {
    slots_->retire();
  }
  --taken_[transfer->to_host];
  --transfer->pieces;
  if (!status.ok()) {
    finish(transfer, std::move(status));
  } else if ((transfer->to_host || transfer->given) && transfer->all_started() &&
             transfer->pieces == 0) {
    finish(transfer, absl::OkStatus());
  }
}

void Copier::finish(Transfer* transfer, Status status) {
  if (transfer->ended) return;
  transfer->ended = true;
  if (status.ok() && !transfer->to_host && !transfer->given) {
    status = guarded("handing over copies", [&] {
      std::vector<c10::cuda::CUDAStream> copies;
      for (const c10::Device device : transfer->targets) {
        const c10::cuda::CUDAStream stream = lanes(device).in;
        if (std::find(copies.begin(), copies.end(), stream) == copies.end()) {
          copies.push_back(stream);
        }
      }
      transfer->work->arrived(transfer->to, copies);
    });
  }
  // Nothing of the message is held longer than the message needs it.
  transfer->from.clear();
  transfer->work = nullptr;
  transfer->memory = nullptr;
  Copied done = std::move(transfer->done);
  if (status.ok()) {
    done(std::move(transfer->to));
  } else {
    done(std::move(status));
  }
}

}  // namespace weft::internal
