// Calls with tensors on GPUs: DA-68 to DA-70, DA-72, DA-73, and values under delayed kernels on
// either side. A delay is a long row of kernels on the stream in question; no test measures time.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/eye.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "c10/core/StreamGuard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/rpc/call.h"
#include "weft/rpc/struct.h"
#include "weft/tests/cuda/gpu_test.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// ---- what the workers offer --------------------------------------------------------------------

struct Boxed {
  std::string label{};
  at::Tensor tensor{};
};
WEFT_STRUCT(Boxed, label, tensor);

// Checks where its arguments are, adds them where the result is wanted.
at::Tensor add_on(at::Tensor x, at::Tensor y, int64_t x_at, int64_t y_at, int64_t z_at) {
  if (x.device() != gpu(x_at) || y.device() != gpu(y_at)) {
    throw Error(absl::StatusCode::kFailedPrecondition,
                "x is on " + x.device().str() + ", y on " + y.device().str());
  }
  return x.to(gpu(z_at)) + y.to(gpu(z_at));
}
at::Tensor same(at::Tensor x) { return x; }
double sum(at::Tensor x) { return x.sum().item<double>(); }
std::vector<at::Tensor> twice(at::Tensor x) { return {x + x, x * 3}; }
Boxed boxed(at::Tensor x) { return {"sum", x + x}; }
// On a stream of its own, joined with the current one as LibTorch asks of its users.
at::Tensor slow_add_on_own_stream(at::Tensor x, at::Tensor y) {
  const c10::Stream request = current_stream(x.device());
  const c10::Stream own = new_stream(x.device());
  join_streams(own, request);
  x.record_stream(own);
  y.record_stream(own);
  at::Tensor z;
  {
    const c10::StreamGuard guard(own);
    delay(x.device().index());
    z = x + y;
  }
  join_streams(request, own);
  z.record_stream(request);
  return z;
}
Future<at::Tensor> nested_slow_add(CallContext& context, std::string next, at::Tensor x,
                                   at::Tensor y) {
  const at::Tensor z = co_await rpc_async(context.worker(), next, &slow_add_on_own_stream, x, y);
  co_return z + 1;
}
// A part of a matrix that is made late: neither contiguous nor the whole of its memory.
at::Tensor late_view(int64_t device) {
  const at::Tensor whole = at::zeros({512, 512}, on(device));
  delay(device);
  whole.add_(7);
  return whole.t().narrow(0, 100, 50);
}

class CudaRpc : public GpuTest {
 protected:
  std::unique_ptr<Cluster> cluster(int size, const Maps& maps) {
    Library lib("cuda");
    lib.def("add_on", &add_on).def("same", &same).def("sum", &sum).def("make_on", &make_on);
    lib.def("twice", &twice).def("boxed", &boxed).def("slow_add", &slow_add);
    lib.def("own_stream", &slow_add_on_own_stream).def("nested", &nested_slow_add);
    lib.def("late_view", &late_view);
    return start(size, std::move(lib), maps);
  }
  std::unique_ptr<Cluster> mapped(int size, const DeviceMap& map) {
    return cluster(size, all_to_all(size, map));
  }
};

// ---- DA-68: placements -------------------------------------------------------------------------

struct Placement {
  int64_t x_from, y_from, x_to, y_to, z_to;
  DeviceMap map;
};

int64_t back(const DeviceMap& map, int64_t theirs) {
  for (const auto& [ours, its] : map) {
    if (its == gpu(theirs)) return ours.index();
  }
  return -1;
}

void check_placement(Cluster& c, const Destination& to, const Placement& p) {
  const at::Tensor x = at::full({100, 100}, 1, on(p.x_from));
  const at::Tensor y = at::full({100, 100}, 2, on(p.y_from));
  const at::Tensor z = rpc_sync(c[0], to, &add_on, x, y, p.x_to, p.y_to, p.z_to);
  ASSERT_EQ(z.device(), gpu(back(p.map, p.z_to)));
  EXPECT_TRUE(at::equal(z.cpu(), at::full({100, 100}, 3, at::kFloat)));
}

