#include "weft/rpc/c10d_store.h"

#include <algorithm>
#include <chrono>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "weft/store/store_url.h"

namespace weft {
namespace {

struct C10dAddress {
  std::string host;
  int port = 0;
  std::string key;
  absl::Duration timeout = absl::Seconds(60);
};

// Runs `use` on a client of the agent's store; what LibTorch throws becomes a Status.
template <class F>
Status with_client(const C10dAddress& at, F use) {
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

// "host:port", "[::1]:port".
StatusOr<C10dAddress> parse_address(const StoreUrl& url) {
  C10dAddress at;
  const size_t colon = url.rest.rfind(':');
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(url.rest.substr(colon + 1), &at.port) || at.port < 1 || at.port > 65535) {
    return url.error("it needs the address of a c10d store: c10d://host:port");
  }
  at.host = url.rest.substr(0, colon);
  if (at.host.size() > 2 && at.host.front() == '[' && at.host.back() == ']') {
    at.host = at.host.substr(1, at.host.size() - 2);
  }
  return at;
}

}  // namespace

StatusOr<std::shared_ptr<Store>> open_c10d_store(std::string_view text, const StoreOptions& options,
                                                 std::shared_ptr<Runtime> runtime) {
  WEFT_ASSIGN_OR_RETURN(StoreUrl url, parse_store_url(text));
  WEFT_ASSIGN_OR_RETURN(C10dAddress at, parse_address(url));
  at.key = url.take("key", "weft/store");
  at.timeout = options.timeout.value_or(absl::Seconds(60));
  const std::string listen = url.take("listen", at.host);
  const std::string allow = url.take("allow_insecure", "0");
  WEFT_RETURN_IF_ERROR(url.nothing_left());
  if (!options.is_server) {
    std::string hosted;
    WEFT_RETURN_IF_ERROR(
        with_client(at, [&](c10d::Store& store) { hosted = store.get_to_str(at.key); }));
    return open_store(hosted, options, std::move(runtime));
  }
  const std::string own =
      absl::StrCat("tcp://", listen, ":0", allow != "0" ? "?allow_insecure=1" : "");
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<Store> store, open_store(own, options, std::move(runtime)));
  WEFT_RETURN_IF_ERROR(
      with_client(at, [&](c10d::Store& agent) { agent.set(at.key, store->describe()); }));
  return store;
}

}  // namespace weft
