// DEF_18: the backend of weft::cuda by itself, on GPUs that are made of host memory, when CUDA reports
// errors, and beside the capture of a graph.

#include <dlfcn.h>

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/runtime.h"
#include "weft/rpc/internal/device/device_backend.h"
#include "weft/tests/cuda/fake_gpus.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;
using Copies = StatusOr<std::vector<at::Tensor>>;

constexpr int64_t kSlot = (1 << 20) / 4;  // elements

class CudaCopier : public ::testing::Test {
 protected:
  void SetUp() override {
    void* const library = ::dlopen("libweft_cuda.so", RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << ::dlerror();
    auto* const open =
        reinterpret_cast<internal::OpenDeviceBackend*>(::dlsym(library, "weft_cuda_open"));
    ASSERT_NE(open, nullptr) << ::dlerror();
    StatusOr<std::shared_ptr<internal::DeviceBackend>> made =
        make_error(ErrorKind::kInternal, "not opened");
    open(runtime_, Logger(), &made);
    ASSERT_TRUE(made.ok()) << made.status();
    backend_ = *made;
    ASSERT_TRUE(backend_->prepare({gpu(0)}).ok());
  }
  void TearDown() override {
    hold(false, false);
    fake_cuda::capture_elsewhere(false);
    fake_cuda::run_all();
    if (backend_ != nullptr) backend_->shutdown(make_error(ErrorKind::kState, "the test ends"));
  }
  static void hold(bool to_host, bool to_devices) {
    fake_cuda::hold_copies_to_host(to_host);
    fake_cuda::hold_copies_to_devices(to_devices);
  }

  std::future<Copies> to_host(const at::Tensor& x) {
    const auto mark = backend_->mark({x});
    EXPECT_TRUE(mark.ok()) << mark.status();
    return to_host(x, *mark);
  }
  std::future<Copies> to_host(const at::Tensor& x, std::shared_ptr<const void> mark) {
    auto promise = std::make_shared<std::promise<Copies>>();
    backend_->to_host({x}, std::move(mark), nullptr,
                      [promise](Copies copies) { promise->set_value(std::move(copies)); });
    return promise->get_future();
  }
  std::future<Copies> to_device(const at::Tensor& x) {
    const auto work = backend_->make_work({gpu(0)});
    EXPECT_TRUE(work.ok()) << work.status();
    auto promise = std::make_shared<std::promise<Copies>>();
    backend_->to_devices({x}, {gpu(0)}, *work,
                         [promise](Copies copies) { promise->set_value(std::move(copies)); });
    return promise->get_future();
  }
  // A copy to the host is under way from `x`, of which CUDA has reported an error. What is sent to a
  // device next arrives as it is.
  void expect_next_is_right() {
    hold(true, true);
    const at::Tensor y = at::full({kSlot}, 3.0F);
    const Copies copy = to_device(y).get();
    ASSERT_TRUE(copy.ok()) << copy.status();
    hold(false, true);
    fake_cuda::run_all();  // the copy of which nothing is known comes to its end
    hold(false, false);
    EXPECT_TRUE(at::equal(settled(copy->front()), y))
        << "the copy that failed has written over the bytes of another message";
  }

  const std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  std::shared_ptr<internal::DeviceBackend> backend_;
};

TEST_F(CudaCopier, DEF_18_an_error_of_an_event_keeps_the_slot_from_others) {
  const at::Tensor x = with_bytes(at::full({kSlot}, 7.0F), gpu(0));
  hold(true, false);
  const size_t before = fake_cuda::copies();
  std::future<Copies> copied = to_host(x);
  ASSERT_TRUE(fake_cuda::wait_for_copies(before + 1));
  fake_cuda::fail(fake_cuda::Call::kEventQuery, 1);
  EXPECT_EQ(error_kind(copied.get().status()), ErrorKind::kInternal);
  expect_next_is_right();
}

TEST_F(CudaCopier, DEF_18_an_event_that_was_not_recorded_says_nothing) {
  const at::Tensor x = with_bytes(at::full({kSlot}, 7.0F), gpu(0));
  const auto mark = backend_->mark({x});
  ASSERT_TRUE(mark.ok()) << mark.status();
  hold(true, false);
  fake_cuda::fail(fake_cuda::Call::kEventRecord, 1);
  EXPECT_EQ(error_kind(to_host(x, *mark).get().status()), ErrorKind::kInternal);
  EXPECT_EQ(fake_cuda::failures_left(fake_cuda::Call::kEventRecord), 0u);
  expect_next_is_right();
}

TEST_F(CudaCopier, DEF_18_without_slots_transfers_fail) {
  const at::Tensor x = with_bytes(at::full({4}, 7.0F), gpu(0));
  hold(true, false);
  constexpr size_t kSlots = 32;
  for (size_t i = 0; i < kSlots; ++i) {
    const size_t before = fake_cuda::copies();
    std::future<Copies> copied = to_host(x);
    ASSERT_TRUE(fake_cuda::wait_for_copies(before + 1)) << i;
    fake_cuda::fail(fake_cuda::Call::kEventQuery, 1);
    EXPECT_FALSE(copied.get().ok()) << i;
  }
  for (const bool there : {false, true}) {
    const Status none =
        there ? to_device(at::full({4}, 1.0F)).get().status() : to_host(x).get().status();
    EXPECT_THAT(std::string(none.message()), HasSubstr("no pinned memory is left"));
  }
}

TEST_F(CudaCopier, DEF_18_transfers_beside_the_capture_of_a_graph) {
  const at::Tensor values = at::full({3 * kSlot}, 5.0F);
  const at::Tensor x = with_bytes(values, gpu(0));
  const size_t before = fake_cuda::forbidden_calls();
  fake_cuda::capture_elsewhere(true);
  const Copies down = to_host(x).get();
  const Copies up = to_device(values).get();
  fake_cuda::capture_elsewhere(false);
  ASSERT_TRUE(down.ok()) << down.status();
  ASSERT_TRUE(up.ok()) << up.status();
  EXPECT_TRUE(at::equal(down->front(), values));
  EXPECT_TRUE(at::equal(settled(up->front()), values));
  EXPECT_EQ(fake_cuda::forbidden_calls(), before) << "the capture would be broken";
}

}  // namespace
}  // namespace weft::testing