// The eight of mixed_1 to mixed_8: two orders of arguments, two places of the result, two maps.
std::vector<Placement> mixed() {
  std::vector<Placement> out;
  const DeviceMap straight = {{gpu(0), gpu(0)}, {gpu(1), gpu(1)}};
  const DeviceMap crossed = {{gpu(0), gpu(1)}, {gpu(1), gpu(0)}};
  for (const int64_t x : {0, 1}) {
    for (const int64_t z : {0, 1}) {
      out.push_back({x, 1 - x, x, 1 - x, z, straight});
      out.push_back({x, 1 - x, 1 - x, x, z, crossed});
    }
  }
  return out;
}

TEST_P(CudaRpc, DA_68_device_map_gpu_default) {
  const Placement p{0, 0, 0, 0, 0, {{gpu(0), gpu(0)}}};
  const auto c = mapped(2, p.map);
  check_placement(*c, 1, p);
  check_placement(*c, 0, p);
}

TEST_P(CudaRpc, DA_68_device_map_gpu_non_default_and_from_one_to_the_other) {
  if (gpus_.count < 2) GTEST_SKIP() << "no GPU on this machine besides one";
  for (const Placement& p :
       {Placement{1, 1, 1, 1, 1, {{gpu(1), gpu(1)}}}, Placement{0, 0, 1, 1, 1, {{gpu(0), gpu(1)}}},
        Placement{1, 1, 0, 0, 0, {{gpu(1), gpu(0)}}}}) {
    const auto c = mapped(2, p.map);
    check_placement(*c, 1, p);
  }
}

TEST_P(CudaRpc, DA_68_device_map_gpu_mixed) {
  if (gpus_.count < 2) GTEST_SKIP() << "no GPU on this machine besides one";
  for (const Placement& p : mixed()) {
    const auto c = mapped(2, p.map);
    check_placement(*c, 1, p);
  }
}

TEST_P(CudaRpc, DA_68_device_map_gpu_mixed_self) {
  if (gpus_.count < 2) GTEST_SKIP() << "no GPU on this machine besides one";
  for (const Placement& p : mixed()) {
    const auto c = mapped(1, p.map);
    check_placement(*c, 0, p);
  }
}

TEST_P(CudaRpc, SizesLayoutsAndTypesSurvive) {
  const auto c = mapped(2, {{gpu(0), gpu(0)}});
  std::vector<at::Tensor> tensors;
  // Sizes: no bytes, one slot, a slot and a bit, many slots.
  for (const int64_t n : {0, 1, 1 << 18, (1 << 18) + 1, 20'000'000}) {
    tensors.push_back(at::full({n}, 5, on(0)));
  }
  tensors.push_back(at::ones({4, 5, 6}, on(0)).permute({2, 0, 1}));
  tensors.push_back(at::ones({64, 64}, on(0)).narrow(1, 3, 7));
  tensors.push_back(at::ones({3}, on(0)).to(at::kBFloat16));
  tensors.push_back(at::ones({3}, on(0)).to(at::kBool));
  tensors.push_back(at::eye(50).to(gpu(0)).to_sparse());
  for (const at::Tensor& x : tensors) {
    const at::Tensor y = rpc_sync((*c)[0], 1, &same, x);
    EXPECT_EQ(y.device(), x.device());
    EXPECT_EQ(y.layout(), x.layout());
    EXPECT_EQ(y.scalar_type(), x.scalar_type());
    const bool sparse = x.layout() == at::kSparse;
    EXPECT_TRUE(
        at::equal(sparse ? y.to_dense().cpu() : y.cpu(), sparse ? x.to_dense().cpu() : x.cpu()));
  }
}

// ---- DA-69: no map -----------------------------------------------------------------------------

TEST_P(CudaRpc, DA_69_device_maps_missing_config_of_a_gpu) {
  const auto c = cluster(2, [](int i) {
    return i == 0 ? std::map<std::string, DeviceMap>{{"worker1", {{gpu(0), gpu(0)}}}}
                  : std::map<std::string, DeviceMap>{};
  });
  const at::Tensor x = at::ones({2}, on(0));
  for (int round = 0; round < 10; ++round) {
    const Status request = try_rpc_sync((*c)[1], 0, &same, x).status();
    EXPECT_EQ(error_kind(request), ErrorKind::kInvalidArgument) << request;
    EXPECT_THAT(std::string(request.message()),
                AllOf(HasSubstr("it is on cuda:0"), HasSubstr("no device map for 'worker0'")));
    const Status response = try_rpc_sync((*c)[1], 0, {.deadline = kInfinite}, &make_on, 0).status();
    EXPECT_THAT(std::string(response.message()), HasSubstr("the result of 'cuda.make_on'"));
    expect_all(rpc_sync((*c)[0], 1, &same, x), 1, gpu(0));
  }
}

