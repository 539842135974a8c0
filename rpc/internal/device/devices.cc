#include "weft/rpc/internal/device/devices.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/rpc/internal/membership/members.h"

namespace weft::internal {
namespace {

// "" for a device that may stand in an option.
std::string wrong_with(c10::Device device) {
  if (device.is_cpu()) {
    return device.index() <= 0 ? ""
                               : absl::StrCat("there is one CPU, not cpu:", int{device.index()});
  }
  if (!device.is_cuda()) {
    return absl::StrCat(device.str(), " cannot be used: tensors travel between CPU and CUDA");
  }
  if (device.index() == -1) return "cuda without an index: which of them is meant must be said";
  if (device.index() < 0) {
    return absl::StrCat("cuda has the negative index ", int{device.index()});
  }
  return "";
}

DevicePairs pairs_of(const DeviceMap& map) {
  DevicePairs pairs;
  for (const auto& [ours, theirs] : map) pairs.emplace_back(device_code(ours), device_code(theirs));
  return pairs;
}

std::string list_text(const std::vector<DeviceCode>& devices) {
  return absl::StrCat(
      "[",
      absl::StrJoin(devices, ", ",
                    [](std::string* out, DeviceCode code) { out->append(device_text(code)); }),
      "]");
}

std::string count_text(int count) {
  return count == 0 ? "no CUDA device"
                    : absl::StrCat(count, count == 1 ? " CUDA device" : " CUDA devices");
}

}  // namespace

std::string pairs_text(const DevicePairs& pairs) {
  return absl::StrCat("{",
                      absl::StrJoin(pairs, ", ",
                                    [](std::string* out, const auto& pair) {
                                      absl::StrAppend(out, device_text(pair.first), " -> ",
                                                      device_text(pair.second));
                                    }),
                      "}");
}

StatusOr<DeviceCode> target_device(const DeviceRoute* route, c10::Device from) {
  std::string why = "there is no device map (JoinOptions::device_maps)";
  if (route != nullptr && (from.is_cpu() || from.is_cuda())) {
    const DeviceCode code = device_code(from);
    if (route->wrong.empty()) {
      for (const auto& [ours, theirs] : route->pairs) {
        if (ours == code) return theirs;
      }
    }
    if (code == kCpuCode) return kCpuCode;
    if (!route->wrong.empty()) {
      why = route->wrong;
    } else if (route->pairs.empty()) {
      why = absl::StrCat("there is no device map for '", route->to, "' (JoinOptions::device_maps)");
    } else {
      why = absl::StrCat("the device map for '", route->to, "' is ", pairs_text(route->pairs));
    }
  }
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("it is on ", from.str(), ", and ", why,
                                 "; a tensor goes where a map says, or as x.cpu()"));
}

std::vector<std::string> check_device_options(const std::map<std::string, DeviceMap>& maps,
                                              const std::vector<c10::Device>& devices) {
  std::vector<std::string> wrong;
  std::set<DeviceCode> used;
  for (const c10::Device device : devices) {
    if (const std::string why = wrong_with(device); !why.empty()) {
      wrong.push_back(absl::StrCat("devices: ", why));
    } else if (!used.insert(device_code(device)).second) {
      wrong.push_back(absl::StrCat("devices names ", device.str(), " twice"));
    }
  }
  for (const auto& [to, map] : maps) {
    const std::string where = absl::StrCat("the device map for '", to, "'");
    std::set<DeviceCode> ours_seen;
    std::set<DeviceCode> theirs_seen;
    for (const auto& [ours, theirs] : map) {
      const std::string why_ours = wrong_with(ours);
      const std::string why_theirs = wrong_with(theirs);
      if (!why_ours.empty()) wrong.push_back(absl::StrCat(where, ", our device: ", why_ours));
      if (!why_theirs.empty()) wrong.push_back(absl::StrCat(where, ", its device: ", why_theirs));
      if (!why_ours.empty() || !why_theirs.empty()) continue;
      if (!ours_seen.insert(device_code(ours)).second) {
        wrong.push_back(
            absl::StrCat(where, " is not one to one: it maps our ", ours.str(), " more than once"));
      }
      if (!theirs_seen.insert(device_code(theirs)).second) {
        wrong.push_back(absl::StrCat(
            where, " is not one to one: it maps several of our devices to ", theirs.str()));
      }
      if (!devices.empty() && !ours.is_cpu() && used.count(device_code(ours)) == 0) {
        wrong.push_back(absl::StrCat(where, " maps our ", ours.str(),
                                     ", which is not among our devices ",
                                     list_text({used.begin(), used.end()})));
      }
    }
  }
  return wrong;
}

