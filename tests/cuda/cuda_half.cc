// The lean LibTorch, which ./dev build takes, has not all that the CUDA half of LibTorch wants; the
// full one, which ./dev test takes, has. Its tests skip with the reason, which is not in
// tests/allowed_skips: a run that is to be complete fails.

#include <dlfcn.h>
#include <gtest/gtest.h>

namespace weft::testing {
namespace {

class CudaHalf : public ::testing::Environment {
  void SetUp() override {
    if (::dlopen("libweft_cuda.so", RTLD_NOW | RTLD_LOCAL) == nullptr) {
      // GoogleTest counts the tests as passed then; the word in brackets is what ctest looks for.
      GTEST_SKIP() << "[  SKIPPED ] weft::cuda cannot be loaded: " << ::dlerror()
                   << "; ./dev test builds with a LibTorch that has it all";
    }
  }
};

const ::testing::Environment* const kCudaHalf = ::testing::AddGlobalTestEnvironment(new CudaHalf);

}  // namespace
}  // namespace weft::testing
