#include "weft/collectives/internal/making.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/internal/text.h"
#include "weft/proto/collectives.pb.h"

namespace weft::internal {
namespace {

class Maker {
 public:
  Maker(const Making& making, const wire::GroupMember& mine) : making_(making), mine_(mine) {}

  Status run(ConnectMembers connect) {
    WEFT_RETURN_IF_ERROR(write());
    if (Status s = read(); !s.ok()) {
      // A later try must not take it for its own; the empty value shows the others, which may be
      // naming who is missing, that this rank was here.
      (void)making_.store->set(own_key(), "", absl::Seconds(1));
      return s;
    }
    uint64_t id = 0x9e3779b97f4a7c15u;
    for (const wire::GroupMember& member : members_) {
      id = (id ^ member.identity()) * 0xbf58476d1ce4e5b9u;
      id ^= id >> 31;
    }
    id = std::max<uint64_t>(id, 1);
    const std::string below = cat(making_.prefix, absl::Hex(id, absl::kZeroPad16), "/");
    Status made = check();
    if (made.ok()) {
      made = connect(id, members_, [&]() -> Status {
        WEFT_ASSIGN_OR_RETURN(const std::optional<std::string> go,
                              making_.store->try_get(below + "go", left()));
        return go.has_value() && *go != "all" ? not_made(*go) : absl::OkStatus();
      });
    }
    if (!made.ok()) {
      (void)making_.store->compare_set(below + "go", "",
                                       cat("rank ", mine_.rank(), ": ", made.message()), left());
    }
    Status gone = agree(below, made);
    if (!made.ok() || !gone.ok()) {
      (void)making_.store->delete_key(own_key(), absl::Seconds(1));
    }
    return made.ok() ? gone : made;
  }

 private:
  absl::Duration left() const {
    return std::max(absl::Milliseconds(100), making_.deadline - making_.runtime->now());
  }
  std::string key(uint32_t rank) const {
    return member_key(making_.prefix, static_cast<int>(rank));
  }
  std::string own_key() const { return key(mine_.rank()); }

  Status write() {
    const std::string value = mine_.SerializeAsString();
    WEFT_ASSIGN_OR_RETURN(const std::string there,
                          making_.store->compare_set(own_key(), "", value, left()));
    if (there == value) return absl::OkStatus();
    return make_error(ErrorKind::kState,
                      cat("group '", making_.name, "' has a member of rank ", mine_.rank(),
                          " already, at ", making_.store->describe()));
  }

  Status read() {
    std::vector<std::string> keys;
    for (uint32_t rank = 0; rank < mine_.size(); ++rank) keys.push_back(key(rank));
    if (Status all = making_.store->wait(keys, left()); !all.ok()) {
      std::vector<uint32_t> missing;
      for (uint32_t rank = 0; rank < mine_.size(); ++rank) {
        const auto there = making_.store->check({key(rank)}, absl::Seconds(1));
        if (!there.ok() || !*there) missing.push_back(rank);
      }
      if (error_kind(all) != ErrorKind::kDeadline || missing.empty()) return all;
      return make_error(ErrorKind::kDeadline,
                        cat("group '", making_.name, "' of ", mine_.size(), " lacks rank ",
                            absl::StrJoin(missing, ", "), " at ", making_.store->describe()));
    }
    for (uint32_t rank = 0; rank < mine_.size(); ++rank) {
      WEFT_ASSIGN_OR_RETURN(std::optional<std::string> written,
                            making_.store->try_get(key(rank), left()));
      while (written.value_or("").empty()) {  // it gave up, and may come again
        auto next = making_.store->wait_change(key(rank), written, left());
        if (!next.ok()) return annotate(next.status(), cat("rank ", rank, " gave up"));
        written = *std::move(next);
      }
      const std::string& value = *written;
      wire::GroupMember member;
      if (!member.ParseFromString(value)) {
        return make_error(ErrorKind::kProtocol, cat("group '", making_.name, "': what rank ", rank,
                                                    " has written is no member"));
      }
      members_.push_back(std::move(member));
    }
    return absl::OkStatus();
  }

  // All see the same members, so all come to the same.
  Status check() const {
    for (uint32_t rank = 0; rank < members_.size(); ++rank) {
      const wire::GroupMember& member = members_[rank];
      std::string_view what;
      if (member.version() != members_[0].version()) what = "versions";
      if (member.size() != members_[0].size()) what = "sizes";
      if (member.backend() != members_[0].backend()) what = "backends";
      if (member.secure() != members_[0].secure()) what = "credentials";
      if (member.rank() != rank) what = "ranks";
      if (what.empty()) continue;
      const auto say = [](const wire::GroupMember& m) {
        return cat("rank ", m.rank(), " of ", m.size(), ", version ", m.version(), ", backend ",
                   m.backend(), m.secure() ? ", with credentials" : ", without credentials");
      };
      return make_error(ErrorKind::kInvalidArgument,
                        cat("the members of group '", making_.name, "' differ in their ", what,
                            ": ", say(members_[0]), " and ", say(member)));
    }
    return absl::OkStatus();
  }

  Status agree(const std::string& below, const Status& made) {
    const auto size = static_cast<int64_t>(mine_.size());
    WEFT_ASSIGN_OR_RETURN(const int64_t read, making_.store->add(below + "read", 1, left()));
    if (read == size) {
      for (uint32_t rank = 0; rank < mine_.size(); ++rank) {
        WEFT_RETURN_IF_ERROR(making_.store->delete_key(key(rank), left()).status());
      }
      // A member that failed has written why; then this changes nothing.
      WEFT_RETURN_IF_ERROR(making_.store
                               ->compare_set(below + "go", "",
                                             made.ok() ? "all" : std::string(made.message()),
                                             left())
                               .status());
    }
    WEFT_ASSIGN_OR_RETURN(const std::string go, making_.store->get(below + "go", left()));
    if (go != "all") await_readers(below, read);
    WEFT_ASSIGN_OR_RETURN(const int64_t gone, making_.store->add(below + "gone", 1, left()));
    if (gone == size) {
      for (const char* last : {"read", "go", "gone"}) {
        WEFT_RETURN_IF_ERROR(making_.store->delete_key(below + last, left()).status());
      }
    }
    return go == "all" ? absl::OkStatus() : not_made(go);
  }

  // A member that gives up deletes its record: not before the others have read it, which would wait
  // for it to the end of their time.
  void await_readers(const std::string& below, int64_t read) {
    const absl::Time until = std::min(making_.deadline, making_.runtime->now() + absl::Seconds(2));
    std::string seen = cat(read);
    while (read < static_cast<int64_t>(mine_.size())) {
      const auto next =
          making_.store->wait_change(below + "read", seen, until - making_.runtime->now());
      // Others that are gone read nothing.
      if (!next.ok() || !next->has_value() || !absl::SimpleAtoi(**next, &read)) return;
      seen = **next;
    }
  }

  Status not_made(const std::string& why) const {
    return make_error(ErrorKind::kUnavailable,
                      cat("group '", making_.name, "' could not be made: ", why));
  }

  const Making& making_;
  const wire::GroupMember& mine_;
  std::vector<wire::GroupMember> members_;
};

}  // namespace

std::string member_key(const std::string& prefix, int rank) { return cat(prefix, "m/", rank); }

Status make_group(const Making& making, const wire::GroupMember& mine, ConnectMembers connect) {
  return annotate(Maker(making, mine).run(connect), "init_process_group");
}

}  // namespace weft::internal