StatusOr<MemberDevices> make_member_devices(const std::map<std::string, DeviceMap>& maps,
                                            const std::vector<c10::Device>& devices, int count) {
  MemberDevices out;
  out.count = count;
  std::vector<std::string> wrong;
  const auto check = [&wrong, count](const std::string& where, c10::Device device) {
    if (device.is_cpu() || device.index() < count) return;
    wrong.push_back(
        absl::StrCat(where, " names our ", device.str(), ", and we have ", count_text(count)));
  };
  for (const c10::Device device : devices) {
    check("devices", device);
    out.used.push_back(device_code(device));
  }
  std::sort(out.used.begin(), out.used.end());
  for (const auto& [to, map] : maps) {
    for (const auto& [ours, theirs] : map)
      check(absl::StrCat("the device map for '", to, "'"), ours);
    out.maps.emplace(to, pairs_of(map));
  }
  if (wrong.empty()) return out;
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("join: ", absl::StrJoin(wrong, "; ")));
}

std::vector<c10::Device> devices_in_use(const MemberDevices& devices) {
  std::set<DeviceCode> codes(devices.used.begin(), devices.used.end());
  if (devices.used.empty()) {
    for (const auto& [to, pairs] : devices.maps) {
      for (const auto& [ours, theirs] : pairs) codes.insert(ours);
    }
  }
  codes.erase(kCpuCode);
  std::vector<c10::Device> out;
  for (const DeviceCode code : codes) out.push_back(*device_of_code(code));
  return out;
}

std::string check_device_map(std::string_view owner, std::string_view to, const DevicePairs& pairs,
                             const MemberDevices* target) {
  for (const auto& [ours, theirs] : pairs) {
    if (theirs == kCpuCode) continue;
    std::string why;
    if (target == nullptr) {
      why = "which uses no devices (JoinOptions::devices)";
    } else if (theirs - kCudaCode >= static_cast<DeviceCode>(target->count)) {
      why = absl::StrCat("which has ", count_text(target->count));
    } else if (!target->used.empty() &&
               !std::binary_search(target->used.begin(), target->used.end(), theirs)) {
      why = absl::StrCat("which uses the devices ", list_text(target->used), " only");
    } else {
      continue;
    }
    return absl::StrCat("the device map of '", std::string(owner), "' for '", std::string(to),
                        "', ", pairs_text(pairs), ", names ", device_text(theirs), " of '",
                        std::string(to), "', ", why);
  }
  return "";
}

Status check_device_maps(const MemberList& members, const std::string* owner, bool complete) {
  std::vector<std::string> wrong;
  for (const auto& [id, member] : members.by_id) {
    if (member.devices == nullptr || (owner != nullptr && member.info.name != *owner)) continue;
    for (const auto& [to, pairs] : member.devices->maps) {
      const Member* target = members.find(std::string_view(to));
      if (target != nullptr) {
        std::string why = check_device_map(member.info.name, to, pairs, target->devices.get());
        if (!why.empty()) wrong.push_back(std::move(why));
      } else if (complete && members.gone_names.count(to) == 0) {
        std::vector<std::string> names;
        for (const auto& [name, other] : members.by_name) names.push_back(name);
        wrong.push_back(absl::StrCat("'", member.info.name, "' has a device map for '", to,
                                     "', which is none of the ", members.by_id.size(),
                                     " workers of the job", nearest_names(to, names)));
      }
    }
  }
  if (wrong.empty()) return absl::OkStatus();
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("join: ", absl::StrJoin(wrong, "; ")));
}

}  // namespace weft::internal
