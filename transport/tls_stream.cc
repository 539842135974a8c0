#include "weft/transport/tls_stream.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/files.h"
#include "weft/common/internal/text.h"
#include "weft/common/posix.h"
#include "weft/transport/internal/openssl.h"

namespace weft::internal {
namespace {

// So much goes to the socket, and comes from it, at a time: 16 records. More is no faster, and one
// record at a time loses 10 % of the rate.
constexpr size_t kBatchBytes = 256u << 10;
// Around a record's text: head, tag and the inner type, and an update of the key before it.
constexpr size_t kRecordExtra = 256;
// Kept free for what OpenSSL says by itself: an alert, the handshake's messages.
constexpr size_t kOutReserve = 32u << 10;
constexpr size_t kOutBytes = kBatchBytes + kOutReserve;
// A piece of this size has records of its own; smaller ones are put together.
constexpr size_t kOwnRecord = 4096;
constexpr std::string_view kKeyIdentity = "weft";
// AES-128-GCM first: with a key it is the only one, since a key belongs to one suite.
constexpr char kKeySuite[] = "TLS_AES_128_GCM_SHA256";
constexpr char kSuites[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
constexpr unsigned char kKeySuiteId[] = {0x13, 0x01};

using ContextRef = std::unique_ptr<SSL_CTX, OpensslFree<SSL_CTX, SSL_CTX_free>>;

WEFT_COLD Status no_memory(std::string_view what) {
  ERR_clear_error();
  return make_error(ErrorKind::kResource, absl::StrCat("TLS: cannot make ", view(what)));
}
WEFT_COLD Status broken(int code) {
  return make_error(ErrorKind::kUnavailable, system_error(code));
}

unsigned char* bytes(char* p) { return reinterpret_cast<unsigned char*>(p); }
const unsigned char* bytes(const char* p) { return reinterpret_cast<const unsigned char*>(p); }

// TLS 1.3 alone, without sessions to come back to.
ContextRef make_context(const char* suites) {
  ContextRef context(SSL_CTX_new(TLS_method()));
  if (context == nullptr || SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context.get(), suites) != 1 ||
      SSL_CTX_set_num_tickets(context.get(), 0) != 1 ||
      // A key counts as a session, and one without a context is refused.
      SSL_CTX_set_session_id_context(context.get(), bytes(kKeyIdentity.data()),
                                     static_cast<unsigned>(kKeyIdentity.size())) != 1) {
    return nullptr;
  }
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  // With a key there are no authorities: a peer with a certificate instead of the key is refused.
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  return context;
}

// Whether this reason says that one side does not prove what it must.
bool is_refusal(int reason) {
  switch (reason) {
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
    case SSL_R_BINDER_DOES_NOT_VERIFY:
    case SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM:
    case SSL_R_NO_SHARED_CIPHER:
    case SSL_R_TLSV1_ALERT_DECRYPT_ERROR:
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
    case SSL_R_TLSV1_ALERT_ACCESS_DENIED:
    case SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE:
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
    case SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER:
    case SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED: return true;
    default: return false;
  }
}

// Calls `take` with each certificate of the text, which owns it.
template <class Take>
void each_certificate(const std::string& text, Take take) {
  const BioRef bio = memory_bio(text);
  while (X509* const cert = PEM_read_bio_X509(bio.get(), nullptr, no_passphrase, nullptr)) {
    take(CertRef(cert));
  }
  ERR_clear_error();
}

}  // namespace

StatusOr<std::string> random_tls_key() {
  std::string key(kTlsKeyBytes, '\0');
  if (RAND_priv_bytes(bytes(key.data()), static_cast<int>(key.size())) != 1) {
    return make_error(ErrorKind::kResource, "the system has no random bytes for a key");
  }
  return key;
}

// ---- certificates ------------------------------------------------------------------------------

StatusOr<std::shared_ptr<const TlsCertificates>> TlsCertificates::load(
    const Credentials& credentials, Runtime& runtime) {
  WEFT_RETURN_IF_ERROR(check_credentials(credentials, runtime).status());
  WEFT_ASSIGN_OR_RETURN(const std::string ca, runtime.files().read(credentials.ca_file));
  WEFT_ASSIGN_OR_RETURN(const std::string chain, runtime.files().read(credentials.cert_file));
  WEFT_ASSIGN_OR_RETURN(std::string key_text, runtime.files().read(credentials.key_file));
  const BioRef key_bio = memory_bio(key_text);
  const KeyRef key(PEM_read_bio_PrivateKey(key_bio.get(), nullptr, no_passphrase, nullptr));
  OPENSSL_cleanse(key_text.data(), key_text.size());
  ContextRef context = make_context(kSuites);
  if (context == nullptr) return no_memory("a context");
  X509_STORE* const store = SSL_CTX_get_cert_store(context.get());
  bool good = key != nullptr;
  each_certificate(ca, [&](CertRef cert) { good &= X509_STORE_add_cert(store, cert.get()) == 1; });
  bool first = true;
  each_certificate(chain, [&](CertRef cert) {
    good &= (first ? SSL_CTX_use_certificate(context.get(), cert.get())
                   : static_cast<int>(SSL_CTX_add1_chain_cert(context.get(), cert.get()))) == 1;
    first = false;
  });
  good = good && SSL_CTX_use_PrivateKey(context.get(), key.get()) == 1;
  ERR_clear_error();
  if (!good) {
    return make_error(
        ErrorKind::kUnavailable,
        absl::StrCat("credentials: '", credentials.cert_file, "' and '", credentials.key_file,
                     "' changed while they were read: try again"));
  }
  return std::shared_ptr<const TlsCertificates>(new TlsCertificates(context.release()));
}

TlsCertificates::~TlsCertificates() { SSL_CTX_free(context_); }

// ---- what OpenSSL calls ------------------------------------------------------------------------

// Within calls of OpenSSL, under the stream's lock.
struct TlsStream::Callbacks {
  static int read(BIO* bio, char* to, int size) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    auto* const tls = static_cast<TlsStream*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    const size_t n =
        std::min(static_cast<size_t>(std::max(size, 0)), tls->in_end_ - tls->in_begin_);
    // A writer has no business with what comes in.
    if (n == 0 || !tls->reading_) {
      BIO_set_retry_read(bio);
      return -1;
    }
    std::memcpy(to, tls->in_.get() + tls->in_begin_, n);
    tls->in_begin_ += n;
    return static_cast<int>(n);
  }
  static int write(BIO* bio, const char* from, int size) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    auto* const tls = static_cast<TlsStream*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    const size_t n = static_cast<size_t>(std::max(size, 0));
    if (n > kOutBytes - tls->out_end_) {
      BIO_set_retry_write(bio);
      return -1;
    }
    std::memcpy(tls->out_.get() + tls->out_end_, from, n);
    tls->out_end_ += n;
    return static_cast<int>(n);
  }
  // NOLINTNEXTLINE(google-runtime-int): OpenSSL's type
  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

  // The stream's key, as a session to take up again. Null: none is left.
  static SSL_SESSION* session(SSL* ssl) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto* const tls = static_cast<const TlsStream*>(SSL_get_app_data(ssl));
    const SSL_CIPHER* const suite = SSL_CIPHER_find(ssl, kKeySuiteId);
    SSL_SESSION* const out = SSL_SESSION_new();
    if (out != nullptr && suite != nullptr && !tls->key_.empty() &&
        SSL_SESSION_set1_master_key(out, bytes(tls->key_.data()), tls->key_.size()) == 1 &&
        SSL_SESSION_set1_id_context(out, bytes(kKeyIdentity.data()),
                                    static_cast<unsigned>(kKeyIdentity.size())) == 1 &&
        SSL_SESSION_set_cipher(out, suite) == 1 &&
        SSL_SESSION_set_protocol_version(out, TLS1_3_VERSION) == 1) {
      return out;
    }
    SSL_SESSION_free(out);
    return nullptr;
  }
  static int use_session(SSL* ssl, const EVP_MD* digest, const unsigned char** identity,
                         size_t* size, SSL_SESSION** out) {
    (void)digest;
    *identity = bytes(kKeyIdentity.data());
    *size = kKeyIdentity.size();
    *out = session(ssl);
    return *out != nullptr ? 1 : 0;
  }
  static int find_session(SSL* ssl, const unsigned char* identity, size_t size, SSL_SESSION** out) {
    const bool ours =
        std::string_view(reinterpret_cast<const char*>(identity), size) == kKeyIdentity;
    *out = ours ? session(ssl) : nullptr;
    return 1;
  }
};

