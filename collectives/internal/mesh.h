#ifndef WEFT_COLLECTIVES_INTERNAL_MESH_H_
#define WEFT_COLLECTIVES_INTERNAL_MESH_H_

// Mesh: what the ways to connect all members of a group share: hellos and waits. The higher rank
// dials and greets first.
//
// Threads: one.

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "weft/collectives/internal/link.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/proto/collectives.pb.h"

namespace weft::internal {

class Mesh {
 protected:
  // `identities`: of the members by rank. `apart`: by rank, the members that are reached in another
  // way; empty: none. `given_up`: see making.h.
  Mesh(const Membership& member, std::vector<uint64_t> identities, std::vector<bool> apart,
       absl::FunctionRef<Status()> given_up, Runtime& runtime, absl::Time deadline)
      : member_(member),
        runtime_(runtime),
        deadline_(deadline),
        given_up_(given_up),
        identities_(std::move(identities)),
        apart_(std::move(apart)) {}
  ~Mesh() = default;

  bool apart(int peer) const { return !apart_.empty() && apart_[static_cast<size_t>(peer)]; }
  bool over() const { return runtime_.now() >= deadline_; }
  // For poll().
  int milliseconds_left() const;
  // Returns when poll() reports one of `events`. Error, kind deadline: "waited for rank 2 to ...".
  Status wait(int fd, short events, int peer, std::string_view what) const;

  wire::GroupHello own_hello() const;
  // Whether it is that peer's.
  bool fits(const wire::GroupHello& hello, int peer) const;
  // The rank that a hello claims, if it is one that dials this rank; -1 otherwise.
  int dialling_rank(const wire::GroupHello& hello) const;
  // The error of a deadline: names the ranks above this one of which `missing`.
  template <class Missing>
  Status late(std::string_view what, const Missing& missing) const {
    std::vector<int> ranks;
    for (int peer = member_.rank + 1; peer < member_.size; ++peer) {
      if (!apart(peer) && missing(peer)) ranks.push_back(peer);
    }
    return late_error(what, ranks);
  }

  const Membership member_;
  Runtime& runtime_;
  const absl::Time deadline_;
  const absl::FunctionRef<Status()> given_up_;

 private:
  static Status late_error(std::string_view what, const std::vector<int>& ranks);

  const std::vector<uint64_t> identities_;
  const std::vector<bool> apart_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_MESH_H_
