#include "weft/collectives/internal/reduce.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "c10/util/BFloat16.h"
#include "c10/util/Float8_e4m3fn.h"
#include "c10/util/Float8_e4m3fnuz.h"
#include "c10/util/Float8_e5m2.h"
#include "c10/util/Float8_e5m2fnuz.h"
#include "c10/util/Half.h"
#include "c10/util/complex.h"
#include "weft/collectives/internal/text.h"
#include "weft/transport/stream_copy.h"

// Output and input may be the same memory, element by element, and never overlap otherwise.
#if defined(__clang__)
// Loops of some types have no vectors, which is no news.
#pragma clang diagnostic ignored "-Wpass-failed"
#define WEFT_EACH_ALONE _Pragma("clang loop vectorize(assume_safety)")
#else
#define WEFT_EACH_ALONE _Pragma("GCC ivdep")
#endif

namespace weft {

std::string_view reduction_name(uint8_t kind) {
  constexpr std::string_view kNames[] = {"sum",        "prod", "min", "max", "avg",
                                         "premul_sum", "band", "bor", "bxor"};
  return kind < std::size(kNames) ? kNames[kind] : "unknown reduction";
}

namespace internal {
namespace {

using ComplexHalf = c10::complex<c10::Half>;

// What is computed with: fp32 for the shorter floating-point types, unsigned integers of at least
// 32 bits for sums and products of integers, so that they wrap.
template <class T>
struct Wide {
  using Type = T;
};
template <class T>
requires(!std::is_arithmetic_v<T> && sizeof(T) <= 2) struct Wide<T> {
  using Type = float;
};
template <>
struct Wide<ComplexHalf> {
  using Type = c10::complex<float>;
};
template <class T>
using WideOf = typename Wide<T>::Type;

template <class T>
inline constexpr bool kIsComplex = false;
template <class T>
inline constexpr bool kIsComplex<c10::complex<T>> = true;

template <class T>
WideOf<T> widen(T x) {
  if constexpr (std::is_same_v<T, ComplexHalf>) {
    return {static_cast<float>(x.real()), static_cast<float>(x.imag())};
  } else {
    return static_cast<WideOf<T>>(x);
  }
}
template <class T>
T narrow(WideOf<T> x) {
  if constexpr (std::is_same_v<T, ComplexHalf>) {
    return T(static_cast<c10::Half>(x.real()), static_cast<c10::Half>(x.imag()));
  } else {
    return static_cast<T>(x);
  }
}

// Wraps instead of overflowing.
template <class T>
using Wrapping = std::conditional_t<sizeof(T) <= 4, uint32_t, uint64_t>;

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a | b;
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};
struct Prod {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a & b;
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return (b < a || b != b) ? b : a;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return (b > a || b != b) ? b : a;
  }
};
struct Band {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Bor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Bxor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <class W>
void divide_wide(W* data, uint64_t n, uint64_t divisor) {
  if constexpr (std::is_same_v<W, bool>) {
    (void)data, (void)n, (void)divisor;
  } else if constexpr (std::is_integral_v<W>) {
    using D = std::conditional_t<std::is_signed_v<W>, int64_t, uint64_t>;
    for (uint64_t i = 0; i < n; ++i) {
      data[i] = static_cast<W>(static_cast<D>(data[i]) / static_cast<D>(divisor));
    }
  } else if constexpr (kIsComplex<W>) {
    const auto d = static_cast<typename W::value_type>(divisor);
    for (uint64_t i = 0; i < n; ++i) data[i] = W(data[i].real() / d, data[i].imag() / d);
  } else {
    const W d = static_cast<W>(divisor);
    WEFT_EACH_ALONE
    for (uint64_t i = 0; i < n; ++i) data[i] = data[i] / d;
  }
}

template <class T, class Op>
void run(T* out, const T* const* in, size_t count, uint64_t n, uint64_t divisor) {
  using W = WideOf<T>;
  if constexpr (std::is_same_v<W, T>) {
    if (count == 2) {
      const T* const a = in[0];
      const T* const b = in[1];
      WEFT_EACH_ALONE
      for (uint64_t i = 0; i < n; ++i) out[i] = Op::apply(a[i], b[i]);
      if (divisor != 0) divide_wide(out, n, divisor);
      return;
    }
  }
  constexpr uint64_t kBlock = 1024;
  W sum[kBlock];
  for (uint64_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t m = std::min(kBlock, n - begin);
    const T* const first = in[0] + begin;
    for (uint64_t i = 0; i < m; ++i) sum[i] = widen(first[i]);
    for (size_t k = 1; k < count; ++k) {
      const T* const next = in[k] + begin;
      for (uint64_t i = 0; i < m; ++i) sum[i] = Op::apply(sum[i], widen(next[i]));
    }
    if (divisor != 0) divide_wide(sum, m, divisor);
    T* const to = out + begin;
    for (uint64_t i = 0; i < m; ++i) to[i] = narrow<T>(sum[i]);
  }
}

// A store that stays in the caches first fetches the line that it overwrites, or takes it from the
// core that has read it. So a block at a time leaves around them.
template <class T, class Op>
void run_streamed(T* out, const T* const* in, size_t count, uint64_t n, uint64_t divisor) {
  constexpr uint64_t kBlock = 8192 / sizeof(T);
  constexpr size_t kInputs = 16;
  if (count > kInputs) return run<T, Op>(out, in, count, n, divisor);
  std::array<T, kBlock> block;
  std::array<const T*, kInputs> from;
  for (uint64_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t m = std::min(kBlock, n - begin);
    for (size_t k = 0; k < count; ++k) from[k] = in[k] + begin;
    run<T, Op>(block.data(), from.data(), count, m, divisor);
    copy_streamed(out + begin, block.data(), m * sizeof(T));
  }
}

// Calls `fn` with a value of the type.
template <class F>
void with_type(ElementType type, F fn) {
  switch (type) {
    case ElementType::kNone: return;
    case ElementType::kBool: return fn(bool{});
    case ElementType::kUInt8: return fn(uint8_t{});
    case ElementType::kInt8: return fn(int8_t{});
    case ElementType::kInt16: return fn(int16_t{});
    case ElementType::kUInt16: return fn(uint16_t{});
    case ElementType::kInt32: return fn(int32_t{});
    case ElementType::kUInt32: return fn(uint32_t{});
    case ElementType::kInt64: return fn(int64_t{});
    case ElementType::kUInt64: return fn(uint64_t{});
    case ElementType::kHalf: return fn(c10::Half{});
    case ElementType::kBFloat16: return fn(c10::BFloat16{});
    case ElementType::kFloat: return fn(float{});
    case ElementType::kDouble: return fn(double{});
    case ElementType::kComplexHalf: return fn(ComplexHalf{});
    case ElementType::kComplexFloat: return fn(c10::complex<float>{});
    case ElementType::kComplexDouble: return fn(c10::complex<double>{});
    case ElementType::kFloat8E4M3Fn: return fn(c10::Float8_e4m3fn{});
    case ElementType::kFloat8E5M2: return fn(c10::Float8_e5m2{});
    case ElementType::kFloat8E4M3Fnuz: return fn(c10::Float8_e4m3fnuz{});
    case ElementType::kFloat8E5M2Fnuz: return fn(c10::Float8_e5m2fnuz{});
  }
}

bool is_integer(ElementType t) { return t >= ElementType::kUInt8 && t <= ElementType::kUInt64; }
bool is_complex(ElementType t) {
  return t >= ElementType::kComplexHalf && t <= ElementType::kComplexDouble;
}

}  // namespace

uint64_t element_size(ElementType type) {
  uint64_t size = 0;
  with_type(type, [&size](auto zero) { size = sizeof zero; });
  return size;
}

std::string_view element_name(uint8_t type) {
  constexpr std::string_view kNames[kElementTypes] = {
      "nothing",        "bool",       "uint8",         "int8",        "int16",
      "uint16",         "int32",      "uint32",        "int64",       "uint64",
      "float16",        "bfloat16",   "float32",       "float64",     "complex32",
      "complex64",      "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
      "float8_e5m2fnuz"};
  return type < kElementTypes ? kNames[type] : "unknown type";
}

Status check_reduction(ElementType type, ReduceOp op) {
  const ReduceOp::Kind kind = op.kind();
  bool has = type != ElementType::kNone;
  switch (kind) {
    case ReduceOp::kSum:
    case ReduceOp::kProd: break;
    case ReduceOp::kMin:
    case ReduceOp::kMax: has = has && !is_complex(type); break;
    case ReduceOp::kAvg: has = has && type != ElementType::kBool; break;
    case ReduceOp::kPremulSum: has = has && type != ElementType::kBool && !is_integer(type); break;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor: has = type == ElementType::kBool || is_integer(type); break;
    default: has = false;
  }
  if (has) return absl::OkStatus();
  return make_error(ErrorKind::kInvalidArgument,
                    cat("elements of type ", element_name(static_cast<uint8_t>(type)),
                        " have no reduction ", reduction_name(kind)));
}

void reduce_many(ElementType type, ReduceOp::Kind kind, void* out, const void* const* inputs,
                 size_t input_count, uint64_t elements, uint64_t divisor, bool streamed) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    T* const to = static_cast<T*>(out);
    // An array of pointers to T, as the caller has it as pointers to void.
    const auto* const from = reinterpret_cast<const T* const*>(inputs);
    const auto apply = [&](auto op, uint64_t by) {
      if (streamed) return run_streamed<T, decltype(op)>(to, from, input_count, elements, by);
      run<T, decltype(op)>(to, from, input_count, elements, by);
    };
    switch (kind) {
      case ReduceOp::kSum:
      case ReduceOp::kPremulSum: return apply(Sum{}, 0);
      case ReduceOp::kAvg: return apply(Sum{}, divisor);
      case ReduceOp::kProd: return apply(Prod{}, 0);
      case ReduceOp::kMin:
        if constexpr (!kIsComplex<T>) apply(Min{}, 0);
        return;
      case ReduceOp::kMax:
        if constexpr (!kIsComplex<T>) apply(Max{}, 0);
        return;
      case ReduceOp::kBand:
        if constexpr (std::is_integral_v<T>) apply(Band{}, 0);
        return;
      case ReduceOp::kBor:
        if constexpr (std::is_integral_v<T>) apply(Bor{}, 0);
        return;
      case ReduceOp::kBxor:
        if constexpr (std::is_integral_v<T>) apply(Bxor{}, 0);
        return;
    }
  });
}

