#ifndef WEFT_TRANSPORT_TLS_STREAM_H_
#define WEFT_TRANSPORT_TLS_STREAM_H_

// TlsStream: TLS 1.3 by OpenSSL on a stream socket that does not block. It reads into memory of the
// caller and writes from slices of the caller. The two sides prove who they are by certificates, or
// by a key that both know already (an external PSK of RFC 8446, with a fresh key exchange).
//
//   auto tls = *TlsStream::with_key(fd, TlsRole::kClient, key);
//   StatusOr<TlsState> state = tls->handshake();        // again when the socket is ready, until
//   kDone StatusOr<TlsMoved> in = tls->read(tensor_bytes);    // in->bytes of them are there
//   StatusOr<TlsMoved> out = tls->write({head, body});  // out->bytes of them were taken
//
// A state says what to wait for. An error is final: the stream is not used again. Its kinds:
//   permission   handshake: the other side does not prove the expected identity, or does not trust
//                our certificate
//   protocol     bytes that are not TLS, or were changed, left out, repeated or moved
//   unavailable  the socket is broken, or ended without TLS's own end (TLS-2)
//
// Invariants:
//   TLS-1  no byte is handed out before the tag of its record was checked, and none before the
//          handshake has proved the other side.
//   TLS-2  kEnded is the other side's word (close_notify). An end of the socket without it is an
//          error: the stream was cut.
//   TLS-3  no key seals more than `key_bytes` bytes: then the sender changes to the next (RFC 8446,
//          4.6.3 and 5.5).
//
// Threads: handshake() belongs to one thread. After it one thread may read while another one
// writes, flushes or closes; the socket's system calls are made outside of the lock that the two
// share.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/transport/checked_credentials.h"
#include "weft/transport/credentials.h"

struct bio_method_st;
struct ssl_ctx_st;
struct ssl_st;

namespace weft::internal {

enum class TlsRole { kClient, kServer };

enum class TlsState {
  kDone,       // all of it, or as much as was asked for
  kWantRead,   // the socket has nothing now
  kWantWrite,  // the socket takes nothing now; what is pending() waits
  kEnded,      // reading: the other side has said that nothing follows
};

struct TlsMoved {
  size_t bytes = 0;         // of the caller's
  size_t socket_bytes = 0;  // that were read from the socket for it
  TlsState state = TlsState::kDone;
};

inline constexpr size_t kTlsKeyBytes = 32;
// The most that a record holds.
inline constexpr size_t kTlsRecordText = 16u << 10;
// AES-GCM: 2^24.5 full records by RFC 8446; this is 2^22.
inline constexpr uint64_t kTlsKeyUpdateBytes = uint64_t{64} << 30;

// From the system's generator. Error, kind resource: it has none to give.
WEFT_API StatusOr<std::string> random_tls_key();

// Certificates, key and authorities as the files held them at load(). Constant; any thread.
class WEFT_API TlsCertificates {
 public:
  // Errors: see check_credentials().
  static StatusOr<std::shared_ptr<const TlsCertificates>> load(const Credentials& credentials,
                                                               Runtime& runtime);
  ~TlsCertificates();
  TlsCertificates(const TlsCertificates&) = delete;
  TlsCertificates& operator=(const TlsCertificates&) = delete;

 private:
  friend class TlsStream;
  explicit TlsCertificates(ssl_ctx_st* context) : context_(context) {}
  ssl_ctx_st* const context_;
};

class WEFT_API TlsStream {
 public:
  // `fd` outlives the stream. `key`: kTlsKeyBytes random bytes that only the two sides know.
  // Errors: invalid_argument, the key has another size; resource, OpenSSL has no memory.
  static StatusOr<std::unique_ptr<TlsStream>> with_key(int fd, TlsRole role, std::string_view key,
                                                       uint64_t key_bytes = kTlsKeyUpdateBytes);
  // Both sides have certificates. The caller must check the names in the peer's, see peer().
  static StatusOr<std::unique_ptr<TlsStream>> with_certificates(
      int fd, TlsRole role, const std::shared_ptr<const TlsCertificates>& certificates,
      uint64_t key_bytes = kTlsKeyUpdateBytes);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // REQUIRES for all below: kDone was returned. A server that does not trust the client's
  // certificate says so only then: the client's first read() fails.
  StatusOr<TlsState> handshake() ABSL_LOCKS_EXCLUDED(mutex_);
  // The names in the peer's certificate; empty with a key.
  const std::vector<Identity>& peer() const { return peer_; }

  // Reads until `to` is full, the socket is empty, or `socket_bytes` were read from it. What was
  // read from the socket and not asked for is kept: the socket does not become ready for it, so
  // a caller that stops before kWantRead must call again.
  StatusOr<TlsMoved> read(absl::Span<char> to, size_t socket_bytes = SIZE_MAX)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes bytes from the pieces, in order, until all are taken or the socket takes no more. Small
  // pieces share records; what was taken may be changed by the caller.
  StatusOr<TlsMoved> write(absl::Span<const std::string_view> pieces) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether sealed bytes wait for the socket: flush(), when it is ready.
  bool pending() const ABSL_LOCKS_EXCLUDED(mutex_);
  StatusOr<TlsState> flush() ABSL_LOCKS_EXCLUDED(mutex_);
  // Says that nothing follows, once, and flushes. Reading goes on.
  StatusOr<TlsState> close() ABSL_LOCKS_EXCLUDED(mutex_);

  // How often our key was changed.
  int64_t key_updates() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Callbacks;

  TlsStream(int fd, TlsRole role, uint64_t key_bytes);

  Status begin(ssl_ctx_st* context) ABSL_LOCKS_EXCLUDED(mutex_);
  Status learn_peer_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One record. REQUIRES: there is room for it.
  Status seal_locked(std::string_view text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool room_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Seals from `*at` of `*piece` on while there is room, and moves them; how many bytes it took.
  StatusOr<size_t> seal_some(absl::Span<const std::string_view> pieces, size_t* piece, size_t* at)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // What OpenSSL says of the last call, as an error; tells the peer of it if it can be told at
  // once.
  Status failure_locked(std::string_view what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // At most `most` bytes from the socket to in_, which has room for them: how many; 0: none now.
  // REQUIRES: in_ was used up.
  StatusOr<size_t> receive(size_t most) ABSL_LOCKS_EXCLUDED(mutex_);

  const int fd_;
  const TlsRole role_;
  const uint64_t key_bytes_;
  std::vector<Identity> peer_;  // constant after the handshake
  // The reader's: bytes of the socket that OpenSSL has not taken, from in_begin_ to in_end_.
  const std::unique_ptr<char[]> in_;
  size_t in_begin_ = 0;
  size_t in_end_ = 0;
  // The writer's: small pieces on their way into one record.
  const std::unique_ptr<char[]> gather_;

  mutable Mutex mutex_;
  bio_method_st* method_ ABSL_GUARDED_BY(mutex_) = nullptr;
  ssl_st* ssl_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;  // within a call that may take from in_
  std::string key_ ABSL_GUARDED_BY(mutex_);       // wiped after the handshake
  bool up_ ABSL_GUARDED_BY(mutex_) = false;
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  // Sealed bytes from out_begin_ to out_end_. The thread that sends them releases the lock for it:
  // bytes may be added behind, and only that thread moves out_begin_.
  const std::unique_ptr<char[]> out_;
  size_t out_begin_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t out_end_ ABSL_GUARDED_BY(mutex_) = 0;
  bool sending_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t sealed_ ABSL_GUARDED_BY(mutex_) = 0;  // by the key of now
  int64_t key_updates_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_TLS_STREAM_H_
