// Tensors in files: what is written is read again, bit for bit; files of the Python package are read;
// and whatever is not whole is refused with the place.
#include "weft/rpc/safetensors.h"

#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/_efficientzerotensor.h"
#include "ATen/ops/_neg_view.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/complex.h"
#include "ATen/ops/conj.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/scalar_tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string bytes_of(const at::Tensor& t) {
  const at::Tensor flat = t.clone(at::MemoryFormat::Contiguous);
  return {static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()};
}

std::string with_length(std::string json) {
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>((json.size() >> (8 * i)) & 0xFF);
  return out + json;
}

std::string error_of(const Status& status, ErrorKind kind = ErrorKind::kInvalidArgument) {
  EXPECT_EQ(error_kind(status), kind) << status;
  return std::string(status.message());
}

std::string refused(const std::string& json, size_t data) {
  const std::string head = with_length(json);
  return error_of(decode_safetensors_header(head, head.size() + data).status());
}

TEST(Safetensors, RoundTrips) {
  const auto files = make_memory_files();
  std::map<std::string, at::Tensor> tensors;
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                          at::kShort, at::kChar, at::kByte, at::kBool, at::kComplexFloat}) {
    tensors.emplace(absl::StrCat("of ", c10::toString(type)),
                    at::arange(6).reshape({2, 3}).to(type));
  }
  const at::Tensor complex = at::complex(at::arange(3.0), at::ones({3}));
  tensors.emplace("conjugate", complex.conj());
  tensors.emplace("negative", at::_neg_view(at::arange(3.0)));
  tensors.emplace("zeros", at::_efficientzerotensor({3}, at::kFloat));
  tensors.emplace("scalar", at::scalar_tensor(2.5, at::kDouble));
  tensors.emplace("empty", at::empty({0, 7}, at::kFloat));
  tensors.emplace("a view", at::arange(24, at::kFloat).reshape({4, 6}).t().slice(0, 1, 4, 2));
  tensors.emplace("large", at::arange(3'000'000, at::kInt));  // more than one piece
  tensors.emplace("na\"me\\ with \xC3\xA9 and \x01", at::ones({1}));
  const std::map<std::string, std::string> metadata = {{"step", "12"}, {"\xF0\x9F\x98\x80", "\n"}};
  ASSERT_EQ(write_safetensors(*files, "a", tensors, metadata), absl::OkStatus());
  const auto file = SafetensorsFile::open(*files, "a");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->header().metadata, metadata);
  EXPECT_EQ(file->header().tensors.size(), tensors.size());
  EXPECT_EQ(file->header().data_begin % 8, 0u);
  for (const auto& [name, tensor] : tensors) {
    const auto read = file->read(name);
    ASSERT_TRUE(read.ok()) << name << ": " << read.status();
    EXPECT_EQ(read->scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(read->sizes(), tensor.sizes()) << name;
    EXPECT_EQ(bytes_of(*read), bytes_of(tensor)) << name;
  }
  // A shorter one over it.
  ASSERT_EQ(write_safetensors(*files, "a", {{"x", at::ones({2})}}), absl::OkStatus());
  EXPECT_EQ(SafetensorsFile::open(*files, "a")->read("x")->sum().item<double>(), 2);
  ASSERT_EQ(write_safetensors(*files, "none", {}), absl::OkStatus());
  EXPECT_TRUE(SafetensorsFile::open(*files, "none")->header().tensors.empty());
}

