#include "weft/ps/internal/move_wire.h"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/proto/ps.pb.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/placement.h"

namespace weft::ps::internal {
namespace {

// Sums of it for all parts of a job fit 64 bits.
constexpr uint64_t kMostPartBytes = uint64_t{1} << 50;

Status wrong_move(std::string_view what) {
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("message about a move: ", std::string(what)));
}
template <class Record>
Status parse_move(std::string_view bytes, Record* record) {
  if (record->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return absl::OkStatus();
  return wrong_move(absl::StrCat(bytes.size(), " bytes that cannot be parsed"));
}
Status check_part(const std::string& name, uint32_t index) {
  if (const Status s = check_name(name); !s.ok()) return wrong_move(std::string(s.message()));
  if (index >= kMostParts) return wrong_move(absl::StrCat("part ", index));
  return absl::OkStatus();
}

}  // namespace

std::string encode(const MoveRequest& request) {
  v1::PsMove out;
  out.set_name(request.name);
  out.set_index(request.index);
  out.mutable_to()->set_name(request.to.name);
  out.mutable_to()->set_incarnation(request.to.incarnation);
  out.set_number(request.number);
  return out.SerializeAsString();
}
StatusOr<MoveRequest> decode_move(std::string_view bytes) {
  v1::PsMove in;
  WEFT_RETURN_IF_ERROR(parse_move(bytes, &in));
  WEFT_RETURN_IF_ERROR(check_part(in.name(), in.index()));
  if (in.number() == 0 || in.to().name().empty()) return wrong_move("no number, or no server");
  return MoveRequest{in.name(), in.index(), {in.to().name(), in.to().incarnation()}, in.number()};
}

std::string encode(const std::vector<ListedPart>& parts) {
  v1::PsListed out;
  for (const ListedPart& part : parts) {
    v1::PsListed::Part* one = out.add_parts();
    one->set_name(part.name);
    one->set_index(part.index);
    one->set_bytes(part.bytes);
    one->set_moves(part.moves);
  }
  return out.SerializeAsString();
}
StatusOr<std::vector<ListedPart>> decode_listed(std::string_view bytes) {
  v1::PsListed in;
  WEFT_RETURN_IF_ERROR(parse_move(bytes, &in));
  std::vector<ListedPart> out;
  for (const v1::PsListed::Part& part : in.parts()) {
    WEFT_RETURN_IF_ERROR(check_part(part.name(), part.index()));
    if (part.bytes() > kMostPartBytes) return wrong_move(absl::StrCat(part.bytes(), " bytes"));
    out.push_back({part.name(), part.index(), part.bytes(), part.moves()});
  }
  return out;
}

std::string encode_servers(const std::vector<std::string>& names) {
  v1::PsServers out;
  for (const std::string& name : names) out.add_names(name);
  return out.SerializeAsString();
}
StatusOr<std::vector<std::string>> decode_servers(std::string_view bytes) {
  v1::PsServers in;
  WEFT_RETURN_IF_ERROR(parse_move(bytes, &in));
  std::vector<std::string> out(in.names().begin(), in.names().end());
  const bool sorted =
      std::adjacent_find(out.begin(), out.end(), std::greater_equal<>()) == out.end();
  if (out.size() > kMostServers || !sorted || (!out.empty() && out.front().empty())) {
    return wrong_move("a list of servers that is not sorted, or too long");
  }
  return out;
}

void add_name(const std::string& name, std::vector<std::string>* names) {
  if (std::find(names->begin(), names->end(), name) == names->end()) names->push_back(name);
}

std::vector<OwnedPart> share_of(const std::string& to, std::vector<OwnedPart> parts) {
  const auto weight = [](const OwnedPart& one) { return one.part.bytes + 1; };
  std::sort(parts.begin(), parts.end(), [&](const OwnedPart& a, const OwnedPart& b) {
    return std::tuple(weight(b), a.part.name, a.part.index, a.server) <
           std::tuple(weight(a), b.part.name, b.part.index, b.server);
  });
  std::map<std::string, uint64_t> loads;
  for (const OwnedPart& one : parts) loads[one.server] += weight(one);
  loads.try_emplace(to, 0);
  std::vector<OwnedPart> out;
  for (;;) {
    const auto most =
        std::max_element(loads.begin(), loads.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    const auto fits = std::find_if(parts.begin(), parts.end(), [&](const OwnedPart& one) {
      return one.server == most->first && one.server != to &&
             loads[to] + weight(one) < most->second;
    });
    if (fits == parts.end()) return out;
    loads[to] += weight(*fits);
    most->second -= weight(*fits);
    out.push_back(*fits);
    parts.erase(fits);
  }
}

}  // namespace weft::ps::internal