// ---- making ------------------------------------------------------------------------------------

TlsStream::TlsStream(int fd, TlsRole role, uint64_t key_bytes)
    : fd_(fd),
      role_(role),
      key_bytes_(key_bytes),
      in_(new char[kBatchBytes]),
      gather_(new char[kTlsRecordText]),
      out_(new char[kOutBytes]) {}

TlsStream::~TlsStream() {
  MutexLock lock(&mutex_);
  SSL_free(ssl_);
  BIO_meth_free(method_);
  OPENSSL_cleanse(key_.data(), key_.size());
}

StatusOr<std::unique_ptr<TlsStream>> TlsStream::with_key(int fd, TlsRole role, std::string_view key,
                                                         uint64_t key_bytes) {
  if (key.size() != kTlsKeyBytes) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("TLS: a key of ", key.size(), " bytes, must be ", kTlsKeyBytes));
  }
  const ContextRef context = make_context(kKeySuite);
  if (context == nullptr) return no_memory("a context");
  SSL_CTX_set_psk_use_session_callback(context.get(), &Callbacks::use_session);
  SSL_CTX_set_psk_find_session_callback(context.get(), &Callbacks::find_session);
  std::unique_ptr<TlsStream> out(new TlsStream(fd, role, key_bytes));
  {
    MutexLock lock(&out->mutex_);
    out->key_ = std::string(key);
  }
  WEFT_RETURN_IF_ERROR(out->begin(context.get()));
  return out;
}

