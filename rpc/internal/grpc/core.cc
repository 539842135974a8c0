#include "weft/rpc/internal/grpc/core.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include <grpcpp/alarm.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "weft/rpc/internal/grpc/address.h"
#include "weft/rpc/internal/grpc/server.h"
#include "weft/rpc/internal/wire/text.h"

namespace weft::internal {
namespace {

// shutdown() lets peers take what was sent before it cancels.
constexpr absl::Duration kShutdownGrace = absl::Seconds(1);
constexpr absl::Duration kServerGrace = absl::Milliseconds(200);
// A listener that does not believe our certificate and one that dies look the same the first time.
// One that has died is not reached the next time.
constexpr int kTlsAttempts = 3;

int millis(absl::Duration d) { return static_cast<int>(absl::ToInt64Milliseconds(d)); }

// Of the private socket beside the local one that gRPC listens on.
std::string gate_name(std::string_view local) {
  return absl::StrCat("weft-", view(local), "-gate");
}

uint64_t quarter_of_memory() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return 0;
  return static_cast<uint64_t>(pages) / 4 * static_cast<uint64_t>(page);
}

grpc::ChannelArguments lane_arguments(int lane, size_t max_frame_bytes, bool same_host,
                                      const GrpcTransportOptions& options, bool tls) {
  grpc::ChannelArguments args;
  if (tls) GrpcTls::prepare(&args);
  args.SetMaxReceiveMessageSize(static_cast<int>(std::max(max_frame_bytes, kMaxBatchBytes)));
  args.SetMaxSendMessageSize(-1);  // the peer's hello says how much it takes
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_ENABLE_CHANNELZ, 0);
  args.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a TCP connection of its own
  args.SetInt("weft.lane", lane);
  if (same_host) args.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  // A channel makes one attempt, and a new dial makes a new channel, so gRPC's waiting before a
  // second attempt (1 s by default) never shows; it is short all the same. The minimum is not set:
  // it is also the time that an attempt may take (20 s, cut by the dial's own deadline).
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, millis(options.keepalive_time));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, millis(options.keepalive_timeout));
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return args;
}

}  // namespace

// Tells a dial's failure on a poller, as every other outcome.
class GrpcTransportCore::FailedDial final : public GrpcEvent {
 public:
  FailedDial(std::shared_ptr<GrpcTransportCore> core, GrpcDialDone done, Status why)
      : core_(std::move(core)), done_(std::move(done)), why_(std::move(why)) {}
  void start() { alarm_.Set(core_->poller_queue(), gpr_now(GPR_CLOCK_MONOTONIC), this); }
  void complete(bool ok) override {
    (void)ok;
    const std::shared_ptr<GrpcTransportCore> core = core_;
    done_(why_, false);
    delete this;
    core->end_operation();
  }

 private:
  const std::shared_ptr<GrpcTransportCore> core_;
  const GrpcDialDone done_;
  const Status why_;
  grpc::Alarm alarm_;
};

GrpcTransportCore::GrpcTransportCore(const TransportContext& context,
                                     const GrpcTransportOptions& options,
                                     std::shared_ptr<const GrpcTls> tls)
    : context_(context),
      options_(options),
      tls_(std::move(tls)),
      poller_(std::make_shared<GrpcPoller>(context.runtime, options)),
      data_loop_(std::make_shared<DataLoop>(context.runtime, options.max_spin)),
      gate_(std::make_shared<LocalGate>(context.runtime)),
      changed_(context.runtime.get()) {
  if (!options.abseil_lock_checks) {
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  }
  MutexLock lock(&mutex_);
  timer_ = context_.runtime->make_timer([this] { fire(); });
}

GrpcTransportCore::~GrpcTransportCore() = default;

void GrpcTransportCore::start_poller_locked(std::unique_ptr<grpc::CompletionQueue> queue) {
  poller_->start(std::move(queue), "weft-poller");
  poller_started_ = true;
}

