#include "weft/rpc/internal/membership/members.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::internal {
namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, change}));
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest_names(std::string_view name, const std::vector<std::string>& names) {
  std::vector<std::pair<size_t, std::string>> ranked;
  for (const std::string& candidate : names) {
    if (candidate.size() > 256 || name.size() > 256) continue;
    ranked.emplace_back(edit_distance(name, candidate), candidate);
  }
  std::sort(ranked.begin(), ranked.end());
  std::string out;
  for (size_t i = 0; i < ranked.size() && i < 3; ++i) {
    absl::StrAppend(&out, i == 0 ? "; nearest: '" : ", '", ranked[i].second, "'");
  }
  return out;
}

void MemberList::forget_oldest_gone() {
  while (gone.size() > kMostGone) {
    const auto oldest = std::min_element(
        gone.begin(), gone.end(),
        [](const auto& a, const auto& b) { return a.second.order < b.second.order; });
    const auto name = gone_names.find(oldest->second.info.name);
    if (name != gone_names.end() && name->second == oldest->first) gone_names.erase(name);
    gone.erase(oldest);
  }
}

StatusOr<const Member*> MemberList::resolve(const Destination& to) const {
  if (to.by_id()) {
    const Member* member =
        to.id() >= 0 && to.id() <= 0xffffffff ? find(static_cast<uint32_t>(to.id())) : nullptr;
    if (member != nullptr) return member;
    auto left = gone.find(static_cast<uint32_t>(to.id()));
    if (left != gone.end() && to.id() >= 0) return left->second.why;
    return make_error(ErrorKind::kNotFound,
                      absl::StrCat("no worker with id ", to.id(), " among ", by_id.size(),
                                   " workers (membership version ", version, ")"));
  }
  const Member* member = find(std::string_view(to.name()));
  if (member == nullptr) {
    auto left = gone_names.find(to.name());
    if (left != gone_names.end() && gone.count(left->second) > 0) {
      return gone.at(left->second).why;
    }
    if (to.by_info()) {
      // A caller that has its info has met it, so the name is not wrong.
      return make_error(
          ErrorKind::kPeerLost,
          absl::StrCat("worker '", to.name(), "' (id ", to.id(), ", incarnation ",
                       absl::Hex(to.incarnation(), absl::kZeroPad16), ") is not among the ",
                       by_id.size(), " workers (membership version ", version, ")"));
    }
    std::vector<std::string> names;
    for (const auto& [other, id] : by_name) names.push_back(other);
    return make_error(ErrorKind::kNotFound,
                      absl::StrCat("no worker named '", to.name(), "' among ", by_id.size(),
                                   " workers (membership version ", version, ")",
                                   nearest_names(to.name(), names)));
  }
  if (to.by_info() && (member->info.incarnation != to.incarnation() ||
                       member->info.id != static_cast<uint32_t>(to.id()))) {
    return make_error(
        ErrorKind::kPeerLost,
        absl::StrCat("worker '", to.name(), "' id ", to.id(), " incarnation ",
                     absl::Hex(to.incarnation(), absl::kZeroPad16),
                     " is gone; the worker of that name is now id ", member->info.id,
                     " incarnation ", absl::Hex(member->info.incarnation, absl::kZeroPad16)));
  }
  return member;
}

}  // namespace weft::internal