// As the Python package writes it: two tensors and metadata.
TEST(Safetensors, ReadsWhatThePythonPackageWrites) {
  const auto files = make_memory_files();
  std::string bytes = with_length(
      "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"I64\",\"shape\":[2],"
      "\"data_offsets\":[0,16]},\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[16,20]}}  "
      " ");
  const int64_t longs[2] = {-1, 7};
  const float value = 1.5F;
  bytes.append(reinterpret_cast<const char*>(longs), 16);
  bytes.append(reinterpret_cast<const char*>(&value), 4);
  ASSERT_TRUE(files->write_atomic("f", bytes).ok());
  const auto file = SafetensorsFile::open(*files, "f");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->header().metadata.at("format"), "pt");
  EXPECT_EQ(file->read("b")->sum().item<int64_t>(), 6);
  EXPECT_EQ(file->read("a")->item<float>(), 1.5F);
  EXPECT_THAT(error_of(file->read("c").status(), ErrorKind::kNotFound),
              HasSubstr("'f' has no tensor 'c'"));
}

TEST(Safetensors, HeadersRoundTrip) {
  SafetensorsHeader header;
  header.metadata = {{"k", "v"}};
  header.tensors["x"] = {at::kHalf, {2, 0, 3}, 0, 0};
  header.tensors["y"] = {at::kFloat8_e5m2, {3}, 0, 3};
  const auto bytes = encode_safetensors_header(header);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  header.data_begin = bytes->size();
  const auto again = decode_safetensors_header(*bytes, bytes->size() + 3);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(*again == header);
}

TEST(Safetensors, BadInput_FilesThatAreNotWhole) {
  const auto files = make_memory_files();
  ASSERT_EQ(write_safetensors(*files, "whole", {{"w", at::arange(100, at::kFloat)}}),
            absl::OkStatus());
  const std::string whole = *files->read("whole");
  const auto opened = [&](const std::string& bytes) {
    EXPECT_TRUE(files->write_atomic("f", bytes).ok());
    return error_of(SafetensorsFile::open(*files, "f").status());
  };
  EXPECT_THAT(opened(whole.substr(0, whole.size() / 2)),
              AllOf(HasSubstr("'f'"), HasSubstr("the tensors have 400 bytes, and the file has "),
                    HasSubstr("it is cut")));
  EXPECT_THAT(opened(whole + "x"), HasSubstr("the tensors have 400 bytes, and the file has 401"));
  EXPECT_THAT(opened(whole.substr(0, 40)), HasSubstr("in a file of 40: it is cut"));
  EXPECT_THAT(opened(whole.substr(0, 5)), HasSubstr("a file of 5 bytes has no header"));
  EXPECT_THAT(opened(""), HasSubstr("a file of 0 bytes has no header"));
  std::string interrupted = whole;
  interrupted.replace(0, 8, std::string(8, '\0'));
  EXPECT_THAT(opened(interrupted), HasSubstr("its writer was interrupted"));
  EXPECT_THAT(opened(std::string(8, '\xFF') + whole),
              HasSubstr("a header of 18446744073709551615"));
  EXPECT_THAT(error_of(SafetensorsFile::open(*files, "g").status(), ErrorKind::kNotFound),
              HasSubstr("'g'"));
  // Another file of that name since it was opened.
  const auto file = SafetensorsFile::open(*files, "whole");
  ASSERT_TRUE(file.ok());
  ASSERT_EQ(write_safetensors(*files, "whole", {{"w", at::zeros({200})}}), absl::OkStatus());
  EXPECT_THAT(error_of(file->read("w").status(), ErrorKind::kState),
              HasSubstr("'whole' was changed while it was read"));
}

