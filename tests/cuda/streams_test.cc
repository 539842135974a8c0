// weft::cuda itself, on GPUs that are made of host memory (fake_runtime.h): pieces and slots, and
// what waits for what. Streams there do only what is waited for, so an order that is missing
// shows.

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gtest/gtest.h"
#include "weft/rpc/call.h"
#include "weft/tests/cuda/fake_gpus.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

float first(const at::Tensor& x) {
  const auto read = queue_read(x);
  fake_cuda::run_all();
  return (*read)[0];
}

bool on_default_stream() {
  return current() == c10::impl::VirtualGuardImpl(c10::kCUDA).getDefaultStream(gpu(0));
}

class Streams : public ::testing::TestWithParam<Net> {
 protected:
  Streams() {
    Library lib("streams");
    lib.def("where", &where).def("same", &same).def("one", &one).def("first", &first);
    lib.def("on_default_stream", &on_default_stream);
    lib.def("keep", [kept = kept_](const at::Tensor& x) {
      *kept = queue_read(x);
      return x.numel();
    });
    // A result that a kernel makes late.
    lib.def("late", [gate = gate_](int64_t n) {
      const at::Tensor x = with_bytes(at::zeros({n}), gpu(0));
      queue_fill(x, 5, gate);
      return x;
    });
    lib.def("now", [](int64_t n) {
      const at::Tensor x = with_bytes(at::zeros({n}), gpu(0));
      queue_fill(x, 4, nullptr);
      return x;
    });
    ClusterOptions options{.net = GetParam(), .library = std::move(lib)};
    options.adjust = [](int i, JoinOptions* o) {
      o->devices = {gpu(0), gpu(1)};
      if (i == 0) o->device_maps = {{"worker1", {{gpu(0), gpu(0)}, {c10::kCPU, c10::kCPU}}}};
    };
    cluster_ = std::make_unique<Cluster>(std::move(options));
  }
  Worker& caller() { return (*cluster_)[0]; }

  // What the kernel of a handler read.
  const std::shared_ptr<std::shared_ptr<std::vector<float>>> kept_ =
      std::make_shared<std::shared_ptr<std::vector<float>>>();
  const OpenFlag gate_ = std::make_shared<std::atomic<bool>>(false);
  std::unique_ptr<Cluster> cluster_;
};

using Late = FunctionRef<at::Tensor(int64_t)>;

TEST_P(Streams, EveryNumberOfSlots) {
  constexpr int64_t kSlot = (1 << 20) / 4;
  const size_t before = fake_cuda::copies();
  size_t pieces = 0;
  for (const int64_t n : {int64_t{0}, int64_t{1}, kSlot - 1, kSlot, kSlot + 1, 40 * kSlot}) {
    const at::Tensor values = at::arange(n).to(at::kFloat);
    const at::Tensor x = with_bytes(values, gpu(0));
    EXPECT_EQ(rpc_sync(caller(), 1, &where, x), "cuda:0");
    EXPECT_TRUE(at::equal(settled(rpc_sync(caller(), 1, &same, x)), values)) << n;
    pieces +=
        6 * static_cast<size_t>((n + kSlot - 1) / kSlot);  // there, there and back, in and out
  }
  EXPECT_EQ(fake_cuda::copies() - before, pieces);
}

