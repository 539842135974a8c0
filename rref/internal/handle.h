#ifndef WEFT_RREF_INTERNAL_HANDLE_H_
#define WEFT_RREF_INTERNAL_HANDLE_H_

// RRefHandle: what copies of one RRef share: this worker's share in the object. Its end drops it.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "weft/common/mutex.h"
#include "weft/common/worker_info.h"
#include "weft/rpc/payload.h"
#include "weft/rref/id.h"
#include "weft/rref/internal/message.h"

namespace weft::internal {

class RRefService;

// Where a handle comes from, for the list of what is alive.
struct CreationSite {
  CallSite at{};
  std::string through{};  // a method call over an RRef, whose place in the source is not known

  std::string text() const;  // "main.cc:40"; empty for one that arrived in a message
};

class RRefHandle final : public Reference {
 public:
  RRefHandle(std::weak_ptr<RRefService> service, const Handle& handle, WorkerInfo owner,
             bool is_creator, CreationSite site, absl::Time created)
      : service_(std::move(service)),
        handle_(handle),
        owner_(std::move(owner)),
        is_creator_(is_creator),
        site_(std::move(site)),
        created_(created) {}
  ~RRefHandle() override;

  std::shared_ptr<RRefService> service() const { return service_.lock(); }
  const Handle& handle() const { return handle_; }
  const WorkerInfo& owner() const { return owner_; }
  bool is_owner() const { return handle_.fork.is_zero(); }
  // "RRef 0/000a/1 of 'ps0'"
  std::string text() const;
  const CreationSite& site() const { return site_; }
  absl::Time created() const { return created_; }

  // Whether the value, or its error, is known to be there.
  bool ready() const { return ready_.load(std::memory_order_acquire); }
  void set_ready() const { ready_.store(true, std::memory_order_release); }

  // What every use of it carries, encoded; empty before the first. Under the service's mutex.
  std::string& use_bytes() const { return use_bytes_; }

  // True at the creator while its creation may still fail.
  bool may_fail() const { return is_creator_ && !ready(); }
  // `fn` runs once when it does, unless removed before. 0: it cannot happen any more.
  uint64_t on_failure(std::function<void(const Status&)> fn) const;
  void remove(uint64_t id) const;
  void fail(const Status& why) const;

 private:
  const std::weak_ptr<RRefService> service_;  // weak: an RRef does not keep a worker alive
  const Handle handle_;
  const WorkerInfo owner_;
  const bool is_creator_;
  const CreationSite site_;
  const absl::Time created_;
  mutable std::atomic<bool> ready_{false};
  mutable std::string use_bytes_;
  mutable Mutex mutex_;
  mutable uint64_t last_watcher_ ABSL_GUARDED_BY(mutex_) = 0;
  mutable std::map<uint64_t, std::function<void(const Status&)>> watchers_ ABSL_GUARDED_BY(mutex_);
};
using RRefHandleRef = std::shared_ptr<const RRefHandle>;

}  // namespace weft::internal

#endif  // WEFT_RREF_INTERNAL_HANDLE_H_
