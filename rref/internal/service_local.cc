// local_value(): the object itself, at its owner.

#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/util/Type.h"
#include "weft/rref/internal/service.h"

namespace weft::internal {

struct RRefService::LocalUse {
  LocalUse(RRefHandleRef h, LocalDone d) : handle(std::move(h)), done(std::move(d)) {}

  const RRefHandleRef handle;
  LocalDone done;  // called by the thread that sets `ended`
  std::atomic<bool> ended{false};
  uint64_t token = 0;
  std::unique_ptr<Timer> timer;
};

CallHandle RRefService::start_local_use(const RRefHandleRef& handle, const std::type_info& type,
                                        Timeout deadline, LocalDone done) {
  const absl::Time start = context_.runtime->now();
  auto use = std::make_shared<LocalUse>(handle, std::move(done));
  if (!handle->is_owner()) {
    end_local_use(
        use, make_error(ErrorKind::kState,
                        absl::StrCat("local_value() of ", handle->text(), " at '", worker().name(),
                                     "': only its owner has the object; fetch a copy "
                                     "with to_here()")));
    return CallHandle();
  }
  const RRefId rref = handle->handle().rref;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    use->token = ++last_token_;
    uses_[use->token] = ParkedUse{
        rref, /*local=*/true, [this, use, rref, &type](Status status) {
          RRefValueRef value;
          if (status.ok()) {
            MutexLock lock(&mutex_);
            value = find_value_locked(rref);
          }
          if (status.ok() && value == nullptr) {
            status = make_error(ErrorKind::kState, "the object is gone");
          }
          if (status.ok() && *value->kept.type != type) {
            status = make_error(
                ErrorKind::kSignature,
                absl::StrCat("the object is of type ", c10::demangle(value->kept.type->name()),
                             ", the RRef says ", c10::demangle(type.name())));
          }
          if (!status.ok()) return end_local_use(use, annotate(status, use->handle->text()));
          use->handle->set_ready();
          end_local_use(use, value->kept);
        }};
    p.use(use->token, p.self(), Use{rref, ForkId(), 0}, out);
  });
  if (use->token == 0) end_local_use(use, check(*handle));
  if (use->ended.load()) return CallHandle();
  const absl::Duration patience = deadline.value_or(worker().rpc_timeout());
  const std::weak_ptr<RRefService> weak = weak_from_this();
  const std::weak_ptr<LocalUse> weak_use = use;  // weak: the use owns the timer
  if (patience != absl::InfiniteDuration()) {
    use->timer =
        context_.runtime->make_timer([weak, weak_use, patience, executor = context_.executor] {
          // Elsewhere, since the timer may go with the use.
          (void)executor->post([weak, weak_use, patience] {
            const auto self = weak.lock();
            const auto late = weak_use.lock();
            if (self == nullptr || late == nullptr) return;
            self->cancel_local_use(
                late, make_error(ErrorKind::kDeadline,
                                 absl::StrCat("local_value() of ", late->handle->text(),
                                              ": deadline of ", absl::FormatDuration(patience),
                                              " exceeded: its function still runs")));
          });
        });
    use->timer->arm(deadline_after(start, patience));
  }
  return CallHandle([weak, weak_use] {
    const auto self = weak.lock();
    const auto given_up = weak_use.lock();
    if (self == nullptr || given_up == nullptr) return;
    self->cancel_local_use(given_up, make_error(ErrorKind::kCancelled, "cancelled by the caller"));
  });
}

void RRefService::end_local_use(const std::shared_ptr<LocalUse>& use, StatusOr<KeptObject> result) {
  if (!use->ended.exchange(true)) std::exchange(use->done, nullptr)(std::move(result));
}

void RRefService::cancel_local_use(const std::shared_ptr<LocalUse>& use, const Status& why) {
  OnUse dropped;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    auto it = uses_.find(use->token);
    if (it == uses_.end()) return;
    p.cancel_use(it->first, it->second.rref, out);
    dropped = std::move(it->second.done);
    uses_.erase(it);
  });
  end_local_use(use, why);
}

}  // namespace weft::internal
