#ifndef WEFT_RPC_INTERNAL_AGENT_MESSAGE_H_
#define WEFT_RPC_INTERNAL_AGENT_MESSAGE_H_

// Messages: between a Payload (value tree and tensors) and frames. proto/rpc.proto is the
// specification; this file is the only one that knows it besides the agent.
//
// Sending:   pack() once -> OutMessage -> send_message() on a connection, again on the next one if
//            the first breaks. No tensor byte is copied here.
// Receiving: Assembler, one per connection: header frame -> budget -> allocation -> chunks straight
//            into place -> Payload. Of a wide message (CALL-6) the header comes in chunks, too.
//
// An OutMessage is immutable once packed. An Assembler belongs to its connection's handler: lanes
// may call it at the same time.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/byte_budget.h"
#include "weft/common/config.h"
#include "weft/common/executor.h"
#include "weft/common/mutex.h"
#include "weft/proto/rpc.pb.h"
#include "weft/rpc/internal/agent/send_room.h"
#include "weft/rpc/internal/agent/tensor_meta.h"
#include "weft/rpc/payload.h"
#include "weft/transport/channel.h"
#include "weft/transport/frame.h"
#include "weft/transport/transport.h"

namespace weft::internal {

// Size of chunks on a data connection, where nothing small waits behind one.
inline constexpr size_t kDataChunkBytes = size_t{1} << 20;

// Protocol versions of a worker (Hello); 2 has wide messages, 3 has prompt lanes.
inline constexpr uint32_t kVersion = kPromptLaneVersion;
inline constexpr uint32_t kWideVersion = 2;
// All together, to a peer of version 1.
inline constexpr size_t kMaxMetadataBytesOfVersion1 = 16 << 10;
// Maximum length of the header of a wide message.
inline constexpr uint64_t kMaxWideHeaderBytes = uint64_t{1} << 30;

inline bool is_wide(const v1::Layout& layout) { return layout.wide_length() > 0; }

struct MessageLimits {
  MessageLimits() : MessageLimits(Config()) {}
  explicit MessageLimits(const Config& config)
      : inline_bytes(config.inline_bytes),
        chunk_bytes(config.chunk_bytes),
        max_message_bytes(config.max_message_bytes) {}
  size_t inline_bytes;  // a message up to this size is one frame
  size_t chunk_bytes;
  size_t max_message_bytes;
  size_t max_parked_bytes = 8 << 20;  // chunks that came before their header, per connection
};

// Held as a whole by each frame that carries a part of it.
struct OutMessage {
  OutMessage() = default;
  OutMessage(const OutMessage&) = delete;
  OutMessage& operator=(const OutMessage&) = delete;
  WEFT_API ~OutMessage();

  std::string body;  // segment 0: the value tree (or the error text)
  Buffers buffers;   // the segments after it
  std::string tensor_metas;
  size_t bytes = 0;
  // Buffers whose bytes are still on a device. Agent::stage() brings them to the host; before that
  // nothing of the message can be sent.
  std::vector<size_t> on_device;
  // What it takes of the worker's send budget, as long as it exists. Set by the agent, once.
  mutable SendCharge charge;
  // A buffer's memory is freed by code of the user's (at::from_blob), which is not to run on a
  // thread that serves others: it goes to this pool, set by the agent.
  bool foreign = false;
  std::weak_ptr<Executor> pool{};
  // Bytes of the metadata that goes with it. Set by the agent, once, before it is sent.
  mutable size_t riding = 0;

