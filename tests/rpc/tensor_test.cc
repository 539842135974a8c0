// Tensors on the wire: values, dtype, layout and flags survive; hostile descriptors and indices do
// not.

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "c10/core/InferenceMode.h"
#include "weft/rpc/internal/agent/tensor_meta.h"
#include "weft/rpc/internal/codec/varint.h"
#include "weft/rpc/value.h"

namespace weft::internal {
namespace {

constexpr c10::ScalarType kAll[] = {at::kByte,
                                    at::kChar,
                                    at::kShort,
                                    at::kInt,
                                    at::kLong,
                                    at::kHalf,
                                    at::kFloat,
                                    at::kDouble,
                                    at::kComplexHalf,
                                    at::kComplexFloat,
                                    at::kComplexDouble,
                                    at::kBool,
                                    at::kBFloat16,
                                    at::kBits8,
                                    at::kBits16,
                                    at::kBits1x8,
                                    at::kBits2x4,
                                    at::kBits4x2,
                                    at::kFloat8_e5m2,
                                    at::kFloat8_e4m3fn,
                                    at::kFloat8_e5m2fnuz,
                                    at::kFloat8_e4m3fnuz,
                                    at::kFloat8_e8m0fnu,
                                    at::kUInt16,
                                    at::kUInt32,
                                    at::kUInt64,
                                    at::kFloat4_e2m1fn_x2};

// As the message layer does it, with fresh memory at the receiver.
StatusOr<at::Tensor> over_the_wire(const at::Tensor& tensor, uint64_t* bytes = nullptr,
                                   bool copy = false) {
  WEFT_ASSIGN_OR_RETURN(const TensorParts parts, split_for_wire(tensor, copy));
  std::string header;
  append_meta(parts.meta, &header);
  header.append("rest");
  std::string_view in(header);
  TensorMeta meta;
  WEFT_RETURN_IF_ERROR(take_meta(&in, &meta));
  EXPECT_EQ(in, "rest");
  EXPECT_EQ(meta, parts.meta);
  WEFT_ASSIGN_OR_RETURN(Buffers buffers, allocate_buffers(meta));
  const BufferSpecs specs = buffer_specs(meta);
  EXPECT_EQ(buffers.size(), parts.buffers.size());
  EXPECT_EQ(buffers.size(), buffer_count(meta));
  uint64_t sum = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    EXPECT_EQ(buffers[i].nbytes(), parts.buffers[i].nbytes());
    EXPECT_EQ(specs[i].nbytes, parts.buffers[i].nbytes());
    EXPECT_TRUE(parts.buffers[i].is_contiguous());
    EXPECT_FALSE(parts.buffers[i].requires_grad());
    sum += specs[i].nbytes;
    if (specs[i].nbytes > 0) {
      std::memcpy(buffers[i].mutable_data_ptr(), parts.buffers[i].const_data_ptr(),
                  specs[i].nbytes);
    }
  }
  EXPECT_EQ(sum, total_bytes(meta));
  if (bytes != nullptr) *bytes = sum;
  WEFT_ASSIGN_OR_RETURN(at::Tensor result, join_from_wire(meta, std::move(buffers)));
  restore_requires_grad(meta, &result);
  return result;
}

void expect_same(const at::Tensor& tensor) {
  const StatusOr<at::Tensor> back = over_the_wire(tensor);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->scalar_type(), tensor.scalar_type());
  EXPECT_EQ(back->sizes(), tensor.sizes());
  EXPECT_EQ(back->requires_grad(), tensor.requires_grad());
  EXPECT_TRUE(back->is_leaf());
  EXPECT_FALSE(back->is_conj());
  EXPECT_FALSE(back->is_neg());
  EXPECT_TRUE(at::equal(back->detach(), tensor.detach().resolve_conj().resolve_neg()));
}

