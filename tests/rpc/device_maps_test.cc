// Device maps at join: DA-67. Counts of devices are injected, so no device is needed.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/fake_devices.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class DeviceMaps : public ::testing::TestWithParam<Net> {
 protected:
  using Adjust = std::function<void(int index, JoinOptions*)>;

  // Two workers, "worker0" and "worker1", of a static group, that join at once with two devices
  // each.
  std::vector<Status> join(const Adjust& adjust) {
    ClusterOptions options{.size = 0, .net = GetParam(), .library = test_.library};
    const Cluster shape(options);
    auto runtime = make_system_runtime();
    std::vector<Status> out(2);
    std::vector<StatusOr<Worker>> workers;
    for (int i = 0; i < 2; ++i) workers.emplace_back(make_error(ErrorKind::kInternal, "no"));
    {
      std::vector<std::unique_ptr<Thread>> threads;
      for (int i = 0; i < 2; ++i) {
        JoinOptions o = shape.join_options(i, "worker" + std::to_string(i));
        o.rank = i;
        o.world_size = 2;
        o.store = shape.store()->new_client();
        o.device_backend = std::make_shared<FakeDevices>(2);
        adjust(i, &o);
        threads.push_back(runtime->spawn("join", [&workers, i, o = std::move(o)]() mutable {
          workers[static_cast<size_t>(i)] = Worker::try_join(std::move(o));
        }));
      }
    }
    for (size_t i = 0; i < 2; ++i) out[i] = workers[i].status();
    return out;
  }
  // The same options for both, each with a map for the other.
  std::vector<Status> join_with_map(const DeviceMap& map, std::vector<c10::Device> devices = {}) {
    return join([&](int i, JoinOptions* o) {
      o->device_maps = {{i == 0 ? "worker1" : "worker0", map}};
      o->devices = devices;
    });
  }
  static void expect_both(const std::vector<Status>& joined,
                          const ::testing::Matcher<std::string>& message) {
    for (const Status& s : joined) {
      EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument) << s;
      EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
      EXPECT_THAT(std::string(s.message()), message);
    }
  }
  TestLibrary test_;
};

TEST_P(DeviceMaps, RightMapsJoin) {
  for (const DeviceMap& map :
       {DeviceMap{{cuda(0), cuda(0)}}, DeviceMap{{cuda(0), cuda(1)}, {cuda(1), cuda(0)}},
        DeviceMap{{kCpu, cuda(1)}}, DeviceMap{{cuda(1), kCpu}}}) {
    for (const Status& s : join_with_map(map)) EXPECT_TRUE(s.ok()) << s;
  }
  for (const Status& s : join_with_map({{cuda(1), cuda(1)}}, {cuda(1)})) EXPECT_TRUE(s.ok()) << s;
}

TEST_P(DeviceMaps, AWorkerThatOnlyReceivesSaysWhatItUses) {
  const auto join_one_way = [&](const std::vector<c10::Device>& devices) {
    return join([&](int i, JoinOptions* o) {
      if (i == 0) o->device_maps = {{"worker1", {{cuda(0), cuda(1)}}}};
      if (i == 1) o->devices = devices;
    });
  };
  for (const Status& s : join_one_way({cuda(1)})) EXPECT_TRUE(s.ok()) << s;
  expect_both(join_one_way({}), HasSubstr("names cuda:1 of 'worker1', which uses no devices"));
}

TEST_P(DeviceMaps, DA_67_device_maps_wrong_worker_name) {
  const auto joined = join([](int i, JoinOptions* o) {
    if (i == 0) o->device_maps = {{"worker3", {{cuda(0), cuda(0)}}}};
  });
  // The other one has no device map and is told all the same.
  expect_both(joined, AllOf(HasSubstr("'worker0' has a device map for 'worker3', which is none of"),
                            HasSubstr("nearest: 'worker")));
}

TEST_P(DeviceMaps, DA_67_device_maps_invalid_max_local_device) {
  expect_both(join_with_map({{cuda(2), cuda(0)}}),
              HasSubstr("names our cuda:2, and we have 2 CUDA devices"));
}