StatusOr<std::string> GrpcTransportCore::listen(const ListenOptions& options,
                                                std::shared_ptr<Acceptor> acceptor) {
  WEFT_ASSIGN_OR_RETURN(const BindHost host, resolve_bind_host(options.host));
  if (!host.loopback && tls_ == nullptr && !options.allow_insecure) {
    return make_error(
        ErrorKind::kPermission,
        absl::StrCat("refusing to listen on ", host.host,
                     ": it can be reached from other machines, "
                     "and there are no credentials. Whoever reaches the port may call every "
                     "registered function. Give the worker credentials (WEFT_TLS_CERT and so on, "
                     "docs/security.md), or set allow_insecure if the network is trusted"));
  }
  if (host.wildcard && options.advertise.empty()) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("listening on ", host.host,
                                   ", which is every interface: "
                                   "`advertise` must say which host peers dial"));
  }
  const int first = options.port_first;
  const int last = std::max(first, options.port_last);
  if (first < 0 || last > 65535) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("ports ", first, " to ", last, " are not in 0 to 65535"));
  }
  MutexLock lock(&mutex_);
  if (closing_ || poller_started_) {
    return make_error(ErrorKind::kState, closing_ ? "listen after shutdown"
                                                  : "listen must be called once, and before the "
                                                    "first connect");
  }
  Status failure = absl::OkStatus();
  for (int port = first; port <= last; ++port) {
    auto server = std::make_shared<GrpcServer>(shared_from_this(), acceptor);
    std::unique_ptr<grpc::CompletionQueue> queue;
    const std::string local =
        options_.local_sockets
            ? absl::StrCat("local-", absl::Hex(runtime().random().next(), absl::kZeroPad16))
            : std::string();
    StatusOr<int> bound = server->bind(host, port, local, &queue);
    if (!bound.ok()) {
      failure = bound.status();
      continue;
    }
    start_poller_locked(std::move(queue));
    server_ = server;
    lock.unlock();
    // Before the first dialler can learn the address. Without it they come by TCP, sharing nothing.
    if (!local.empty() && gate_->listen(gate_name(local)).ok()) {
      same_user_only_.store(options_.same_user && tls_ == nullptr && host.loopback &&
                            !options.allow_insecure);
    }
    server->start();
    return join_address(
        join_host_port(options.advertise.empty() ? host.host : options.advertise, *bound), local,
        tls_ != nullptr);
  }
  if (first == last) return failure;
  return annotate(failure,
                  absl::StrCat("no port of ", first, " to ", last, " on ", host.host, " is free"));
}

void GrpcTransportCore::fail_dial(GrpcDialDone done, Status why) {
  if (!begin_operation()) return done(why, false);
  // Owned by its alarm; deletes itself.
  (new FailedDial(shared_from_this(), std::move(done), std::move(why)))->start();
}

void GrpcTransportCore::connect(std::string_view address, const Hello& hello, absl::Time deadline,
                                std::shared_ptr<ConnectionHandler> handler,
                                Transport::DialDone done) {
  if (tls_ != nullptr) {
    return dial_tls(std::string(address), hello, deadline, std::move(handler), std::move(done), 1);
  }
  dial(address, hello, deadline, std::move(handler),
       [done = std::move(done)](StatusOr<std::shared_ptr<Connection>> result, bool) {
         done(std::move(result));
       });
}

void GrpcTransportCore::dial_tls(std::string address, Hello hello, absl::Time deadline,
                                 std::shared_ptr<ConnectionHandler> handler,
                                 Transport::DialDone done, int attempt) {
  dial(address, hello, deadline, handler,
       [self = shared_from_this(), address, hello, deadline, handler, done = std::move(done),
        attempt](StatusOr<std::shared_ptr<Connection>> result, bool turned_away) {
         if (result.ok() || !turned_away) return done(std::move(result));
         if (attempt < kTlsAttempts) {
           return self->dial_tls(address, hello, deadline, handler, done, attempt + 1);
         }
         done(annotate(self->tls_->turned_away_error(attempt), absl::StrCat("dial of ", address)));
       });
}