// ---- DA-70: streams of the user's own ----------------------------------------------------------

TEST_P(CudaRpc, DA_70_custom_stream) {
  const auto c = mapped(2, {{gpu(0), gpu(0)}});
  const c10::StreamGuard guard(new_stream(gpu(0)));
  const at::Tensor x = at::zeros({1 << 20}, on(0));
  delay(0);
  x.add_(1);
  expect_all(rpc_sync((*c)[0], 1, &slow_add_on_own_stream, x, x), 2, gpu(0));
}

TEST_P(CudaRpc, DA_70_custom_stream_multi) {
  const auto c = mapped(2, {{gpu(0), gpu(0)}});
  std::vector<Future<at::Tensor>> results;
  for (int i = 0; i < 5; ++i) {
    const c10::StreamGuard guard(new_stream(gpu(0)));
    const at::Tensor x = at::zeros({1 << 20}, on(0));
    delay(0);
    x.add_(i);
    results.push_back(rpc_async((*c)[0], 1, &slow_add_on_own_stream, x, x));
  }
  for (int i = 0; i < 5; ++i) expect_all(results[static_cast<size_t>(i)].wait(), 2 * i, gpu(0));
}

TEST_P(CudaRpc, DA_70_custom_stream_nested) {
  const auto c = mapped(3, {{gpu(0), gpu(0)}});
  const at::Tensor x = at::full({1 << 20}, 2, on(0));
  expect_all(rpc_sync((*c)[0], 1, &nested_slow_add, "worker2", x, x), 5, gpu(0));
}

TEST_P(CudaRpc, DA_70_custom_stream_nested_multi) {
  const auto c = mapped(3, {{gpu(0), gpu(0)}});
  std::vector<Future<at::Tensor>> results;
  for (int i = 0; i < 5; ++i) {
    const c10::StreamGuard guard(new_stream(gpu(0)));
    const at::Tensor x = at::full({1 << 20}, i, on(0));
    results.push_back(rpc_async((*c)[0], 1, &nested_slow_add, "worker2", x, x));
  }
  for (int i = 0; i < 5; ++i) expect_all(results[static_cast<size_t>(i)].wait(), 2 * i + 1, gpu(0));
}

// ---- values under delays -----------------------------------------------------------------------

// STREAM-1, STREAM-2: the caller's kernels are late, its threads are not.
TEST_P(CudaRpc, ADelayedSenderBlocksNobody) {
  const auto c = mapped(2, {{gpu(0), gpu(0)}});
  rpc_sync((*c)[0], 1, &sum, at::ones({1}, on(0)));  // everything has been used once
  const c10::StreamGuard guard(new_stream(gpu(0)));
  const at::Tensor x = at::zeros({1 << 20}, on(0));
  for (int i = 0; i < 5; ++i) delay(0);
  c10::Event late(c10::kCUDA);
  late.record(current_stream(gpu(0)));
  x.add_(1);
  auto slow = rpc_async((*c)[0], 1, &sum, x);
  EXPECT_EQ(rpc_sync((*c)[0], 1, &sum, at::ones({3})), 3);
  EXPECT_FALSE(late.query()) << "a call without the tensor waited for its kernels";
  EXPECT_EQ(slow.wait(), 1 << 20);
}

TEST_P(CudaRpc, ADelayedHandlerIsWaitedForByItsResultOnly) {
  const auto c = mapped(2, {{gpu(0), gpu(0)}});
  const at::Tensor x = at::ones({1 << 20}, on(0));
  std::vector<Future<at::Tensor>> results;
  for (int i = 0; i < 8; ++i) results.push_back(rpc_async((*c)[0], 1, &slow_add, x, x));
  for (auto& result : results) expect_all(result.wait(), 2, gpu(0));
}

// ---- DA-72: futures ----------------------------------------------------------------------------

