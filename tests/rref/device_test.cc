// RRefs to tensors on devices: fetched by the device map of who fetches. The devices need no
// hardware; what only a GPU can show is in tests/cuda.

#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "weft/tests/rref/fixture.h"
#include "weft/tests/testing/fake_devices.h"

namespace weft::testing {
namespace {

at::Tensor same(at::Tensor x) { return x; }
at::Tensor make_on(int64_t device) {
  return on_device(at::full({3}, 7.0), cuda(static_cast<int>(device)));
}
std::string owned_on(const RRef<at::Tensor>& x) { return x.local_value()->device().str(); }
std::string fetched_on(const RRef<at::Tensor>& x) { return x.to_here().device().str(); }

class RRefDevices : public RRefTest {
 protected:
  // `maps` of worker i; two devices each.
  std::unique_ptr<Cluster> cluster(std::vector<std::map<std::string, DeviceMap>> maps) {
    Library lib("devices");
    lib.def("same", &same).def("make_on", &make_on);
    lib.def("owned_on", &owned_on).def("fetched_on", &fetched_on);
    ClusterOptions o{.size = static_cast<int>(maps.size()), .net = GetParam(), .library = lib};
    o.adjust = [maps](int i, JoinOptions* j) {
      j->device_backend = std::make_shared<FakeDevices>(2);
      j->device_maps = maps[static_cast<size_t>(i)];
      j->devices = {cuda(0), cuda(1)};
      j->services.push_back(rref_service());
    };
    return std::make_unique<Cluster>(std::move(o));
  }
};

TEST_P(RRefDevices, ToHereBringsTheValueWhereTheMapSays) {
  auto c = cluster({{{"worker1", {{cuda(0), cuda(1)}}}}, {}, {{"worker1", {{cuda(1), cuda(1)}}}}});
  {
    const at::Tensor values = at::arange(6);
    const auto x = remote((*c)[0], 1, &same, on_device(values, cuda(0)));
    for (const at::Tensor& got : {x.to_here(), x.to_here_async().wait()}) {
      ASSERT_EQ(got.device(), cuda(0));
      EXPECT_TRUE(at::equal(on_cpu(got), values));
    }
    EXPECT_EQ(rpc_sync((*c)[0], 1, &owned_on, x), "cuda:1");
    EXPECT_EQ(rpc_sync((*c)[0], 2, &fetched_on, x), "cuda:1") << "by the map of who fetches";
    const auto mine = RRef<at::Tensor>::local((*c)[0], on_device(values, cuda(1)));
    EXPECT_EQ(mine.local_value()->device(), cuda(1));
  }
  expect_nothing_left(*c);
}

TEST_P(RRefDevices, DA_69_device_maps_missing_config_remote) {
  auto c = cluster({{{"worker1", {{cuda(0), cuda(1)}}}}, {}});
  for (int round = 0; round < 3; ++round) {
    const auto x = remote((*c)[0], 1, &same, on_device(at::arange(4), cuda(1)));
    expect_error(x.try_to_here().status(), ErrorKind::kInvalidArgument,
                 {"it is on cuda:1", "{cuda:0 -> cuda:1}"});
  }
  expect_nothing_left(*c);
}

TEST_P(RRefDevices, DA_69_device_maps_missing_config_remote_response) {
  auto c = cluster({{{"worker1", {{cuda(0), cuda(1)}}}}, {}, {}});
  {
    const auto x = remote((*c)[0], 1, &make_on, 0);
    for (int round = 0; round < 3; ++round) {
      expect_error(x.try_to_here().status(), ErrorKind::kInvalidArgument,
                   {"it is on cuda:0", "{cuda:1 -> cuda:0}"});
    }
    // A worker without a map gets tensors of the CPU only.
    const auto y = remote((*c)[0], 1, &make_on, 1);
    expect_error(try_rpc_sync((*c)[0], 2, &fetched_on, y).status(), ErrorKind::kInvalidArgument,
                 {"for 'worker2'", "there is no device map"});
    EXPECT_EQ(y.to_here().device(), cuda(0));
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, RRefDevices, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
