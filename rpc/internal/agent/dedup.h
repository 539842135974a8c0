#ifndef WEFT_RPC_INTERNAL_AGENT_DEDUP_H_
#define WEFT_RPC_INTERNAL_AGENT_DEDUP_H_

// CallWindow: at-most-once execution at the callee, for one incarnation of a caller. KeptAnswers:
// what bounds the answers in all windows of a worker.
//
//   CALL-2  begin() says kNew exactly once per call id.
//   KEEP-1  the answer of a finished call is kept until the caller says that it has it
//           (acked_below), within a bound of bytes per caller and one for all callers. When there
//           is no room, the caller that has been idle for the longest time loses its oldest answer
//           first, and the next one. The fact remains that the call ran: when it is repeated, its
//           caller is told so, and that its answer is gone.
//   KEEP-2  a kept answer takes nothing of the send budgets: they count what is on its way. What is
//           sent again from a window stays charged here until it has left.
//   KEEP-3  facts are bounded, too: a caller that acknowledges nothing is refused new calls.
//
// Not synchronised: the agent's mutex, but for the bytes, which are given back on any thread.

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/byte_budget.h"
#include "weft/rpc/internal/agent/attachments.h"
#include "weft/rpc/internal/agent/message.h"

namespace weft::internal {

// An answer, ready to be sent again.
struct Answer {
  FrameKind kind = FrameKind::kResponse;
  uint32_t code = 0;
  uint32_t error_kind = 0;
  OutMessageRef message;
  v1::ErrorHeader::Reach reach = v1::ErrorHeader::UNKNOWN;  // of an error
  AttachmentsRef attachments{};                             // of a response; null: none
};

class CallWindow;

class WEFT_API KeptAnswers {
 public:
  // In bytes: of all callers together, and of one.
  KeptAnswers(uint64_t limit, uint64_t limit_per_caller);

  uint64_t bytes() const { return budget_->used(); }

 private:
  friend class CallWindow;
  // Drops one answer. False: there is none.
  bool drop_one(std::vector<Answer>* dropped);

  const uint64_t limit_per_caller_;
  // Shared with answers that are being sent again, which may outlive the agent.
  const std::shared_ptr<ByteBudget> budget_;
  std::list<CallWindow*> callers_;  // those that have answers here, the longest idle first
};

class WEFT_API CallWindow {
 public:
  enum class Seen { kNew, kRunning, kAnswered, kAnswerDropped, kForgotten, kTooMany };

  // The most calls whose answers were dropped before they were acknowledged.
  static constexpr size_t kMostFacts = 1 << 20;

  // `kept` outlives the window.
  explicit CallWindow(KeptAnswers* kept, size_t most_facts = kMostFacts)
      : kept_(*kept), most_facts_(most_facts) {}
  ~CallWindow() { close(); }
  CallWindow(const CallWindow&) = delete;
  CallWindow& operator=(const CallWindow&) = delete;

  // `answer` is filled for kAnswered; its message holds its bytes of the budget.
  Seen begin(uint64_t call_id, Answer* answer);
  // `dropped` gets the answers that are kept no longer: they, and what is attached to them, are to
  // be destroyed without the mutex.
  void finish(uint64_t call_id, const Answer& answer, std::vector<Answer>* dropped);
  // Every call below is complete at the caller.
  void ack_below(uint64_t call_id, std::vector<Answer>* dropped);
  // The caller is gone: nothing here counts any more. The answers go with the window.
  void close();

  size_t answers() const { return answered_.size(); }
  size_t calls() const { return running_.size() + answered_.size() + facts_.size(); }
  size_t bytes() const { return bytes_; }

 private:
  friend class KeptAnswers;
  struct Kept {
    Answer answer;
    uint64_t bytes = 0;
    std::shared_ptr<const void> charge;
  };
  // With its bytes, which are free then unless it is being sent again.
  void drop(std::map<uint64_t, Kept>::iterator it, std::vector<Answer>* dropped);
  void drop_oldest(std::vector<Answer>* dropped);
  void unlist_if_empty();

  KeptAnswers& kept_;
  const size_t most_facts_;
  std::set<uint64_t> running_;
  std::map<uint64_t, Kept> answered_;
  std::set<uint64_t> facts_;  // calls that have run, without their answers
  uint64_t acked_below_ = 0;
  uint64_t bytes_ = 0;
  bool listed_ = false;
  std::list<CallWindow*>::iterator place_;
};

// The same message, which keeps `held` as long as it is held by this reference.
WEFT_API OutMessageRef holding(const OutMessageRef& message, std::shared_ptr<const void> held);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_DEDUP_H_