void GrpcTransportCore::dial(std::string_view address, const Hello& hello, absl::Time deadline,
                             std::shared_ptr<ConnectionHandler> handler, GrpcDialDone done) {
  const std::string context = absl::StrCat("dial of ", view(address));
  bool closing;
  {
    MutexLock lock(&mutex_);
    closing = closing_;
    if (!closing && !poller_started_) {
      start_poller_locked(std::make_unique<grpc::CompletionQueue>());
    }
  }
  if (closing) {
    return done(
        make_error(ErrorKind::kState, absl::StrCat(context, ": the transport is shut down")),
        false);
  }
  const SplitAddress at = split_address(address);
  const bool local = options_.local_sockets && !at.local.empty() && local_socket_exists(at.local);
  if (!local && options_.local_sockets && listener_has_ended(at)) {
    return fail_dial(
        std::move(done),
        make_error(ErrorKind::kPeerLost,
                   absl::StrCat(context, ": nobody listens there any more, its worker has ended")));
  }
  const StatusOr<std::string> target =
      local ? StatusOr<std::string>(local_target(at.local)) : dial_target(address);
  Hello wanted = hello;
  if (wanted.lanes == 0) {
    wanted.lanes =
        1 + static_cast<uint32_t>(local ? options_.local_bulk_lanes : options_.bulk_lanes);
  }
  StatusOr<Hello> own = complete_hello(wanted, context_.max_frame_bytes, runtime().random());
  if (!target.ok()) return fail_dial(std::move(done), target.status());
  if (!own.ok()) return fail_dial(std::move(done), annotate(own.status(), context));
  if (at.tls && tls_ == nullptr) {
    return fail_dial(std::move(done),
                     make_error(ErrorKind::kPermission,
                                absl::StrCat(context,
                                             ": it wants TLS, and this worker has no credentials; "
                                             "set WEFT_TLS_CA, WEFT_TLS_CERT and WEFT_TLS_KEY")));
  }
  std::shared_ptr<ArenaLink> arena;
  if (local) {
    StatusOr<std::shared_ptr<LocalSession>> session = gate_->visit(gate_name(at.local));
    if (session.ok()) {
      own->ticket = (*session)->ticket();
      arena = make_arena_link(*std::move(session));
    } else if (error_kind(session.status()) == ErrorKind::kResource) {
      // There is no room now; without a ticket the listener might turn us away for good.
      return fail_dial(std::move(done),
                       make_error(ErrorKind::kUnavailable,
                                  absl::StrCat(context, ": ", session.status().message())));
    }
  }

  auto connection =
      std::make_shared<GrpcConnection>(shared_from_this(), *own, std::string(address),
                                       std::move(arena), std::move(handler), std::move(done));
  connection->set_local(local);
  std::vector<std::shared_ptr<GrpcClientLane>> lanes;
  GrpcConnection::Lanes base;
  for (uint32_t i = 0; i < own->lanes; ++i) {
    const int number = static_cast<int>(i);
    lanes.push_back(std::make_shared<GrpcClientLane>(
        number, context_.max_frame_bytes, poller_.get(), connection.get(), tls_,
        [self = shared_from_this()](GrpcLane* lane) { self->lane_gone(lane); }));
    base.push_back(lanes.back());
  }
  connection->set_lanes(std::move(base));
  remember(connection);
  bool alive = true;
  for (const auto& lane : lanes) alive = lane_born(lane) && alive;
  set_deadline(deadline, connection);
  for (const auto& lane : lanes) {
    lane->start(grpc::CreateCustomChannel(
                    *target, tls_ == nullptr ? grpc::InsecureChannelCredentials() : tls_->channel(),
                    lane_arguments(lane->number(), context_.max_frame_bytes,
                                   local || is_loopback(at.tcp), options_, tls_ != nullptr)),
                poller_queue());
  }
  if (!alive) {
    connection->fail(
        make_error(ErrorKind::kState, absl::StrCat(context, ": the transport is shut down")));
  }
}

// ---- shared memory ---------------------------------------------------------------------------

std::shared_ptr<SharedArena> GrpcTransportCore::arena(std::string* why_none) {
  MutexLock lock(&arena_mutex_);
  if (!arena_tried_) {
    arena_tried_ = true;
    const uint64_t bytes = std::min(options_.arena_bytes, quarter_of_memory());
    if (bytes == 0) {
      why_no_arena_ = "it is switched off (arena_bytes is 0)";
    } else {
      StatusOr<std::shared_ptr<SharedArena>> made = SharedArena::make(bytes);
      if (made.ok()) {
        arena_ = *std::move(made);
      } else {
        why_no_arena_ = std::string(made.status().message());
      }
    }
  }
  if (why_none != nullptr) *why_none = why_no_arena_;
  return arena_;
}

std::shared_ptr<ArenaLink> GrpcTransportCore::make_arena_link(
    std::shared_ptr<LocalSession> session) {
  std::string why_none;
  std::shared_ptr<SharedArena> own = arena(&why_none);
  return std::make_shared<ArenaLink>(std::move(own), std::move(why_none), std::move(session), gate_,
                                     runtime().random());
}

