#ifndef WEFT_TRANSPORT_INTERNAL_DATA_STREAM_READER_H_
#define WEFT_TRANSPORT_INTERNAL_DATA_STREAM_READER_H_

// StreamReader: frames out of a stream of bytes that arrives in any pieces. The payload of a chunk
// goes straight to where it belongs; every other frame is short and is put together here. The
// caller, which has the bytes, asks where they belong:
//
//   absl::Span<char> place = reader.direct();   // the rest of a payload, when one is under way
//   ... n bytes were put there:                 reader.advance(n);
//   ... bytes that were read somewhere else:    reader.feed(bytes);
//
// An error ends the stream: it is not called again. Memory: a header, and of a frame that does not
// say where it belongs what has come of its payload. One thread at a time.

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/transport/frame.h"
#include "weft/transport/transport.h"

namespace weft::internal {

// The receiver of the frames.
class StreamSink {
 public:
  // Where the payload of a chunk belongs; the place stays valid while its owner lives. Null:
  // stream_frame() gets the chunk as a whole.
  virtual ChunkTarget stream_target(std::string_view header, size_t bytes) = 0;
  // The bytes lie in the last target.
  virtual Status stream_filled(std::string_view header, size_t bytes) = 0;
  virtual Status stream_frame(const FrameView& frame) = 0;

 protected:
  ~StreamSink() = default;
};

class WEFT_API StreamReader {
 public:
  StreamReader(size_t max_frame_bytes, StreamSink* sink)
      : limits_{WireState::kOpen, max_frame_bytes}, sink_(sink) {}

  // Where the next bytes belong, if that is known; empty: feed() them.
  absl::Span<char> direct() {
    return target_.data != nullptr ? absl::MakeSpan(place_, left_) : absl::Span<char>();
  }
  // REQUIRES: n <= direct().size().
  Status advance(size_t n);
  Status feed(std::string_view bytes);
  // The peer has said that nothing follows: an end of the stream here cuts nothing off.
  bool ended() const { return ended_; }

 private:
  enum class Stage { kPrefix, kHeader, kPayload };

  // Moves bytes from `in` to head_ until there are `wanted`; true when they are all there.
  bool gather(size_t wanted, std::string_view* in);
  Status begin_payload();
  Status end_frame();

  const FrameLimits limits_;
  StreamSink* const sink_;
  Stage stage_ = Stage::kPrefix;
  std::string head_;  // the prefix, then the header
  FramePrefix prefix_;
  ChunkTarget target_;  // of the payload under way; null: it goes to payload_
  char* place_ = nullptr;
  size_t left_ = 0;
  std::string payload_;
  bool ended_ = false;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_DATA_STREAM_READER_H_
