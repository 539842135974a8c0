// RRefs and remote modules whose values are on GPUs: DA-71, the cases of DA-69 with remote(), and
// RPC-137's module on a GPU. What is fetched or passed on is right although the kernels that make
// it are late.

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>

#include "ATen/TensorOperators.h"
#include "ATen/ops/allclose.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "gtest/gtest.h"
#include "weft/rref/remote_module.h"
#include "weft/tests/cuda/gpu_test.h"

namespace weft::testing {
namespace {

// Fetches there, and goes on with what it has.
at::Tensor fetch_and_add(const RRef<at::Tensor>& x, at::Tensor y) { return x.to_here() + y; }
at::Tensor fetch_both(const RRef<at::Tensor>& x, const RRef<at::Tensor>& y) {
  return x.to_here() + y.to_here();
}

// Doubles, late.
struct SlowImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    delay(x.device().index());
    return x + x;
  }
};
TORCH_MODULE(Slow);

class CudaRRef : public GpuTest {
 protected:
  std::unique_ptr<Cluster> cluster(const DeviceMap& map) {
    constexpr int kWorkers = 3;
    Library lib("cuda");
    lib.def("slow_add", &slow_add).def("fetch_and_add", &fetch_and_add);
    lib.def("fetch_both", &fetch_both).def("make_on", &make_on);
    module_<Slow>(lib, "Slow").constructor<>().def("forward", &SlowImpl::forward);
    module_<torch::nn::Linear>(lib, "Linear")
        .constructor<int64_t, int64_t>()
        .def("forward", &torch::nn::LinearImpl::forward);
    return start(kWorkers, std::move(lib), all_to_all(kWorkers, map), {rref_service()});
  }
  static Status error_of_fetch(Cluster& c, const at::Tensor& x) {
    try {
      return remote(c[0], 1, &slow_add, x, x).try_to_here().status();
    } catch (const Error& e) {
      return e.status();
    }
  }
};

TEST_P(CudaRRef, DA_71_rref_to_here_synchronization) {
  for (const DeviceMap& map : maps()) {
    const auto c = cluster(map);
    const at::Tensor x = at::ones({200, 200}, on(0));
    // Made late here, too, and fetched twice.
    delay(0);
    const at::Tensor late = x + x;
    for (const int to : {1, 0}) {
      const auto sum = remote((*c)[0], to, &slow_add, x, late);
      expect_all(sum.to_here(), 3, gpu(0));
      expect_all(sum.to_here_async().wait() + x, 4, gpu(0));
    }
  }
}

TEST_P(CudaRRef, DA_71_rref_as_arg_synchronization) {
  for (const DeviceMap& map : maps()) {
    const auto c = cluster(map);
    const at::Tensor x = at::ones({200, 200}, on(0));
    const auto sum = remote((*c)[0], 1, &slow_add, x, x);
    const auto other = remote((*c)[0], 2, &slow_add, sum.to_here(), x);
    // At its owner, at another worker, and at home.
    for (const int to : {1, 2, 0}) {
      expect_all(rpc_sync((*c)[0], to, &fetch_and_add, sum, x), 3, gpu(0));
      expect_all(rpc_sync((*c)[0], to, &fetch_both, sum, other), 5, gpu(0));
    }
    const auto chained = remote((*c)[0], 2, &fetch_and_add, sum, x);
    expect_all(remote((*c)[0], 1, &fetch_and_add, chained, x).to_here(), 4, gpu(0));
  }
}

TEST_P(CudaRRef, DA_71_rref_forward_synchronization) {
  for (const DeviceMap& map : maps()) {
    const auto c = cluster(map);
    const at::Tensor x = at::ones({200, 200}, on(0));
    const RemoteModule<Slow> a((*c)[0], "worker1");
    const RemoteModule<Slow> b((*c)[0], "worker2");
    expect_all(a.forward(x), 2, gpu(0));
    expect_all(b.forward(a.forward(x)) + x, 5, gpu(0));
    const Future<at::Tensor> late = a.forward_async(x);
    expect_all(late.wait() + x, 3, gpu(0));
  }
}

TEST_P(CudaRRef, DA_71_owner_rref_forward_synchronization) {
  for (const DeviceMap& map : maps()) {
    const auto c = cluster(map);
    const RemoteModule<Slow> mine((*c)[0], "worker0");
    const at::Tensor x = at::ones({200, 200}, on(0));
    for (int i = 0; i < 4; ++i) {
      delay(0);
      expect_all(mine.forward(x + x) + x, 5, gpu(0));
    }
  }
}

TEST_P(CudaRRef, DA_69_device_maps_missing_config_remote) {
  const auto c = cluster({});
  for (int round = 0; round < 3; ++round) {
    const Status s = error_of_fetch(*c, at::ones({2}, on(0)));
    EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
    EXPECT_NE(std::string(s.message()).find("it is on cuda:0"), std::string::npos) << s;
  }
}

TEST_P(CudaRRef, DA_69_device_maps_missing_config_remote_response) {
  const auto c = cluster({});
  const auto x = remote((*c)[0], 1, &make_on, 0);
  for (int round = 0; round < 3; ++round) {
    const Status s = x.try_to_here().status();
    EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
    EXPECT_NE(std::string(s.message()).find("it is on cuda:0"), std::string::npos) << s;
  }
}

// Tensors of the CPU go to the module's GPU, and its results come back, as the map says.
TEST_P(CudaRRef, RPC_137_input_moved_to_cuda_device) {
  const auto c = cluster({{c10::Device(c10::kCPU), gpu(0)}});
  const RemoteModule<torch::nn::Linear> linear((*c)[0], "worker1/cuda:0", 3, 2);
  const at::Tensor y = linear.forward(at::ones({5, 3}));
  EXPECT_EQ(y.device(), c10::Device(c10::kCPU));
  EXPECT_EQ(y.size(1), 2);
  EXPECT_TRUE(at::allclose(linear.forward_async(at::ones({5, 3})).wait(), y));
}

INSTANTIATE_TEST_SUITE_P(Nets, CudaRRef, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
