// Any bytes as what rides on calls with RRefs, or as control items and their replies: an error of
// kind protocol, or something that encodes to bytes that mean the same.
//
// Input: a byte that says which of the four, then the message.

#include <string>
#include <string_view>
#include <vector>

#include "weft/rref/internal/wire.h"
#include "weft/tests/fuzz/target.h"

namespace {

using namespace weft::internal;  // NOLINT: the target's whole subject
using weft::Incarnation;
using weft::Status;
using weft::WorkerId;
using weft::WorkerKey;

const WorkerKey kSender{WorkerId(3), Incarnation(0xabc)};

std::string encode(const RequestData& request) { return weft::internal::encode(kSender, request); }

template <class Decode>
Status twice(std::string_view bytes, const Decode& decode) {
  const auto value = decoded(bytes.size(), [&] { return decode(bytes); });
  if (!value.ok()) {
    require(weft::error_kind(value.status()) == weft::ErrorKind::kProtocol);
    return value.status();
  }
  const std::string again = encode(*value);
  const auto same = decode(again);
  require(same.ok() && encode(*same) == again);
  return absl::OkStatus();
}

// Items that cannot be read are answered one by one; the verdict is the first of them.
Status items(std::string_view bytes) {
  const auto all = decoded(bytes.size(), [&] { return decode_items(bytes); });
  if (!all.ok()) return all.status();
  Status verdict;
  std::vector<Message> good;
  for (const ReceivedItem& item : *all) {
    require(item.seq != 0);
    if (item.message.ok()) {
      require(item.message->seq == item.seq);
      good.push_back(*item.message);
    } else {
      note(item.message.status(), &verdict);
    }
  }
  const auto again = decode_items(encode(good));
  require(again.ok() && again->size() == good.size());
  for (size_t i = 0; i < good.size(); ++i) {
    require((*again)[i].message.ok() && to_string(*(*again)[i].message) == to_string(good[i]));
  }
  return verdict;
}

}  // namespace

// A fork in a carrier: three numbers of at least one byte become ids of 64 bytes and more, in a
// vector that doubles; protobuf's own record of them besides.
const size_t kMostBytesPerByte = 144;

Status fuzz_one(std::string_view input) {
  if (input.empty()) return absl::OkStatus();
  const std::string_view bytes = input.substr(1);
  switch (static_cast<uint8_t>(input[0]) % 4) {
    case 0: return twice(bytes, [](std::string_view b) { return decode_request(kSender, b); });
    case 1: return twice(bytes, [](std::string_view b) { return decode_carrier(kSender, b); });
    case 2: return items(bytes);
    default: return twice(bytes, [](std::string_view b) { return decode_replies(b); });
  }
}
