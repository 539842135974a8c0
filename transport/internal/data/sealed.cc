#include "weft/transport/internal/data/sealed.h"

#include <openssl/evp.h>
#include <openssl/rand.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"

namespace weft::internal {
namespace {

constexpr size_t kNonceBytes = 12;

WEFT_COLD Status cipher_failed(std::string_view what) {
  return make_error(ErrorKind::kInternal, absl::StrCat("AES-128-GCM: ", view(what), " failed"));
}

unsigned char* bytes(char* p) { return reinterpret_cast<unsigned char*>(p); }
const unsigned char* bytes(const char* p) { return reinterpret_cast<const unsigned char*>(p); }

}  // namespace

StatusOr<std::string> random_seal_key() {
  std::string key(kSealKeyBytes, '\0');
  if (RAND_priv_bytes(bytes(key.data()), static_cast<int>(key.size())) != 1) {
    return make_error(ErrorKind::kResource, "the system has no random bytes for a key");
  }
  return key;
}

SealContext::SealContext() : context_(EVP_CIPHER_CTX_new()) {}
// Wipes the key, too.
SealContext::~SealContext() { EVP_CIPHER_CTX_free(context_); }

Status SealContext::set_key(std::string_view key, bool enciphers) {
  if (key.size() != kSealKeyBytes) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("a key of ", key.size(), " bytes, must be ", kSealKeyBytes));
  }
  enciphers_ = enciphers;
  // GCM's nonce has 12 bytes by default.
  if (context_ == nullptr ||
      EVP_CipherInit_ex(context_, EVP_aes_128_gcm(), nullptr, bytes(key.data()), nullptr,
                        enciphers ? 1 : 0) != 1) {
    return cipher_failed("taking the key");
  }
  return absl::OkStatus();
}

Status SealContext::begin_record(const char* head) {
  unsigned char nonce[kNonceBytes] = {};
  for (size_t i = 0; i < sizeof records_; ++i) {
    nonce[kNonceBytes - 1 - i] = static_cast<unsigned char>(records_ >> (8 * i));
  }
  ++records_;
  int n = 0;
  if (EVP_CipherInit_ex(context_, nullptr, nullptr, nullptr, nonce, enciphers_ ? 1 : 0) != 1 ||
      EVP_CipherUpdate(context_, nullptr, &n, bytes(head), kRecordHeadBytes) != 1) {
    return cipher_failed("beginning a record");
  }
  return absl::OkStatus();
}

StatusOr<std::unique_ptr<Sealer>> Sealer::make(std::string_view key) {
  auto sealer = std::make_unique<Sealer>();
  WEFT_RETURN_IF_ERROR(sealer->set_key(key, true));
  return sealer;
}

StatusOr<size_t> Sealer::seal(absl::Span<const std::string_view> pieces, char* out) {
  size_t text = 0;
  for (std::string_view piece : pieces) text += piece.size();
  for (size_t i = 0; i < kRecordHeadBytes; ++i) out[i] = static_cast<char>(text >> (8 * i));
  WEFT_RETURN_IF_ERROR(begin_record(out));
  char* at = out + kRecordHeadBytes;
  int n = 0;
  for (std::string_view piece : pieces) {
    if (EVP_CipherUpdate(context_, bytes(at), &n, bytes(piece.data()),
                         static_cast<int>(piece.size())) != 1) {
      return cipher_failed("sealing");
    }
    at += n;
  }
  if (EVP_CipherFinal_ex(context_, bytes(at), &n) != 1 ||
      EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_GCM_GET_TAG, kRecordTagBytes, at) != 1) {
    return cipher_failed("sealing");
  }
  return kRecordHeadBytes + text + kRecordTagBytes;
}

StatusOr<std::unique_ptr<Opener>> Opener::make(std::string_view key) {
  auto opener = std::make_unique<Opener>();
  WEFT_RETURN_IF_ERROR(opener->set_key(key, false));
  return opener;
}

StatusOr<size_t> Opener::text_bytes(std::string_view head) {
  size_t text = 0;
  for (size_t i = 0; i < kRecordHeadBytes; ++i) {
    text |= size_t{static_cast<unsigned char>(head[i])} << (8 * i);
  }
  if (text == 0 || text > kMaxRecordText) {
    return make_error(ErrorKind::kProtocol, absl::StrCat("a record of ", text, " bytes, 1 to ",
                                                         kMaxRecordText, " are allowed"));
  }
  return text;
}

Status Opener::open(std::string_view record, absl::Span<char> first, char* rest) {
  WEFT_RETURN_IF_ERROR(begin_record(record.data()));
  std::string_view text = record.substr(kRecordHeadBytes);
  text.remove_suffix(kRecordTagBytes);
  const std::string_view tag = record.substr(record.size() - kRecordTagBytes);
  int n = 0;
  const size_t k = std::min(first.size(), text.size());
  if ((k > 0 && EVP_CipherUpdate(context_, bytes(first.data()), &n, bytes(text.data()),
                                 static_cast<int>(k)) != 1) ||
      (k < text.size() && EVP_CipherUpdate(context_, bytes(rest), &n, bytes(text.data() + k),
                                           static_cast<int>(text.size() - k)) != 1) ||
      EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_GCM_SET_TAG, kRecordTagBytes,
                          const_cast<char*>(tag.data())) != 1) {
    return cipher_failed("opening a record");
  }
  unsigned char none[1];
  if (EVP_CipherFinal_ex(context_, none, &n) != 1) {
    return make_error(ErrorKind::kProtocol,
                      "a sealed record does not open: it was changed, left out, repeated, or is "
                      "from elsewhere");
  }
  return absl::OkStatus();
}

}  // namespace weft::internal
