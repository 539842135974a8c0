// Tensors on devices through calls: maps, staging, scopes and futures, with devices that need no
// hardware. What only a GPU can show is in tests/cuda.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/fake_devices.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string place_of(const at::Tensor& x) { return x.device().str(); }
at::Tensor same(at::Tensor x) { return x; }
std::vector<at::Tensor> swapped(at::Tensor x, at::Tensor y) { return {y, x}; }
at::Tensor make_on(int64_t device) {
  const at::Tensor values = at::full({3}, 7.0);
  return device < 0 ? values : on_device(values, cuda(static_cast<int>(device)));
}
Future<at::Tensor> nested(CallContext& context, std::string next, at::Tensor x) {
  const at::Tensor y = co_await rpc_async(context.worker(), next, &same, x);
  co_return y;
}

class DeviceTensors : public ::testing::TestWithParam<Net> {
 protected:
  DeviceTensors() {
    Library lib("devices");
    lib.def("place_of", &place_of)
        .def("same", &same)
        .def("swapped", &swapped)
        .def("make_on", &make_on);
    lib.def("nested", &nested).def("add", &add, {.inline_ok = true});
    library_ = lib;
  }
  // worker0, worker1, ... with two devices each. `maps` of worker i.
  std::unique_ptr<Cluster> cluster(int size,
                                   std::function<std::map<std::string, DeviceMap>(int)> maps) {
    for (int i = 0; i < size; ++i) backends_.push_back(std::make_shared<FakeDevices>(2));
    ClusterOptions options{.size = size, .net = GetParam(), .library = library_};
    options.adjust = [this, maps](int i, JoinOptions* o) {
      o->device_backend = backends_[static_cast<size_t>(i)];
      o->device_maps = maps(i);
      o->devices = {cuda(0), cuda(1)};
    };
    return std::make_unique<Cluster>(std::move(options));
  }
  // worker0 has this map for worker1, which has none.
  std::unique_ptr<Cluster> pair(const DeviceMap& map) {
    return cluster(2, [map](int i) {
      return i == 0 ? std::map<std::string, DeviceMap>{{"worker1", map}}
                    : std::map<std::string, DeviceMap>{};
    });
  }
  static void expect_same(const at::Tensor& got, const at::Tensor& values, c10::Device device) {
    ASSERT_EQ(got.device(), device);
    EXPECT_EQ(got.sizes(), values.sizes());
    EXPECT_EQ(got.strides(), values.strides());
    EXPECT_TRUE(at::equal(device.is_cpu() ? got : on_cpu(got), values));
  }
  FakeDevices& fake(size_t i) { return *backends_[i]; }

  Library library_{"devices"};
  std::vector<std::shared_ptr<FakeDevices>> backends_;
};

TEST_P(DeviceTensors, GoWhereTheMapSaysAndComeBackTheOtherWay) {
  const auto c = pair({{cuda(0), cuda(1)}, {cuda(1), cuda(0)}});
  // In one frame, in chunks, and of no elements.
  for (const at::Tensor& values :
       {at::arange(6).reshape({2, 3}), at::arange(1 << 19), at::zeros({0, 4})}) {
    const at::Tensor x = on_device(values, cuda(0));
    EXPECT_EQ(rpc_sync((*c)[0], 1, &place_of, x), "cuda:1");
    expect_same(rpc_sync((*c)[0], "worker1", &same, x), values, cuda(0));
    const at::Tensor y = on_device(values, cuda(1));
    EXPECT_EQ(rpc_sync((*c)[0], 1, &place_of, y), "cuda:0");
    expect_same(rpc_sync((*c)[0], (*c)[1].info(), &same, y), values, cuda(1));
  }
  EXPECT_EQ(fake(0).counts().prepared, 2);
}

TEST_P(DeviceTensors, BesideTensorsOnTheCpu) {
  const auto c = pair({{cuda(1), cuda(0)}});
  const at::Tensor a = at::arange(5);
  const at::Tensor b = at::ones({300, 300});
  const auto got = rpc_sync((*c)[0], 1, &swapped, a, on_device(b, cuda(1)));
  ASSERT_EQ(got.size(), 2u);
  expect_same(got[0], b, cuda(1));
  expect_same(got[1], a, kCpu);
  // Gradient flags travel, without a graph.
  at::Tensor leaf = on_device(at::ones({2}), cuda(1));
  leaf.set_requires_grad(true);
  EXPECT_TRUE(rpc_sync((*c)[0], 1, &same, leaf).requires_grad());
}

