#include "weft/ps/internal/shared_wire.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/proto/ps.pb.h"
#include "weft/ps/internal/definition.h"

namespace weft::ps::internal {
namespace {

constexpr uint64_t kSharedLine = 64;
constexpr uint64_t kSharedPage = 4096;
// Sums of it do not overflow.
constexpr uint64_t kMostSharedBytes = uint64_t{1} << 40;
constexpr size_t kMostSharedDimensions = 64;

uint64_t rounded_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

Status wrong_share(std::string_view what) {
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("message about shared memory: ", std::string(what)));
}

// 0: too many.
uint64_t element_bytes(const SharedParameter& one) {
  uint64_t sum = c10::elementSize(one.dtype);
  for (const int64_t n : one.shape) {
    if (n < 0) return 0;
    if (n > 0 && sum > kMostSharedBytes / static_cast<uint64_t>(n)) return 0;
    sum *= static_cast<uint64_t>(n > 0 ? n : 1);
  }
  return sum;
}

std::string text_of(const SharedParameter& one) {
  return absl::StrCat("'", one.name, "' ",
                      one.dtype == c10::ScalarType::Double ? "Double" : "Float", " [",
                      absl::StrJoin(one.shape, ", "), "]");
}

}  // namespace

uint64_t SharedParameter::bytes() const {
  for (const int64_t n : shape) {
    if (n == 0) return 0;
  }
  return element_bytes(*this);
}

StatusOr<SharedLayout> layout_of(const std::vector<SharedParameter>& parameters) {
  SharedLayout out;
  uint64_t at = kSharedLine;
  for (const SharedParameter& one : parameters) {
    out.offsets.push_back(at);
    at += rounded_up(one.bytes(), kSharedLine);
    if (element_bytes(one) == 0 || at > kMostSharedBytes) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("shared memory has at most ", kMostSharedBytes,
                                     " bytes, and with ", text_of(one), " there are more"));
    }
  }
  out.total = rounded_up(at, kSharedPage);
  return out;
}

std::string encode(const ShareRequest& request) {
  v1::PsShare out;
  out.set_name(request.name);
  out.set_socket(request.socket);
  out.set_secret(request.secret);
  return out.SerializeAsString();
}
StatusOr<ShareRequest> decode_share(std::string_view bytes) {
  v1::PsShare in;
  if (!in.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return wrong_share(absl::StrCat(bytes.size(), " bytes that cannot be parsed"));
  }
  if (const Status s = check_name(in.name()); !s.ok()) return wrong_share(std::string(s.message()));
  if (in.socket().size() != kShareToken || in.secret().size() != kShareToken) {
    return wrong_share("a socket or secret of another length");
  }
  return ShareRequest{in.name(), in.socket(), in.secret()};
}

std::string encode(const std::vector<SharedParameter>& parameters) {
  v1::PsShared out;
  for (const SharedParameter& one : parameters) {
    v1::PsShared::Parameter* to = out.add_parameters();
    to->set_name(one.name);
    to->set_dtype(one.dtype == c10::ScalarType::Double ? 2 : 1);
    for (const int64_t n : one.shape) to->add_shape(n);
  }
  return out.SerializeAsString();
}
StatusOr<std::vector<SharedParameter>> decode_shared(std::string_view bytes) {
  v1::PsShared in;
  if (!in.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return wrong_share(absl::StrCat(bytes.size(), " bytes that cannot be parsed"));
  }
  std::vector<SharedParameter> out;
  for (const v1::PsShared::Parameter& from : in.parameters()) {
    SharedParameter one;
    one.name = from.name();
    if (from.dtype() < 1 || from.dtype() > 2) {
      return wrong_share(absl::StrCat("dtype ", from.dtype()));
    }
    one.dtype = from.dtype() == 2 ? c10::ScalarType::Double : c10::ScalarType::Float;
    one.shape.assign(from.shape().begin(), from.shape().end());
    if (one.shape.size() > kMostSharedDimensions || element_bytes(one) == 0) {
      return wrong_share("a shape that no parameter has");
    }
    out.push_back(std::move(one));
  }
  return out;
}

std::string share_socket_name(std::string_view socket) {
  return "weft-share-" + absl::BytesToHexString(std::string(socket));
}

std::string difference(const std::vector<SharedParameter>& there,
                       const std::vector<SharedParameter>& here) {
  for (size_t i = 0; i < std::min(there.size(), here.size()); ++i) {
    if (there[i] == here[i]) continue;
    return absl::StrCat("parameter ", i, " is ", text_of(there[i]), " there and ", text_of(here[i]),
                        " here");
  }
  if (there.size() == here.size()) return {};
  return absl::StrCat("there are ", there.size(), " parameters there and ", here.size(), " here");
}

}  // namespace weft::ps::internal