Status GrpcTransportCore::check_user(const Hello& theirs) {
  if (!same_user_only_.load() || gate_->knows(theirs.ticket)) return absl::OkStatus();
  if (!theirs.ticket.empty()) {
    return make_error(ErrorKind::kResource,
                      "the ticket that was left at this worker's private socket is not there any "
                      "more, as too many others wait: try again");
  }
  return make_error(
      ErrorKind::kPermission,
      absl::StrCat("'", theirs.name.substr(0, 128), "' did not prove that it runs under user ",
                   geteuid(),
                   ", as peers of this worker must while it listens on loopback without "
                   "credentials. If it comes by a relay or a forwarded port, set WEFT_SAME_USER=0 "
                   "here; between users, credentials (docs/security.md)"));
}

std::shared_ptr<ArenaLink> GrpcTransportCore::claim_arena(std::string_view ticket) {
  std::shared_ptr<LocalSession> session = gate_->claim(ticket);
  return session == nullptr ? nullptr : make_arena_link(std::move(session));
}

std::shared_ptr<char> GrpcTransportCore::allocate_shared(size_t bytes) {
  const std::shared_ptr<SharedArena> own = arena(nullptr);
  return own == nullptr ? nullptr : own->allocate(bytes);
}

void GrpcTransportCore::sweep() {
  std::shared_ptr<SharedArena> own;
  {
    MutexLock lock(&arena_mutex_);
    own = arena_;
  }
  if (own != nullptr) own->sweep();
  gate_->sweep();
}

// ---- what is alive ---------------------------------------------------------------------------

bool GrpcTransportCore::lane_born(std::shared_ptr<GrpcLane> lane) {
  MutexLock lock(&mutex_);
  GrpcLane* const key = lane.get();
  lanes_.emplace(key, std::move(lane));
  return !closing_;
}

void GrpcTransportCore::lane_gone(GrpcLane* lane) {
  std::shared_ptr<GrpcLane> last;
  MutexLock lock(&mutex_);
  auto it = lanes_.find(lane);
  if (it == lanes_.end()) return;
  last = std::move(it->second);
  lanes_.erase(it);
  past_lanes_[static_cast<size_t>(lane->number())] += lane->stats();
  if (closing_) changed_.notify_all();
}

bool GrpcTransportCore::begin_operation() {
  MutexLock lock(&mutex_);
  if (closing_) return false;
  ++operations_;
  return true;
}

void GrpcTransportCore::end_operation() {
  MutexLock lock(&mutex_);
  --operations_;
  if (closing_) changed_.notify_all();
}

void GrpcTransportCore::remember(std::shared_ptr<GrpcConnection> connection) {
  MutexLock lock(&mutex_);
  GrpcConnection* const key = connection.get();
  connections_.emplace(key, std::move(connection));
}

void GrpcTransportCore::forget(GrpcConnection* connection) {
  std::shared_ptr<GrpcConnection> last;  // destroyed without the lock
  MutexLock lock(&mutex_);
  auto it = connections_.find(connection);
  if (it == connections_.end()) return;
  last = std::move(it->second);
  connections_.erase(it);
  size_t number = last->lanes();
  for (const LaneStats& lane : last->data_stats()) past_lanes_[number++] += lane;
  std::erase_if(expected_data_, [&](const auto& one) {
    return one.second.connection.expired() || one.second.connection.lock() == last;
  });
  if (closing_) changed_.notify_all();
  lock.unlock();
}

// ---- data connections --------------------------------------------------------------------------

void GrpcTransportCore::expect_data(const std::string& ticket, ExpectedData data) {
  MutexLock lock(&mutex_);
  const absl::Time now = runtime().now();
  std::erase_if(expected_data_, [now](const auto& one) { return one.second.until < now; });
  data.until = now + options_.handshake_timeout;
  if (!closing_) expected_data_.emplace(ticket, std::move(data));
}

void GrpcTransportCore::take_data(const std::string& ticket, UniqueFd fd) {
  ExpectedData data;
  {
    MutexLock lock(&mutex_);
    const auto it = expected_data_.find(ticket);
    if (it == expected_data_.end()) return;
    data = std::move(it->second);
    expected_data_.erase(it);
  }
  if (data.until < runtime().now()) return;
  const std::shared_ptr<GrpcConnection> connection = data.connection.lock();
  if (connection != nullptr) {
    connection->take_data(data.index, std::move(data.keys), std::move(fd));
  }
}

// ---- time limits -----------------------------------------------------------------------------

void GrpcTransportCore::set_deadline(absl::Time when, std::weak_ptr<GrpcTimed> what) {
  if (when == absl::InfiniteFuture()) return;
  MutexLock lock(&mutex_);
  const auto it = deadlines_.emplace(when, std::move(what));
  if (it == deadlines_.begin() && timer_ != nullptr) timer_->arm(when);
}