TEST_P(DeviceTensors, TheCpuCanBeMappedToo) {
  const auto c = pair({{kCpu, cuda(1)}, {cuda(0), kCpu}});
  const at::Tensor values = at::arange(7);
  EXPECT_EQ(rpc_sync((*c)[0], 1, &place_of, values), "cuda:1");
  expect_same(rpc_sync((*c)[0], 1, &same, values), values, kCpu);
  EXPECT_EQ(rpc_sync((*c)[0], 1, &place_of, on_device(values, cuda(0))), "cpu");
  expect_same(rpc_sync((*c)[0], 1, &same, on_device(values, cuda(0))), values, cuda(0));
}

TEST_P(DeviceTensors, ToOneself) {
  const auto c = cluster(1, [](int) {
    return std::map<std::string, DeviceMap>{{"worker0", {{cuda(0), cuda(1)}, {cuda(1), cuda(0)}}}};
  });
  const at::Tensor values = at::arange(4);
  EXPECT_EQ(rpc_sync((*c)[0], 0, &place_of, on_device(values, cuda(0))), "cuda:1");
  expect_same(rpc_sync((*c)[0], 0, &same, on_device(values, cuda(0))), values, cuda(0));
}

TEST_P(DeviceTensors, SeveralDestinationsEachByItsOwnMap) {
  const auto c = cluster(3, [](int i) {
    if (i != 0) return std::map<std::string, DeviceMap>{};
    return std::map<std::string, DeviceMap>{{"worker1", {{cuda(0), cuda(0)}}},
                                            {"worker2", {{cuda(0), cuda(1)}}}};
  });
  EXPECT_EQ(rpc_sync((*c)[0], std::vector<Destination>{1, 2}, &place_of,
                     on_device(at::arange(4), cuda(0))),
            (std::vector<std::string>{"cuda:0", "cuda:1"}));
}

// ---- no map ------------------------------------------------------------------------------------

void expect_refused(const Status& s, const ::testing::Matcher<std::string>& message) {
  EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
  EXPECT_THAT(std::string(s.message()), message);
}

TEST_P(DeviceTensors, DA_69_device_maps_missing_config) {
  const auto c = pair({{cuda(0), cuda(1)}});
  const at::Tensor unmapped = on_device(at::arange(4), cuda(1));
  for (int round = 0; round < 3; ++round) {
    expect_refused(try_rpc_sync((*c)[0], 1, &swapped, at::ones({1}), unmapped).status(),
                   AllOf(HasSubstr("calling 'devices.swapped' on worker 1: tensor 1"),
                         HasSubstr("it is on cuda:1, and the device map for 'worker1' is "
                                   "{cuda:0 -> cuda:1}")));
    // The other worker has no map at all.
    expect_refused(try_rpc_sync((*c)[1], "worker0", &place_of, unmapped).status(),
                   AllOf(HasSubstr("on 'worker0': tensor 0: it is on cuda:1"),
                         HasSubstr("there is no device map for 'worker0'")));
    EXPECT_EQ(rpc_sync((*c)[0], 1, &add, 1, 2), 3);
  }
  EXPECT_EQ(fake(0).counts().marked, 0);
}

TEST_P(DeviceTensors, DA_69_device_maps_missing_config_response) {
  const auto c = pair({{cuda(0), cuda(1)}});
  for (int round = 0; round < 3; ++round) {
    const Status s = try_rpc_sync((*c)[0], 1, &make_on, 0).status();
    expect_refused(s, AllOf(HasSubstr("the result of 'devices.make_on' for 'worker0': tensor 0"),
                            HasSubstr("it is on cuda:0"), HasSubstr("{cuda:1 -> cuda:0}")));
    EXPECT_EQ(error_details(s).origin, "worker1");
    expect_same(rpc_sync((*c)[0], 1, &make_on, 1), at::full({3}, 7.0), cuda(0));
    // A caller without a map gets CPU tensors only.
    expect_refused(try_rpc_sync((*c)[1], 0, &make_on, 1).status(),
                   AllOf(HasSubstr("for 'worker1'"), HasSubstr("there is no device map")));
    expect_same(rpc_sync((*c)[1], 0, &make_on, -1), at::full({3}, 7.0), kCpu);
  }
}