  // The header has at most so many bytes, what any header has aside.
  size_t header_bound() const {
    constexpr size_t kSegment = 40;  // with all of its fields
    return kSegment * segments() + tensor_metas.size() + riding;
  }
  // Whether its header may be larger than a frame's, and whether it is. Most are far from it.
  bool maybe_wide() const {
    constexpr size_t kRest = 8 << 10;
    return header_bound() > kMaxHeaderBytes - kRest;
  }
  bool is_wide() const { return 2 * segments() + tensor_metas.size() + riding > kMaxHeaderBytes; }
  // Goes by a bulk lane, as a rule.
  bool large(const MessageLimits& limits) const {
    return bytes > limits.inline_bytes || maybe_wide();
  }
  size_t segments() const { return 1 + buffers.size(); }
  std::string_view segment(size_t i) const {
    if (i == 0) return body;
    const at::Tensor& b = buffers[i - 1];
    return {static_cast<const char*>(b.const_data_ptr()), b.nbytes()};
  }
};
using OutMessageRef = std::shared_ptr<const OutMessage>;

// Whose the memory of a message's tensors is until they have left.
enum class TensorMemory : uint8_t {
  kBorrowed,     // the sender's, which writes nothing to it
  kCopied,       // the message's: copied now, holders of the tensors may change them immediately
  kOwned,        // the message's: copied now unless the payload alone holds it
  kOwnedOnHost,  // the same, but what is on a device is borrowed until it is staged
};
// `route`: where tensors belong that are not on the CPU; null for workers without device maps.
// `copies`: memory for large copies; may be null.
WEFT_API StatusOr<std::shared_ptr<OutMessage>> pack(Payload payload, TensorMemory memory,
                                                    const DeviceRoute* route = nullptr,
                                                    ReceiveMemory* copies = nullptr);
// Message, origin, trace and payload of an error, as the first segment.
OutMessageRef pack_error(const Status& error, std::string_view self);
// The error that came; `origin` is used when the sender did not name one.
WEFT_API Status unpack_error(uint32_t code, uint32_t kind, std::string_view body,
                             std::string_view origin);

// A refusal for lack of room that may have passed in a moment, marked so; and whether it is one.
WEFT_API Status no_room_now(const Status& refused);
WEFT_API bool is_no_room_now(const Status& error);

// Sends `message` under `header`, whose layout it fills in (Header: CallHeader, ResponseHeader or
// ErrorHeader). `transfers` gives transfer ids. A message that needs chunks goes over `bulk_lane`,
// as a whole and in order, one that does not over `small_lane`. An error means: not delivered, not as a whole.
template <class Header>
Status send_message(Connection* connection, FrameKind kind, Header* header,
                    const OutMessageRef& message, const MessageLimits& limits, uint64_t cookie,
                    std::atomic<uint64_t>* transfers, int bulk_lane = kBulkLane,
                    int small_lane = kControlLane);

// The call that a message belongs to. What is incomplete for long is given up with its call: that
// nothing of it comes tells nothing, since others may go before it on a slow line.
struct MessagePurpose {
  bool request = false;  // else an answer
  uint64_t call_id = 0;
  absl::Time deadline = absl::InfiniteFuture();  // of a request

  friend bool operator<(const MessagePurpose& a, const MessagePurpose& b) {
    return std::pair(a.request, a.call_id) < std::pair(b.request, b.call_id);
  }
};

class WEFT_API Assembler {
 public:
  // What the message is for, so that a refusal can be told to the right call.
  using Delivered = std::function<void(StatusOr<Payload>)>;
  // What the header of a wide message says. An error is a violation of the protocol.
  struct Opened {
    std::unique_ptr<v1::Layout> layout;
    Delivered delivered;
  };
  using Open = std::function<StatusOr<Opened>(std::string_view header)>;
  using Purpose = MessagePurpose;

  // `memory` may be null: then every tensor is from LibTorch's allocator.
  Assembler(const MessageLimits& limits, ByteBudget* budget,
            std::shared_ptr<ReceiveMemory> memory = nullptr)
      : limits_(limits), budget_(budget), memory_(std::move(memory)) {}
  // What is delivered keeps its bytes charged (Payload::charge), and the budget alive.
  Assembler(const MessageLimits& limits, std::shared_ptr<ByteBudget> budget,
            std::shared_ptr<ReceiveMemory> memory)
      : Assembler(limits, budget.get(), std::move(memory)) {
    shared_budget_ = std::move(budget);
  }

