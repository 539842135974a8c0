#ifndef WEFT_TRANSPORT_INTERNAL_DATA_SEALED_H_
#define WEFT_TRANSPORT_INTERNAL_DATA_SEALED_H_

// Records: what goes over a data connection between workers with credentials. The two have a TLS
// connection already, the control lane, on which each knows who the other is. Over it the acceptor
// sends a fresh random key for each direction of each data connection, and on that every record is
// sealed with AES-128-GCM (NIST SP 800-38D):
//
//   offset  size  field
//   0       4     length of the text, 1 to kMaxRecordText, little endian; authenticated
//   4       n     the text, enciphered
//   4+n     16    tag
//
// The nonce is the number of the record in its direction, from 0: no key is ever used with the same
// nonce twice, and a record that is left out, repeated, moved or from elsewhere does not open
// (SEAL-1); a stream that is cut lacks its data_end. No byte of a record is interpreted before its
// tag was checked (SEAL-2). Keys live as long as their connection, and are wiped.
//
// One thread at a time for each object.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

struct evp_cipher_ctx_st;

namespace weft::internal {

inline constexpr size_t kSealKeyBytes = 16;
inline constexpr size_t kMaxRecordText = 128u << 10;
inline constexpr size_t kRecordHeadBytes = 4;
inline constexpr size_t kRecordTagBytes = 16;
inline constexpr size_t kMaxRecordBytes = kRecordHeadBytes + kMaxRecordText + kRecordTagBytes;

// From the system's generator. Error, kind resource: it has none to give.
WEFT_API StatusOr<std::string> random_seal_key();

class WEFT_API SealContext {
 public:
  virtual ~SealContext();

 protected:
  SealContext();
  // `enciphers`: which direction. REQUIRES: called once.
  Status set_key(std::string_view key, bool enciphers);
  Status begin_record(const char* head);

  evp_cipher_ctx_st* const context_;

 private:
  bool enciphers_ = false;
  uint64_t records_ = 0;
};

class WEFT_API Sealer : public SealContext {
 public:
  // Error, kind internal: the key has not kSealKeyBytes, or there is no such cipher.
  static StatusOr<std::unique_ptr<Sealer>> make(std::string_view key);

  // One record whose text is `pieces` in order, at most kMaxRecordText bytes together. Writes
  // kRecordHeadBytes + text + kRecordTagBytes at `out` and returns how many.
  StatusOr<size_t> seal(absl::Span<const std::string_view> pieces, char* out);
};

class WEFT_API Opener : public SealContext {
 public:
  static StatusOr<std::unique_ptr<Opener>> make(std::string_view key);

  // The length of the text of the record that begins with `head`. Error, kind protocol: none is as
  // long, or as short.
  static StatusOr<size_t> text_bytes(std::string_view head);
  // `record` as a whole; its text goes to `first`, and what does not fit there to `rest`. Error,
  // kind protocol: it is not the next record of this direction; what was written is worthless.
  Status open(std::string_view record, absl::Span<char> first, char* rest);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_DATA_SEALED_H_
