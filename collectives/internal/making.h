#ifndef WEFT_COLLECTIVES_INTERNAL_MAKING_H_
#define WEFT_COLLECTIVES_INTERNAL_MAKING_H_

// Making a group: its members meet at a store, read what each has written, connect, and leave
// nothing there.
//
//   <prefix>m/<rank>         what the member of that rank has written
//   <prefix><id>/read        how many have read all of them; the last one deletes them
//   <prefix><id>/go          "all" when all are connected, or the text of an error
//   <prefix><id>/gone        how many have seen that; the last one deletes these keys
//
// The id is made of the members' random identities, so a later group of the same name never sees
// keys of this one.
//
// Any thread; blocks on the store.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "weft/collectives/internal/link.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/store/store.h"

namespace weft::wire {
class GroupMember;
}

namespace weft::internal {

struct Making {
  Store* store = nullptr;
  Runtime* runtime = nullptr;
  std::string name;    // for errors
  std::string prefix;  // of keys
  absl::Time deadline;
};

// The key of a member below the prefix of its group.
std::string member_key(const std::string& prefix, int rank);

// Connects this member, given the group's id and all members by rank. `given_up`: asked now and
// then while it waits; error, another member could not connect.
using ConnectMembers =
    absl::FunctionRef<Status(uint64_t id, const std::vector<wire::GroupMember>& members,
                             absl::FunctionRef<Status()> given_up)>;

// Writes `mine`, reads the others', checks that they fit, calls `connect`, and returns when that
// has succeeded everywhere. Errors: kind deadline names the ranks that are missing;
// invalid_argument, the members do not fit; state, there is another member of this rank.
Status make_group(const Making& making, const wire::GroupMember& mine, ConnectMembers connect);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_MAKING_H_