  // A header frame with `layout`. Calls `delivered` once: now, or when the last chunk is there, or
  // with kind resource when the message is refused (its chunks are then discarded). An error return
  // is a violation of the protocol: the connection must go.
  // `connection`: where it came from, and what its sender placed can be borrowed.
  Status begin(const v1::Layout& layout, const FrameView& frame, Connection* connection,
               Delivered delivered, const Purpose& purpose = {});
  // A header frame that stands for a header which comes as a transfer. When that is there, `open`
  // reads it, once, and what it gives is told what becomes of the message; `delivered` is told of
  // what becomes of it before that. Errors as of begin().
  Status begin_wide(const v1::Layout& layout, const FrameView& frame, Connection* connection,
                    Open open, Delivered delivered, const Purpose& purpose = {})
      ABSL_LOCKS_EXCLUDED(mutex_);
  Status on_chunk(const FrameView& frame) ABSL_LOCKS_EXCLUDED(mutex_);
  // Where a chunk of `bytes` belongs, for a transport that reads it to there by itself; then
  // chunk_filled() must follow, and until then no other chunk of its transfer is taken. Null: it is
  // not the one that is expected next, and on_chunk() is to judge it.
  ChunkTarget chunk_target(std::string_view header, size_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  Status chunk_filled(std::string_view header, size_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // The calls of the messages that are incomplete.
  std::set<Purpose> incomplete() ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops those of them that are still incomplete; their `delivered` gets the error.
  void give_up(const std::map<Purpose, Status>& over) ABSL_LOCKS_EXCLUDED(mutex_);
  // The connection is gone: drops what is incomplete without a word. A request will be sent again
  // or is given up by its caller; of a call whose answer was coming the agent decides (CALL-4).
  void abandon();

  size_t incomplete_for_test() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Incoming;
  using Metas = absl::InlinedVector<TensorMeta, 2>;
  using Places = std::vector<Borrowed>;  // by segment; null where it lies elsewhere
  struct Transfer {
    std::shared_ptr<Incoming> message;  // null: draining, chunks are discarded
    char* target = nullptr;
    uint64_t length = 0;
    uint64_t received = 0;
    uint64_t filling = 0;  // bytes that a transport is reading into place
    bool wide = false;
    // For a wide message: a chunk of it is being processed, without the mutex.
    bool busy = false;
  };
  struct Parked {
    std::string bytes;
    uint64_t offset = 0;
  };

  // `charge`: bytes for which memory will be allocated before they are here. `payload_bytes`: those
  // that lie beside the header.
  Status validate(const v1::Layout& layout, uint64_t payload_bytes, uint64_t* charge, Metas* metas);
  // The places of its segments, in the sender's arena.
  static StatusOr<Places> borrow_places(const v1::Layout& layout, Connection* connection);
  // A chunk of a wide message: `in` holds its bytes, or null: they are in place.
  Status take_wide(uint64_t id, uint64_t offset, uint64_t bytes, const FrameView* in)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Without the mutex, by the thread that set `busy`. `refused`: the message, not the connection.
  Status place_wide(Incoming* message, uint64_t offset, uint64_t bytes, const FrameView* in,
                    Status* refused);
  Status open_wide(Incoming* message, Status* refused);
  Status fill_buffers(const v1::Layout& layout, Places places, Incoming* message);
  Status take_locked(uint64_t id, uint64_t offset, const FrameView* frame, std::string_view bytes,
                     std::shared_ptr<Incoming>* complete) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Chunks that came before the header of their message.
  Status take_parked_locked(const v1::Layout& layout, std::shared_ptr<Incoming>* complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // So many bytes more of the transfer are in place.
  void took_locked(uint64_t id, uint64_t bytes, std::shared_ptr<Incoming>* complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void finish(const std::shared_ptr<Incoming>& message);

  const MessageLimits limits_;
  ByteBudget* const budget_;
  std::shared_ptr<ByteBudget> shared_budget_;  // null: what is delivered is charged no more
  const std::shared_ptr<ReceiveMemory> memory_;
  Mutex mutex_;
  std::map<uint64_t, Transfer> transfers_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::vector<Parked>> parked_ ABSL_GUARDED_BY(mutex_);
  size_t parked_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t max_announced_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The fixed header of a chunk frame: transfer id and offset, little endian.
inline constexpr size_t kChunkHeaderBytes = 16;
WEFT_API std::string encode_chunk_header(uint64_t transfer_id, uint64_t offset);
WEFT_API Status decode_chunk_header(std::string_view header, uint64_t* transfer_id,
                                    uint64_t* offset);

// ---- implementation of the template ------------------------------------------------------------

// The size of a message's chunks on this connection.
size_t fitting_chunk(const MessageLimits& limits, const Hello& peer);
WEFT_API Status check_size(const OutMessage& message, const MessageLimits& limits);
// `transfers`: null for a wide message, whose segments need none.
WEFT_API void plan_layout(Connection* connection, const OutMessage& message,
                          const MessageLimits& limits, v1::Layout* layout,
                          std::atomic<uint64_t>* transfers);
// Gives back the places of a message that is not sent after all.
WEFT_API void unplace_all(Connection* connection, const v1::Layout& layout);
WEFT_API Status send_frames(Connection* connection, FrameKind kind, std::string header,
                            const v1::Layout& layout, const OutMessageRef& message,
                            const MessageLimits& limits, uint64_t cookie, int bulk_lane,
                            int small_lane);

// Whether a header of so many bytes, and what rides in it, may go as a frame's.
WEFT_API bool fits_frame(const Connection& connection, size_t header_bytes,
                         const OutMessage& message);
WEFT_API Status check_takes_wide(const Connection& connection, const OutMessage& message);
WEFT_API Status check_wide_size(size_t header_bytes, const OutMessage& message,
                                const MessageLimits& limits);
// What stands for a header in the frame of a wide message.
WEFT_API void put_brief(const v1::CallHeader& header, v1::CallHeader* out);
void put_brief(const v1::ResponseHeader& header, v1::ResponseHeader* out);
void put_brief(const v1::ErrorHeader& header, v1::ErrorHeader* out);
// The transfer of a wide message: slices of `message`, small ones gathered.
struct WideStream {
  std::vector<Slice> pieces;
  uint64_t length = 0;
};
WEFT_API WideStream make_stream(std::string header, const v1::Layout& layout,
                                const OutMessageRef& message);
// `begun`: the peer may have been told something.
WEFT_API Status send_stream(Connection* connection, FrameKind kind, std::string brief,
                            uint64_t transfer, WideStream stream, const MessageLimits& limits,
                            uint64_t cookie, int bulk_lane, bool* begun);

template <class Header>
Status send_wide(Connection* connection, FrameKind kind, Header* header,
                 const OutMessageRef& message, const MessageLimits& limits, uint64_t cookie,
                 std::atomic<uint64_t>* transfers, int bulk_lane) {
  WEFT_RETURN_IF_ERROR(check_takes_wide(*connection, *message));
  plan_layout(connection, *message, limits, header->mutable_layout(), nullptr);
  const size_t bytes = header->ByteSizeLong();
  Status sent = check_wide_size(bytes, *message, limits);
  bool begun = false;
  if (sent.ok()) {
    Header brief;
    put_brief(*header, &brief);
    v1::Layout* const wide = brief.mutable_layout();
    wide->set_wide_header_length(bytes);
    WideStream stream = make_stream(header->SerializeAsString(), header->layout(), message);
    wide->set_wide_length(stream.length);
    wide->set_wide_transfer(transfers->fetch_add(1, std::memory_order_relaxed) + 1);
    sent = send_stream(connection, kind, brief.SerializeAsString(), wide->wide_transfer(),
                       std::move(stream), limits, cookie, bulk_lane, &begun);
  }
  if (!sent.ok() && !begun) unplace_all(connection, header->layout());
  return sent;
}

template <class Header>
Status send_message(Connection* connection, FrameKind kind, Header* header,
                    const OutMessageRef& message, const MessageLimits& limits, uint64_t cookie,
                    std::atomic<uint64_t>* transfers, int bulk_lane, int small_lane) {
  // First: planning copies what goes through an arena.
  WEFT_RETURN_IF_ERROR(check_size(*message, limits));
  if (!message->is_wide()) {
    plan_layout(connection, *message, limits, header->mutable_layout(), transfers);
    std::string bytes = header->SerializeAsString();
    if (fits_frame(*connection, bytes.size(), *message)) {
      return send_frames(connection, kind, std::move(bytes), header->layout(), message, limits,
                         cookie, bulk_lane, small_lane);
    }
    unplace_all(connection, header->layout());
  }
  return send_wide(connection, kind, header, message, limits, cookie, transfers, bulk_lane);
}

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_MESSAGE_H_