TEST(Safetensors, BadInput_Headers) {
  const std::string f = "\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]";
  EXPECT_THAT(refused("[]", 0), HasSubstr("byte 0: expected '{'"));
  EXPECT_THAT(refused("{", 0), HasSubstr("byte 1: expected '\"'"));
  EXPECT_THAT(refused("{\"a\":{" + f + "}}x", 8), HasSubstr("expected the end of the header"));
  EXPECT_THAT(refused("{\"a\":{" + f + "},\"a\":{" + f + "}}", 8), HasSubstr("tensor 'a' twice"));
  EXPECT_THAT(refused("{\"a\":{" + f + "," + f + "}}", 8), HasSubstr("key 'dtype'"));
  EXPECT_THAT(refused("{\"a\":{\"dtype\":\"F32\"}}", 8),
              AllOf(HasSubstr("tensor 'a'"), HasSubstr("expected 'dtype', 'shape'")));
  EXPECT_THAT(refused("{\"a\":{\"dtype\":\"F31\"}}", 8), HasSubstr("dtype 'F31' is not known"));
  EXPECT_THAT(refused("{\"a\":{\"shape\":[-1]}}", 8), HasSubstr("expected a whole number"));
  EXPECT_THAT(refused("{\"a\":{\"shape\":[01]}}", 8), HasSubstr("expected a whole number"));
  EXPECT_THAT(refused("{\"a\":{\"shape\":[9223372036854775808]}}", 8), HasSubstr("below 2^63"));
  EXPECT_THAT(refused("{\"a\\ud800\":{}}", 0), HasSubstr("not half of a pair"));
  EXPECT_THAT(refused("{\"a\\q\":{}}", 0), HasSubstr("an escape that JSON has"));
  EXPECT_THAT(refused("{\"\xFF\":{}}", 0), HasSubstr("expected UTF-8 text"));
  EXPECT_THAT(refused("{\"__metadata__\":{\"k\":1}}", 0), HasSubstr("expected '\"'"));
  const auto two = [](int begin, int end) {
    return absl::StrCat(
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{"
        "\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[",
        begin, ",", end, "]}}");
  };
  EXPECT_THAT(refused(two(5, 9), 9), HasSubstr("tensor 'b' is at bytes 5 to 9 of the data, and "
                                               "should begin at 4 with 4 bytes"));
  EXPECT_THAT(refused(two(3, 7), 7), HasSubstr("tensor 'b' is at bytes 3 to 7"));
  EXPECT_THAT(refused(two(4, 9), 9), HasSubstr("tensor 'b' is at bytes 4 to 9"));
  EXPECT_THAT(refused(two(4, 2), 9), HasSubstr("tensor 'b' is at bytes 4 to 2"));
  EXPECT_THAT(
      refused("{\"a\":{\"dtype\":\"F64\",\"shape\":[4294967296,4294967296],\"data_offsets\":"
              "[0,8]}}",
              8),
      HasSubstr("with 2^63 or more bytes"));
}

TEST(Safetensors, BadInput_TensorsThatHaveNoPlaceInTheFormat) {
  const auto files = make_memory_files();
  const auto written = [&](const std::string& name, const at::Tensor& t) {
    return error_of(write_safetensors(*files, "f", {{name, t}}));
  };
  EXPECT_THAT(written("u", at::Tensor()), HasSubstr("tensor 'u' is undefined"));
  EXPECT_THAT(written("s", at::ones({2, 2}).to_sparse()), HasSubstr("tensor 's'"));
  EXPECT_THAT(written("c", at::ones({1}, at::kComplexDouble)),
              HasSubstr("tensor 'c' of ComplexDouble"));
  EXPECT_THAT(written("__metadata__", at::ones({1})), HasSubstr("'__metadata__'"));
  EXPECT_THAT(written("\xFF", at::ones({1})), HasSubstr("is not UTF-8"));
  EXPECT_FALSE(files->stamp("f").ok());
  // While another one writes it.
  const auto on_disk = make_system_files();
  const std::string path = absl::StrCat(::testing::TempDir(), "/weft_safetensors_", getpid());
  const auto done =
      on_disk->try_locked(path, Files::Lock::kExclusive, [&](LockedFile*) -> absl::Status {
        EXPECT_THAT(error_of(write_safetensors(*on_disk, path, {}), ErrorKind::kUnavailable),
                    HasSubstr("is locked by another process"));
        return absl::OkStatus();
      });
  EXPECT_TRUE(on_disk->remove(path).ok());
  EXPECT_TRUE(done.ok() && *done);
}

}  // namespace
}  // namespace weft
