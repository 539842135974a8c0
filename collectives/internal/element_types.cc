// Types of elements, as LibTorch and as headers name them.
#include <utility>

#include "weft/collectives/internal/operation.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

constexpr std::pair<at::ScalarType, ElementType> kTypes[] = {
    {at::ScalarType::Bool, ElementType::kBool},
    {at::ScalarType::Byte, ElementType::kUInt8},
    {at::ScalarType::Char, ElementType::kInt8},
    {at::ScalarType::Short, ElementType::kInt16},
    {at::ScalarType::UInt16, ElementType::kUInt16},
    {at::ScalarType::Int, ElementType::kInt32},
    {at::ScalarType::UInt32, ElementType::kUInt32},
    {at::ScalarType::Long, ElementType::kInt64},
    {at::ScalarType::UInt64, ElementType::kUInt64},
    {at::ScalarType::Half, ElementType::kHalf},
    {at::ScalarType::BFloat16, ElementType::kBFloat16},
    {at::ScalarType::Float, ElementType::kFloat},
    {at::ScalarType::Double, ElementType::kDouble},
    {at::ScalarType::ComplexHalf, ElementType::kComplexHalf},
    {at::ScalarType::ComplexFloat, ElementType::kComplexFloat},
    {at::ScalarType::ComplexDouble, ElementType::kComplexDouble},
    {at::ScalarType::Float8_e4m3fn, ElementType::kFloat8E4M3Fn},
    {at::ScalarType::Float8_e5m2, ElementType::kFloat8E5M2},
    {at::ScalarType::Float8_e4m3fnuz, ElementType::kFloat8E4M3Fnuz},
    {at::ScalarType::Float8_e5m2fnuz, ElementType::kFloat8E5M2Fnuz},
};

}  // namespace

StatusOr<at::ScalarType> scalar_type_of(uint8_t type) {
  for (const auto& [scalar, element] : kTypes) {
    if (static_cast<uint8_t>(element) == type) return scalar;
  }
  return make_error(ErrorKind::kProtocol, cat("there is no type of elements ", type));
}

StatusOr<ElementType> element_type_of(at::ScalarType type) {
  for (const auto& [scalar, element] : kTypes) {
    if (scalar == type) return element;
  }
  return make_error(ErrorKind::kInvalidArgument, cat("tensors of type ", c10::toString(type),
                                                     " do not travel in process groups"));
}

}  // namespace weft::internal
