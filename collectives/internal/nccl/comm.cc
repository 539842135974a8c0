#include "weft/collectives/internal/nccl/comm.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "weft/collectives/internal/text.h"

namespace weft::internal {

Comm::Comm(std::shared_ptr<const NcclApi> api, std::shared_ptr<Runtime> runtime)
    : api_(std::move(api)), runtime_(std::move(runtime)), changed_(runtime_.get()) {}

Comm::~Comm() {
  MutexLock lock(&mutex_);
  abort_locked();
}

Status Comm::connect(const Membership& member, const std::string& id,
                     absl::FunctionRef<Status()> given_up, absl::Time deadline) {
  ncclUniqueId unique{};
  if (id.size() != sizeof unique.internal) {
    return make_error(ErrorKind::kProtocol,
                      cat("rank 0 gave an id for NCCL of ", id.size(), " bytes"));
  }
  std::memcpy(unique.internal, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  MutexLock lock(&mutex_);
  const ncclResult_t begun =
      api_->comm_init_rank_config(&comm_, member.size, unique, member.rank, &config);
  if (begun != ncclSuccess && begun != ncclInProgress) return api_->error(begun, nullptr);
  const Status ready = wait_ready_locked(deadline, given_up);
  if (!ready.ok()) abort_locked();
  return ready;
}

Status Comm::wait_ready_locked(absl::Time deadline, absl::FunctionRef<Status()> given_up) {
  constexpr absl::Duration kShortest = absl::Microseconds(10);
  constexpr absl::Duration kLongest = absl::Milliseconds(1);
  absl::Duration nap = kShortest;
  while (true) {
    WEFT_RETURN_IF_ERROR(refused_);
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = api_->comm_get_async_error(comm_, &state);
    if (asked != ncclSuccess) return api_->error(asked, comm_);
    if (state == ncclSuccess) return absl::OkStatus();
    if (state != ncclInProgress) return api_->error(state, comm_);
    WEFT_RETURN_IF_ERROR(given_up());
    const absl::Time now = runtime_->now();
    if (now >= deadline) {
      return make_error(ErrorKind::kDeadline,
                        cat("the time given is over; ", api_->text(), " has not connected"));
    }
    // An early end of the wait is looked at again.
    const Status waited = changed_.wait_until(&mutex_, std::min(deadline, now + nap));
    if (!waited.ok() && error_kind(waited) != ErrorKind::kDeadline) return waited;
    nap = std::min(2 * nap, kLongest);
  }
}

Status Comm::call(absl::Time deadline, absl::FunctionRef<ncclResult_t(ncclComm_t)> body) {
  MutexLock lock(&mutex_);
  WEFT_RETURN_IF_ERROR(refused_);
  const auto failed = [](ncclResult_t r) { return r != ncclSuccess && r != ncclInProgress; };
  if (const ncclResult_t r = api_->group_start(); failed(r)) return api_->error(r, comm_);
  const ncclResult_t queued = body(comm_);
  const ncclResult_t ended = api_->group_end();
  if (failed(queued)) return api_->error(queued, comm_);
  if (failed(ended)) return api_->error(ended, comm_);
  return wait_ready_locked(deadline, [] { return absl::OkStatus(); });
}

Status Comm::async_error() {
  MutexLock lock(&mutex_);
  if (!refused_.ok() || comm_ == nullptr) return absl::OkStatus();
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = api_->comm_get_async_error(comm_, &state);
  if (asked != ncclSuccess) return api_->error(asked, comm_);
  return state == ncclSuccess || state == ncclInProgress ? absl::OkStatus()
                                                         : api_->error(state, comm_);
}

void Comm::refuse(const Status& cause) {
  MutexLock lock(&mutex_);
  if (refused_.ok()) refused_ = cause;
  changed_.notify_all();
}

void Comm::abort() {
  MutexLock lock(&mutex_);
  abort_locked();
}

void Comm::abort_locked() {
  // An error here concerns what is given up anyway.
  if (comm_ != nullptr) (void)api_->comm_abort(std::exchange(comm_, nullptr));
}

void Comm::finish(absl::Time until) {
  MutexLock lock(&mutex_);
  if (comm_ == nullptr || !refused_.ok()) return;
  const ncclResult_t begun = api_->comm_finalize(comm_);
  if (begun != ncclSuccess && begun != ncclInProgress) return;
  if (!wait_ready_locked(until, [] { return absl::OkStatus(); }).ok()) return;
  if (comm_ != nullptr) (void)api_->comm_destroy(std::exchange(comm_, nullptr));
}

}  // namespace weft::internal
