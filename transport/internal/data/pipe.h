#ifndef WEFT_TRANSPORT_INTERNAL_DATA_PIPE_H_
#define WEFT_TRANSPORT_INTERNAL_DATA_PIPE_H_

// The two directions of a data connection: frames into a socket that does not block, and out of it.
// As they are, or by TLS. Each object belongs to one thread at a time; the two of one
// socket may be used side by side.

#include <cstddef>
#include <deque>
#include <memory>
#include <string>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/transport/internal/data/stream_reader.h"
#include "weft/transport/tls_stream.h"
#include "weft/transport/transport.h"

namespace weft::internal {

enum class PipeState {
  kDone,     // nothing is left to do
  kBlocked,  // until the socket is ready again
  kEnded,    // reading: nothing follows
  kPaused,   // enough for one turn
};

// A frame on its way.
struct WEFT_API OutFrame {
  explicit OutFrame(Frame f);

  // What of it was handed on.
  bool begun() const { return sent > 0; }

  Frame frame;
  std::string head;  // prefix and header
  size_t bytes;      // of all of it
  size_t sent = 0;
};

class WEFT_API PipeWriter {
 public:
  virtual ~PipeWriter() = default;
  // Writes frames from the front and drops those that are out. Stops after `budget` bytes or so.
  virtual StatusOr<PipeState> write(std::deque<OutFrame>* frames, size_t budget) = 0;
  // Something was taken from the frames and is not out yet: write() must be called again, if only
  // with none.
  virtual bool pending() const { return false; }
};

class WEFT_API PipeReader {
 public:
  virtual ~PipeReader() = default;
  // kEnded: in good order, as the peer had said; otherwise an error, kind unavailable.
  virtual StatusOr<PipeState> read(StreamReader* to, size_t budget) = 0;
};

// `fd` outlives them. As they are.
WEFT_API std::unique_ptr<PipeWriter> make_pipe_writer(int fd);
WEFT_API std::unique_ptr<PipeReader> make_pipe_reader(int fd);
// Through a stream whose handshake is done. The frame data_end closes its direction of TLS, too.
WEFT_API std::unique_ptr<PipeWriter> make_pipe_writer(std::shared_ptr<TlsStream> tls);
WEFT_API std::unique_ptr<PipeReader> make_pipe_reader(std::shared_ptr<TlsStream> tls);

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_DATA_PIPE_H_
