#ifndef WEFT_TRANSPORT_INTERNAL_FAULTY_FAULTY_H_
#define WEFT_TRANSPORT_INTERNAL_FAULTY_FAULTY_H_

// The decorator's parts: each wraps one of the inner transport's and asks the plan about every
// frame. The locks here guard the queues of delayed frames only; the inner transport is called
// without them.
//
// Threads: as transport/transport.h says.

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/transport.h"

namespace weft::internal {

// What the parts of one faulty transport share.
struct FaultyShared {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<FaultPlan> plan;
  std::string own_name;
};

class FaultyConnection final : public Connection,
                               public std::enable_shared_from_this<FaultyConnection> {
 public:
  FaultyConnection(std::shared_ptr<const FaultyShared> shared, std::shared_ptr<Connection> inner)
      : shared_(std::move(shared)), inner_(std::move(inner)) {}

  const Hello& peer() const override { return inner_->peer(); }
  bool dialled() const override { return inner_->dialled(); }
  bool lane_begun(int lane) const override { return inner_->lane_begun(lane); }
  Status send(Frame frame, int lane) override ABSL_LOCKS_EXCLUDED(mutex_);
  void close(Status reason) override ABSL_LOCKS_EXCLUDED(mutex_);
  std::string describe() const override { return inner_->describe(); }

  // Ends the connection as a fault: after what was sent so far is delivered, or at once.
  void cut(bool after_delivery) ABSL_LOCKS_EXCLUDED(mutex_);
  // The inner connection is lost: adds what never reached it.
  void finish(Lost* lost) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Delayed {
    absl::Time due;
    Frame frame;
    bool until_other_lane = false;
  };
  struct LaneQueue {
    std::deque<Delayed> frames;
    bool flushing = false;
  };

  Status forward(Frame frame, int lane, absl::Duration delay, bool reorder)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Sends what is due on every lane.
  void flush(bool all) ABSL_LOCKS_EXCLUDED(mutex_);
  bool next_due_locked(bool all, int* lane, Frame* frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void arm_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<const FaultyShared> shared_;
  const std::shared_ptr<Connection> inner_;

  Mutex mutex_;
  std::map<int, LaneQueue> lanes_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Timer> timer_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> unsent_ ABSL_GUARDED_BY(mutex_);
  bool faulted_ ABSL_GUARDED_BY(mutex_) = false;  // a fault ended it
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

class FaultyHandler final : public ConnectionHandler {
 public:
  FaultyHandler(std::shared_ptr<const FaultyShared> shared,
                std::shared_ptr<ConnectionHandler> inner)
      : shared_(std::move(shared)), inner_(std::move(inner)) {}

  // REQUIRES: before the first frame.
  void set(std::shared_ptr<FaultyConnection> connection) { connection_ = std::move(connection); }
  void set_inner(std::shared_ptr<ConnectionHandler> inner) { inner_ = std::move(inner); }
  void on_frame(const FrameView& frame, int lane) override;
  void on_lost(Lost lost) override;

 private:
  const std::shared_ptr<const FaultyShared> shared_;
  std::shared_ptr<ConnectionHandler> inner_;
  // Until the end: this breaks the cycle (connection, handler of the user, connection).
  std::shared_ptr<FaultyConnection> connection_;
};

class FaultyAcceptor final : public Acceptor {
 public:
  FaultyAcceptor(std::shared_ptr<const FaultyShared> shared, std::shared_ptr<Acceptor> inner)
      : shared_(std::move(shared)), inner_(std::move(inner)) {}
  StatusOr<Hello> check_hello(const Hello& theirs) override;
  std::shared_ptr<ConnectionHandler> on_connection(std::shared_ptr<Connection> connection) override;

 private:
  const std::shared_ptr<const FaultyShared> shared_;
  const std::shared_ptr<Acceptor> inner_;
};

class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::shared_ptr<const FaultyShared> shared, std::unique_ptr<Transport> inner);
  ~FaultyTransport() override { shutdown(); }

  std::string name() const override { return "faulty+" + inner_->name(); }
  StatusOr<std::string> listen(const ListenOptions& options,
                               std::shared_ptr<Acceptor> acceptor) override;
  void connect(std::string_view address, const Hello& hello, absl::Time deadline,
               std::shared_ptr<ConnectionHandler> handler, DialDone done) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void shutdown() override ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::pair<std::string, int64_t>> counters() const override;

 private:
  // A dial that waits for a time before it goes on.
  struct Waiting {
    std::unique_ptr<Timer> timer;
    Task go_on;
    DialDone fail;
  };

  void dial(std::string address, const Hello& hello, absl::Time deadline,
            std::shared_ptr<ConnectionHandler> handler, DialDone done, bool fail_after);
  void wait_until(absl::Time when, Task go_on, DialDone fail) ABSL_LOCKS_EXCLUDED(mutex_);
  void go_on(uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<const FaultyShared> shared_;
  const std::unique_ptr<Transport> inner_;
  const std::shared_ptr<Executor> loop_;

  Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::shared_ptr<Waiting>> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_FAULTY_FAULTY_H_
