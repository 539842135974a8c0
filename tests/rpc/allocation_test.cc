// VALUE-2, counted: no decoder allocates more than a constant times its input before it has read
// what it allocates for. And what a small call costs.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "ATen/ops/add.h"
#include "ATen/ops/ones.h"
#include "weft/rpc/call.h"
#include "weft/rpc/internal/agent/tensor_meta.h"
#include "weft/rpc/internal/codec/varint.h"
#include "weft/rpc/struct.h"
#include "weft/rpc/value.h"
#include "weft/tests/rpc/probe.h"
#include "weft/tests/testing/cluster.h"

namespace {

std::atomic<size_t> allocated{0};
std::atomic<int64_t> allocations{0};

}  // namespace

// Not inline: the compiler would see free() of what it takes for the standard operator's.
__attribute__((noinline)) void* operator new(size_t size) {
  allocated += size;
  ++allocations;
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  throw std::bad_alloc();
}
// std::stable_sort() asks this one; without it a sanitizer's would answer, and the memory come back to free().
__attribute__((noinline)) void* operator new(size_t size, const std::nothrow_t&) noexcept {
  allocated += size;
  ++allocations;
  return std::malloc(size == 0 ? 1 : size);
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace weft {
namespace {

struct Big {
  std::array<int64_t, 64> numbers{};
  std::string text{};
};
WEFT_STRUCT(Big, text, numbers);

// Messages and statuses.
constexpr size_t kWords = 8 * 1024;

template <class T>
void bounded(const std::string& body, size_t factor) {
  Payload payload{body, {}};
  const size_t before = allocated;
  {
    Decoder in(std::move(payload));
    (void)in.take<T>();
  }
  EXPECT_LE(allocated - before, factor * body.size() + kWords) << body.size();
}

TEST(Allocation, IsBoundedByTheInput) {
  for (const size_t filler : {size_t{0}, size_t{100}, size_t{100'000}}) {
    for (const uint64_t count : {uint64_t{100}, uint64_t{100'000}, uint64_t{1} << 40, UINT64_MAX}) {
      for (const char tag : {6, 7, 9, 10, 11, 12, 13, 14}) {
        std::string body(1, tag);
        if (tag == 10) body.push_back(7);
        internal::append_varint(count, &body);
        body.append(filler, '\0');
        bounded<std::string>(body, 4);
        bounded<std::vector<int8_t>>(body, 4);
        bounded<std::vector<int64_t>>(body, 4);
        bounded<std::vector<std::string>>(body, 3 * sizeof(std::string));
        bounded<std::vector<bool>>(body, 4);
        bounded<std::vector<std::monostate>>(body, 4);
        bounded<std::vector<Big>>(body, 3 * sizeof(Big));
        bounded<std::map<int, Big>>(body, 3 * sizeof(Big));
        bounded<Big>(body, 4);
      }
    }
  }
  // The largest honest expansion: elements of one byte each that become large values.
  std::string body("\x09");
  internal::append_varint(100'000, &body);
  for (int i = 0; i < 50'000; ++i) body.append("\x0d\x00", 2);
  bounded<std::vector<Big>>(body, 2 * sizeof(Big));
}

TEST(Allocation, OfADescriptorIsBoundedByItsBytes) {
  std::string bytes("\x06\x00\x40", 3);
  for (int i = 0; i < 64; ++i) bytes.push_back('\1');
  bytes.push_back('\4');
  for (size_t n = 0; n <= bytes.size(); ++n) {
    std::string_view in(bytes.data(), n);
    internal::TensorMeta meta;
    const size_t before = allocated;
    const Status s = internal::take_meta(&in, &meta);
    EXPECT_EQ(s.ok(), n == bytes.size());
    EXPECT_LE(allocated - before, 16 * n + kWords);
  }
}

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }

// Both sides of it, the addition and the simulated wire included; at 100,000 calls a second and
// more, what is allocated for each of them is what it costs.
TEST(Allocation, OfASmallCallIsFewPieces) {
  constexpr int kCalls = 200;
  constexpr double kMost = 64;
  Library library("app");
  library.def("add", &add, {.inline_ok = true});
  testing::Cluster c({.library = library});
  const at::Tensor x = at::ones({4});
  const auto calls = [&](int n) {
    for (int i = 0; i < n; ++i) rpc_sync(c[0], "worker1", &add, x, x);
  };
  calls(50);  // what is made once
  const int64_t before = allocations;
  calls(kCalls);
  const double each = static_cast<double>(allocations - before) / kCalls;
  RecordProperty("allocations_per_call", std::to_string(each));
  EXPECT_LE(each, kMost);
}

// INT-4.
TEST(Allocation, OfASmallCallIsTheSameWithAnInterceptorThatAttachesNothing) {
  constexpr int kCalls = 200;
  Library library("app");
  library.def("add", &add, {.inline_ok = true});
  const at::Tensor x = at::ones({4});
  const auto count = [&](bool intercepted) {
    testing::ClusterOptions o{.library = library,
                              .heartbeat = std::chrono::minutes(1),
                              .lease = std::chrono::minutes(10)};
    o.adjust = [intercepted](int, JoinOptions* j) {
      if (!intercepted) return;
      j->services = {[](const ServiceContext&) {
        return std::make_shared<testing::Probe>("@probe", /*all=*/false);
      }};
    };
    testing::Cluster c(std::move(o));
    const auto calls = [&](int n) {
      for (int i = 0; i < n; ++i) rpc_sync(c[0], "worker1", &add, x, x);
    };
    calls(50);
    // Threads that meet share some work, so that a round takes less now and then; never more.
    int64_t most = 0;
    for (int round = 0; round < 8; ++round) {
      const int64_t before = allocations;
      calls(kCalls);
      most = std::max<int64_t>(most, allocations - before);
    }
    return most;
  };
  const int64_t plain = count(false);
  // One piece for each call would be 200 more.
  EXPECT_LT(count(true), plain + kCalls / 2) << plain;
}

}  // namespace
}  // namespace weft
