#include "weft/tests/cuda/fake_runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace weft::testing::fake_cuda {
namespace {

struct Event {
  long recorded = 0;
  long done = 0;
};

struct World {
  std::recursive_mutex mutex;
  std::map<void*, std::deque<std::function<bool()>>> streams;
  std::deque<std::function<bool()>> done;
  std::atomic<bool> held{false};
  std::atomic<bool> held_to_host{false};
  std::atomic<size_t> fail_record{0};
  std::atomic<size_t> fail_query{0};
  std::atomic<bool> capturing{false};
  std::atomic<size_t> forbidden{0};
  std::condition_variable_any queued;
  std::atomic<size_t> copies{0};
  std::atomic<size_t> blocking{0};
  std::atomic<size_t> early{0};
  std::atomic<size_t> made{0};
  std::atomic<size_t> events_made{0};
};

World& world() {
  static auto* const only = new World();
  return *only;
}

// One operation of each stream, if it can be done. True when one was. What it holds is not let go
// of here: a tensor would go to LibTorch's allocator, which calls this with its own lock held.
bool step() {
  World& w = world();
  const std::lock_guard<std::recursive_mutex> lock(w.mutex);
  bool moved = false;
  for (auto& [stream, queue] : w.streams) {
    if (queue.empty() || !queue.front()()) continue;
    w.done.push_back(std::move(queue.front()));
    queue.pop_front();
    moved = true;
  }
  return moved;
}

void drain() {
  while (step()) {
  }
}

void push(void* stream, std::function<bool()> operation) {
  World& w = world();
  const std::lock_guard<std::recursive_mutex> lock(w.mutex);
  w.streams[stream].push_back(std::move(operation));
}

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

cudaError_t new_stream(cudaStream_t* stream) {
  *stream = static_cast<cudaStream_t>(std::malloc(64));
  ++world().made;
  return cudaSuccess;
}

thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

std::atomic<size_t>& failures(Call call) {
  return call == Call::kEventRecord ? world().fail_record : world().fail_query;
}

bool takes_failure(Call call) {
  std::atomic<size_t>& left = failures(call);
  size_t n = left.load();
  while (n > 0 && !left.compare_exchange_weak(n, n - 1)) {
  }
  return n > 0;
}

// What CUDA's documentation calls potentially unsafe.
bool is_forbidden() {
  World& w = world();
  if (!w.capturing.load() || capture_mode != cudaStreamCaptureModeGlobal) return false;
  ++w.forbidden;
  return true;
}

}  // namespace

void queue(void* stream, std::function<bool()> operation) { push(stream, std::move(operation)); }
void run_all() {
  drain();
  std::deque<std::function<bool()>> done;
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  done.swap(world().done);
}
void hold_copies_to_devices(bool held) { world().held.store(held); }
void hold_copies_to_host(bool held) { world().held_to_host.store(held); }
bool wait_for_copies(size_t count) {
  World& w = world();
  std::unique_lock<std::recursive_mutex> lock(w.mutex);
  return w.queued.wait_for(lock, std::chrono::seconds(30), [&] { return w.copies >= count; });
}
void fail(Call call, size_t times) { failures(call).store(times); }
size_t failures_left(Call call) { return failures(call).load(); }
void capture_elsewhere(bool on) { world().capturing.store(on); }
size_t forbidden_calls() { return world().forbidden.load(); }
size_t copies() { return world().copies.load(); }
size_t blocking_calls() { return world().blocking.load(); }
size_t early_queries() { return world().early.load(); }
size_t streams_made() { return world().made.load(); }
size_t events_made() { return world().events_made.load(); }

}  // namespace weft::testing::fake_cuda

using namespace weft::testing::fake_cuda;  // NOLINT

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof *properties);
  properties->pciBusID = device + 1;
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = 1;
  properties->totalGlobalMem = size_t{8} << 30;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{8} << 30;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (is_forbidden()) return cudaErrorStreamCaptureUnsupported;
  *memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  if (is_forbidden()) return cudaErrorStreamCaptureUnsupported;
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return new_stream(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  drain();
  std::free(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (is_forbidden()) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  step();
  return world().streams[stream].empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  ++world().blocking;
  drain();
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ++world().blocking;
  drain();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event());
  ++world().events_made;
  return cudaSuccess;
}
// What is queued may still refer to it, as it may to a real one.
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (takes_failure(Call::kEventRecord)) return cudaErrorUnknown;
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  Event* const e = event_of(event);
  push(stream, [e, n = ++e->recorded] {
    e->done = std::max(e->done, n);
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (is_forbidden()) return cudaErrorStreamCaptureUnsupported;
  if (takes_failure(Call::kEventQuery)) return cudaErrorUnknown;
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  step();
  const Event* const e = event_of(event);
  if (e->done >= e->recorded) return cudaSuccess;
  ++world().early;
  return cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  ++world().blocking;
  drain();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  Event* const e = event_of(event);
  push(stream, [e, n = e->recorded] { return e->done >= n; });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  ++world().copies;
  world().queued.notify_all();
  push(stream, [=] {
    if (kind == cudaMemcpyHostToDevice && world().held.load()) return false;
    if (kind == cudaMemcpyDeviceToHost && world().held_to_host.load()) return false;
    std::memcpy(to, from, bytes);
    return true;
  });
  return cudaSuccess;
}

// The driver, of which LibTorch wants to know whether a device is in use.
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

}  // extern "C"
