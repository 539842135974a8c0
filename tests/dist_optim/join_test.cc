// weft::join, which lists every service: with the options that a program gives for them.

#include <memory>
#include <string>
#include <thread>

#include "ATen/ops/ones.h"
#include "gtest/gtest.h"
#include "weft/store/hash_store.h"
#include "weft/transport/inproc_transport.h"
#include "weft/weft.h"

namespace weft::testing {
namespace {

at::Tensor make_ones() { return at::ones({2}); }

// "a" shuts down while it holds an RRef to an object of "b".
ShutdownResult leak(const ServiceOptions& services) {
  const auto store = std::make_shared<HashStore>(make_system_runtime());
  const auto network = std::make_shared<InprocNetwork>();
  const auto join_as = [&](const std::string& name) {
    Library library("app");
    library.def("make_ones", &make_ones);
    return join({.name = name,
                 .rank = name == "a" ? 0 : 1,
                 .world_size = 2,
                 .library = library,
                 .store = store->new_client(),
                 .transport = inproc_transport(network),
                 .log_level = Severity::kOff},
                services);
  };
  std::thread other([&] { (void)join_as("b").shutdown(); });
  Worker worker = join_as("a");
  const RRef<at::Tensor> held = remote(worker, "b", &make_ones);
  EXPECT_EQ(held.to_here().numel(), 2);
  EXPECT_EQ(DistAutogradContext(worker).id().counter, 1u);
  ShutdownResult result = worker.shutdown();
  other.join();
  return result;
}

TEST(Join, GivesEachServiceItsOptions) {
  const Status forgiven = leak({}).status;
  EXPECT_TRUE(forgiven.ok()) << forgiven;
  const Status leaked = leak({.rref = {.fail_on_leak = true}}).status;
  EXPECT_EQ(error_kind(leaked), ErrorKind::kState) << leaked;
}

}  // namespace
}  // namespace weft::testing
