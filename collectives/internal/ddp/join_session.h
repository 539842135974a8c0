#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_JOIN_SESSION_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_JOIN_SESSION_H_

// What takes part in a Join, and how ranks say what they do next.
//
// Invariants (cited by tests):
//   JOIN-1  each operation that a part issues under a Join stands between two announcements, in
//           which every rank takes part; so a rank without batches knows which one it is to answer.
//   JOIN-2  announcements are numbered alike on all ranks, and all ranks know of each which ranks
//           had batches; so they agree on who was last.
//
// Threads: announce() and settle() from anywhere, in the order of the group's operations.

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/ddp/join.h"
#include "weft/collectives/process_group.h"
#include "weft/collectives/work.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"

namespace weft::internal {

// What a part does next.
enum class JoinStep : int64_t { kSyncBuffers, kReduce, kOptimize };

// The ranks that have batches, at one announcement.
struct JoinActive {
  int count = 0;
  int highest = 0;
};

class WEFT_API Joinable {
 public:
  virtual ~Joinable() = default;
  virtual const ProcessGroup& join_group() const = 0;
  // The session is empty when the Join is over. Throws, as Join's constructor does.
  virtual void set_join(std::shared_ptr<JoinSession> session, size_t index) = 0;
  virtual std::shared_ptr<JoinSession> join() const = 0;
  // Does what the ranks with batches do, without one.
  virtual void shadow(JoinStep step, const JoinActive& active) = 0;
  // What all ranks get from one that was among the last.
  virtual std::vector<at::Tensor> join_state() const = 0;
};

class WEFT_API JoinSession : public std::enable_shared_from_this<JoinSession> {
 public:
  struct Announcement {
    at::Tensor mine{};
    at::Tensor all{};
    Work work{};
    bool settled = false;
    JoinActive active{};
  };
  using AnnouncementRef = std::shared_ptr<Announcement>;

  JoinSession(std::vector<Joinable*> parts, const UnevenJoinOptions& options);

  // Begins to say that this part takes that step.
  AnnouncementRef announce(size_t part, JoinStep step);
  // Throws, and ends the group: the ranks take different steps; a rank has no batches left, with
  // throw_on_early_termination.
  JoinActive settle(const AnnouncementRef& one);

  const UnevenJoinOptions& options() const { return options_; }
  // A rank without batches needs the gradients: it steps a part of the parameters.
  bool needs_gradients() const { return parts_.size() > 1; }
  // Tells the parts. Throws what they throw, and then none is in it.
  void begin();
  void end();
  // As Join's.
  void wait();
  bool is_over() const { return over_; }
  ProcessGroup& group() { return group_; }

 private:
  AnnouncementRef announce_code(int64_t code);
  void settle_locked(Announcement* one) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string describe(int64_t code) const;
  int last_rank() const;

  const std::vector<Joinable*> parts_;
  const UnevenJoinOptions options_;
  ProcessGroup group_;
  bool over_ = false;
  Mutex mutex_;
  std::deque<AnnouncementRef> unsettled_ ABSL_GUARDED_BY(mutex_);
  int64_t settled_ ABSL_GUARDED_BY(mutex_) = 0;
  // By rank: the number of the last announcement at which it had batches.
  std::vector<int64_t> last_active_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_JOIN_SESSION_H_
