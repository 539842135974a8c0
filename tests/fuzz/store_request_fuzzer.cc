// Arbitrary bytes as messages to a store server, one after the other. 'D' an operation, 'S' a
// session; length (2 bytes); the message. Client 1 has a session from the start.
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "weft/store/internal/tcp_data.h"
#include "weft/tests/fuzz/target.h"

namespace {

using weft::ErrorKind;
using weft::Status;
using weft::internal::TcpData;
using weft::v1::StoreReply;
using weft::v1::StoreRequest;

constexpr size_t kMaxBytes = 4096;

// What the client makes of it.
Status read_reply(const StoreReply& reply) {
  switch (reply.outcome()) {
    case StoreReply::DONE:
    case StoreReply::NOT_YET: return absl::OkStatus();
    case StoreReply::FAILED:
      return weft::make_error(static_cast<absl::StatusCode>(reply.error_code()),
                              static_cast<ErrorKind>(reply.error_kind()), reply.error());
    case StoreReply::REFUSED_NO_SESSION:
      return weft::make_error(ErrorKind::kState, "refused: no session");
    case StoreReply::REFUSED_OLD: return weft::make_error(ErrorKind::kState, "refused: old");
    default: break;
  }
  require(false);  // never sent
  return absl::OkStatus();
}

Status operate(std::string_view bytes, TcpData* store) {
  StoreRequest request;
  if (!decoded(bytes.size(), [&] {
        return request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
      })) {
    return weft::make_error(ErrorKind::kProtocol, "an operation that cannot be read");
  }
  const TcpData::Result result = decoded(0, [&] {
    TcpData::Result out = store->handle(request);
    // One key may be asked for many times. Its values are copied once into lists that grow by
    // doubling.
    require(out.reply.values_size() <= request.multi_get().keys_size() + out.reply.keys_size());
    if (out.reply.values_size() > 0) {
      require(out.reply.ByteSizeLong() <= size_t{2} << 20);
      Decoding::charged(out.reply.ByteSizeLong() +
                        64 * static_cast<size_t>(out.reply.values_size()));
    }
    return out;
  });
  const Status status = read_reply(result.reply);
  require(result.parked_on.empty() || result.reply.outcome() == StoreReply::NOT_YET);
  // STORE-1: once more, and nothing more happens.
  const TcpData::Result again = store->handle(request);
  require(again.changed.empty());
  if (!result.changed.empty()) {
    require(status.ok());
    require(again.reply.SerializeAsString() == result.reply.SerializeAsString());
  }
  if (!result.parked_on.empty()) {
    require(store->not_yet(request).outcome() == StoreReply::NOT_YET);
  }
  return status;
}

Status open_session(std::string_view bytes, int second, TcpData* store) {
  weft::v1::StoreSessionRequest session;
  if (!decoded(bytes.size(), [&] {
        return session.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
      })) {
    return weft::make_error(ErrorKind::kProtocol, "a session that cannot be read");
  }
  const auto reply = decoded(
      0, [&] { return store->open_session(session, absl::UnixEpoch() + absl::Seconds(second)); });
  require(reply.ok() || weft::error_kind(reply.status()) == ErrorKind::kProtocol);
  return reply.status();
}

}  // namespace

// An empty key of two bytes becomes two strings and two pointers, in a list that grows by doubling.
const size_t kMostBytesPerByte = 64;

Status fuzz_one(std::string_view input) {
  static const weft::v1::StoreSessionRequest& hello = [] {
    auto* out = new weft::v1::StoreSessionRequest();
    out->set_magic(weft::internal::kStoreMagic);
    out->set_protocol(weft::internal::kStoreProtocol);
    out->set_client_id(1);
    return std::ref(*out);
  }();
  TcpData store(7, kMaxBytes);
  require(store.open_session(hello, absl::UnixEpoch()).ok());
  Status verdict;
  for (int second = 0; input.size() >= 3; second += 100) {
    const char kind = input[0];
    const size_t length = static_cast<uint8_t>(input[1]) | static_cast<uint8_t>(input[2]) << 8;
    const std::string_view bytes = input.substr(3, length);
    input.remove_prefix(3 + bytes.size());
    if (kind == 'D') {
      note(operate(bytes, &store), &verdict);
    } else if (kind == 'S') {
      note(open_session(bytes, second, &store), &verdict);
    } else {
      break;
    }
  }
  return verdict;
}
