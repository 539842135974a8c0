#include "weft/rpc/internal/agent/receive_memory.h"

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "gtest/gtest.h"

namespace weft::internal {
namespace {

constexpr size_t kMebibyte = size_t{1} << 20;

at::Tensor bytes(const std::shared_ptr<ReceiveMemory>& memory, size_t n) {
  return memory->empty({static_cast<int64_t>(n)}, at::kByte, n);
}

TEST(ReceiveMemory, ABlockServesTheNextTensorOfItsSize) {
  auto memory = std::make_shared<ReceiveMemory>(64 * kMebibyte);
  const void* first = nullptr;
  {
    const at::Tensor t = memory->empty({3, 1000, 1000}, at::kFloat, 12'000'000);
    first = t.const_data_ptr();
    EXPECT_EQ(t.sizes(), (at::IntArrayRef{3, 1000, 1000}));
    EXPECT_EQ(t.scalar_type(), at::kFloat);
    EXPECT_TRUE(t.is_contiguous());
    EXPECT_EQ(t.nbytes(), 12'000'000u);
    EXPECT_EQ(t.storage().nbytes(), 12'000'000u);
    EXPECT_FALSE(t.is_inference());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % (2 * kMebibyte), 0u);
    EXPECT_EQ(memory->counters().kept_bytes, 0u) << "in use, so not kept";
  }
  EXPECT_EQ(memory->counters().kept_bytes, 12 * kMebibyte);
  const at::Tensor again = bytes(memory, 11 * kMebibyte);  // the same class
  EXPECT_EQ(again.const_data_ptr(), first);
  const at::Tensor other = bytes(memory, 11 * kMebibyte);  // the block is taken
  EXPECT_NE(other.const_data_ptr(), first);
  EXPECT_EQ(memory->counters().mapped, 2u);
  EXPECT_EQ(memory->counters().reused, 1u);
}

TEST(ReceiveMemory, SizesWasteAtMostAnEighthOrAHugePage) {
  EXPECT_EQ(ReceiveMemory::block_size(1), 2 * kMebibyte);
  EXPECT_EQ(ReceiveMemory::block_size(2 * kMebibyte), 2 * kMebibyte);
  EXPECT_EQ(ReceiveMemory::block_size(2 * kMebibyte + 1), 4 * kMebibyte);
  EXPECT_EQ(ReceiveMemory::block_size(64 * kMebibyte), 64 * kMebibyte);
  EXPECT_EQ(ReceiveMemory::block_size(64 * kMebibyte + 1), 72 * kMebibyte);
  for (size_t n = kMebibyte; n < 4096 * kMebibyte; n += n / 3 + 1) {
    const size_t size = ReceiveMemory::block_size(n);
    EXPECT_GE(size, n);
    EXPECT_LE(size - n, std::max(2 * kMebibyte, n / 8)) << n;
    EXPECT_EQ(size % (2 * kMebibyte), 0u) << n;
  }
}

TEST(ReceiveMemory, KeepsNoMoreThanItsBound) {
  auto memory = std::make_shared<ReceiveMemory>(10 * kMebibyte);
  {
    std::vector<at::Tensor> many;
    for (int i = 0; i < 8; ++i) many.push_back(bytes(memory, 4 * kMebibyte));
  }
  EXPECT_EQ(memory->counters().kept_bytes, 8 * kMebibyte);
  EXPECT_EQ(memory->counters().mapped, 8u);
}

TEST(ReceiveMemory, WhatNobodyTookBetweenTwoSweepsGoesBack) {
  auto memory = std::make_shared<ReceiveMemory>(100 * kMebibyte);
  {
    const at::Tensor a = bytes(memory, 4 * kMebibyte);
    const at::Tensor b = bytes(memory, 8 * kMebibyte);
  }
  memory->sweep();
  EXPECT_EQ(memory->counters().kept_bytes, 12 * kMebibyte) << "they have just come back";
  { const at::Tensor a = bytes(memory, 4 * kMebibyte); }  // used again
  memory->sweep();
  EXPECT_EQ(memory->counters().kept_bytes, 4 * kMebibyte);
  memory->sweep();
  EXPECT_EQ(memory->counters().kept_bytes, 0u);
}

TEST(ReceiveMemory, ATensorOutlivesTheWorkerAndMayBeResized) {
  at::Tensor t;
  std::weak_ptr<ReceiveMemory> gone;
  {
    auto memory = std::make_shared<ReceiveMemory>(100 * kMebibyte);
    gone = memory;
    t = bytes(memory, 4 * kMebibyte);
  }
  t.fill_(7);
  t.resize_({static_cast<int64_t>(6 * kMebibyte)});
  EXPECT_EQ(t[0].item<uint8_t>(), 7);
  EXPECT_EQ(t[static_cast<int64_t>(4 * kMebibyte) - 1].item<uint8_t>(), 7);
  EXPECT_TRUE(gone.expired()) << "its memory is LibTorch's now, so nothing holds ours";
}

TEST(ReceiveMemory, ManyThreads) {
  auto memory = std::make_shared<ReceiveMemory>(16 * kMebibyte);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&memory, i] {
      for (int round = 0; round < 100; ++round) {
        const at::Tensor t = bytes(memory, (2 + 2 * static_cast<size_t>(i % 2)) * kMebibyte);
        auto* data = static_cast<uint8_t*>(t.mutable_data_ptr());
        data[0] = data[kMebibyte] = static_cast<uint8_t>(i);
        if (round % 10 == i) memory->sweep();
        EXPECT_EQ(data[0], i);
        EXPECT_EQ(data[kMebibyte], i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(memory->counters().kept_bytes, 16 * kMebibyte);
  EXPECT_EQ(memory->counters().mapped + memory->counters().reused, 400u);
}

}  // namespace
}  // namespace weft::internal
