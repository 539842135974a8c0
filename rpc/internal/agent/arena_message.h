#ifndef WEFT_RPC_INTERNAL_AGENT_ARENA_MESSAGE_H_
#define WEFT_RPC_INTERNAL_AGENT_ARENA_MESSAGE_H_

// A protobuf message together with the memory of its parts: a header with its layout and segments
// is then one allocation, or none on the stack, instead of one for each of them. A message that
// does not fit goes on from the heap.

#include <cstddef>

#include "google/protobuf/arena.h"

namespace weft::internal {

template <class Message>
class ArenaMessage {
 public:
  ArenaMessage()
      : arena_(block_, sizeof block_),
        message_(google::protobuf::Arena::CreateMessage<Message>(&arena_)) {}
  ArenaMessage(const ArenaMessage&) = delete;
  ArenaMessage& operator=(const ArenaMessage&) = delete;

  Message& operator*() { return *message_; }
  Message* operator->() { return message_; }
  Message* get() { return message_; }

 private:
  alignas(std::max_align_t) char block_[960];
  google::protobuf::Arena arena_;
  Message* const message_;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_ARENA_MESSAGE_H_
