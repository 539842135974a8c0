// Parts that move to other servers, and servers that join.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/trace.h"
#include "weft/ps/internal/ask.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/service.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kJoinedStoreTime = absl::Seconds(5);
constexpr absl::Duration kMoveAskTime = absl::Seconds(2);
constexpr absl::Duration kMoveAgain = absl::Milliseconds(20);
constexpr int kJoinsAtOnce = 64;
constexpr int kRoundsWithoutCopy = 3;
// No table has this name.
constexpr std::string_view kJoinedKey = "@joined";

bool may_be_otherwise_soon(const Status& why) {
  switch (error_kind(why)) {
    case ErrorKind::kDeadline:
    case ErrorKind::kNotDelivered:
    case ErrorKind::kMaybeExecuted:
    case ErrorKind::kPeerLost:
    case ErrorKind::kNotFound:
    case ErrorKind::kUnavailable: return true;
    default: return false;
  }
}

}  // namespace

// ---- who there is ------------------------------------------------------------------------------

StatusOr<std::vector<std::string>> PsService::read_joined(absl::Duration at_most) {
  WEFT_ASSIGN_OR_RETURN(Keeper * keeper, this->keeper());
  WEFT_ASSIGN_OR_RETURN(
      const auto there,
      keeper->store().try_get(std::string(kJoinedKey),
                              std::clamp(at_most, absl::ZeroDuration(), kJoinedStoreTime)));
  std::vector<std::string> names;
  if (there.has_value()) {
    WEFT_ASSIGN_OR_RETURN(names, decode_servers(*there));
  }
  MutexLock lock(&mutex_);
  joined_ = names;
  return names;
}

Status PsService::write_joined(bool with_self) {
  WEFT_ASSIGN_OR_RETURN(Keeper * keeper, this->keeper());
  for (int i = 0; i < kJoinsAtOnce; ++i) {
    WEFT_ASSIGN_OR_RETURN(std::vector<std::string> names, read_joined(kJoinedStoreTime));
    const std::string expected = names.empty() ? "" : encode_servers(names);
    const auto at = std::lower_bound(names.begin(), names.end(), worker().name());
    const bool there = at != names.end() && *at == worker().name();
    if (there == with_self) return absl::OkStatus();
    if (with_self) {
      if (names.size() >= kMostServers) {
        return make_error(ErrorKind::kResource,
                          absl::StrCat(kMostServers, " servers have joined already"));
      }
      names.insert(at, worker().name());
    } else {
      names.erase(at);
    }
    const std::string desired = encode_servers(names);
    WEFT_ASSIGN_OR_RETURN(
        const std::string now,
        keeper->store().compare_set(std::string(kJoinedKey), expected, desired, kJoinedStoreTime));
    if (now == desired) return absl::OkStatus();
  }
  return make_error(ErrorKind::kUnavailable, "the list of servers that join changes all the time");
}

std::vector<std::string> PsService::with_joined(std::vector<std::string> servers,
                                                absl::Duration at_most) {
  const StatusOr<std::vector<std::string>> joined = read_joined(at_most);
  if (!joined.ok()) return servers;
  for (const std::string& name : *joined) add_name(name, &servers);
  return servers;
}

void PsService::read_joined(std::function<void(const std::vector<std::string>&)> done) {
  const StatusOr<Keeper*> keeper = this->keeper();
  if (!keeper.ok()) return done({});  // the worker leaves
  (*keeper)->post([weak = weak_from_this(), done = std::move(done)] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    (void)self->read_joined(kMoveAskTime);  // without the store: those of before
    done(self->joined());
  });
}

void PsService::look_for_others(const std::shared_ptr<Part>& part) {
  read_joined([weak = std::weak_ptr<Part>(part)](const std::vector<std::string>&) {
    if (const auto at = weak.lock()) at->others_known();
  });
}

// ---- requests ----------------------------------------------------------------------------------

void PsService::on_move(Payload arguments, ReplyFn reply) {
  const StatusOr<std::string> bytes = unpack_bytes(std::move(arguments));
  const StatusOr<MoveRequest> request = bytes.ok() ? decode_move(*bytes) : bytes.status();
  if (!request.ok()) return reply(request.status());
  PartRef part;
  {
    MutexLock lock(&mutex_);
    const auto at = by_name_.find({request->name, request->index});
    if (at != by_name_.end()) part = at->second;
  }
  if (part == nullptr) {
    return reply(make_error(ErrorKind::kNotFound,
                            absl::StrCat("'", worker().name(), "' has no copy of table '",
                                         request->name, "', part ", request->index)));
  }
  auto shared = std::make_shared<ReplyFn>(std::move(reply));
  part->move(request->to, request->number, [shared](const StatusOr<CopyAnswer>& answer) {
    if (!answer.ok()) return (*shared)(answer.status());
    (*shared)(pack_bytes(encode(*answer)));
  });
}

void PsService::on_list(ReplyFn reply) {
  std::vector<ListedPart> out;
  for (const auto& [name, part] : parts_by_name()) {
    const PartReport report = part->report();
    if (report.role != ReplicaProtocol::Role::kOwner) continue;
    out.push_back({name.first, name.second, static_cast<uint64_t>(report.bytes),
                   in_map(part->identity().definition)});
  }
  reply(pack_bytes(encode(out)));
}

// ---- moves -------------------------------------------------------------------------------------