at::Tensor random_bytes_as(c10::ScalarType dtype, at::IntArrayRef sizes, std::mt19937* random) {
  at::Tensor t = at::empty(sizes, dtype);
  auto* bytes = static_cast<unsigned char*>(t.mutable_data_ptr());
  for (size_t i = 0; i < t.nbytes(); ++i) {
    bytes[i] = static_cast<unsigned char>(dtype == at::kBool ? (*random)() % 2 : (*random)());
  }
  return t;
}

TEST(Tensor, EveryDtypeAndOddSizes) {
  std::mt19937 random(1);
  for (const c10::ScalarType dtype : kAll) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{}, {0}, {1}, {7}, {3, 0, 5}, {2, 3, 5}, {1, 1, 1}, {1023}}) {
      const at::Tensor t = random_bytes_as(dtype, sizes, &random);
      const StatusOr<at::Tensor> back = over_the_wire(t);
      ASSERT_TRUE(back.ok()) << c10::toString(dtype) << ": " << back.status();
      EXPECT_EQ(back->scalar_type(), dtype);
      EXPECT_EQ(back->sizes(), t.sizes());
      EXPECT_EQ(back->strides(), t.strides());
      ASSERT_EQ(back->nbytes(), t.nbytes());
      // Bytes, since not every dtype can be compared, and NaNs are no excuse.
      if (t.nbytes() > 0) {
        EXPECT_EQ(std::memcmp(back->const_data_ptr(), t.const_data_ptr(), t.nbytes()), 0)
            << c10::toString(dtype);
      }
    }
  }
}