TEST_P(DeviceMaps, DA_67_device_maps_invalid_max_remote_device) {
  expect_both(join_with_map({{cuda(0), cuda(2)}}),
              AllOf(HasSubstr("'worker0' for 'worker1', {cuda:0 -> cuda:2}, names cuda:2 of "
                              "'worker1', which has 2 CUDA devices"),
                    HasSubstr("'worker1' for 'worker0'")));
  // The counts of the two differ.
  const auto joined = join([](int i, JoinOptions* o) {
    o->device_maps = {{i == 0 ? "worker1" : "worker0", {{cuda(0), cuda(i == 0 ? 1 : 0)}}}};
    if (i == 1) o->device_backend = std::make_shared<FakeDevices>(1);
  });
  expect_both(joined, HasSubstr("names cuda:1 of 'worker1', which has 1 CUDA device"));
}

TEST_P(DeviceMaps, DA_67_device_maps_invalid_min_device) {
  // Builds of LibTorch with assertions do not even make such a device.
  c10::Device negative = cuda(0);
  negative.set_index(-2);
  expect_both(join_with_map({{negative, cuda(0)}}),
              HasSubstr("our device: cuda has the negative index -2"));
  expect_both(join_with_map({{cuda(0), negative}}),
              HasSubstr("its device: cuda has the negative index -2"));
  expect_both(join_with_map({{c10::Device(c10::kCUDA), cuda(0)}}),
              HasSubstr("cuda without an index"));
  expect_both(join_with_map({{cuda(0), c10::Device(c10::kMeta)}}),
              HasSubstr("meta cannot be used"));
  expect_both(join_with_map({{cuda(0), cuda(0)}}, {c10::Device(c10::kCUDA)}),
              HasSubstr("devices: cuda without an index"));
}

TEST_P(DeviceMaps, DA_67_device_maps_many_to_one) {
  expect_both(join_with_map({{cuda(1), cuda(0)}, {cuda(0), cuda(0)}}),
              HasSubstr("is not one to one: it maps several of our devices to cuda:0"));
}

TEST_P(DeviceMaps, DA_67_device_maps_one_to_many) {
  expect_both(join_with_map({{cuda(0), cuda(1)}, {cuda(0), cuda(0)}}),
              HasSubstr("is not one to one: it maps our cuda:0 more than once"));
  expect_both(join_with_map({{cuda(0), cuda(0)}}, {cuda(0), cuda(0)}),
              HasSubstr("devices names cuda:0 twice"));
}

TEST_P(DeviceMaps, DA_67_devices_option_mismatch) {
  expect_both(join_with_map({{cuda(0), cuda(0)}}, {cuda(1)}),
              HasSubstr("maps our cuda:0, which is not among our devices [cuda:1]"));
}

TEST_P(DeviceMaps, DA_67_devices_option_mismatch_reverse) {
  expect_both(join_with_map({{cuda(0), cuda(1)}}, {cuda(0)}),
              HasSubstr("names cuda:1 of 'worker1', which uses the devices [cuda:0] only"));
}

TEST_P(DeviceMaps, EverythingThatIsWrongIsToldAtOnce) {
  expect_both(join_with_map({{cuda(0), cuda(1)}, {cuda(0), c10::Device(c10::kCUDA)}}, {cuda(1)}),
              AllOf(HasSubstr("cuda without an index"), HasSubstr("not among our devices")));
}

TEST_P(DeviceMaps, BadInput_devices_that_nobody_has) {
  const auto joined = join([](int, JoinOptions* o) {
    o->devices = {cuda(0)};
    o->device_backend = std::make_shared<FakeDevices>(0);
  });
  expect_both(joined, HasSubstr("devices names our cuda:0, and we have no CUDA device"));
}

// A worker that comes in the place of one that died fails alone: the others go on.
TEST_P(DeviceMaps, TheMistakeOfALatecomerIsItsOwn) {
  Cluster c({.size = 2, .net = GetParam(), .library = test_.library, .dynamic = true});
  JoinOptions late = c.join_options(2, "late");
  late.device_backend = std::make_shared<FakeDevices>(1);
  late.device_maps = {{"worker0", {{cuda(0), cuda(0)}}}};
  const Status s = Worker::try_join(late).status();
  EXPECT_THAT(std::string(s.message()), HasSubstr("'worker0', which uses no devices"));
  // The one that joined a dynamic group first hears of the others a moment later.
  eventually([&] { return c[0].worker_infos().size() == 2; }, "worker1 is known");
  EXPECT_EQ(rpc_sync(c[0], "worker1", &add, 1, 2), 3);
}

INSTANTIATE_TEST_SUITE_P(Nets, DeviceMaps, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
