#ifndef WEFT_TESTS_TESTING_SANITIZERS_H_
#define WEFT_TESTS_TESTING_SANITIZERS_H_

// kSanitizer: whether this program is built with AddressSanitizer or ThreadSanitizer, ten times slower.
// kThreadSanitizer: whether this program is built with ThreadSanitizer. Packaged libraries (gRPC,
// LibTorch) are not, so what passes between threads inside them is invisible to it.
// fewer(2000, 300): how often a test does something that takes the same ways through the code each time: 2000 times, and
// 300 in a sanitizer's build, which has seen all of those ways by then.

namespace weft::testing {

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WEFT_TESTS_THREAD_SANITIZER_ 1
#endif
#if __has_feature(address_sanitizer)
#define WEFT_TESTS_ADDRESS_SANITIZER_ 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(WEFT_TESTS_THREAD_SANITIZER_)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(WEFT_TESTS_ADDRESS_SANITIZER_)
inline constexpr bool kSanitizer = true;
#else
inline constexpr bool kSanitizer = kThreadSanitizer;
#endif

template <typename T>
constexpr T fewer(T ordinary, T sanitized) {
  return kSanitizer ? sanitized : ordinary;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_SANITIZERS_H_
