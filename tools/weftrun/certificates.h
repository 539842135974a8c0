// A certificate authority for a single job, in memory: what `weftrun --tls auto` gives its workers.
//
// Keys are EC P-256 and made with OpenSSL's generator; the authority's key never leaves the object.
// Any thread, one at a time.
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
  CertificateAuthority(CertificateAuthority&&) noexcept;
  ~CertificateAuthority();

  absl::StatusOr<CertifiedKey> issue(const CertificateRequest& request);
  const std::string& certificate() const { return certificate_; }  // PEM

 private:
  struct Keys;
  CertificateAuthority();

  std::unique_ptr<Keys> keys_;
  std::string certificate_;
};

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_CERTIFICATES_H_
