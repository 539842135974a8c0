#include "weft/rpc/internal/dedup.h"

#include <utility>

namespace weft::internal {

CallWindow::Seen CallWindow::begin(uint64_t call_id, Answer* answer) {
  if (call_id < acked_below_) return Seen::kForgotten;
  const auto [it, fresh] = calls_.try_emplace(call_id);
  if (fresh) return Seen::kNew;
  if (!it->second.done) return Seen::kRunning;
  if (it->second.answer.message == nullptr) return Seen::kAnswerDropped;
  *answer = it->second.answer;
  return Seen::kAnswered;
}

namespace {

void drop(AttachmentsRef attachments, std::vector<AttachmentsRef>* dropped) {
  if (attachments != nullptr) dropped->push_back(std::move(attachments));
}

}  // namespace

void CallWindow::finish(uint64_t call_id, const Answer& answer,
                        std::vector<AttachmentsRef>* dropped) {
  auto it = calls_.find(call_id);
  if (it == calls_.end()) return;  // acknowledged meanwhile: its caller gave up
  it->second.done = true;
  it->second.answer = answer;
  bytes_ += answer.message->bytes;
  for (auto oldest = calls_.begin(); bytes_ > max_bytes_ && oldest != calls_.end(); ++oldest) {
    if (oldest->second.answer.message == nullptr) continue;
    bytes_ -= oldest->second.answer.message->bytes;
    oldest->second.answer.message = nullptr;
    drop(std::move(oldest->second.answer.attachments), dropped);
  }
}

void CallWindow::ack_below(uint64_t call_id, std::vector<AttachmentsRef>* dropped) {
  if (call_id <= acked_below_) return;
  acked_below_ = call_id;
  while (!calls_.empty() && calls_.begin()->first < call_id) {
    Entry& entry = calls_.begin()->second;
    drop(std::move(entry.answer.attachments), dropped);
    if (entry.answer.message != nullptr) bytes_ -= entry.answer.message->bytes;
    calls_.erase(calls_.begin());
  }
}

}  // namespace weft::internal