Status PsService::move(const std::string& table, uint32_t index, const CopyPlace& to,
                       const std::vector<std::string>& servers, absl::Time end) {
  const std::shared_ptr<TraceWriter> trace = trace_of(worker());
  const TraceSpan span(trace.get(), &context_.runtime->clock(), "ps", "move");
  const std::string what =
      absl::StrCat("move of table '", table, "', part ", index, ", to '", to.name, "'");
  const auto attempt = [&] {
    return MoveRequest{table, index, to, mix_bits(worker().info().incarnation + next_cut()) | 1};
  };
  MoveRequest request = attempt();
  std::vector<std::string> names = with_joined(servers, end - worker().now());
  Status last = make_error(ErrorKind::kDeadline, "there was no time to ask");
  int without_copy = 0;
  const auto left = [&] {
    return std::min(kMoveAskTime, std::max(absl::ZeroDuration(), end - worker().now()));
  };
  const auto parker = context_.runtime->make_parker();
  for (;;) {
    bool copies = false;
    for (size_t i = 0; i < names.size(); ++i) {
      const StatusOr<WorkerInfo> info = worker().try_get_worker_info(names[i]);
      if (!info.ok()) continue;
      const StatusOr<std::string> bytes =
          ask_bytes(worker(), *info, kFindMethod, kFindSignature,
                    encode(FindRequest{table, index, false}), left());
      const StatusOr<FindAnswer> found = bytes.ok() ? decode_found(*bytes) : bytes.status();
      copies |= !found.ok() || found->copy;
      if (!found.ok()) {
        last = found.status();
        continue;
      }
      if (found->map.epoch != 0) add_name(found->map.owner.name, &names);
      if (found->part == 0) continue;
      std::rotate(names.begin(), names.begin() + static_cast<int64_t>(i),
                  names.begin() + static_cast<int64_t>(i) + 1);  // asked first in the next round
      if (CopyPlace{info->name, info->incarnation} == to) return absl::OkStatus();
      const StatusOr<std::string> said =
          ask_bytes(worker(), *info, kMoveMethod, kMoveSignature, encode(request), left());
      if (!said.ok() && !may_be_otherwise_soon(said.status())) return annotate(said.status(), what);
      // A target that has died is an error of the owner: the same move never succeeds.
      const StatusOr<WorkerInfo> there = worker().try_get_worker_info(to.name);
      if (!there.ok() || there->incarnation != to.incarnation) {
        return make_error(ErrorKind::kPeerLost,
                          absl::StrCat(what, ": the server is not there any more"));
      }
      if (!said.ok()) {
        last = said.status();
        // The owner keeps how an attempt has ended, and would say it again.
        request = attempt();
      }
      break;
    }
    without_copy = copies ? 0 : without_copy + 1;
    if (without_copy == kRoundsWithoutCopy) {
      return make_error(ErrorKind::kNotFound, absl::StrCat(what, ": no server has it"));
    }
    const absl::Time now = worker().now();
    if (now >= end) {
      return make_error(ErrorKind::kDeadline,
                        absl::StrCat(what, ": not in its time; the last: ", last.message()));
    }
    parker->park_until(std::min(end, now + kMoveAgain));
  }
}

StatusOr<std::vector<OwnedPart>> PsService::list_parts(const std::vector<std::string>& servers,
                                                       absl::Time end) {
  std::vector<Question> questions;
  for (const std::string& name : servers) {
    const StatusOr<WorkerInfo> info = worker().try_get_worker_info(name);
    if (info.ok()) questions.push_back({*info, ""});
  }
  const auto answers =
      ask_all_again(worker(), kListMethod, kMoveSignature, questions,
                    std::max(absl::ZeroDuration(), end - worker().now()), kMoveAskTime);
  std::vector<OwnedPart> out;
  for (size_t i = 0; i < answers.size(); ++i) {
    const std::string& server = questions[i].to.name;
    if (error_kind(answers[i].status()) == ErrorKind::kPeerLost) continue;
    const auto parts = answers[i].ok() ? decode_listed(*answers[i]) : answers[i].status();
    if (!parts.ok()) return annotate(parts.status(), absl::StrCat("parts of '", server, "'"));
    for (const ListedPart& part : *parts) out.push_back({server, part});
  }
  return out;
}

StatusOr<int64_t> PsService::join(const std::vector<std::string>& servers,
                                  absl::Duration deadline) {
  const absl::Time end = deadline_after(context_.runtime->now(), deadline);
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return closed_;
    if (limits_ == nullptr) return make_error(ErrorKind::kState, "the server has ended");
    if (draining_) return make_error(ErrorKind::kState, "the server drains");
  }
  const std::string what = absl::StrCat("join of server '", worker().name(), "'");
  if (Status s = write_joined(true); !s.ok()) return annotate(s, what);
  std::vector<std::string> names = with_joined(servers, end - worker().now());
  add_name(worker().name(), &names);
  WEFT_ASSIGN_OR_RETURN(std::vector<OwnedPart> parts, list_parts(names, end));
  std::erase_if(parts, [](const OwnedPart& one) { return !one.part.moves; });
  for (const OwnedPart& one : share_of(worker().name(), parts)) {
    if (Status s = move(one.part.name, one.part.index, self(), names, end); !s.ok()) {
      return annotate(s, what);
    }
  }
  int64_t owned = 0;
  for (const auto& [name, part] : parts_by_name()) {
    owned += part->report().role == ReplicaProtocol::Role::kOwner ? 1 : 0;
  }
  return owned;
}

}  // namespace weft::ps::internal