TEST_P(CudaRpc, DA_72_cuda_future_can_extract_tensors_lists_and_structs) {
  const auto c = mapped(2, {{gpu(0), gpu(0)}});
  const at::Tensor x = at::ones({1 << 22}, on(0));
  // The consumer's stream is one that knows nothing of the copies.
  const c10::StreamGuard guard(new_stream(gpu(0)));
  expect_all(rpc_async((*c)[0], 1, &same, x).wait() + 1, 2, gpu(0));
  const auto list = rpc_async((*c)[0], 1, &twice, x).wait();
  expect_all(list[0] + list[1], 5, gpu(0));
  const Boxed box = rpc_async((*c)[0], 1, &boxed, x).wait();
  expect_all(box.tensor * 2, 4, gpu(0));
}

TEST_P(CudaRpc, DA_72_cuda_future_callback_changes_devices) {
  if (gpus_.count < 2) GTEST_SKIP() << "no GPU on this machine besides one";
  const auto c = mapped(2, {{gpu(0), gpu(0)}, {gpu(1), gpu(1)}});
  const at::Tensor x = at::ones({1 << 22}, on(0));
  auto moved = rpc_async((*c)[0], 1, &same, x).then([](const at::Tensor& y) {
    delay(0);
    return (y + 1).to(gpu(1), /*non_blocking=*/true);
  });
  const c10::StreamGuard guard(new_stream(gpu(1)));
  expect_all(moved.wait() * 2, 4, gpu(1));
}

TEST_P(CudaRpc, DA_72_cuda_future_callback_on_one_device) {
  const auto c = mapped(2, {{gpu(0), gpu(0)}});
  const at::Tensor x = at::ones({1 << 22}, on(0));
  auto child = rpc_async((*c)[0], 1, &same, x).then([](const at::Tensor& y) {
    delay(0);
    return y + 1;
  });
  const c10::StreamGuard guard(new_stream(gpu(0)));
  expect_all(child.wait() * 2, 4, gpu(0));
}

TEST_P(CudaRpc, DA_72_cuda_future_value_on_bad_device) {
  if (gpus_.count < 2) GTEST_SKIP() << "no GPU on this machine besides one";
  const auto c = mapped(2, {{gpu(0), gpu(0)}});
  auto bad = rpc_async((*c)[0], 1, &make_on, 1);
  EXPECT_THAT(std::string(bad.try_wait().status().message()), HasSubstr("it is on cuda:1"));
}

TEST_P(CudaRpc, DA_72_cuda_future_device_in_every_spelling) {
  for (const c10::Device device :
       {c10::Device(c10::kCUDA, 0), c10::Device(std::string("cuda:0")), gpu(0)}) {
    const auto c = mapped(1, {{device, device}});
    expect_all(rpc_sync((*c)[0], 0, &make_on, 0), 3, gpu(0));
  }
}

// ---- DA-73 -------------------------------------------------------------------------------------

TEST_P(CudaRpc, DA_73_tensor_view_as_return_value) {
  const auto c = mapped(2, {{gpu(0), gpu(0)}});
  std::vector<Future<at::Tensor>> views;
  for (int i = 0; i < 4; ++i) views.push_back(rpc_async((*c)[0], 1, &late_view, 0));
  for (auto& view : views) {
    const at::Tensor x = view.wait();
    EXPECT_EQ(x.sizes(), at::IntArrayRef({50, 512}));
    expect_all(x, 7, gpu(0));
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, CudaRpc, ::testing::ValuesIn(nets()), net_name);

// ---- without a GPU -----------------------------------------------------------------------------

// The library is opened as in any program, and the worker says what is missing.
TEST(DevicesWithoutAGpu, BadInput_devices_on_a_machine_without_a_gpu) {
  const Gpus gpus = find_gpus();
  Cluster c({.size = 0});
  JoinOptions o = c.join_options(0, "lonely");
  o.world_size = 1;
  o.devices = {gpu(gpus.count)};
  const Status s = Worker::try_join(std::move(o)).status();
  EXPECT_THAT(
      std::string(s.message()),
      ::testing::AnyOf(HasSubstr("devices names our " + gpu(gpus.count).str() + ", and we have "),
                       HasSubstr("weft::cuda cannot be loaded: ")));
  EXPECT_THAT(error_kind(s),
              ::testing::AnyOf(ErrorKind::kInvalidArgument, ErrorKind::kUnavailable));
}

}  // namespace
}  // namespace weft::testing
