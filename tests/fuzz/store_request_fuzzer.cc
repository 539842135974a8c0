// Arbitrary bytes as requests to a store server, one after the other: length byte, request.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "weft/rpc/internal/store/tcp_data.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  weft::internal::TcpData store(7, 4096);
  weft::v1::StoreSessionRequest hello;
  hello.set_magic("weft-store");
  hello.set_protocol(1);
  hello.set_client_id(1);
  require(store.open_session(hello, absl::UnixEpoch()).ok());
  while (size > 0) {
    const size_t length = data[0] < size - 1 ? data[0] : size - 1;
    weft::v1::StoreRequest request;
    if (request.ParseFromArray(data + 1, static_cast<int>(length))) {
      request.set_client_id(1);
      const auto result = store.handle(request);
      require(!result.parked_on.empty() || result.reply.outcome() != 0);
      // STORE-1: once more, and nothing more happens.
      const auto again = store.handle(request);
      require(again.changed.empty());
      require(result.changed.empty() ||
              again.reply.SerializeAsString() == result.reply.SerializeAsString());
      store.not_yet(request);
    }
    weft::v1::StoreSessionRequest session;
    if (session.ParseFromArray(data + 1, static_cast<int>(length))) {
      (void)store.open_session(session,
                               absl::UnixEpoch() + absl::Seconds(static_cast<int>(length)));
    }
    data += 1 + length;
    size -= 1 + length;
  }
  return 0;
}
