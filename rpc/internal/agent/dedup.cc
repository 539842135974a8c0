#include "weft/rpc/internal/agent/dedup.h"

#include <utility>

namespace weft::internal {
namespace {

// What an answer takes besides its bytes, those of one without a value included.
constexpr uint64_t kAnswerBytes = 512;

uint64_t answer_bytes(const OutMessage& message) {
  return message.bytes + message.header_bound() + kAnswerBytes;
}

struct KeptCharge {
  KeptCharge(std::shared_ptr<ByteBudget> from, uint64_t n) : budget(std::move(from)), bytes(n) {}
  ~KeptCharge() { budget->release(bytes); }
  const std::shared_ptr<ByteBudget> budget;
  const uint64_t bytes;
};

}  // namespace

OutMessageRef holding(const OutMessageRef& message, std::shared_ptr<const void> held) {
  using Both = std::pair<OutMessageRef, std::shared_ptr<const void>>;
  const auto both = std::make_shared<Both>(message, std::move(held));
  return OutMessageRef(both, both->first.get());
}

KeptAnswers::KeptAnswers(uint64_t limit, uint64_t limit_per_caller)
    : limit_per_caller_(limit_per_caller),
      budget_(std::make_shared<ByteBudget>(limit, "answers kept for calls that are at most once")) {
}

bool KeptAnswers::drop_one(std::vector<Answer>* dropped) {
  if (callers_.empty()) return false;
  callers_.front()->drop_oldest(dropped);
  return true;
}

CallWindow::Seen CallWindow::begin(uint64_t call_id, Answer* answer) {
  if (call_id < acked_below_) return Seen::kForgotten;
  if (listed_) kept_.callers_.splice(kept_.callers_.end(), kept_.callers_, place_);
  if (const auto it = answered_.find(call_id); it != answered_.end()) {
    *answer = it->second.answer;
    answer->message = holding(answer->message, it->second.charge);
    return Seen::kAnswered;
  }
  if (facts_.count(call_id) > 0) return Seen::kAnswerDropped;
  if (running_.count(call_id) > 0) return Seen::kRunning;
  if (facts_.size() >= most_facts_) return Seen::kTooMany;
  running_.insert(call_id);
  return Seen::kNew;
}

void CallWindow::finish(uint64_t call_id, const Answer& answer, std::vector<Answer>* dropped) {
  if (running_.erase(call_id) == 0) return;  // acknowledged meanwhile: its caller gave up
  const uint64_t bytes = answer_bytes(*answer.message);
  bool room = bytes <= kept_.limit_per_caller_ && kept_.budget_->may_fit(bytes);
  while (room && bytes_ + bytes > kept_.limit_per_caller_) drop_oldest(dropped);
  while (room && !kept_.budget_->charge(bytes).ok()) room = kept_.drop_one(dropped);
  if (!room) {
    facts_.insert(call_id);
    return;
  }
  bytes_ += bytes;
  answered_.emplace(call_id,
                    Kept{answer, bytes, std::make_shared<KeptCharge>(kept_.budget_, bytes)});
  if (!listed_) place_ = kept_.callers_.insert(kept_.callers_.end(), this);
  listed_ = true;
}

void CallWindow::ack_below(uint64_t call_id, std::vector<Answer>* dropped) {
  if (call_id <= acked_below_) return;
  acked_below_ = call_id;
  while (!answered_.empty() && answered_.begin()->first < call_id) {
    drop(answered_.begin(), dropped);
  }
  running_.erase(running_.begin(), running_.lower_bound(call_id));
  facts_.erase(facts_.begin(), facts_.lower_bound(call_id));
  unlist_if_empty();
}

void CallWindow::close() {
  for (auto& [id, kept] : answered_) kept.charge = nullptr;
  bytes_ = 0;
  if (listed_) kept_.callers_.erase(place_);
  listed_ = false;
}

void CallWindow::drop(std::map<uint64_t, Kept>::iterator it, std::vector<Answer>* dropped) {
  bytes_ -= it->second.bytes;
  it->second.charge = nullptr;
  dropped->push_back(std::move(it->second.answer));
  answered_.erase(it);
}

void CallWindow::drop_oldest(std::vector<Answer>* dropped) {
  facts_.insert(answered_.begin()->first);
  drop(answered_.begin(), dropped);
  unlist_if_empty();
}

void CallWindow::unlist_if_empty() {
  if (!listed_ || !answered_.empty()) return;
  kept_.callers_.erase(place_);
  listed_ = false;
}

}  // namespace weft::internal
