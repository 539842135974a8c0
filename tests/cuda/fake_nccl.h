#ifndef WEFT_TESTS_CUDA_FAKE_NCCL_H_
#define WEFT_TESTS_CUDA_FAKE_NCCL_H_

// A libnccl for the GPUs of fake_runtime.h: ranks are threads of one process, and an operation is
// done when the streams of all ranks have come to it. What a test asks for goes wrong.
//
// Any thread.

#include <cstddef>
#include <string>

namespace weft::testing::fake_nccl {

// The file that this library was loaded from: for WEFT_NCCL_LIBRARY.
std::string path();
// As it was at the start of the program.
void reset();

void set_version(int version);
// While it is held, no operation ends, but those of communicators that are aborted; and no
// communicator gets connected.
void hold_operations(bool held);
void hold_connecting(bool held);
// The next call of that function fails, on whatever thread.
void fail_next(const std::string& function, int result);
// What communicators of that rank report from now on.
void set_async_error(int rank, int result);

// Since reset().
size_t calls(const std::string& function);
size_t aborted();
// Communicators that are there now.
size_t communicators();

}  // namespace weft::testing::fake_nccl

#endif  // WEFT_TESTS_CUDA_FAKE_NCCL_H_
