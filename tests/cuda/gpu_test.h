#ifndef WEFT_TESTS_CUDA_GPU_TEST_H_
#define WEFT_TESTS_CUDA_GPU_TEST_H_

// What tests of workers with real GPUs begin with. They skip, with the reason, where there are
// none.

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "gtest/gtest.h"
#include "weft/tests/cuda/gpus.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {

// What workers register.
inline at::Tensor make_on(int64_t device) { return at::full({2}, 3, on(device)); }
inline at::Tensor slow_add(at::Tensor x, at::Tensor y) {
  delay(x.device().index());
  return x + y;
}

class GpuTest : public ::testing::TestWithParam<Net> {
 protected:
  using Maps = std::function<std::map<std::string, DeviceMap>(int)>;  // of worker i

  void SetUp() override {
    gpus_ = find_gpus();
    if (gpus_.count == 0) GTEST_SKIP() << gpus_.why;
  }

  // Workers with up to two GPUs each.
  std::unique_ptr<Cluster> start(int size, Library library, const Maps& maps,
                                 const std::vector<ServiceFactory>& services = {}) const {
    ClusterOptions options{.size = size, .net = GetParam(), .library = std::move(library)};
    options.adjust = [maps, services, n = gpus_.count](int i, JoinOptions* o) {
      o->device_maps = maps(i);
      for (int d = 0; d < std::min(n, 2); ++d) o->devices.push_back(gpu(d));
      o->services = services;
    };
    return std::make_unique<Cluster>(std::move(options));
  }
  // Every worker maps to every worker, itself included; with an empty map none does.
  static Maps all_to_all(int size, const DeviceMap& map) {
    return [size, map](int) {
      std::map<std::string, DeviceMap> maps;
      for (int to = 0; to < size && !map.empty(); ++to) maps["worker" + std::to_string(to)] = map;
      return maps;
    };
  }
  // From GPU 0 to 0, and, with two GPUs, from each to the other.
  std::vector<DeviceMap> maps() const {
    std::vector<DeviceMap> out = {{{gpu(0), gpu(0)}}};
    if (gpus_.count > 1) out.push_back({{gpu(0), gpu(1)}, {gpu(1), gpu(0)}});
    return out;
  }
  static void expect_all(const at::Tensor& x, double value, c10::Device device) {
    ASSERT_EQ(x.device(), device);
    EXPECT_TRUE(at::equal(x.cpu(), at::full(x.sizes(), value, at::kFloat)));
  }

  Gpus gpus_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_CUDA_GPU_TEST_H_