StatusOr<std::unique_ptr<TlsStream>> TlsStream::with_certificates(
    int fd, TlsRole role, const std::shared_ptr<const TlsCertificates>& certificates,
    uint64_t key_bytes) {
  std::unique_ptr<TlsStream> out(new TlsStream(fd, role, key_bytes));
  WEFT_RETURN_IF_ERROR(out->begin(certificates->context_));
  return out;
}

Status TlsStream::begin(ssl_ctx_st* context) {
  MutexLock lock(&mutex_);
  ssl_ = SSL_new(context);  // holds the context
  method_ = BIO_meth_new(BIO_TYPE_SOURCE_SINK, "weft");
  BIO* const bio = method_ == nullptr ? nullptr : BIO_new(method_);
  if (ssl_ == nullptr || bio == nullptr || SSL_set_app_data(ssl_, this) != 1) {
    BIO_free(bio);
    return no_memory("a stream");
  }
  BIO_meth_set_read(method_, &Callbacks::read);
  BIO_meth_set_write(method_, &Callbacks::write);
  BIO_meth_set_ctrl(method_, &Callbacks::control);
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_, bio, bio);
  if (role_ == TlsRole::kServer) {
    SSL_set_accept_state(ssl_);
  } else {
    SSL_set_connect_state(ssl_);
  }
  return absl::OkStatus();
}

// ---- the socket --------------------------------------------------------------------------------

