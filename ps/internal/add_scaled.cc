#include "weft/ps/internal/add_scaled.h"

#include <cmath>
#include <string>

#include "ATen/Version.h"

namespace weft::ps::internal {
namespace {

template <class T>
void add_rounded_twice(T* to, const T* from, T by, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] += by * from[i];
}

#if defined(__x86_64__)
// In blocks of a fixed length, which compilers turn into vectors.
constexpr size_t kBlock = 16;

template <class T>
__attribute__((target("avx2,fma"))) void add_fused(T* __restrict to, const T* __restrict from, T by,
                                                   size_t count) {
  size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (size_t k = i; k < i + kBlock; ++k) to[k] = std::fma(by, from[k], to[k]);
  }
  for (; i < count; ++i) to[i] = std::fma(by, from[i], to[i]);
}
bool torch_fuses() {
  const std::string has = at::get_cpu_capability();
  return has == "AVX2" || has == "AVX512";
}
#else
bool torch_fuses() { return false; }
template <class T>
void add_fused(T* to, const T* from, T by, size_t count) {
  add_rounded_twice(to, from, by, count);
}
#endif

}  // namespace

AddScaled::AddScaled() : fused_(torch_fuses()) {}

void AddScaled::operator()(float* to, const float* from, float by, size_t count) const {
  fused_ ? add_fused(to, from, by, count) : add_rounded_twice(to, from, by, count);
}
void AddScaled::operator()(double* to, const double* from, double by, size_t count) const {
  fused_ ? add_fused(to, from, by, count) : add_rounded_twice(to, from, by, count);
}

}  // namespace weft::ps::internal