void GrpcTransportCore::fire() {
  std::vector<std::weak_ptr<GrpcTimed>> due;
  {
    MutexLock lock(&mutex_);
    const absl::Time now = runtime().now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      due.push_back(std::move(deadlines_.begin()->second));
      deadlines_.erase(deadlines_.begin());
    }
    if (!deadlines_.empty() && timer_ != nullptr) timer_->arm(deadlines_.begin()->first);
  }
  for (const auto& weak : due) {
    if (const std::shared_ptr<GrpcTimed> what = weak.lock()) what->on_deadline();
  }
}

// ---- shutdown --------------------------------------------------------------------------------

bool GrpcTransportCore::wait_until_idle(absl::Time deadline, bool operations) {
  MutexLock lock(&mutex_);
  while (!lanes_.empty() || !connections_.empty() || (operations && operations_ > 0)) {
    const Status status = changed_.wait_until(&mutex_, deadline);
    if (!status.ok() && runtime().now() >= deadline) return false;
  }
  return true;
}

// transport.md, P3 and P4: streams first, then the server, then the queue, then the poller. What
// the peers do cannot hold it up: after the cancel every operation completes by itself.
void GrpcTransportCore::shutdown() {
  std::vector<std::shared_ptr<GrpcConnection>> connections;
  {
    MutexLock lock(&mutex_);
    if (closing_) {
      while (!closed_) (void)changed_.wait_until(&mutex_, absl::InfiniteFuture());
      return;
    }
    closing_ = true;
    for (const auto& [raw, connection] : connections_) connections.push_back(connection);
  }
  const Status why = make_error(ErrorKind::kState, "the transport was shut down");
  for (const auto& connection : connections) connection->leave(why);
  connections.clear();
  (void)wait_until_idle(runtime().now() + kShutdownGrace, false);
  std::vector<std::shared_ptr<GrpcLane>> lanes;
  std::shared_ptr<GrpcServer> server;
  {
    MutexLock lock(&mutex_);
    for (const auto& [raw, lane] : lanes_) lanes.push_back(lane);
    for (const auto& [raw, connection] : connections_) connections.push_back(connection);
    server = server_;
  }
  for (const auto& connection : connections) connection->fail(why);
  connections.clear();
  for (const auto& lane : lanes) lane->abort(why);
  lanes.clear();
  if (server != nullptr) server->shut_down(kServerGrace);
  (void)wait_until_idle(absl::InfiniteFuture(), true);
  std::unique_ptr<Timer> timer;
  {
    MutexLock lock(&mutex_);
    timer = std::move(timer_);
    deadlines_.clear();
    server_ = nullptr;
  }
  timer = nullptr;
  gate_->stop();
  data_loop_->stop();
  poller_->stop();
  if (server != nullptr) server->release();
  MutexLock lock(&mutex_);
  closed_ = true;
  changed_.notify_all();
}

