#ifndef WEFT_RPC_INTERNAL_DEDUP_H_
#define WEFT_RPC_INTERNAL_DEDUP_H_

// CallWindow: at-most-once execution at the callee, for one incarnation of a caller.
//
//   CALL-2  begin() says kNew exactly once per call id.
//
// The answer of a finished call is kept until the caller says that it has it (acked_below), within
// a bound of bytes; beyond it the oldest answers are dropped and only the fact remains, so a
// repeated request is then told that the call ran but its answer is gone. Not synchronised: the
// agent's mutex.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "weft/rpc/internal/attachments.h"
#include "weft/rpc/internal/message.h"

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

class CallWindow {
 public:
  enum class Seen { kNew, kRunning, kAnswered, kAnswerDropped, kForgotten };

  explicit CallWindow(size_t max_bytes) : max_bytes_(max_bytes) {}

  // `answer` is filled for kAnswered.
  Seen begin(uint64_t call_id, Answer* answer);
  // `dropped` gets what was attached to answers that are forgotten.
  void finish(uint64_t call_id, const Answer& answer, std::vector<AttachmentsRef>* dropped);
  // Every call below is complete at the caller.
  void ack_below(uint64_t call_id, std::vector<AttachmentsRef>* dropped);

  size_t size() const { return calls_.size(); }
  size_t bytes() const { return bytes_; }

 private:
  struct Entry {
    bool done = false;
    Answer answer;  // message null: dropped
  };
  const size_t max_bytes_;
  std::map<uint64_t, Entry> calls_;
  uint64_t acked_below_ = 0;
  size_t bytes_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEDUP_H_
