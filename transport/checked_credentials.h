#ifndef WEFT_TRANSPORT_CHECKED_CREDENTIALS_H_
#define WEFT_TRANSPORT_CHECKED_CREDENTIALS_H_

// Credentials are checked before they are used, so that a mistake in them is reported immediately,
// by the process that was given them and with the file's name; and names in certificates. Pure but
// for reading the files; any thread.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/config.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/transport/credentials.h"

struct x509_st;

namespace weft::internal {

inline constexpr size_t kMaxTokenBytes = 1024;
inline constexpr size_t kMinTokenBytes = 16;

// What a certificate says about its worker.
struct Identity {
  std::string name;
  std::optional<uint32_t> rank;

  friend bool operator==(const Identity&, const Identity&) = default;
};

// From the URIs of a certificate, or from its common name when none of them is one of ours. Empty
// when it names no worker.
WEFT_API std::vector<Identity> identities_of(const std::vector<std::string>& uris,
                                             std::string_view common_name);
WEFT_API std::vector<Identity> identities_of(x509_st* certificate);
// "'ps0' or 'ps1' (rank 4)"
WEFT_API std::string describe(const std::vector<Identity>& identities);
// `rank` not given: only the name counts.
WEFT_API bool matches(const std::vector<Identity>& identities, std::string_view name,
                      std::optional<uint32_t> rank);

// WEFT_TLS_CA and so on; empty() when they are not set.
WEFT_API Credentials configured_credentials(const Config& config);

struct CheckedCredentials {
  Credentials files;
  std::string token;  // empty: none
  std::vector<Identity> identities;
};

// Reads the files: they are there, belong together, are in date, and an authority of ours has
// signed our certificate. Errors: kind invalid_argument (or permission: expired, another
// authority), naming the file and what to do. REQUIRES: not empty().
WEFT_API StatusOr<CheckedCredentials> check_credentials(const Credentials& credentials,
                                                        Runtime& runtime);

// The certificate that a client shows to a server that is none of weft's, such as an etcd, and the
// CAs that it trusts: PEM texts for gRPC.
struct ClientTls {
  std::string ca;
  std::string cert;  // empty: the client shows none
  std::string key;
};
// As check_credentials(), of ca_file alone or of all three files. An authority that is out of date
// is an error as well, since it would fail every handshake. The other fields are not looked at.
WEFT_API StatusOr<ClientTls> check_client_files(const Credentials& files, Runtime& runtime);

// Whether two secrets are equal, in a time that does not tell where they differ.
WEFT_API bool same_secret(std::string_view a, std::string_view b);

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_CHECKED_CREDENTIALS_H_
