// Arbitrary bytes as values of many types. Decoding may fail, in its own words; what it accepts
// must encode again to something that decodes to the same.
//
// Input: the type's number, the number of tensors beside the value, the value.

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/ops/ones.h"
#include "weft/rpc/aten_operators.h"
#include "weft/rpc/struct.h"
#include "weft/rpc/value.h"
#include "weft/tests/fuzz/target.h"

namespace {

struct Tree {
  int16_t value = 0;
  std::vector<Tree> children{};
  std::optional<std::string> label{};
};
WEFT_STRUCT(Tree, value, children, label);

using weft::Decoder;
using weft::Encoder;
using weft::Payload;

template <class T>
weft::Status decode(const Payload& payload) {
  Decoder in(payload);
  auto value = decoded(payload.body.size(), [&] { return in.take<T>(); });
  if (!value.ok()) return value.status();
  WEFT_RETURN_IF_ERROR(in.finish());
  Payload again;
  Encoder out(&again);
  out.put(*value);
  require(out.status().ok());
  Decoder second(again);
  auto same = second.take<T>();
  require(same.ok() && second.finish().ok());
  Payload third;
  Encoder last(&third);
  last.put(*same);
  require(third.body == again.body && third.tensors.size() == again.tensors.size());
  return absl::OkStatus();
}

// One value of whatever kind.
weft::Status skip(const Payload& payload) {
  Decoder in(payload);
  WEFT_RETURN_IF_ERROR(decoded(payload.body.size(), [&] { return in.skip(); }));
  return in.finish();
}

}  // namespace

// VALUE-2: a Tree without fields has two bytes and becomes sizeof(Tree); the list that it is in
// grows by doubling, and so is allocated twice.
const size_t kMostBytesPerByte = 2 * sizeof(Tree);

weft::Status fuzz_one(std::string_view input) {
  if (input.size() < 2) return absl::OkStatus();
  static const at::Tensor& one = *new at::Tensor(at::ones({1}));
  Payload payload;
  payload.body.assign(input.substr(2));
  payload.tensors.assign(static_cast<uint8_t>(input[1]) % 4, one);
  switch (static_cast<uint8_t>(input[0]) % 14) {
    case 0: return decode<std::tuple<bool, int8_t, uint64_t, double, std::string>>(payload);
    case 1: return decode<std::vector<int>>(payload);
    case 2: return decode<std::vector<float>>(payload);
    case 3: return decode<std::map<std::string, std::vector<std::optional<int64_t>>>>(payload);
    case 4: return decode<std::unordered_map<uint32_t, std::pair<bool, weft::Bytes>>>(payload);
    case 5: return decode<Tree>(payload);
    case 6:
      return decode<std::variant<std::monostate, int, std::string, std::vector<at::Tensor>>>(
          payload);
    case 7: return decode<std::vector<at::Tensor>>(payload);
    case 8: return decode<std::set<std::string>>(payload);
    case 9: return decode<at::Scalar>(payload);
    case 10: return decode<at::TensorOptions>(payload);
    case 11: return decode<std::array<int16_t, 3>>(payload);
    case 12: return decode<weft::WorkerInfo>(payload);
    default: return skip(payload);
  }
}