std::vector<std::pair<std::string, int64_t>> GrpcTransportCore::counters() const {
  std::vector<std::pair<std::string, int64_t>> out;
  using Counter = std::pair<const char*, const std::atomic<int64_t>*>;
  const auto add = [&out](std::string_view prefix, std::initializer_list<Counter> all) {
    for (const auto& [name, value] : all) {
      out.emplace_back(absl::StrCat(view(prefix), name), value->load(std::memory_order_relaxed));
    }
  };
  std::array<LaneStats, kMaxLanes> lanes;
  {
    MutexLock lock(&mutex_);
    lanes = past_lanes_;
    for (const auto& [raw, lane] : lanes_) {
      lanes[static_cast<size_t>(lane->number())] += lane->stats();
    }
    for (const auto& [raw, connection] : connections_) {
      size_t number = connection->lanes();
      for (const LaneStats& lane : connection->data_stats()) lanes[number++] += lane;
    }
  }
  for (size_t i = 0; i < lanes.size(); ++i) {
    const LaneStats& lane = lanes[i];
    // Those that nobody has used, here or at a peer that dialled, would only be long to read.
    if (i > kBulkLane && lane.frames_sent == 0 && lane.frames_received == 0) continue;
    for (const auto& [name, value] : lane_numbers(lane)) {
      out.emplace_back(absl::StrCat("lane", i, "_", name), value);
    }
  }
  std::shared_ptr<SharedArena> own;
  {
    MutexLock lock(&arena_mutex_);
    own = arena_;
  }
  const SharedArena::Counters arena = own == nullptr ? SharedArena::Counters() : own->counters();
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, uint64_t>>{
           {"arena_capacity", arena.capacity},
           {"arena_bytes", arena.used_bytes},
           {"arena_populated_bytes", arena.populated_bytes},
           {"arena_blocks", arena.blocks},
           {"arena_leases", arena.leases},
           {"arena_copies", arena.copied},
           {"arena_copied_bytes", arena.copied_bytes},
           {"arena_zero_copies", arena.shared},
           {"arena_full", arena.full},
           {"arena_ignored_frees", arena.ignored_frees}}) {
    out.emplace_back(name, static_cast<int64_t>(value));
  }
  out.emplace_back("arena_links_on", arena_links_on_.load());
  out.emplace_back("arena_links_off", arena_links_off_.load());
  add("listener_",
      {{"accepted", &listener_counters_.accepted}, {"stalls", &listener_counters_.stalls}});
  const PollerCounters& poller = poller_->counters();
  add("poller_", {{"blocking_waits", &poller.blocking_waits},
                  {"spins_paid", &poller.spins_paid},
                  {"spins_missed", &poller.spins_missed},
                  {"spins_crowded", &poller.spins_crowded},
                  {"drives_paid", &poller.drives_paid},
                  {"drives_missed", &poller.drives_missed},
                  {"drives_slept", &poller.drives_slept},
                  {"kicks", &poller.kicks},
                  {"events", &poller.events}});
  return out;
}

namespace {

class GrpcTransport final : public Transport {
 public:
  explicit GrpcTransport(std::shared_ptr<GrpcTransportCore> core) : core_(std::move(core)) {}
  ~GrpcTransport() override { shutdown(); }

  std::string name() const override { return "grpc"; }
  StatusOr<std::string> listen(const ListenOptions& options,
                               std::shared_ptr<Acceptor> acceptor) override {
    return core_->listen(options, std::move(acceptor));
  }
  void connect(std::string_view address, const Hello& hello, absl::Time deadline,
               std::shared_ptr<ConnectionHandler> handler, DialDone done) override {
    core_->connect(address, hello, deadline, std::move(handler), std::move(done));
  }
  void shutdown() override { core_->shutdown(); }
  std::shared_ptr<char> allocate_shared(size_t bytes) override {
    return core_->allocate_shared(bytes);
  }
  void sweep() override { core_->sweep(); }
  std::shared_ptr<WaitDriver> wait_driver() override { return core_->wait_driver(); }
  std::vector<std::pair<std::string, int64_t>> counters() const override {
    return core_->counters();
  }

 private:
  const std::shared_ptr<GrpcTransportCore> core_;
};

}  // namespace
}  // namespace weft::internal

namespace weft {

TransportFactory grpc_transport(const GrpcTransportOptions& options) {
  return [options](const TransportContext& context) -> StatusOr<std::unique_ptr<Transport>> {
    if (context.runtime == nullptr || context.runtime->simulated()) {
      return make_error(ErrorKind::kInvalidArgument,
                        "grpc transport: needs the system's runtime; use inproc in simulation");
    }
    if (context.max_frame_bytes < internal::kMinMaxFrameBytes ||
        context.max_frame_bytes > (1u << 30)) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("grpc transport: max_frame_bytes is ", context.max_frame_bytes,
                                     ", allowed are ", internal::kMinMaxFrameBytes, " to 2^30"));
    }
    for (const int lanes : {options.bulk_lanes, options.local_bulk_lanes}) {
      if (lanes >= 1 && lanes < static_cast<int>(internal::kMaxLanes)) continue;
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("grpc transport: ", lanes, " bulk lanes, allowed are 1 to ",
                                     internal::kMaxLanes - 1));
    }
    const Credentials& credentials =
        options.credentials.empty() ? context.credentials : options.credentials;
    std::shared_ptr<const internal::GrpcTls> tls;
    if (!credentials.empty()) {
      WEFT_ASSIGN_OR_RETURN(tls, internal::GrpcTls::make(credentials, *context.runtime));
      WEFT_RETURN_IF_ERROR(tls->check_own_name(context.worker_name));
    }
    return std::make_unique<internal::GrpcTransport>(
        std::make_shared<internal::GrpcTransportCore>(context, options, std::move(tls)));
  };
}

}  // namespace weft
