// Two workers in one program; one calls what the other registered from the plugin, a shared library
// of its own.
#include <ATen/ops/full.h>
#include <weft/weft.h>

#include <chrono>
#include <cstdio>
#include <future>
#include <string>
#include <utility>

#include "plugin.h"

namespace {

int failures = 0;

void check(bool ok, const char* what) {
  if (!ok) {
    std::printf("stranger: failed: %s\n", what);
    ++failures;
  }
}

weft::Worker join(const std::string& store, int rank) {
  weft::JoinOptions options;
  options.name = "worker" + std::to_string(rank);
  options.rank = rank;
  options.world_size = 2;
  options.library = make_library();
  options.rendezvous = store;
  options.environment = weft::Environment{};  // whatever launcher runs this test is not ours
  return weft::join(std::move(options));
}

}  // namespace

int main(int, char** argv) {
  using namespace std::chrono_literals;
  const std::string store = std::string("file://") + argv[1] + "?run_id=install";
  try {
    auto other = std::async(std::launch::async, [&] { return join(store, 1); });
    weft::Worker caller = join(store, 0);
    weft::Worker callee = other.get();

    check(weft::rpc_sync(caller, "worker1", &add, 20, 22) == 42, "a function of the plugin");
    check(weft::rpc_sync(caller, "worker1", {.deadline = 30s}, &greet, "stranger") ==
              "hello, stranger",
          "strings");
    weft::Future<torch::Tensor> future =
        weft::rpc_async(caller, "worker1", &twice, at::full({3}, 2.0));
    check(future.wait().sum().item<double>() == 12.0, "a tensor");
    check(weft::rpc_sync(caller, "worker1", weft::FunctionRef<int(int, int)>{"plugin.add"}, 1, 2) ==
              3,
          "by name");
    try {
      weft::rpc_sync(caller, "worker1", &refuse, "not today");
      check(false, "an exception of the plugin");
    } catch (const weft::Error& error) {
      // Caught by its type across three libraries: the exception carries WEFT_API.
      check(std::string(error.what()).find("not today") != std::string::npos,
            "the text of an exception");
    }
    auto leaving = std::async(std::launch::async, [&] { return callee.shutdown(); });
    check(caller.shutdown().status.ok(), "shutdown");
    check(leaving.get().status.ok(), "the other's shutdown");
  } catch (const weft::Error& error) {
    std::printf("stranger: weft::Error: %s\n", error.what());
    return 1;
  }
  if (failures == 0) std::printf("stranger: ok\n");
  return failures == 0 ? 0 : 1;
}