TEST(Tensor, RPC_36_values_and_layout_survive) {
  const at::Tensor images = at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor gray = at::rand({2, 1, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor video = at::rand({2, 3, 4, 5, 6}).contiguous(at::MemoryFormat::ChannelsLast3d);
  for (const at::Tensor& t :
       {images, gray, video, at::rand({4, 7}).t(), at::rand({2, 3, 4}).permute({2, 0, 1}),
        at::rand({2, 1, 4}).permute({2, 1, 0}), at::rand({1, 5}).t()}) {
    const StatusOr<TensorParts> parts = split_for_wire(t, false);
    ASSERT_TRUE(parts.ok());
    EXPECT_TRUE(parts->buffers[0].is_alias_of(t))
        << "copied although its memory could be sent as it lies";
    const StatusOr<at::Tensor> back = over_the_wire(t);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_TRUE(at::equal(*back, t));
    EXPECT_EQ(back->suggest_memory_format(), t.suggest_memory_format()) << t.sizes();
    for (int64_t d = 0; d < t.dim(); ++d) {
      if (t.size(d) > 1) {
        EXPECT_EQ(back->stride(d), t.stride(d)) << t.sizes() << " at " << d;
      }
    }
  }
}

TEST(Tensor, AViewCostsItsOwnBytesOnly) {
  const at::Tensor big = at::rand({1000, 1000});
  uint64_t bytes = 0;
  for (const auto& [view, expected] : std::vector<std::pair<at::Tensor, uint64_t>>{
           {big.select(0, 3), 4000},
           {big.slice(0, 0, 1000, 100).slice(1, 0, 1000, 10), 10 * 100 * 4},
           {big.select(1, 5), 4000},
           {at::rand({1}).expand({25}), 100},
           {big.narrow(0, 10, 2), 8000}}) {
    const StatusOr<at::Tensor> back = over_the_wire(view, &bytes);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_TRUE(at::equal(*back, view));
    EXPECT_EQ(bytes, expected);
    EXPECT_EQ(back->storage().nbytes(), expected);
  }
}

TEST(Tensor, LazyBitsAreResolved) {
  const at::Tensor c = at::rand({3, 4}, at::kComplexFloat);
  expect_same(c.conj());
  expect_same(c.conj().t());
  expect_same(at::imag(c.conj()));
  expect_same(at::_neg_view(at::rand({5})));
  expect_same(at::_efficientzerotensor({2, 3}));
}

TEST(Tensor, FlagsSurviveAndNothingOfAutogradTravels) {
  const at::Tensor leaf = at::rand({3}).set_requires_grad(true);
  expect_same(leaf);
  const at::Tensor product = leaf.mul(2);
  expect_same(product);
  at::Tensor inference;
  {
    const c10::InferenceMode guard;
    inference = at::ones({2, 2});
  }
  const StatusOr<TensorParts> parts = split_for_wire(inference, false);
  ASSERT_TRUE(parts.ok());
  EXPECT_FALSE(parts->buffers[0].is_inference());
  const StatusOr<at::Tensor> back = over_the_wire(inference);
  ASSERT_TRUE(back.ok());
  EXPECT_FALSE(back->is_inference());
  {
    const c10::InferenceMode guard;
    EXPECT_FALSE(over_the_wire(inference)->is_inference());
  }
}

TEST(Tensor, CopyOrBorrowIsTheCallersChoice) {
  const at::Tensor t = at::rand({4});
  EXPECT_TRUE(split_for_wire(t, false)->buffers[0].is_alias_of(t));
  EXPECT_FALSE(split_for_wire(t, true)->buffers[0].is_alias_of(t));
  const at::Tensor images = at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_FALSE(split_for_wire(images, true)->buffers[0].is_alias_of(images));
  expect_same(images);
  const at::Tensor s = at::eye(3).to_sparse();
  EXPECT_FALSE(split_for_wire(s, true)->buffers[1].is_alias_of(s._values()));
}

TEST(Tensor, SparseTensors) {
  const at::Tensor plain = at::eye(4).to_sparse();
  const at::Tensor hybrid =
      at::sparse_coo_tensor(at::randint(0, 3, {2, 5}, at::kLong), at::rand({5, 2}), {3, 3, 2});
  const at::Tensor empty = at::zeros({3, 4}).to_sparse();
  const at::Tensor complex = at::rand({3, 3}, at::kComplexDouble).to_sparse();
  const at::Tensor none =
      at::sparse_coo_tensor(at::empty({0, 2}, at::kLong), at::rand({2, 3}), {3});
  for (const at::Tensor& t : {plain, hybrid, hybrid.coalesce(), empty, complex, none}) {
    const StatusOr<at::Tensor> back = over_the_wire(t);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->layout(), at::kSparse);
    EXPECT_EQ(back->is_coalesced(), t.is_coalesced());
    EXPECT_EQ(back->_nnz(), t._nnz());
    EXPECT_TRUE(at::equal(back->to_dense(), t.to_dense()));
  }
  at::Tensor leaf = at::eye(2).to_sparse().set_requires_grad(true);
  EXPECT_TRUE(over_the_wire(leaf)->requires_grad());
}

TEST(Tensor, HostileIndicesMakeNoSparseTensor) {
  const at::Tensor good = at::eye(4).to_sparse();
  const auto bend = [&good](int64_t dim, int64_t entry, int64_t index, bool coalesced) {
    TensorParts parts = *split_for_wire(good, true);
    parts.meta.coalesced = coalesced;
    parts.buffers[0].index_put_({at::tensor(dim), at::tensor(entry)}, at::tensor(index));
    return join_from_wire(parts.meta, parts.buffers).status();
  };
  EXPECT_TRUE(bend(0, 0, 0, true).ok());
  for (const int64_t index : {int64_t{4}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(error_kind(bend(0, 1, index, false)), ErrorKind::kProtocol) << index;
    EXPECT_EQ(error_kind(bend(1, 3, index, false)), ErrorKind::kProtocol) << index;
  }
  // Claimed to be coalesced, and is not: out of order, or twice the same.
  EXPECT_EQ(error_kind(bend(0, 0, 3, true)), ErrorKind::kProtocol);
  EXPECT_TRUE(bend(0, 0, 3, false).ok());
  TensorParts twice = *split_for_wire(good, true);
  twice.buffers[0].zero_();
  EXPECT_EQ(error_kind(join_from_wire(twice.meta, twice.buffers).status()), ErrorKind::kProtocol);
}

TEST(Tensor, BytesOfBoolBecomeZeroOrOne) {
  TensorParts parts = *split_for_wire(at::zeros({4}, at::kBool), true);
  auto* bytes = static_cast<unsigned char*>(parts.buffers[0].mutable_data_ptr());
  bytes[0] = 2;
  bytes[1] = 255;
  bytes[3] = 1;
  const StatusOr<at::Tensor> t = join_from_wire(parts.meta, parts.buffers);
  ASSERT_TRUE(t.ok());
  const auto* out = static_cast<const unsigned char*>(t->const_data_ptr());
  EXPECT_EQ(std::vector<int>(out, out + 4), (std::vector<int>{1, 1, 0, 1}));
}

TEST(Tensor, WhatCannotBeSentIsSaidInWords) {
  const auto refused = [](const at::Tensor& t, const char* words) {
    const Status s = split_for_wire(t, false).status();
    EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
    EXPECT_NE(s.message().find(words), std::string::npos) << s;
    // The encoder says so too, before anything is sent.
    Payload payload;
    Encoder out(&payload);
    out.put(std::vector<at::Tensor>{t});
    EXPECT_EQ(out.status().ok(), !t.defined()) << out.status();
  };
  refused(at::Tensor(), "undefined");
  refused(at::quantize_per_tensor(at::rand({3}), 0.1, 0, at::kQInt8), "quantized");
  refused(at::empty({2}, at::TensorOptions().device(at::kMeta)), "from the CPU and from CUDA");
  refused(at::eye(3).to_sparse_csr(), "sparse COO");
}

TEST(Tensor, AnUndefinedTensorIsNone) {
  Payload payload;
  Encoder out(&payload);
  out.put(std::vector<at::Tensor>{at::Tensor(), at::ones({2})});
  ASSERT_EQ(payload.tensors.size(), 1u);
  Decoder in(payload);
  const auto list = in.take<std::vector<at::Tensor>>();
  ASSERT_TRUE(list.ok() && in.finish().ok());
  EXPECT_FALSE((*list)[0].defined());
  EXPECT_TRUE((*list)[1].defined());
}

TEST(Tensor, AsManyTensorsAsTheValueNames) {
  Payload payload;
  Encoder out(&payload);
  out.put(at::ones({2}));
  payload.tensors.push_back(at::ones({1}));
  Decoder more(payload);
  EXPECT_TRUE(more.take<at::Tensor>().ok());
  EXPECT_EQ(error_kind(more.finish()), ErrorKind::kProtocol);
  payload.tensors.clear();
  Decoder fewer(payload);
  EXPECT_EQ(error_kind(fewer.take<at::Tensor>().status()), ErrorKind::kProtocol);
}

// ---- descriptors -------------------------------------------------------------------------------

Status taken(std::string_view bytes) {
  TensorMeta meta;
  return take_meta(&bytes, &meta);
}

std::string varint(uint64_t v) {
  std::string out;
  append_varint(v, &out);
  return out;
}

TEST(TensorMeta, HostileDescriptors) {
  const auto refused = [](const std::string& bytes, const char* words) {
    const Status s = taken(bytes);
    EXPECT_EQ(error_kind(s), ErrorKind::kProtocol) << words;
    EXPECT_NE(s.message().find(words), std::string::npos) << s;
  };
  const std::string f32("\x06\x00", 2);
  const auto dims = [](size_t n) { return std::string(1, static_cast<char>(n)); };
  EXPECT_TRUE(taken(f32 + dims(1) + varint(3) + varint(12)).ok());
  refused("", "ends early");
  refused(std::string("\x0c\x00\x00\x01", 4), "unknown dtype number 12");  // quantized
  refused(std::string("\xff\x00\x00\x01", 4), "unknown dtype");
  refused(std::string("\x06\x20\x00\x04", 4), "unknown flags");
  // Device numbers: 0x100 and above are those of CUDA, 0 is left out.
  const std::string placed("\x06\x10\x00\x04", 4);
  EXPECT_TRUE(taken(placed + varint(0x100)).ok());
  EXPECT_TRUE(taken(placed + varint(0x17f)).ok());
  for (const uint64_t number :
       {uint64_t{0}, uint64_t{1}, uint64_t{0xff}, uint64_t{0x180}, (uint64_t{1} << 32) + 0x100}) {
    refused(placed + varint(number), "stands for no device");
  }
  refused(placed, "stands for no device");
  refused(f32 + dims(65), "65 dimensions");
  refused(f32 + dims(1) + varint(3) + varint(13), "13 bytes declared, 12 follow");
  refused(f32 + dims(1) + varint(3), "not a number");
  refused(f32 + dims(1) + varint(uint64_t{1} << 63) + varint(0), "above the range");
  refused(f32 + dims(2) + varint(uint64_t{1} << 40) + varint(uint64_t{1} << 40) + varint(0),
          "overflow");
  refused(f32 + dims(1) + varint(uint64_t{1} << 62) + varint(0), "overflow");
  // The product is zero, but strides are not.
  refused(
      f32 + dims(3) + varint(uint64_t{1} << 40) + varint(uint64_t{1} << 40) + varint(0) + varint(0),
      "overflow");
  refused(std::string("\x04\x02", 2) + dims(0) + varint(8), "requires_grad");
  refused(std::string("\x06\x04", 2) + dims(0) + varint(4), "coalesced");
  const std::string ordered("\x06\x08", 2);
  refused(ordered + dims(2) + varint(2) + varint(3) + std::string("\0\0", 2) + varint(24),
          "permutation");
  refused(ordered + dims(2) + varint(2) + varint(3) + std::string("\0\2", 2) + varint(24),
          "permutation");
  refused(ordered + dims(2) + varint(2) + varint(3) + std::string("\0\1", 2) + varint(24),
          "plain one");
  refused(ordered + dims(2) + varint(2) + varint(3) + std::string("\1", 1), "ends early");
  refused(ordered + dims(0) + varint(4), "no dimensions");
  const std::string sparse("\x06\x01", 2);
  EXPECT_TRUE(
      taken(sparse + dims(1) + varint(9) + dims(1) + varint(2) + varint(2 * 8 + 2 * 4)).ok());
  refused(sparse + dims(1) + varint(9) + dims(2) + varint(2) + varint(40), "sparse_dim 2");
  refused(sparse + dims(1) + varint(9) + dims(1) + varint(INT64_MAX) + varint(0), "overflow");
  refused(std::string("\x06\x05", 2) + dims(0) + dims(0) + varint(2) + varint(8),
          "several entries");
}

// Allocating follows the descriptor; the descriptor follows its own bytes.
TEST(TensorMeta, ATerabyteCostsNothingUntilItIsAllocated) {
  std::string bytes("\x06\x00\x01", 3);
  bytes += varint(uint64_t{1} << 38) + varint(uint64_t{1} << 40);
  std::string_view in(bytes);
  TensorMeta meta;
  ASSERT_TRUE(take_meta(&in, &meta).ok());
  EXPECT_EQ(total_bytes(meta), uint64_t{1} << 40);
  meta = {};
  bytes = std::string("\x06\x00\x01", 3) + varint(uint64_t{1} << 58) + varint(uint64_t{1} << 60);
  in = bytes;
  ASSERT_TRUE(take_meta(&in, &meta).ok());
  const Status refused = allocate_buffers(meta).status();
  EXPECT_EQ(error_kind(refused), ErrorKind::kResource) << refused;
}

TEST(TensorMeta, BuffersOfAnotherTensorAreRefused) {
  const TensorParts parts = *split_for_wire(at::ones({2, 3}), false);
  EXPECT_FALSE(join_from_wire(parts.meta, {}).ok());
  EXPECT_FALSE(join_from_wire(parts.meta, {at::ones({3, 2})}).ok());
  EXPECT_FALSE(join_from_wire(parts.meta, {at::ones({2, 3}, at::kDouble)}).ok());
  EXPECT_FALSE(join_from_wire(parts.meta, {at::ones({3, 2}).t()}).ok());
  EXPECT_TRUE(join_from_wire(parts.meta, {at::ones({2, 3})}).ok());
}

}  // namespace
}  // namespace weft::internal
