#ifndef WEFT_RPC_INTERNAL_MEMBERS_H_
#define WEFT_RPC_INTERNAL_MEMBERS_H_

// Who is in the job: an immutable snapshot, replaced as a whole when membership changes.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/common/error.h"
#include "weft/rpc/worker_info.h"

namespace weft::internal {

struct Member {
  WorkerInfo info;
  std::string address;
  std::vector<std::string> methods;
  std::string host;
  int64_t pid = 0;
};

struct MemberList {
  uint64_t version = 0;
  // Counts the lists of this worker: two may show the same version, read before and after a record
  // came whose owner has not raised the version yet.
  uint64_t generation = 0;
  std::map<uint32_t, Member> by_id;
  // Those that were here and are not any more, and why: what a call to them is told.
  std::map<uint32_t, Status> gone;
  std::map<std::string, uint32_t, std::less<>> gone_names;

  std::map<std::string, uint32_t, std::less<>> by_name;

  void add(Member member) {
    by_name[member.info.name] = member.info.id;
    const uint32_t id = member.info.id;
    by_id[id] = std::move(member);
  }
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

#endif  // WEFT_RPC_INTERNAL_MEMBERS_H_
