#ifndef WEFT_TESTS_CUDA_FAKE_NCCL_WORLD_H_
#define WEFT_TESTS_CUDA_FAKE_NCCL_WORLD_H_

// Ranks of a group by fake_nccl.h as threads of a test, each with a GPU of fake_runtime.h.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10/core/DeviceGuard.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gtest/gtest.h"
#include "weft/collectives/process_group.h"
#include "weft/common/runtime.h"
#include "weft/store/hash_store.h"
#include "weft/tests/cuda/fake_gpus.h"
#include "weft/tests/cuda/fake_nccl.h"
#include "weft/tests/testing/checks.h"

namespace weft::testing {

class FakeNcclTest : public ::testing::Test {
 protected:
  FakeNcclTest() { fake_nccl::reset(); }
  ~FakeNcclTest() override {
    // COLL-5.
    EXPECT_EQ(fake_nccl::communicators(), 0u);
    fake_nccl::reset();
    fake_cuda::run_all();
  }

  ProcessGroupOptions options(int rank, int size = 2) const {
    ProcessGroupOptions out;
    out.backend = Backend::kNccl;
    out.store = store_->new_client();
    out.rank = rank;
    out.size = size;
    out.timeout = absl::Seconds(60);
    out.init_timeout = absl::Seconds(60);
    out.runtime = runtime_;
    out.device = rank % 2;
    out.environment = Environment{{"WEFT_NCCL_LIBRARY", fake_nccl::path()}};
    return out;
  }
  void run_ranks(const std::function<void(int)>& body, int size = 2) const {
    std::vector<std::unique_ptr<Thread>> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.push_back(runtime_->spawn("rank", [&body, rank] { body(rank); }));
    }
    for (auto& thread : threads) thread->join();
  }
  using Change = std::function<void(ProcessGroupOptions*)>;
  void run(const Change& change, const std::function<void(ProcessGroup&)>& body) const {
    run_ranks([&](int rank) {
      ProcessGroupOptions o = options(rank);
      change(&o);
      // The GPUs here share one default stream, where each rank would come behind the other's half
      // of an operation.
      const c10::Device own = gpu(*o.device);
      const c10::DeviceGuard device(own);
      const c10::StreamGuard stream(
          c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(own));
      StatusOr<ProcessGroup> group = try_init_process_group(o);
      ASSERT_TRUE(group.ok()) << group.status();
      try {
        body(*group);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << rank << ": " << e.what();
        group->abort("the test has failed here");
      }
    });
  }
  void run(const std::function<void(ProcessGroup&)>& body) const {
    run([](ProcessGroupOptions*) {}, body);
  }
  // On the GPU of that rank.
  static at::Tensor on_gpu_of(const ProcessGroup& group, const at::Tensor& x) {
    return with_bytes(x, gpu(group.rank() % 2));
  }

  const std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  const std::shared_ptr<HashStore> store_ = std::make_shared<HashStore>(runtime_);
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_CUDA_FAKE_NCCL_WORLD_H_
