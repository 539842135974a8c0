// Arbitrary bytes as values of many types. Decoding may fail, in its own words; what it accepts
// must encode again to something that decodes to the same.
//
// Input: the type's number, the number of tensors beside the value, the value.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/ops/ones.h"
#include "weft/rpc/aten_operators.h"
#include "weft/rpc/struct.h"
#include "weft/rpc/value.h"

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

void require(bool condition) {
  if (!condition) std::abort();
}

template <class T>
void decode(const Payload& payload) {
  Decoder in(payload);
  auto value = in.take<T>();
  if (!value.ok() || !in.finish().ok()) {
    require(!in.status().ok() || !value.ok());
    return;
  }
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
}

void skip(const Payload& payload) {
  Decoder in(payload);
  while (in.skip().ok()) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  Payload payload;
  payload.body.assign(reinterpret_cast<const char*>(data) + 2, size - 2);
  for (int i = data[1] % 4; i > 0; --i) payload.tensors.push_back(at::ones({1}));
  switch (data[0] % 14) {
    case 0: decode<std::tuple<bool, int8_t, uint64_t, double, std::string>>(payload); break;
    case 1: decode<std::vector<int>>(payload); break;
    case 2: decode<std::vector<float>>(payload); break;
    case 3: decode<std::map<std::string, std::vector<std::optional<int64_t>>>>(payload); break;
    case 4: decode<std::unordered_map<uint32_t, std::pair<bool, weft::Bytes>>>(payload); break;
    case 5: decode<Tree>(payload); break;
    case 6:
      decode<std::variant<std::monostate, int, std::string, std::vector<at::Tensor>>>(payload);
      break;
    case 7: decode<std::vector<at::Tensor>>(payload); break;
    case 8: decode<std::set<std::string>>(payload); break;
    case 9: decode<at::Scalar>(payload); break;
    case 10: decode<at::TensorOptions>(payload); break;
    case 11: decode<std::array<int16_t, 3>>(payload); break;
    case 12: decode<weft::WorkerInfo>(payload); break;
    default: skip(payload); break;
  }
  return 0;
}
