#ifndef WEFT_TRANSPORT_CREDENTIALS_H_
#define WEFT_TRANSPORT_CREDENTIALS_H_

// Credentials: how a worker proves its identity, and which CAs it trusts: mutual TLS with
// certificates in files, and optionally a cluster token. docs/security.md says what that protects.
//
//   auto worker = weft::join({.credentials = {.ca_file = "ca.pem", .cert_file = "ps0.pem",
//                                             .key_file = "ps0.key"}});
//
// Or by WEFT_TLS_CA, WEFT_TLS_CERT, WEFT_TLS_KEY and so on; `weftrun --tls auto` sets them. All
// workers of a job have credentials or none has: those with turn plain text away, and the reverse.
//
// A certificate names its worker: by a URI among its alternative names,
// "weft://worker/<name>" or "weft://worker/<name>/<rank>" (there may be several), else by its
// common name. The name that a worker gives in its hello must be one of those of its certificate.
//
// The files may change while a worker runs: new connections use what is there then, those that
// exist stay. A value type; it is read at join.

#include <string>

#include "absl/time/time.h"

namespace weft {

struct Credentials {
  std::string ca_file{};    // PEM: the trusted CAs
  std::string cert_file{};  // PEM: our certificate, then those between it and the authority
  std::string key_file{};   // PEM: the key of our certificate, without a passphrase
  // How often the files are looked at for a change: whole seconds.
  absl::Duration refresh = absl::Seconds(10);
  // All workers have the same certificate, so it proves membership and no name: each of them may
  // call itself as it likes.
  bool shared_certificate = false;
  // A secret of 16 to 1,024 bytes that all workers of the job have, or a file with it; blanks and
  // line ends around it do not count. It only ever travels inside TLS.
  std::string token{};
  std::string token_file{};

  bool empty() const {  // neither certificates nor a token
    return ca_file.empty() && cert_file.empty() && key_file.empty() && token.empty() &&
           token_file.empty();
  }
};

}  // namespace weft

#endif  // WEFT_TRANSPORT_CREDENTIALS_H_
