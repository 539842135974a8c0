#include "weft/collectives/internal/nccl/types.h"

#include <cstring>

#include "c10/util/BFloat16.h"
#include "c10/util/Half.h"

namespace weft::internal {
namespace {

constexpr int kFirstWithFp8 = 22400;

struct Element {
  ncclDataType_t type = ncclUint8;
  uint64_t parts = 1;  // 2: complex
  bool floating = false;
};

std::optional<Element> element_of(c10::ScalarType type, int version) {
  switch (type) {
    case c10::ScalarType::Byte:
    case c10::ScalarType::Bool: return Element{ncclUint8};
    case c10::ScalarType::Char: return Element{ncclInt8};
    case c10::ScalarType::Int: return Element{ncclInt32};
    case c10::ScalarType::UInt32: return Element{ncclUint32};
    case c10::ScalarType::Long: return Element{ncclInt64};
    case c10::ScalarType::UInt64: return Element{ncclUint64};
    case c10::ScalarType::Half: return Element{ncclFloat16, 1, true};
    case c10::ScalarType::BFloat16: return Element{ncclBfloat16, 1, true};
    case c10::ScalarType::Float: return Element{ncclFloat32, 1, true};
    case c10::ScalarType::Double: return Element{ncclFloat64, 1, true};
    case c10::ScalarType::ComplexHalf: return Element{ncclFloat16, 2, true};
    case c10::ScalarType::ComplexFloat: return Element{ncclFloat32, 2, true};
    case c10::ScalarType::ComplexDouble: return Element{ncclFloat64, 2, true};
    case c10::ScalarType::Float8_e4m3fn:
      if (version >= kFirstWithFp8) return Element{ncclFloat8e4m3, 1, true};
      return std::nullopt;
    case c10::ScalarType::Float8_e5m2:
      if (version >= kFirstWithFp8) return Element{ncclFloat8e5m2, 1, true};
      return std::nullopt;
    default: return std::nullopt;
  }
}

bool is_fp8(ncclDataType_t type) { return type == ncclFloat8e4m3 || type == ncclFloat8e5m2; }

}  // namespace

std::optional<NcclReduction> nccl_reduction(c10::ScalarType type, ReduceOp::Kind kind,
                                            int version) {
  const std::optional<Element> element = element_of(type, version);
  if (!element.has_value()) return std::nullopt;
  const bool is_bool = type == c10::ScalarType::Bool;
  const bool is_complex = element->parts == 2;
  const auto with = [&](ncclRedOp_t op) {
    return NcclReduction{element->type, op, element->parts};
  };
  switch (kind) {
    // A bool is a byte of 0 or 1: its sum is an or, its product an and.
    case ReduceOp::kSum: return with(is_bool ? ncclMax : ncclSum);
    case ReduceOp::kProd:
      if (is_complex) return std::nullopt;
      return with(is_bool ? ncclMin : ncclProd);
    case ReduceOp::kMin:
      if (is_complex) return std::nullopt;
      return with(ncclMin);
    case ReduceOp::kMax:
      if (is_complex) return std::nullopt;
      return with(ncclMax);
    case ReduceOp::kAvg:
      if (is_bool) return std::nullopt;
      return with(ncclAvg);
    case ReduceOp::kPremulSum:
      if (!element->floating || is_fp8(element->type)) return std::nullopt;
      return with(ncclSum);
    default: return std::nullopt;
  }
}

void write_factor(ncclDataType_t type, double factor, void* room) {
  switch (type) {
    case ncclFloat16: {
      const c10::Half value(static_cast<float>(factor));
      std::memcpy(room, &value, sizeof value);
      return;
    }
    case ncclBfloat16: {
      const c10::BFloat16 value(static_cast<float>(factor));
      std::memcpy(room, &value, sizeof value);
      return;
    }
    case ncclFloat32: {
      const auto value = static_cast<float>(factor);
      std::memcpy(room, &value, sizeof value);
      return;
    }
    default: std::memcpy(room, &factor, sizeof factor);
  }
}

}  // namespace weft::internal