// The error does not come by the deadline: there is none.
TEST_P(DeviceTensors, DA_69_device_maps_missing_config_not_timeout) {
  const auto c = pair({{cuda(0), cuda(1)}});
  const CallOptions endless{.deadline = kInfinite};
  const at::Tensor unmapped = on_device(at::arange(4), cuda(1));
  expect_refused(try_rpc_sync((*c)[0], 1, endless, &same, unmapped).status(), HasSubstr("cuda:1"));
  expect_refused(try_rpc_sync((*c)[0], 1, endless, &make_on, 0).status(), HasSubstr("cuda:0"));
}

TEST_P(DeviceTensors, BadInput_a_device_tensor_of_a_worker_without_devices) {
  Cluster c({.size = 2, .net = GetParam(), .library = library_});
  const at::Tensor x = on_device(at::arange(4), cuda(0));
  const auto matcher =
      AllOf(HasSubstr("'worker1': tensor 0: it is on cuda:0"), HasSubstr("there is no device map"));
  expect_refused(try_rpc_sync(c[0], "worker1", &same, x).status(), matcher);
  auto both = try_rpc_async(c[0], std::vector<Destination>{"worker1", "worker0"}, &same, x);
  ASSERT_TRUE(both.ok());
  expect_refused((*both)[0].try_wait().status(), matcher);
  expect_refused(try_rpc_sync(c[0], 1, &make_on, 0).status(), HasSubstr("for 'worker0'"));
}

TEST_P(DeviceTensors, BadInput_a_map_for_a_worker_that_comes_without_the_device) {
  auto a = std::make_shared<FakeDevices>(2);
  auto b = std::make_shared<FakeDevices>(1);
  ClusterOptions options{
      .size = 1, .net = GetParam(), .library = library_, .names = {"a"}, .dynamic = true};
  options.adjust = [&](int i, JoinOptions* o) {
    o->device_backend = i == 0 ? a : b;
    if (i == 0) o->device_maps = {{"b", {{cuda(0), cuda(1)}}}, {"c", {{cuda(0), cuda(0)}}}};
    if (i == 1) o->devices = {cuda(0)};
  };
  Cluster c(options);
  auto runtime = make_system_runtime();
  Mutex mutex;
  Condition changed(runtime.get());
  const auto subscription =
      c[0].subscribe([&changed](const MembershipChange&) { changed.notify_all(); });
  c.add("b");
  {
    MutexLock lock(&mutex);
    const absl::Time end = runtime->now() + absl::Seconds(30);
    while (c[0].worker_infos().size() != 2 && runtime->now() < end) {
      changed.wait_until(&mutex, std::min(end, runtime->now() + absl::Milliseconds(20)))
          .IgnoreError();
    }
  }
  expect_refused(try_rpc_sync(c[0], c[1].info(), &same, on_device(at::ones({1}), cuda(0))).status(),
                 HasSubstr("names cuda:1 of 'b', which has 1 CUDA device"));
  expect_refused(try_rpc_sync(c[0], "b", &make_on, 0).status(), HasSubstr("no device map"));
  EXPECT_EQ(rpc_sync(c[0], "b", &add, 1, 2), 3);
}

// ---- copies that take their time, and fail -----------------------------------------------------

TEST_P(DeviceTensors, ACallWaitsForItsCopiesAndNobodyElseDoes) {
  const auto c = pair({{cuda(0), cuda(0)}});
  const at::Tensor x = on_device(at::arange(9), cuda(0));
  fake(0).hold();
  auto held = rpc_async((*c)[0], 1, &same, x);
  EXPECT_EQ(rpc_sync((*c)[0], 1, &add, 1, 2), 3);
  EXPECT_FALSE(held.done());
  fake(0).release();
  expect_same(held.wait(), at::arange(9), cuda(0));
  // The callee's copies: of the argument, then of the result.
  fake(1).hold();
  held = rpc_async((*c)[0], 1, &same, x);
  EXPECT_EQ(rpc_sync((*c)[0], 1, &add, 1, 2), 3);
  EXPECT_FALSE(held.done());
  fake(1).release();
  expect_same(held.wait(), at::arange(9), cuda(0));
}