void multiply(ElementType type, void* out, const void* in, uint64_t elements, double factor) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    using W = WideOf<T>;
    T* const to = static_cast<T*>(out);
    const T* const from = static_cast<const T*>(in);
    if constexpr (kIsComplex<T>) {
      const auto f = static_cast<typename W::value_type>(factor);
      for (uint64_t i = 0; i < elements; ++i) {
        const W x = widen(from[i]);
        to[i] = narrow<T>(W(x.real() * f, x.imag() * f));
      }
    } else if constexpr (!std::is_integral_v<T>) {
      const W f = static_cast<W>(factor);
      WEFT_EACH_ALONE
      for (uint64_t i = 0; i < elements; ++i) to[i] = narrow<T>(widen(from[i]) * f);
    }
  });
}

void divide(ElementType type, void* data, uint64_t elements, uint64_t divisor) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    T* const at = static_cast<T*>(data);
    if constexpr (std::is_same_v<WideOf<T>, T>) {
      divide_wide(at, elements, divisor);
    } else {
      const T* in[] = {at};
      run<T, Sum>(at, in, 1, elements, divisor);
    }
  });
}

bool divides_first(ElementType type) {
  switch (type) {
    case ElementType::kHalf:
    case ElementType::kComplexHalf:
    case ElementType::kFloat8E4M3Fn:
    case ElementType::kFloat8E5M2:
    case ElementType::kFloat8E4M3Fnuz:
    case ElementType::kFloat8E5M2Fnuz: return true;
    default: return false;
  }
}

}  // namespace internal
}  // namespace weft
