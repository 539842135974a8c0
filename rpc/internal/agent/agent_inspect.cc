// Observers: which processes look at this worker, and what the agent shows them.

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/agent.h"
#include "weft/rpc/internal/agent/arena_message.h"
#include "weft/rpc/internal/observe/counters.h"
#include "weft/rpc/internal/observe/inspect_call.h"
#include "weft/rpc/value.h"

namespace weft::internal {
namespace {

// At once: enough for people, and for a monitor or two.
constexpr size_t kMostObservers = 16;
// Maximum bytes of requests under way from one observer; a request has about a hundred.
constexpr uint64_t kObserverBytes = 64 << 10;

std::string text(CallState state) {
  switch (state) {
    case CallState::kNoRoomUnstaged:
    case CallState::kNoRoom: return "waits for room";
    case CallState::kUnstaged:
    case CallState::kStaging: return "waits for a device";
    case CallState::kWaiting: return "waits for a connection";
    case CallState::kSending:
    case CallState::kSendingUnsent:
    case CallState::kSendingLost: return "being sent";
    case CallState::kSent: return "sent";
  }
  return "";
}

Inspection::Cell seconds_until(absl::Time end, absl::Time now) {
  if (end == absl::InfiniteFuture()) return std::string();
  return absl::ToDoubleSeconds(end - now);
}

std::string incarnation_text(const WorkerInfo& info) {
  return absl::StrCat(absl::Hex(info.incarnation, absl::kZeroPad16));
}

}  // namespace

Status Agent::check_observer_locked(const Hello& theirs) const {
  if (observers_.size() < kMostObservers) return absl::OkStatus();
  return make_error(ErrorKind::kResource,
                    absl::StrCat(observers_.size(), " observers look at worker '",
                                 options_.self.name, "' already, '", theirs.name.substr(0, 128),
                                 "' is one too many: try again later"));
}

std::shared_ptr<ConnectionHandler> Agent::admit_observer(std::shared_ptr<Connection> connection) {
  const auto budget = part_of_budget(kObserverBytes, "messages of an observer");
  const auto link = std::make_shared<Link>(weak_from_this(), MessageLimits(options_.config), budget,
                                           receive_memory_, options_.trace, now());
  link->open(std::move(connection));
  Status refuse;
  {
    MutexLock lock(&mutex_);
    // Once more: others may have come since the hello.
    refuse = closed_ ? closed_error() : check_observer_locked(link->peer());
    if (refuse.ok() && !link->lost) observers_.insert(link);
  }
  if (!refuse.ok()) link->connection()->close(refuse);
  return link;
}

void Agent::on_observer_lost(const std::shared_ptr<Link>& link, const Lost& lost) {
  MutexLock lock(&mutex_);
  link->lost = true;
  if (error_kind(lost.why) == ErrorKind::kProtocol) counters_->violations->add();
  observers_.erase(link);
}

StatusOr<std::string> Agent::look(const std::string& observer, const v1::CallHeader& header,
                                  StatusOr<Payload> payload) const {
  const std::string& self = options_.self.name;
  if (!payload.ok()) return payload.status();
  if (header.method() != kInspectMethod) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("'", observer, "' is an observer of worker '", self,
                                   "' and may call ", kInspectMethod, " alone, not '",
                                   absl::CHexEscape(header.method().substr(0, 128)), "'"));
  }
  if (header.signature_hash() != signature_hash(kInspectSignature) || header.metadata_size() > 0 ||
      header.device_map_size() > 0 || !header.object().empty()) {
    return make_error(ErrorKind::kSignature,
                      absl::StrCat("worker '", self, "' has ", kInspectMethod, kInspectSignature));
  }
  if (observer != self && !options_.access.allows(kInspectMethod, observer)) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("worker '", self, "' does not let '", observer, "' call ",
                                   kInspectMethod, " (JoinOptions::access)"));
  }
  WEFT_ASSIGN_OR_RETURN(const InspectRequest request, decode_inspect_request(*std::move(payload)));
  Inspection out(static_cast<size_t>(std::clamp<int64_t>(request.most_rows, 1, kMostInspectRows)));
  if (options_.inspect != nullptr) options_.inspect(&out, request.counters);
  return request.json ? out.json() : out.text();
}

void Agent::on_observer_request(const std::shared_ptr<Link>& link, const v1::CallHeader& header,
                                StatusOr<Payload> payload) {
  const StatusOr<std::string> seen = look(link->peer().name, header, std::move(payload));
  Payload result;
  if (seen.ok()) Encoder(&result).put_string(*seen);
  StatusOr<std::shared_ptr<OutMessage>> message =
      seen.ok() ? pack(std::move(result), TensorMemory::kBorrowed)
                : StatusOr<std::shared_ptr<OutMessage>>(seen.status());
  Answer answer;
  if (message.ok()) {
    answer.message = *std::move(message);
  } else {
    const Status& error = message.status();
    answer = Answer{FrameKind::kError, static_cast<uint32_t>(error.code()),
                    static_cast<uint32_t>(error_kind(error)), pack_error(error, options_.self.name),
                    v1::ErrorHeader::NOT_TAKEN};
  }
  send_answer(link, header.call_id(), answer);
}

void Agent::put_inspection(Inspection* out) const {
  const absl::Time at = now();
  Inspection::Table& peers =
      out->table("peers", {"name", "id", "incarnation", "address", "connections", "pending",
                           "waiting", "serving", "send_bytes", "receive_bytes"});
  const std::vector<PeerStats> stats = peer_stats();
  for (const PeerStats& p : stats) {
    if (peers.full()) {
      peers.leave_out(stats.size() - peers.rows().size());
      break;
    }
    peers.add({p.worker.name, int64_t{p.worker.id}, incarnation_text(p.worker), p.address,
               static_cast<int64_t>(p.connections.size()), p.calls_pending, p.calls_waiting,
               p.handlers_running, p.send_bytes, p.receive_bytes});
  }
  Inspection::Table& serving =
      out->table("serving", {"method", "caller", "call", "age_s", "deadline_in_s"});
  Inspection::Table& pending =
      out->table("pending", {"method", "to", "call", "state", "age_s", "deadline_in_s"});
  MutexLock lock(&mutex_);
  for (const auto& [key, s] : serving_) {
    if (serving.full()) {
      serving.leave_out(serving_.size() - serving.rows().size());
      break;
    }
    serving.add({s.method, s.link->peer().name, static_cast<int64_t>(key.second),
                 absl::ToDoubleSeconds(at - s.begun), seconds_until(s.deadline, at)});
  }
  for (const auto& [id, p] : pending_) {
    if (pending.full()) {
      pending.leave_out(pending_.size() - pending.rows().size());
      break;
    }
    pending.add({p.spec->call.method, p.to.name, static_cast<int64_t>(id), text(p.state),
                 absl::ToDoubleSeconds(at - p.issued), seconds_until(p.deadline, at)});
  }
}

}  // namespace weft::internal
