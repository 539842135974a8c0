// The agent's callee side: a request that has arrived, until its method is known. Whether it is
// new, refused, or one that was here before (dedup.h).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/agent_job.h"
#include "weft/rpc/internal/observe/counters.h"

namespace weft::internal {
namespace {

// Before its deadline, so that the answer of a call that never started can reach its caller.
constexpr absl::Duration kToldBefore = absl::Milliseconds(20);
// Per peer.
constexpr size_t kMostCancelled = 4096;

// For a request that goes to no interceptor. One that was sent before may have been to them.
v1::ErrorHeader::Reach reach_of_refusal(const v1::CallHeader& header) {
  return header.attempt() == 0 ? v1::ErrorHeader::NOT_TAKEN : v1::ErrorHeader::UNKNOWN;
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): declared in agent.h
struct Agent::Arrival {
  bool dropped = false;  // no answer, nothing
  CallWindow::Seen seen = CallWindow::Seen::kNew;
  Answer answer;    // of one that was answered before
  Status refused;   // it becomes no call
  Status declined;  // it becomes a call that is answered with this
};

Agent::Peer* Agent::peer_of_locked(const Link& link) const {
  const auto found = peers_.find(link.peer().incarnation);
  if (found == peers_.end() || !found->second->gone.ok()) return nullptr;
  const auto& links = found->second->links;
  const bool its_own = std::any_of(links.begin(), links.end(),
                                   [&link](const auto& one) { return one.get() == &link; });
  return its_own ? found->second.get() : nullptr;
}

void Agent::admit_locked(const std::shared_ptr<Job>& job, Arrival* arrival,
                         std::vector<Answer>* acknowledged) {
  const v1::CallHeader& header = *job->header;
  const ServingKey key{job->link->peer().incarnation, header.call_id()};
  if (arrival->refused.ok() && !accepting_) {
    arrival->refused = make_error(
        ErrorKind::kPeerLost,
        absl::StrCat("worker '", options_.self.name, "' is shutting down and takes no new calls"));
  }
  // CALL-2: the window of a worker that is gone is empty, so of its calls none is known any more.
  Peer* const peer = peer_of_locked(*job->link);
  arrival->dropped = peer == nullptr || peer->cancelled.count(key.second) > 0;
  if (arrival->dropped || !arrival->refused.ok()) return;
  if (header.at_most_once()) peer->window->ack_below(header.acked_below(), acknowledged);
  if (auto running = serving_.find(key); running != serving_.end()) {
    arrival->seen = CallWindow::Seen::kRunning;
    Serving& s = running->second;
    if (!s.at_most_once || header.attempt() <= s.attempt) return;
    // CALL-5: the answer of what runs now goes where the caller asks from now.
    s.attempt = header.attempt();
    --s.link->serving;
    s.link = job->link;
    ++job->link->serving;
    return;
  }
  if (header.at_most_once()) arrival->seen = peer->window->begin(key.second, &arrival->answer);
  if (arrival->seen == CallWindow::Seen::kTooMany) {
    arrival->seen = CallWindow::Seen::kNew;
    arrival->refused = make_error(
        ErrorKind::kResource,
        absl::StrCat("worker '", options_.self.name, "' remembers ", peer->window->calls(),
                     " calls of '", peer->info.name,
                     "' that are at most once, none of which is acknowledged: the oldest of them "
                     "must end first"));
    return;
  }
  if (arrival->seen != CallWindow::Seen::kNew) return;
  if (leaving_) arrival->declined = check_leaving_locked(header, key.first);
  Serving s;
  s.job = job;
  s.link = job->link;
  s.at_most_once = header.at_most_once();
  s.attempt = header.attempt();
  s.method = header.method();
  s.begun = now();
  if (header.has_remaining_us()) {
    const absl::Duration remaining = absl::Microseconds(header.remaining_us());
    job->deadline = job->arrived + remaining;
    job->start_by = job->deadline - std::min(remaining / 50, kToldBefore);
    s.deadline = job->deadline;
    s.in_deadlines = deadlines_.emplace(job->start_by, DeadlineKey{true, key.first, key.second});
    s.has_deadline = true;
    arm_locked(job->start_by);
  }
  ++job->link->serving;
  serving_.emplace(key, std::move(s));
}

void Agent::on_request(const std::shared_ptr<Link>& link,
                       std::shared_ptr<const v1::CallHeader> header, StatusOr<Payload> payload,
                       absl::Time arrived) {
  auto job = std::make_shared<Job>();
  job->link = link;
  job->header = std::move(header);
  job->arrived = arrived;
  job->pool = options_.pool;
  if (payload.ok()) job->charge = std::move(payload->charge);

  Arrival arrival;
  arrival.refused = payload.status();
  std::vector<Answer> acknowledged;  // which end without the mutex
  {
    MutexLock lock(&mutex_);
    admit_locked(job, &arrival, &acknowledged);
  }
  if (arrival.dropped) return counters_->given_up->add();
  if (arrival.seen != CallWindow::Seen::kNew) return answer_repeated(*job, arrival);
  if (!arrival.refused.ok()) {
    const Status& refused = arrival.refused;
    return send_answer(
        link, job->header->call_id(),
        Answer{FrameKind::kError, static_cast<uint32_t>(refused.code()),
               static_cast<uint32_t>(error_kind(refused)), pack_error(refused, options_.self.name),
               reach_of_refusal(*job->header)});
  }
  job->payload = *std::move(payload);
  begin(job, std::move(arrival.declined));
}

void Agent::answer_repeated(const Job& job, const Arrival& arrival) {
  const uint64_t call_id = job.header->call_id();
  counters_->duplicates->add();
  if (arrival.seen == CallWindow::Seen::kAnswered) send_answer(job.link, call_id, arrival.answer);
  if (arrival.seen != CallWindow::Seen::kAnswerDropped) return;
  const Status gone =
      make_error(ErrorKind::kMaybeExecuted, "the call has run, but its answer is no longer kept");
  send_answer(job.link, call_id,
              Answer{FrameKind::kError, static_cast<uint32_t>(gone.code()),
                     static_cast<uint32_t>(ErrorKind::kMaybeExecuted),
                     pack_error(gone, options_.self.name), v1::ErrorHeader::PASSED});
}

void Agent::begin(const std::shared_ptr<Job>& job, Status error) {
  const v1::CallHeader& header = *job->header;
  const Hello& from = job->link->peer();
  runtime()->trace("serve", from.incarnation, header.call_id());
  // As the header has it, its span is the caller's.
  TraceContext trace{header.trace_id_high(), header.trace_id(), header.span_id(),
                     static_cast<uint8_t>(header.trace_flags())};
  if (options_.trace != nullptr) {
    options_.trace->serve_begun(from.incarnation, header.call_id(), header.method(), from.name,
                                trace);
  }
  if (!trace.empty()) trace.span_id = span_of_callee(from.incarnation, header.call_id());
  auto scope = std::make_shared<CallScope>();
  scope->worker = scope_key();
  scope->deadline = job->deadline;
  scope->cancel = job->cancel;
  scope->trace = trace;
  scope->holding.assign(header.holding().begin(), header.holding().end());
  scope->chain.assign(header.chain().begin(), header.chain().end());
  if (std::find(scope->chain.begin(), scope->chain.end(), from.incarnation) == scope->chain.end()) {
    scope->chain.push_back(from.incarnation);
  }

  job->reach = reach_of_refusal(header);
  StatusOr<const Method*> method = find_method(header);
  if (!error.ok()) {
  } else if (!method.ok()) {
    error = method.status();
  } else if (from.name != options_.self.name && (*method)->name != kLeavingMethod &&
             !options_.access.allows((*method)->name, from.name)) {
    error = make_error(ErrorKind::kPermission,
                       absl::StrCat("worker '", options_.self.name, "' does not let '", from.name,
                                    "' call ", (*method)->name, " (JoinOptions::access)"));
  } else {
    job->callee = *method;
    job->scope = scope;
    // An interceptor may know the object.
    if (header.metadata_size() == 0) error = find_instance(job.get());
  }
  job->call = std::make_unique<CallContext>(
      *options_.handle, WorkerInfo{from.name, from.id, from.incarnation}, header.call_id(), scope,
      header.has_remaining_us() ? absl::Microseconds(header.remaining_us())
                                : absl::InfiniteDuration(),
      options_.pool);
  if (error.ok() && now() >= job->deadline && !is_service(*job->callee)) {
    error = never_started(*job);
  }
  if (!error.ok()) return reply(job, error);
  if (header.device_map_size() > 0 || job->payload.devices != nullptr) return land_request(job);
  look_at(job);
}

void Agent::on_heartbeat(const std::shared_ptr<Link>& link, const v1::HeartbeatHeader& header) {
  std::vector<Answer> acknowledged;  // which end without the mutex
  MutexLock lock(&mutex_);
  Peer* const peer = peer_of_locked(*link);
  if (peer != nullptr) peer->window->ack_below(header.acked_below(), &acknowledged);
}

void Agent::give_up_arriving(Link* link) {
  const std::set<Assembler::Purpose> incomplete = link->assembler().incomplete();
  if (incomplete.empty()) return;
  std::map<Assembler::Purpose, Status> over;
  {
    MutexLock lock(&mutex_);
    const Peer* const peer = peer_of_locked(*link);
    for (const Assembler::Purpose& one : incomplete) {
      if (!one.request) {
        if (pending_.count(one.call_id) > 0) continue;
        over[one] = make_error(ErrorKind::kCancelled, "its call is complete");
      } else if (now() > one.deadline) {
        over[one] =
            make_error(ErrorKind::kDeadline,
                       absl::StrCat("the deadline of a call was over on worker '",
                                    options_.self.name, "' before all of its arguments had come"));
      } else if (peer != nullptr && peer->cancelled.count(one.call_id) > 0) {
        over[one] = make_error(ErrorKind::kCancelled, "given up by its caller");
      }
    }
  }
  if (!over.empty()) link->assembler().give_up(over);
}

void Agent::on_cancel_frame(const std::shared_ptr<Link>& link, const v1::CancelHeader& header) {
  std::shared_ptr<Job> job;
  {
    MutexLock lock(&mutex_);
    Peer* const peer = peer_of_locked(*link);
    if (peer == nullptr) return;
    auto it = serving_.find({link->peer().incarnation, header.call_id()});
    if (it == serving_.end()) {
      // Answered already, or it has overtaken the end of its request.
      std::set<uint64_t>& cancelled = peer->cancelled;
      cancelled.insert(header.call_id());
      // A caller's numbers grow.
      if (cancelled.size() > kMostCancelled) cancelled.erase(cancelled.begin());
      return;
    }
    job = it->second.job;
  }
  cancel_job(job, header.deadline_over() ? CancelReason::kDeadline : CancelReason::kGivenUp);
}

}  // namespace weft::internal
