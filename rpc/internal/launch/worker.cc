#include "weft/rpc/worker.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/launch/core.h"

namespace weft {
namespace {

Status no_worker() {
  return make_error(ErrorKind::kState,
                    "there is no worker: the handle is empty, or it has been destroyed");
}

}  // namespace

std::shared_ptr<internal::Core> lock_core(const Worker& worker) {
  return worker.owned_ != nullptr ? worker.owned_ : worker.core_.lock();
}

Worker::Worker(std::shared_ptr<internal::Core> owned) : owned_(std::move(owned)), core_(owned_) {}

std::shared_ptr<const Worker> Worker::make_handle(std::weak_ptr<internal::Core> core) {
  std::shared_ptr<Worker> handle(new Worker());
  handle->core_ = std::move(core);
  return handle;
}

Worker& Worker::operator=(Worker&& other) noexcept {
  if (this != &other) {
    if (owned_ != nullptr) owned_->abandon();
    owned_ = std::move(other.owned_);
    core_ = std::move(other.core_);
  }
  return *this;
}

Worker::~Worker() {
  if (owned_ != nullptr) owned_->abandon();
}

std::shared_ptr<internal::Core> Worker::core() const {
  std::shared_ptr<internal::Core> core = lock_core(*this);
  if (core == nullptr) throw_error(no_worker());
  return core;
}

Worker Worker::join(JoinOptions options) { return value_or_throw(try_join(std::move(options))); }

StatusOr<Worker> Worker::try_join(JoinOptions options) {
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<internal::Core> core,
                        internal::Core::join(std::move(options)));
  return Worker(std::move(core));
}

const std::string& Worker::name() const { return core()->self().name; }
uint32_t Worker::id() const { return core()->self().id; }
int Worker::world_size() const { return core()->world_size(); }
const WorkerInfo& Worker::info() const { return core()->self(); }
const std::string& Worker::job_id() const { return core()->agent().options().job_id; }
const std::string& Worker::address() const { return core()->address(); }
const std::string& Worker::metrics_address() const { return core()->metrics_address(); }

std::vector<WorkerInfo> Worker::worker_infos() const {
  const internal::MemberListRef list = core()->agent().members();
  std::vector<WorkerInfo> out;
  for (const auto& [id, member] : list->by_id) out.push_back(member.info);
  return out;
}

StatusOr<WorkerInfo> Worker::try_get_worker_info(const Destination& who) const {
  const auto core = lock_core(*this);
  if (core == nullptr) return no_worker();
  WEFT_ASSIGN_OR_RETURN(const internal::Member* member, core->agent().members()->resolve(who));
  return member->info;
}

WorkerInfo Worker::get_worker_info(const Destination& who) const {
  return value_or_throw(try_get_worker_info(who));
}

uint64_t Worker::membership_version() const { return core()->agent().members()->version; }

Worker::Subscription Worker::subscribe(
    std::function<void(const MembershipChange&)> on_change) const {
  return core()->subscribers().subscribe(std::move(on_change));
}

absl::Duration Worker::rpc_timeout() const { return core()->agent().rpc_timeout(); }

void Worker::set_rpc_timeout(Timeout timeout) const {
  const absl::Duration d = timeout.value_or(absl::Seconds(60));
  if (d <= absl::ZeroDuration()) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("rpc_timeout is ", absl::FormatDuration(d),
                                        ", must be positive; kInfinite is infinite")));
  }
  core()->agent().set_rpc_timeout(d);
}

int Worker::worker_threads() const { return core()->worker_threads(); }

ShutdownResult Worker::shutdown(ShutdownOptions options) const {
  const auto core = lock_core(*this);
  if (core == nullptr) return ShutdownResult{no_worker(), {}};
  return core->shutdown(options);
}

bool Worker::is_shut_down() const {
  const auto core = lock_core(*this);
  return core == nullptr || core->is_shut_down();
}

std::map<std::string, int64_t> Worker::debug_info() const { return core()->debug_info(); }
std::vector<PeerStats> Worker::peer_stats() const { return core()->agent().peer_stats(); }
Metrics& Worker::metrics() const { return core()->metrics(); }
const Logger& Worker::log() const { return core()->log(); }
Runtime& Worker::runtime() const { return core()->runtime(); }
absl::Time Worker::now() const { return core()->runtime().now(); }
std::vector<std::shared_ptr<Service>> Worker::services() const { return core()->services(); }

CallRider::~CallRider() = default;

// ---- the untyped core -------------------------------------------------------------------------

CallHandle start_call(const Worker& worker, const Destination& to, UntypedCall call,
                      CallDone done) {
  const auto core = lock_core(worker);
  if (core == nullptr) {
    done(no_worker());
    return CallHandle();
  }
  return core->agent().start_call(to, std::move(call), std::move(done));
}

std::vector<CallHandle> start_calls(const Worker& worker, const std::vector<Destination>& to,
                                    UntypedCall call,
                                    std::function<void(size_t, StatusOr<Payload>)> done) {
  const auto core = lock_core(worker);
  if (core == nullptr) {
    for (size_t i = 0; i < to.size(); ++i) done(i, no_worker());
    return std::vector<CallHandle>(to.size());
  }
  return core->agent().start_calls(to, std::move(call), std::move(done));
}

const Library* library_of(const Worker& worker) {
  const auto core = lock_core(worker);
  return core == nullptr ? nullptr : core->library();
}

std::shared_ptr<Executor> executor_of(const Worker& worker) {
  const auto core = lock_core(worker);
  return core == nullptr ? nullptr : core->pool();
}

Continuation continuation_of(const Worker& worker) {
  const auto core = lock_core(worker);
  if (core == nullptr) return {};
  return {core->pool(), core->wait_driver()};
}

std::shared_ptr<TraceWriter> trace_of(const Worker& worker) {
  const auto core = lock_core(worker);
  return core == nullptr ? nullptr : core->trace_writer();
}

WorkerInfo info_of(const Worker& worker, const WorkerKey& key) {
  const StatusOr<WorkerInfo> info = worker.try_get_worker_info(key.id.value());
  if (info.ok() && info->incarnation == key.incarnation.value()) return *info;
  return WorkerInfo{to_string(key), key.id.value(), key.incarnation.value()};
}

}  // namespace weft
