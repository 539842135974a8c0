// A certificate authority in memory: for a single job (`weftrun --tls auto`), or read from files and
// written to them (`weftrun ca`).
//
// Keys are EC P-256 and made with OpenSSL's generator. Any thread, one at a time.
//
//   auto authority = CertificateAuthority::make("job 4711", now, now + absl::Hours(24));
//   auto ps0 = authority->issue({.name = "ps0", .uris = {"weft://worker/ps0/0"}, ...});
#ifndef WEFT_TOOLS_WEFTRUN_CERTIFICATES_H_
#define WEFT_TOOLS_WEFTRUN_CERTIFICATES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace weft::launch {

struct CertificateRequest {
  std::string name;               // the subject's common name
  std::vector<std::string> uris;  // alternative names
  std::vector<std::string> dns;   // the same
  absl::Time from;
  absl::Time to;
};

// Both PEM.
struct CertifiedKey {
  std::string certificate;
  std::string key;
};

class CertificateAuthority {
 public:
  static absl::StatusOr<CertificateAuthority> make(const std::string& name, absl::Time from,
                                                   absl::Time to);
  // From the files of an earlier one. Of several certificates in `certificate` the first is the
  // authority's. Errors: invalid_argument when it is no PEM, or the two do not belong together.
  static absl::StatusOr<CertificateAuthority> load(const std::string& certificate,
                                                   const std::string& key);
  CertificateAuthority(CertificateAuthority&&) noexcept;
  ~CertificateAuthority();

  absl::StatusOr<CertifiedKey> issue(const CertificateRequest& request);
  const std::string& certificate() const { return certificate_; }  // PEM
  // PEM, without a passphrase.
  absl::StatusOr<std::string> private_key() const;

 private:
  struct Keys;
  CertificateAuthority();

  std::unique_ptr<Keys> keys_;
  std::string certificate_;
};

// When the first certificate in a PEM text ends. Errors: invalid_argument.
absl::StatusOr<absl::Time> valid_until(const std::string& certificate);

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_CERTIFICATES_H_