TEST_P(DeviceTensors, DeadlineAndCancellationWhileBytesAreCopied) {
  const auto c = pair({{cuda(0), cuda(0)}});
  const at::Tensor x = on_device(at::arange(9), cuda(0));
  for (const size_t side : {0, 1}) {
    fake(side).hold();
    EXPECT_EQ(error_kind(try_rpc_sync((*c)[0], 1, {.deadline = 20ms}, &same, x).status()),
              ErrorKind::kDeadline);
    auto cancelled = rpc_async((*c)[0], 1, &same, x);
    EXPECT_TRUE(cancelled.cancel());
    EXPECT_EQ(error_kind(cancelled.try_wait().status()), ErrorKind::kCancelled);
    fake(side).release();
  }
  expect_same(rpc_sync((*c)[0], 1, &same, x), at::arange(9), cuda(0));
}

TEST_P(DeviceTensors, ACopyThatFailsIsAnErrorOfItsCall) {
  const auto c = pair({{cuda(0), cuda(0)}});
  const at::Tensor x = on_device(at::arange(9), cuda(0));
  const Status broken = make_error(ErrorKind::kInternal, "the device fell off");
  for (const size_t side : {0, 1}) {
    for (const bool out : {true, false}) {
      out ? fake(side).fail_next_to_host(broken) : fake(side).fail_next_to_devices(broken);
      const Status s = try_rpc_sync((*c)[0], 1, &same, x).status();
      EXPECT_EQ(error_kind(s), ErrorKind::kInternal) << s;
      EXPECT_THAT(std::string(s.message()),
                  HasSubstr(out ? "copying tensors to the host: the device fell off"
                                : "copying tensors to devices: the device fell off"));
      expect_same(rpc_sync((*c)[0], 1, &same, x), at::arange(9), cuda(0));
    }
  }
}

// ---- streams, as the core sees them ------------------------------------------------------------

TEST_P(DeviceTensors, AHandlerRunsOnTheStreamsOfItsRequest) {
  const auto c = cluster(3, [](int i) {
    return std::map<std::string, DeviceMap>{{i == 0 ? "worker1" : "worker2", {{cuda(0), cuda(0)}}}};
  });
  EXPECT_EQ(rpc_sync((*c)[0], 1, &add, 1, 2), 3);
  EXPECT_EQ(fake(1).counts().entered, 1) << "the map may be needed for its result";
  const at::Tensor x = on_device(at::arange(3), cuda(0));
  rpc_sync((*c)[0], 1, &same, x);
  EXPECT_EQ(fake(1).counts().entered, 2);
  // A coroutine that has left its thread takes them up again where it goes on.
  const int before = fake(1).counts().entered;
  fake(2).hold();
  auto result = rpc_async((*c)[0], 1, &nested, "worker2", x);
  eventually(
      [&] {
        const FakeDevices::Counts now = fake(1).counts();
        return now.entered == before + 1 && now.inside == 0;
      },
      "the coroutine waits for worker2");
  fake(2).release();
  expect_same(result.wait(), at::arange(3), cuda(0));
  EXPECT_EQ(fake(1).counts().entered, before + 2);
  c->shutdown();
  EXPECT_EQ(fake(1).counts().inside, 0);
  EXPECT_EQ(fake(0).counts().inside, 0);
}

TEST_P(DeviceTensors, FUTURE_4_WhoTakesAResultComesAfterItsCopies) {
  const auto c = pair({{cuda(0), cuda(0)}});
  const at::Tensor x = on_device(at::arange(3), cuda(0));
  auto future = rpc_async((*c)[0], 1, &same, x);
  EXPECT_TRUE(future.state()->wait_done(30s).ok());
  EXPECT_EQ(fake(0).counts().used, 0) << "nobody has taken it";
  future.wait();
  EXPECT_EQ(fake(0).counts().used, 1);
  ASSERT_TRUE(future.try_wait().ok());
  EXPECT_EQ(fake(0).counts().used, 2);
  // A continuation does, and what it makes has a guard of its own.
  auto child = future.then([](const at::Tensor& y) { return place_of(y); });
  EXPECT_EQ(child.wait(), "cuda:0");
  EXPECT_EQ(fake(0).counts().derived, 1);
  EXPECT_EQ(fake(0).counts().used, 4);
  // Both of two.
  const auto all =
      when_all(std::vector<Future<at::Tensor>>{future, rpc_async((*c)[0], 1, &same, x)});
  all.wait();
  EXPECT_EQ(fake(0).counts().used, 6);
  // A result without devices has none.
  auto plain = rpc_async((*c)[0], 1, &place_of, x);
  plain.wait();
  EXPECT_EQ(plain.state()->guard(), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Nets, DeviceTensors, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
