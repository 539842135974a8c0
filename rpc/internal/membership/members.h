#ifndef WEFT_RPC_INTERNAL_MEMBERSHIP_MEMBERS_H_
#define WEFT_RPC_INTERNAL_MEMBERSHIP_MEMBERS_H_

// The members of the job: an immutable snapshot, replaced as a whole when membership changes.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/common/error.h"
#include "weft/common/worker_info.h"
#include "weft/rpc/internal/device/devices.h"
#include "weft/rpc/spi/destination.h"

namespace weft::internal {

struct Member {
  WorkerInfo info;
  std::string address;
  std::vector<std::string> methods;
  std::string host;
  int64_t pid = 0;
  std::shared_ptr<const MemberDevices> devices{};  // null: the CPU only
};

// One that was here and is not any more.
struct GoneMember {
  WorkerInfo info;
  Status why;          // what a call to it is told
  uint64_t order = 0;  // among those that went
};

struct MemberList {
  // In a dynamic group workers come and go for ever: those that went last are remembered by name
  // and id. Later a name or id is unknown; a WorkerInfo still tells a worker that is not there.
  static constexpr size_t kMostGone = 1024;

  uint64_t version = 0;
  // Counts the lists of this worker: two may show the same version, read before and after a record
  // came whose owner has not raised the version yet.
  uint64_t generation = 0;
  std::map<uint32_t, Member> by_id;
  std::map<uint32_t, GoneMember> gone;
  std::map<std::string, uint32_t, std::less<>> gone_names;
  uint64_t departures = 0;  // ever, as seen here

  std::map<std::string, uint32_t, std::less<>> by_name;

  void add(Member member) {
    by_name[member.info.name] = member.info.id;
    const uint32_t id = member.info.id;
    by_id[id] = std::move(member);
  }
  void add_gone(const WorkerInfo& info, Status why) {
    gone_names[info.name] = info.id;
    gone[info.id] = GoneMember{info, std::move(why), ++departures};
  }
  void forget_oldest_gone();
  const Member* find(std::string_view name) const {
    auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : find(it->second);
  }
  const Member* find(uint32_t id) const {
    auto it = by_id.find(id);
    return it == by_id.end() ? nullptr : &it->second;
  }
  // The member; peer_lost for one that is gone; or not_found with the nearest names.
  StatusOr<const Member*> resolve(const Destination& to) const;
};

using MemberListRef = std::shared_ptr<const MemberList>;

// At most three of `names` that resemble `name`, as ", nearest: 'a', 'b'", or "".
std::string nearest_names(std::string_view name, const std::vector<std::string>& names);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_MEMBERSHIP_MEMBERS_H_
