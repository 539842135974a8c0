#ifndef WEFT_TESTS_CUDA_FAKE_RUNTIME_H_
#define WEFT_TESTS_CUDA_FAKE_RUNTIME_H_

// Two GPUs in host memory: the functions of the CUDA runtime that copies, streams and events need,
// for programs that link this library before LibTorch. Streams are queues of operations and as lazy
// as can be: one operation of each is done whenever somebody asks for an event or a stream, so
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
// While it is held, no copy to a device gets done.
void hold_copies_to_devices(bool held);

// Since the start of the program.
size_t copies();
size_t blocking_calls();  // that waited for a device
size_t early_queries();   // of events that were not reached

}  // namespace weft::testing::fake_cuda

#endif  // WEFT_TESTS_CUDA_FAKE_RUNTIME_H_
