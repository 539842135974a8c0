#include "weft/rpc/internal/agent/agent.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/agent_job.h"
#include "weft/rpc/internal/observe/counters.h"

namespace weft::internal {

namespace {

// KEEP-1: of the send budget, beside it; and of one caller.
constexpr uint64_t kKeptPart = 8;
constexpr uint64_t kKeptPerCaller = uint64_t{64} << 20;

}  // namespace

Agent::Agent(AgentOptions options)
    : options_(std::move(options)),
      copier_(options_.self.name, options_.device_backend, options_.devices, options_.pool),
      receive_budget_(std::make_shared<ByteBudget>(
          options_.config.receive_budget,
          "messages that arrive or wait for their handlers (WEFT_RECEIVE_BUDGET)")),
      bell_(std::make_shared<RoomBell>()),
      send_room_(std::make_shared<SendRoom>(options_.config.send_budget,
                                            "arguments and results on their way (WEFT_SEND_BUDGET)",
                                            bell_)),
      receive_memory_(std::make_shared<ReceiveMemory>(options_.config.receive_cache)),
      rpc_timeout_ns_(absl::ToInt64Nanoseconds(options_.config.rpc_timeout)),
      counters_(std::make_unique<Counters>(options_.metrics.get())),
      kept_(options_.config.send_budget / kKeptPart, kKeptPerCaller),
      idle_changed_(options_.runtime.get()),
      members_(std::make_shared<MemberList>()) {
  for (const Method& m : options_.services) services_.emplace(m.name, m);
  services_.emplace(kLeavingMethod, leaving_method());
}

Agent::~Agent() = default;

void Agent::start(std::shared_ptr<Transport> transport) {
  const std::weak_ptr<Agent> weak = weak_from_this();  // weak: the agent owns the timers
  deadline_timer_ = options_.runtime->make_timer([weak] {
    if (auto self = weak.lock()) self->on_deadline_timer();
  });
  tick_timer_ = options_.runtime->make_timer([weak] {
    if (auto self = weak.lock()) self->tick();
  });
  bell_->set([weak, pool = options_.pool] {
    // The thread that released a frame may be the transport's: the calls go on elsewhere.
    pool->post([weak] {
      if (auto self = weak.lock()) self->serve_room_queue();
    });
  });
  {
    MutexLock lock(&mutex_);
    transport_ = std::move(transport);
  }
  tick_timer_->arm(now() + options_.config.heartbeat_interval);
}

void Agent::release_transport() {
  std::shared_ptr<Transport> released;  // its end is not for the mutex
  MutexLock lock(&mutex_);
  released.swap(transport_);
}

MemberListRef Agent::members() const {
  MutexLock lock(&mutex_);
  return members_;
}

void Agent::set_members(MemberListRef members) {
  MutexLock lock(&mutex_);
  // The joining thread and the membership thread both bring lists; the newest stays.
  if (members->generation < members_->generation) return;
  for (const auto& [id, member] : members->by_id) {
    auto it = peers_.find(member.info.incarnation);
    // It dialled us before we had read where it listens.
    if (it != peers_.end() && it->second->address.empty()) it->second->address = member.address;
  }
  members_ = std::move(members);
}

Status Agent::closed_error() const {
  // Why is worth telling: a worker that was declared dead has not shut down.
  return make_error(ErrorKind::kState,
                    absl::StrCat(closed_why_.ok() ? absl::StrCat("worker '", options_.self.name,
                                                                 "' has shut down")
                                                  : std::string(closed_why_.message()),
                                 "; no more calls can be made"));
}

void Agent::stop_accepting() {
  MutexLock lock(&mutex_);
  accepting_ = false;
}

bool Agent::wait_idle(absl::Time deadline) {
  MutexLock lock(&mutex_);
  ++waiters_;
  Status waited;
  while (!serving_.empty() && waited.ok()) waited = idle_changed_.wait_until(&mutex_, deadline);
  --waiters_;
  return serving_.empty();
}

bool Agent::wait_drained(absl::Time deadline) {
  MutexLock lock(&mutex_);
  ++waiters_;
  Status waited;
  while ((!serving_.empty() || !pending_.empty()) && waited.ok()) {
    waited = idle_changed_.wait_until(&mutex_, deadline);
  }
  --waiters_;
  return serving_.empty() && pending_.empty();
}

void Agent::fail_calls(const Status& why) {
  std::vector<uint64_t> calls;
  {
    MutexLock lock(&mutex_);
    for (const auto& [id, p] : pending_) calls.push_back(id);
  }
  for (uint64_t id : calls) complete(id, why, false);
}

std::string Agent::running_handlers() const {
  MutexLock lock(&mutex_);
  std::string out;
  for (const auto& [key, s] : serving_) {
    absl::StrAppend(&out, out.empty() ? "'" : ", '", s.method, "' for '", s.link->peer().name, "'");
  }
  return out;
}

void Agent::close(const Status& why) {
  std::vector<std::shared_ptr<Link>> links;
  std::vector<std::shared_ptr<Job>> handlers;
  std::vector<std::shared_ptr<Job>> early;
  {
    MutexLock lock(&mutex_);
    if (closed_) return;
    closed_ = true;
    open_.store(true);
    early.swap(early_);
    accepting_ = false;
    closed_why_ = why;
    for (const auto& [incarnation, peer] : peers_) {
      for (const auto& link : peer->links) links.push_back(link);
      if (peer->redial != nullptr) peer->redial->disarm();
    }
    links.insert(links.end(), observers_.begin(), observers_.end());
    for (const auto& [key, s] : serving_) handlers.push_back(s.job);
  }
  deadline_timer_->disarm();
  tick_timer_->disarm();
  fail_calls(why);
  for (const auto& job : early) {
    reply(job, make_error(ErrorKind::kPeerLost,
                          absl::StrCat("worker '", options_.self.name, "' did not join")));
  }
  for (const auto& job : handlers) cancel_job(job, CancelReason::kGivenUp);
  for (const auto& link : links) link->connection()->close(absl::OkStatus());
}

Agent::Load Agent::load() const {
  MutexLock lock(&mutex_);
  return Load{pending_.size(), serving_.size(), counters_->issued->value(),
              counters_->served->value()};
}

std::map<std::string, int64_t> Agent::debug_info() const {
  std::map<std::string, int64_t> out;
  const auto put = [&out](const char* name, Counter* c) {
    out[name] = static_cast<int64_t>(c->value());
  };
  put("calls_issued", counters_->issued);
  put("calls_completed", counters_->completed);
  put("calls_failed", counters_->failed);
  put("requests_served", counters_->served);
  put("requests_inline", counters_->inline_runs);
  put("requests_pooled", counters_->pool_posts);
  put("answers_late", counters_->late_answers);
  put("answers_foreign", counters_->foreign_answers);
  put("answers_unsent", counters_->unsent_answers);
  put("calls_resent", counters_->retried);
  put("requests_repeated", counters_->duplicates);
  put("requests_given_up", counters_->given_up);
  put("dials", counters_->dials);
  put("connections_opened", counters_->connects);
  put("reconnects", counters_->reconnects);
  put("connections_lost", counters_->lost);
  put("protocol_errors", counters_->violations);
  MutexLock lock(&mutex_);
  out["calls_pending"] = static_cast<int64_t>(pending_.size());
  out["handlers_running"] = static_cast<int64_t>(serving_.size());
  out["deadlines"] = static_cast<int64_t>(deadlines_.size());
  out["peers"] = static_cast<int64_t>(peers_.size());
  out["observers"] = static_cast<int64_t>(observers_.size());
  int64_t links = 0;
  int64_t window = 0;
  int64_t remembered = 0;
  int64_t waiting = 0;
  int64_t cancelled = 0;
  for (const auto& [incarnation, peer] : peers_) {
    links += static_cast<int64_t>(peer->links.size());
    waiting += static_cast<int64_t>(peer->waiting.size());
    cancelled += static_cast<int64_t>(peer->cancelled.size());
    if (peer->window == nullptr) continue;
    window += static_cast<int64_t>(peer->window->answers());
    remembered += static_cast<int64_t>(peer->window->calls());
  }
  out["connections"] = links;
  out["calls_waiting_for_connection"] = waiting;
  out["answers_kept"] = window;
  out["answers_kept_bytes"] = static_cast<int64_t>(kept_.bytes());
  out["calls_remembered"] = remembered;
  out["cancels_remembered"] = cancelled;
  out["receive_bytes"] = static_cast<int64_t>(receive_budget_->used());
  out["receive_bytes_peak"] = static_cast<int64_t>(receive_budget_->peak());
  out["send_bytes"] = static_cast<int64_t>(send_room_->budget().used());
  out["send_bytes_peak"] = static_cast<int64_t>(send_room_->budget().peak());
  out["calls_waiting_for_room"] = static_cast<int64_t>(room_queue_.size());
  const ReceiveMemory::Counters memory = receive_memory_->counters();
  out["receive_memory_kept_bytes"] = static_cast<int64_t>(memory.kept_bytes);
  out["receive_memory_mapped"] = static_cast<int64_t>(memory.mapped);
  out["receive_memory_reused"] = static_cast<int64_t>(memory.reused);
  return out;
}

}  // namespace weft::internal
