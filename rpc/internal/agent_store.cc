#include "weft/rpc/internal/agent_store.h"

#include <algorithm>
#include <chrono>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "absl/strings/str_cat.h"

namespace weft::internal {
namespace {

// Runs `use` on a client of the agent's store; what LibTorch throws becomes a Status.
template <class F>
Status with_client(const AgentStoreAddress& at, F use) {
  try {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(at.port);
    options.isServer = false;
    options.waitWorkers = false;
    options.timeout = std::chrono::milliseconds(
        std::max<int64_t>(1, std::min<int64_t>(absl::ToInt64Milliseconds(at.timeout), 3'600'000)));
    const auto store = c10::make_intrusive<c10d::TCPStore>(at.host, options);
    use(*store);
    return absl::OkStatus();
  } catch (const c10::Error& e) {
    return make_error(ErrorKind::kUnavailable,
                      absl::StrCat("the launcher's store at ", at.host, ":", at.port, ": ",
                                   e.what_without_backtrace()));
  } catch (const std::exception& e) {
    return make_error(ErrorKind::kUnavailable, absl::StrCat("the launcher's store at ", at.host,
                                                            ":", at.port, ": ", e.what()));
  }
}

}  // namespace

Status publish_through_agent_store(const AgentStoreAddress& at, const std::string& value) {
  return with_client(at, [&](c10d::Store& store) { store.set(at.key, value); });
}

StatusOr<std::string> read_through_agent_store(const AgentStoreAddress& at) {
  std::string value;
  WEFT_RETURN_IF_ERROR(
      with_client(at, [&](c10d::Store& store) { value = store.get_to_str(at.key); }));
  return value;
}

}  // namespace weft::internal