Status TlsStream::failure_locked(std::string_view what) {
  const unsigned long code = ERR_peek_error();  // NOLINT(google-runtime-int): OpenSSL's type
  const int reason = ERR_GET_REASON(code);
  const char* const text = code == 0 ? nullptr : ERR_reason_error_string(code);
  const char* const why =
      SSL_get_verify_result(ssl_) != X509_V_OK && reason == SSL_R_CERTIFICATE_VERIFY_FAILED
          ? X509_verify_cert_error_string(SSL_get_verify_result(ssl_))
          : nullptr;
  const ErrorKind kind = is_refusal(reason) ? ErrorKind::kPermission : ErrorKind::kProtocol;
  std::string message =
      absl::StrCat("TLS: ", view(what), " failed: ", text == nullptr ? "no reason given" : text);
  if (why != nullptr) absl::StrAppend(&message, " (", why, ")");
  ERR_clear_error();
  failed_ = true;
  // The alert, so that the other side can say why. A socket that takes nothing now keeps it.
  if (!sending_ && out_begin_ < out_end_) {
    (void)!send(fd_, out_.get() + out_begin_, out_end_ - out_begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
    out_begin_ = out_end_ = 0;
  }
  return make_error(kind, message);
}

StatusOr<size_t> TlsStream::receive(size_t most) {
  in_begin_ = in_end_ = 0;
  while (true) {
    const ssize_t n = recv(fd_, in_.get(), most, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (n < 0) return broken(errno);
    if (n == 0) {
      return make_error(ErrorKind::kUnavailable,
                        "the stream was cut: its socket ended without a close_notify of TLS");
    }
    in_end_ = static_cast<size_t>(n);
    return in_end_;
  }
}

StatusOr<TlsState> TlsStream::flush() {
  while (true) {
    size_t begin;
    size_t end;
    {
      MutexLock lock(&mutex_);
      begin = out_begin_;
      end = out_end_;
      if (begin == end) return TlsState::kDone;
      sending_ = true;
    }
    const ssize_t n = send(fd_, out_.get() + begin, end - begin, MSG_NOSIGNAL | MSG_DONTWAIT);
    const int code = n < 0 ? errno : 0;
    MutexLock lock(&mutex_);
    sending_ = false;
    if (code == EINTR) continue;
    if (code == EAGAIN || code == EWOULDBLOCK) return TlsState::kWantWrite;
    if (code != 0) return broken(code);
    out_begin_ += static_cast<size_t>(n);
    if (out_begin_ == out_end_) out_begin_ = out_end_ = 0;
  }
}

bool TlsStream::pending() const {
  MutexLock lock(&mutex_);
  return out_begin_ < out_end_;
}

int64_t TlsStream::key_updates() const {
  MutexLock lock(&mutex_);
  return key_updates_;
}

// ---- the handshake -----------------------------------------------------------------------------

StatusOr<TlsState> TlsStream::handshake() {
  while (true) {
    int said = SSL_ERROR_NONE;
    {
      MutexLock lock(&mutex_);
      if (!up_) {
        ERR_clear_error();
        reading_ = true;
        const int done = SSL_do_handshake(ssl_);
        reading_ = false;
        said = done == 1 ? SSL_ERROR_NONE : SSL_get_error(ssl_, done);
        if (said != SSL_ERROR_NONE && said != SSL_ERROR_WANT_READ) {
          return failure_locked("the handshake");
        }
        if (done == 1) WEFT_RETURN_IF_ERROR(learn_peer_locked());
      }
    }
    WEFT_ASSIGN_OR_RETURN(const TlsState flushed, flush());
    if (flushed != TlsState::kDone || said == SSL_ERROR_NONE) return flushed;
    WEFT_ASSIGN_OR_RETURN(const size_t n, receive(kBatchBytes));
    if (n == 0) return TlsState::kWantRead;
  }
}

Status TlsStream::learn_peer_locked() {
  if (!key_.empty()) {
    OPENSSL_cleanse(key_.data(), key_.size());
    key_.clear();
    // OpenSSL would go on by certificates where a key is not known.
    if (SSL_session_reused(ssl_) != 1) {
      failed_ = true;
      return make_error(ErrorKind::kPermission, "TLS: the other side does not have the key");
    }
  } else {
    const CertRef certificate(SSL_get1_peer_certificate(ssl_));
    if (certificate == nullptr) {
      failed_ = true;
      return make_error(ErrorKind::kPermission, "TLS: the other side has no certificate");
    }
    peer_ = identities_of(certificate.get());
  }
  up_ = true;
  return absl::OkStatus();
}

// ---- reading -----------------------------------------------------------------------------------

StatusOr<TlsMoved> TlsStream::read(absl::Span<char> to, size_t socket_bytes) {
  TlsMoved out;
  bool drained = false;  // the socket gave less than it was asked for: it has no more now
  while (out.bytes < to.size()) {
    {
      MutexLock lock(&mutex_);
      if (failed_) return make_error(ErrorKind::kState, "TLS: the stream has failed before");
      ERR_clear_error();
      size_t n = 0;
      reading_ = true;
      const int done = SSL_read_ex(ssl_, to.data() + out.bytes, to.size() - out.bytes, &n);
      reading_ = false;
      if (done == 1) {
        out.bytes += n;
        continue;
      }
      const int said = SSL_get_error(ssl_, done);
      if (said == SSL_ERROR_ZERO_RETURN) {
        out.state = TlsState::kEnded;
        return out;
      }
      if (said != SSL_ERROR_WANT_READ) return failure_locked("reading");
    }
    // All that had come is used up.
    if (out.socket_bytes >= socket_bytes) return out;
    size_t n = 0;
    if (!drained) {
      const size_t most = std::min(socket_bytes - out.socket_bytes, kBatchBytes);
      WEFT_ASSIGN_OR_RETURN(n, receive(most));
      out.socket_bytes += n;
      drained = n < most;
    }
    if (n == 0) {
      out.state = TlsState::kWantRead;
      return out;
    }
  }
  return out;
}

// ---- writing -----------------------------------------------------------------------------------

bool TlsStream::room_locked() const {
  return kOutBytes - out_end_ >= kOutReserve + kTlsRecordText + kRecordExtra;
}

Status TlsStream::seal_locked(std::string_view text) {
  ERR_clear_error();
  if (sealed_ + text.size() > key_bytes_) {
    // TLS-3. It leaves before this record.
    if (SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) {
      return failure_locked("a change of the key");
    }
    sealed_ = 0;
    ++key_updates_;
  }
  size_t n = 0;
  // There is room, so it takes all of it: the text is at most one record.
  if (SSL_write_ex(ssl_, text.data(), text.size(), &n) != 1 || n != text.size()) {
    return failure_locked("writing");
  }
  sealed_ += n;
  return absl::OkStatus();
}

StatusOr<size_t> TlsStream::seal_some(absl::Span<const std::string_view> pieces, size_t* piece,
                                      size_t* at) {
  size_t taken = 0;
  while (*piece < pieces.size()) {
    std::string_view text = pieces[*piece].substr(*at);
    if (text.size() >= kOwnRecord) {
      text = text.substr(0, kTlsRecordText);
      *at += text.size();
    } else {
      // Small ones, up to a large one, a full record or the end.
      size_t n = 0;
      for (; *piece < pieces.size(); ++*piece, *at = 0) {
        text = pieces[*piece].substr(*at);
        if (text.size() >= kOwnRecord || text.size() > kTlsRecordText - n) break;
        std::memcpy(gather_.get() + n, text.data(), text.size());
        n += text.size();
      }
      text = {gather_.get(), n};
    }
    if (!text.empty()) {
      MutexLock lock(&mutex_);
      if (failed_ || closed_) {
        return make_error(ErrorKind::kState, closed_ ? "TLS: the stream was closed for writing"
                                                     : "TLS: the stream has failed before");
      }
      WEFT_RETURN_IF_ERROR(seal_locked(text));
      taken += text.size();
      if (!room_locked()) break;
    }
  }
  // A piece that was used up is behind.
  while (*piece < pieces.size() && *at == pieces[*piece].size()) ++*piece, *at = 0;
  return taken;
}

StatusOr<TlsMoved> TlsStream::write(absl::Span<const std::string_view> pieces) {
  TlsMoved out;
  size_t piece = 0;
  size_t at = 0;
  while (true) {
    WEFT_ASSIGN_OR_RETURN(out.state, flush());
    if (out.state != TlsState::kDone || piece == pieces.size()) return out;
    WEFT_ASSIGN_OR_RETURN(const size_t n, seal_some(pieces, &piece, &at));
    out.bytes += n;
  }
}

StatusOr<TlsState> TlsStream::close() {
  {
    MutexLock lock(&mutex_);
    if (failed_) return make_error(ErrorKind::kState, "TLS: the stream has failed before");
    if (!closed_) {
      closed_ = true;
      ERR_clear_error();
      if (SSL_shutdown(ssl_) < 0) return failure_locked("the end of writing");
    }
  }
  return flush();
}

}  // namespace weft::internal
