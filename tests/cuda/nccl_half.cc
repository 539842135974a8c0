// As cuda_half.cc, of weft::nccl.

#include <dlfcn.h>
#include <gtest/gtest.h>

namespace weft::testing {
namespace {

class NcclHalf : public ::testing::Environment {
  void SetUp() override {
    if (::dlopen("libweft_nccl.so", RTLD_NOW | RTLD_LOCAL) == nullptr) {
      // GoogleTest counts the tests as passed then; the word in brackets is what ctest looks for.
      GTEST_SKIP() << "[  SKIPPED ] weft::nccl cannot be loaded: " << ::dlerror()
                   << "; ./dev test builds with a LibTorch that has it all";
    }
  }
};

const ::testing::Environment* const kNcclHalf = ::testing::AddGlobalTestEnvironment(new NcclHalf);

}  // namespace
}  // namespace weft::testing