TEST_P(Streams, ManyMessagesFromManyThreads) {
  std::atomic<int> wrong{0};
  std::vector<std::unique_ptr<Thread>> threads;
  auto runtime = make_system_runtime();
  for (int t = 0; t < 4; ++t) {
    threads.push_back(runtime->spawn("caller", [this, t, &wrong] {
      for (int round = 0; round < 5; ++round) {
        std::vector<at::Tensor> values;
        std::vector<Future<at::Tensor>> results;
        for (int i = 0; i < 6; ++i) {
          values.push_back(at::full({1000 + i * 400'000 + t}, 100 * t + i, at::kFloat));
          results.push_back(rpc_async(caller(), 1, &same, with_bytes(values.back(), gpu(0))));
        }
        for (size_t i = 0; i < values.size(); ++i) {
          if (!at::equal(settled(results[i].wait()), values[i])) ++wrong;
        }
      }
    }));
  }
  threads.clear();
  EXPECT_EQ(wrong.load(), 0);
}

// STREAM-1, STREAM-2.
TEST_P(Streams, AMessageWaitsForItsOwnStreamAndHoldsUpNobody) {
  const at::Tensor x = with_bytes(at::zeros({40 << 18}), gpu(0));  // more than there are slots
  const at::Tensor other = with_bytes(at::full({40 << 18}, 3.0F), gpu(0));
  const size_t blocking = fake_cuda::blocking_calls();
  Future<float> late;
  {
    const c10::StreamGuard guard(fresh());
    queue_fill(x, 9, gate_);
    late = rpc_async(caller(), 1, &first, x);
  }
  EXPECT_EQ(rpc_sync(caller(), 1, &one), 1);
  EXPECT_EQ(rpc_sync(caller(), 1, &first, other), 3);
  EXPECT_FALSE(late.done());
  gate_->store(true);
  EXPECT_EQ(late.wait(), 9);
  EXPECT_EQ(fake_cuda::blocking_calls(), blocking) << "somebody waited for a device";
}

// STREAM-3, the callee's half: the result is read after the handler's kernels.
TEST_P(Streams, AResultWaitsForTheHandlersKernels) {
  auto late = rpc_async(caller(), 1, Late{"streams.late"}, 300'000);
  EXPECT_EQ(rpc_sync(caller(), 1, &first, with_bytes(at::full({4}, 2.0F), gpu(0))), 2);
  EXPECT_FALSE(late.done());
  gate_->store(true);
  EXPECT_TRUE(at::equal(settled(late.wait()), at::full({300'000}, 5.0F)));
}

// More handlers than LibTorch's pool has streams, each with a kernel that does not end.
TEST_P(Streams, DEF_19_no_handler_comes_behind_the_kernels_of_another) {
  std::vector<Future<at::Tensor>> late;
  for (int i = 0; i < 40; ++i) late.push_back(rpc_async(caller(), 1, Late{"streams.late"}, 10));
  for (int i = 0; i < 40; ++i) {
    const at::Tensor y =
        rpc_sync(caller(), 1, {.deadline = absl::Seconds(20)}, Late{"streams.now"}, 10);
    ASSERT_TRUE(at::equal(settled(y), at::full({10}, 4.0F))) << i;
  }
  gate_->store(true);
  for (const Future<at::Tensor>& one : late) {
    EXPECT_TRUE(at::equal(settled(one.wait()), at::full({10}, 5.0F)));
  }
}

TEST_P(Streams, DEF_19_streams_are_used_again) {
  const at::Tensor x = with_bytes(at::zeros({10}), gpu(0));
  for (int i = 0; i < 20; ++i) rpc_sync(caller(), 1, &where, x);
  fake_cuda::run_all();
  const size_t before = fake_cuda::streams_made();
  for (int i = 0; i < 200; ++i) {
    rpc_sync(caller(), 1, &where, x);
    fake_cuda::run_all();
  }
  EXPECT_LE(fake_cuda::streams_made() - before, 8u);
}

// STREAM-3, the callee's other half: a handler starts before its arguments are there, and what it
// queues comes after them.
TEST_P(Streams, AHandlerStartsWhenItsCopiesAreQueued) {
  const at::Tensor x = with_bytes(at::full({1000}, 6.0F), gpu(0));
  fake_cuda::hold_copies_to_devices(true);
  EXPECT_EQ(rpc_sync(caller(), 1, FunctionRef<int64_t(at::Tensor)>{"streams.keep"}, x), 1000);
  fake_cuda::run_all();
  EXPECT_TRUE((*kept_)->empty()) << "the handler's kernel did not wait for the argument";
  fake_cuda::hold_copies_to_devices(false);
  fake_cuda::run_all();
  EXPECT_EQ(**kept_, std::vector<float>(1000, 6.0F));
}

// STREAM-3, the caller's half: wait() gives the tensor at once, and the consumer's stream the
// order.
TEST_P(Streams, AConsumersStreamWaitsForTheCopy) {
  gate_->store(true);
  fake_cuda::hold_copies_to_devices(true);
  const c10::StreamGuard guard(fresh());
  const auto read = queue_read(rpc_sync(caller(), 1, Late{"streams.late"}, 1000));
  fake_cuda::run_all();
  EXPECT_TRUE(read->empty()) << "the consumer's kernel did not wait for the result";
  fake_cuda::hold_copies_to_devices(false);
  fake_cuda::run_all();
  EXPECT_EQ(*read, std::vector<float>(1000, 5.0F));
}

// A thread of the pool gives the streams of one request back before it serves the next.
TEST_P(Streams, ThreadsGoBackToTheirOwnStreams) {
  const at::Tensor x = with_bytes(at::zeros({10}), gpu(0));
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(rpc_sync(caller(), 1, &on_default_stream)) << "the map has devices";
    rpc_sync(caller(), 1, &where, x);
    EXPECT_TRUE(rpc_sync((*cluster_)[1], 1, &on_default_stream));
  }
}

// FUTURE-4: the thread that takes the child waits for what a continuation queues on its own stream.
TEST_P(Streams, AChildsConsumerWaitsForTheContinuation) {
  auto child = rpc_async(caller(), 1, &same, with_bytes(at::zeros({1000}), gpu(0)))
                   .then([gate = gate_](const at::Tensor& y) {
                     queue_fill(y, 8, gate);
                     return y;
                   });
  const c10::StreamGuard guard(fresh());
  const auto read = queue_read(child.wait());
  fake_cuda::run_all();
  EXPECT_TRUE(read->empty()) << "the reader did not wait for the continuation";
  gate_->store(true);
  fake_cuda::run_all();
  EXPECT_EQ(*read, std::vector<float>(1000, 8.0F));
}

INSTANTIATE_TEST_SUITE_P(Nets, Streams, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
