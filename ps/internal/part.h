#ifndef WEFT_PS_INTERNAL_PART_H_
#define WEFT_PS_INTERNAL_PART_H_

// Part: one server's part of one table: a PartProtocol, its data, and the calls that wait. Any
// thread.
//
// What comes is done one after the other, in turns: a thread that brings something while no other
// works does it, and then what other threads have brought. So no lock is held over an operation of
// LibTorch, and no thread waits for another.

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/common/executor.h"
#include "weft/common/metrics.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/part_protocol.h"
#include "weft/ps/internal/wire.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/payload.h"

namespace weft::ps::internal {

// Of one server, shared by its parts.
struct ServerLimits {
  int64_t queue_bytes = 0;  // pushes that wait for their step to end
  int64_t table_bytes = 0;
  std::atomic<int64_t> queued{0};
};

struct PartMetrics {
  PartMetrics(Metrics& metrics, const std::string& table);
  Counter* pushes;
  Counter* copies;
  Counter* dropped;
  Counter* refused;
  Counter* pulls;
  Gauge* waiting;
  Gauge* held_bytes;
  Gauge* rows;
  Gauge* bytes;
  Gauge* clients;
  Histogram* lag;
  Histogram* behind;
};

// A snapshot for debug_info, inspection and tests.
struct PartReport {
  uint64_t version = 0;
  uint64_t clients = 0;
  uint64_t held = 0;
  uint64_t parked = 0;
  uint64_t remembered = 0;
  int64_t rows = 0;
  int64_t bytes = 0;
};

struct PartIdentity {
  uint64_t id = 0;
  std::string table{};
  TableDefinition definition{};
  std::vector<std::string> servers{};
  uint32_t index = 0;
};

class Part : public std::enable_shared_from_this<Part> {
 public:
  Part(PartIdentity identity, std::unique_ptr<PartData> data, std::shared_ptr<ServerLimits> limits,
       Metrics& metrics, Runtime* runtime);
  ~Part();

  const PartIdentity& identity() const { return identity_; }
  void call(const WorkerKey& caller, Request request, std::vector<at::Tensor> tensors,
            ScopeRef scope, ReplyFn reply);
  void worker_gone(const WorkerKey& worker);
  // Pulls that wait end with this, as does everything that comes later.
  void close(const Status& why);
  PartReport report() const;

 private:
  // A pull until it may be answered.
  struct Waiting {
    std::vector<at::Tensor> keys;
    Answer answer;
    ReplyFn reply;
  };

  void take_turn(Task task);
  // ---- in a turn ----
  void handle(const WorkerKey& caller, const Request& request, std::vector<at::Tensor> tensors,
              const ScopeRef& scope, ReplyFn reply);
  Status handle_push(const ClientKey& client, const PushHeader& header,
                     std::vector<at::Tensor> tensors, Answer* answer, PartEffects* effects);
  void perform(PartEffects effects);
  void apply(const ApplyStep& step);
  void answer_pull(uint64_t token, uint64_t lag);
  void cancel(uint64_t token);
  // To be said at the end of the turn, when report() has what it did.
  void answer(ReplyFn reply, StatusOr<Payload> what);
  void publish();
  void fail_all(const Status& why);
  std::string label() const;

  const PartIdentity identity_;
  const std::shared_ptr<ServerLimits> limits_;
  PartMetrics metrics_;
  Runtime* const runtime_;

  mutable Mutex mutex_;
  std::deque<Task> turns_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  PartReport report_ ABSL_GUARDED_BY(mutex_);

  // Used by the thread that has the turn.
  PartProtocol protocol_;
  const std::unique_ptr<PartData> data_;
  std::map<uint64_t, Push> pushes_;  // accepted and not applied, by token
  std::map<uint64_t, Waiting> waiting_;
  uint64_t last_token_ = 0;
  std::vector<std::pair<ReplyFn, StatusOr<Payload>>> answers_;
  Status closed_;
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_PART_H_
