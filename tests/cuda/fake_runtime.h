#ifndef WEFT_TESTS_CUDA_FAKE_RUNTIME_H_
#define WEFT_TESTS_CUDA_FAKE_RUNTIME_H_

// Two GPUs in host memory: the functions of the CUDA runtime that copies, streams and events need,
// for programs that link this library before LibTorch. Streams are queues of operations and as lazy
// as can be: one operation of each is done whenever the program asks for an event or a stream, so
// whatever is not waited for is not done. Kernels there are none: queue() takes their place.
//
// Any thread.

#include <cstddef>
#include <functional>

namespace weft::testing::fake_cuda {

// Adds an operation to a stream (a cudaStream_t). It is tried until it returns true; those behind
// it wait.
void queue(void* stream, std::function<bool()> operation);
// Does all that can be done.
void run_all();
// While it is held, no copy to a device, or to the host, gets done.
void hold_copies_to_devices(bool held);
void hold_copies_to_host(bool held);
// Waits until so many copies have been queued since the start of the program, half a minute at most.
bool wait_for_copies(size_t count);

// The next so many calls of a function fail, on whatever thread.
enum class Call { kEventRecord, kEventQuery };
void fail(Call call, size_t times);
// How many of those are still to come.
size_t failures_left(Call call);

// As if a thread that has nothing to do with these had begun to capture a graph in the global mode:
// calls that CUDA forbids then fail on threads in that mode, and are counted.
void capture_elsewhere(bool on);
size_t forbidden_calls();

// Since the start of the program.
size_t copies();
size_t blocking_calls();  // that waited for a device
size_t early_queries();   // of events that were not reached
size_t streams_made();
size_t events_made();

}  // namespace weft::testing::fake_cuda

#endif  // WEFT_TESTS_CUDA_FAKE_RUNTIME_H_
