#include "weft/transport/internal/grpc/core.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "weft/common/internal/text.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/descriptors.h"
#include "weft/transport/internal/grpc/backends.h"
#include "weft/transport/internal/grpc/server.h"

namespace weft::internal {
namespace {

// shutdown() lets peers take what was sent before it cancels.
constexpr absl::Duration kShutdownGrace = absl::Seconds(1);
constexpr absl::Duration kServerGrace = absl::Milliseconds(200);

}  // namespace

GrpcTransportCore::GrpcTransportCore(const TransportContext& context,
                                     const GrpcTransportOptions& options,
                                     std::shared_ptr<const GrpcTls> tls)
    : context_(context),
      options_(options),
      tls_(std::move(tls)),
      poller_(std::make_shared<GrpcPoller>(context.runtime, options)),
      gate_(std::make_shared<LocalGate>(context.runtime)),
      backends_(make_channel_backends(context, options, tls_ != nullptr, gate_)),
      changed_(context.runtime.get()) {
  if (options.raise_descriptor_limit) raise_descriptor_limit();
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
  // Before the first dialler can learn the address. Without it peers of this user cannot prove it,
  // and share no memory.
  const std::string local =
      options_.local_sockets ? make_local(runtime().random().next()) : std::string();
  const bool same_user_only = !local.empty() && options_.same_user && tls_ == nullptr &&
                              host.loopback && !options.allow_insecure;
  const Status gate = local.empty() ? absl::OkStatus() : gate_->listen(gate_name(local));
  if (!gate.ok() && same_user_only) {
    return annotate(gate,
                    "cannot open the private socket at which peers prove that they are of this "
                    "user (set WEFT_SAME_USER=0 to take processes of any user, or credentials)");
  }
  if (!gate.ok()) {
    WEFT_LOG(context_.log, kWarning)
        << "peers on this host share no memory with this worker: " << gate.message();
  }
  same_user_only_.store(same_user_only);
  Status failure = absl::OkStatus();
  for (int port = first; port <= last; ++port) {
    auto server = std::make_shared<GrpcServer>(shared_from_this(), acceptor);
    std::unique_ptr<grpc::CompletionQueue> queue;
    StatusOr<int> bound = server->bind(host, port, local, &queue);
    if (!bound.ok()) {
      failure = bound.status();
      continue;
    }
    start_poller_locked(std::move(queue));
    server_ = server;
    lock.unlock();
    server->start();
    return join_address(
        join_host_port(options.advertise.empty() ? host.host : options.advertise, *bound), local,
        tls_ != nullptr);
  }
  if (first == last) return failure;
  return annotate(failure,
                  absl::StrCat("no port of ", first, " to ", last, " on ", host.host, " is free"));
}

// ---- channels ----------------------------------------------------------------------------------

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

GrpcChannels::List GrpcTransportCore::make_channels(const ChannelSite& site) {
  GrpcChannels::List out;
  for (const auto& backend : backends_) out.push_back(backend->make(site));
  return out;
}

bool GrpcTransportCore::takes_sockets() const {
  return std::any_of(backends_.begin(), backends_.end(),
                     [](const auto& backend) { return backend->capabilities().lanes; });
}

void GrpcTransportCore::take_socket(const std::string& ticket, UniqueFd fd) {
  // A stranger's closes here.
  for (const auto& backend : backends_) {
    if (backend->take_socket(ticket, &fd)) return;
  }
}

std::shared_ptr<char> GrpcTransportCore::allocate_shared(size_t bytes) {
  for (const auto& backend : backends_) {
    if (std::shared_ptr<char> out = backend->allocate_shared(bytes)) return out;
  }
  return nullptr;
}

void GrpcTransportCore::sweep() {
  for (const auto& backend : backends_) backend->sweep();
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

std::shared_ptr<GrpcConnection> GrpcTransportCore::accepted(const Hello& hello) {
  const std::string words = encode_hello(hello, 0);
  MutexLock lock(&mutex_);
  for (const auto& [raw, connection] : connections_) {
    if (!connection->dialled() && connection->peer().connection_id == hello.connection_id &&
        same_bytes_in_constant_time(encode_hello(connection->peer(), 0), words)) {
      return connection;
    }
  }
  return nullptr;
}

void GrpcTransportCore::forget(GrpcConnection* connection) {
  std::shared_ptr<GrpcConnection> last;  // destroyed without the lock
  MutexLock lock(&mutex_);
  auto it = connections_.find(connection);
  if (it == connections_.end()) return;
  last = std::move(it->second);
  connections_.erase(it);
  size_t number = last->lanes();
  for (const LaneStats& lane : last->channel_stats()) past_lanes_[number++] += lane;
  if (closing_) changed_.notify_all();
  lock.unlock();
}

// ---- time limits -----------------------------------------------------------------------------

void GrpcTransportCore::set_deadline(absl::Time when, std::weak_ptr<Timed> what) {
  if (when == absl::InfiniteFuture()) return;
  MutexLock lock(&mutex_);
  const auto it = deadlines_.emplace(when, std::move(what));
  if (it == deadlines_.begin() && timer_ != nullptr) timer_->arm(when);
}

void GrpcTransportCore::fire() {
  std::vector<std::weak_ptr<Timed>> due;
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
    if (const std::shared_ptr<Timed> what = weak.lock()) what->on_deadline();
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
  for (const auto& backend : backends_) backend->stop();
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
      for (const LaneStats& lane : connection->channel_stats()) lanes[number++] += lane;
    }
  }
  for (size_t i = 0; i < lanes.size(); ++i) {
    const LaneStats& lane = lanes[i];
    // Unused lanes, here or at a peer that dialled, would only make the list longer.
    if (i > kBulkLane && lane.frames_sent == 0 && lane.frames_received == 0) continue;
    for (const auto& [name, value] : lane_numbers(lane)) {
      out.emplace_back(absl::StrCat("lane", i, "_", name), value);
    }
  }
  for (const auto& backend : backends_) backend->add_counters(&out);
  add("listener_", {{"accepted", &listener_counters_.accepted},
                    {"stalls", &listener_counters_.stalls},
                    {"turned_away", &listener_counters_.turned_away},
                    {"refused", &listener_counters_.refused}});
  const DescriptorUse use = descriptor_use();
  out.emplace_back("descriptors_open", static_cast<int64_t>(use.open));
  out.emplace_back("descriptors_limit", static_cast<int64_t>(use.limit));
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
