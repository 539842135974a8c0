#include "weft/transport/checked_credentials.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/common/files.h"
#include "weft/common/internal/text.h"
#include "weft/common/posix.h"
#include "weft/transport/internal/openssl.h"

namespace weft::internal {
namespace {

constexpr std::string_view kUriPrefix = "weft://worker/";

using StoreRef = std::unique_ptr<X509_STORE, OpensslFree<X509_STORE, X509_STORE_free>>;
using StoreContextRef =
    std::unique_ptr<X509_STORE_CTX, OpensslFree<X509_STORE_CTX, X509_STORE_CTX_free>>;
using NamesRef = std::unique_ptr<GENERAL_NAMES, OpensslFree<GENERAL_NAMES, GENERAL_NAMES_free>>;

Status wrong(std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument, absl::StrCat("credentials: ", view(what)));
}
Status refused(std::string_view what) {
  return make_error(ErrorKind::kPermission, absl::StrCat("credentials: ", view(what)));
}

// Returns the first error that OpenSSL holds for this thread, and clears all of them: otherwise a
// later caller would get them.
std::string openssl_error() {
  const unsigned long code = ERR_get_error();  // NOLINT(google-runtime-int): OpenSSL's type
  ERR_clear_error();
  if (code == 0) return "no PEM block of that kind";
  const char* const reason = ERR_reason_error_string(code);
  return reason == nullptr ? absl::StrCat("error ", absl::Hex(code)) : reason;
}

// One of the three files, and what the user calls it.
struct File {
  std::string path;
  const char* what;
  const char* field;
  const char* variable;
};

std::string named(const File& file) { return absl::StrCat(file.what, " '", file.path, "'"); }

StatusOr<std::string> read_file(const File& file, Runtime& runtime) {
  StatusOr<std::string> text = runtime.files().read(file.path);
  if (text.ok()) return text;
  return wrong(absl::StrCat("cannot read the ", named(file), ": ",
                            std::string(text.status().message()), "; it comes from ", file.field,
                            " or ", file.variable));
}

StatusOr<std::vector<CertRef>> parse_certificates(const File& file, const std::string& text) {
  std::vector<CertRef> out;
  const BioRef bio = memory_bio(text);
  while (X509* const cert = PEM_read_bio_X509(bio.get(), nullptr, no_passphrase, nullptr)) {
    out.emplace_back(cert);
  }
  const std::string why = openssl_error();
  if (out.empty()) {
    return wrong(
        absl::StrCat("the ", named(file), " holds no certificate that can be read: ", why));
  }
  return out;
}

StatusOr<KeyRef> parse_key(const File& file, const std::string& text) {
  const BioRef bio = memory_bio(text);
  KeyRef key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_passphrase, nullptr));
  const std::string why = openssl_error();
  if (key != nullptr) return key;
  return wrong(absl::StrCat("the ", named(file), " holds no key that can be read: ", why,
                            "; it must be PEM and have no passphrase"));
}

std::string name_text(const X509_NAME* name) {
  const BioRef bio(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(bio.get(), name, 0, XN_FLAG_RFC2253);
  char* data = nullptr;
  const auto size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(std::max<decltype(size)>(size, 0)));
}

std::string time_text(const ASN1_TIME* time) {
  tm parts = {};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "a time that cannot be read";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::FromTM(parts, absl::UTCTimeZone()),
                          absl::UTCTimeZone());
}

std::string common_name(X509* cert) {
  X509_NAME* const subject = X509_get_subject_name(cert);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at < 0) return "";
  const ASN1_STRING* const data = X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at));
  return std::string(reinterpret_cast<const char*>(ASN1_STRING_get0_data(data)),
                     static_cast<size_t>(ASN1_STRING_length(data)));
}

std::vector<std::string> uris(X509* cert) {
  std::vector<std::string> out;
  const NamesRef names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(cert, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const ASN1_STRING* const uri = name->d.uniformResourceIdentifier;
    out.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(uri)),
                     static_cast<size_t>(ASN1_STRING_length(uri)));
  }
  return out;
}

Status expired(X509* cert, const File& file) {
  return refused(absl::StrCat("the certificate of ", name_text(X509_get_subject_name(cert)), " in ",
                              named(file), " expired at ", time_text(X509_get0_notAfter(cert)),
                              "; put a new one there"));
}

Status check_fits(const File& key_file, const KeyRef& key, const File& cert_file, X509* cert) {
  const bool fits = X509_check_private_key(cert, key.get()) == 1;
  ERR_clear_error();
  if (fits) return absl::OkStatus();
  return wrong(absl::StrCat("the ", named(key_file), " does not fit the ", named(cert_file), " (",
                            name_text(X509_get_subject_name(cert)), ")"));
}

Status check_in_date(const File& file, const CertRef& cert) {
  if (X509_cmp_current_time(X509_get0_notAfter(cert.get())) > 0) return absl::OkStatus();
  return expired(cert.get(), file);
}

Status check_chain(const File& ca_file, const std::vector<CertRef>& ca, const File& cert_file,
                   const std::vector<CertRef>& chain) {
  const StoreRef store(X509_STORE_new());
  for (const CertRef& cert : ca) X509_STORE_add_cert(store.get(), cert.get());
  STACK_OF(X509)* const between = sk_X509_new_null();
  for (size_t i = 1; i < chain.size(); ++i) sk_X509_push(between, chain[i].get());
  const StoreContextRef context(X509_STORE_CTX_new());
  X509_STORE_CTX_init(context.get(), store.get(), chain[0].get(), between);
  // At the time of the system's calendar, as in the handshakes: a Runtime's clock is a steady one.
  const bool good = X509_verify_cert(context.get()) == 1;
  const int code = X509_STORE_CTX_get_error(context.get());
  X509* const at = X509_STORE_CTX_get_current_cert(context.get());
  const std::string subject = at == nullptr ? "" : name_text(X509_get_subject_name(at));
  const std::string issuer = name_text(X509_get_issuer_name(chain[0].get()));
  Status status;
  if (!good && at != nullptr && code == X509_V_ERR_CERT_HAS_EXPIRED) {
    status = expired(at, cert_file);
  } else if (!good && at != nullptr && code == X509_V_ERR_CERT_NOT_YET_VALID) {
    status = refused(absl::StrCat("the certificate of ", subject, " in ", named(cert_file),
                                  " is not valid before ", time_text(X509_get0_notBefore(at)),
                                  "; is the clock right?"));
  } else if (!good) {
    status = refused(absl::StrCat("no authority in the ", named(ca_file), " has signed the ",
                                  named(cert_file), " (issuer ", issuer,
                                  "): ", X509_verify_cert_error_string(code)));
  }
  sk_X509_free(between);
  ERR_clear_error();
  return status;
}

StatusOr<std::string> read_token(const Credentials& credentials, Runtime& runtime) {
  if (credentials.token.empty() && credentials.token_file.empty()) return std::string();
  if (!credentials.token.empty() && !credentials.token_file.empty()) {
    return wrong("both token and token_file are given");
  }
  std::string token = credentials.token;
  if (token.empty()) {
    const File file{credentials.token_file, "token file", "token_file", "WEFT_TOKEN_FILE"};
    WEFT_ASSIGN_OR_RETURN(token, read_file(file, runtime));
  }
  token = std::string(absl::StripAsciiWhitespace(token));
  if (token.size() < kMinTokenBytes || token.size() > kMaxTokenBytes) {
    return wrong(absl::StrCat("the cluster token has ", token.size(), " bytes, allowed are ",
                              kMinTokenBytes, " to ", kMaxTokenBytes,
                              "; `openssl rand -hex 32` makes a good one"));
  }
  return token;
}

}  // namespace

std::vector<Identity> identities_of(const std::vector<std::string>& uris,
                                    std::string_view common_name) {
  std::vector<Identity> out;
  bool ours = false;
  for (const std::string& uri : uris) {
    if (uri.rfind(kUriPrefix, 0) != 0) continue;
    ours = true;
    Identity identity;
    identity.name = uri.substr(kUriPrefix.size());
    const size_t slash = identity.name.find('/');
    if (slash != std::string::npos) {
      uint32_t rank = 0;
      // A rank that cannot be parsed identifies no worker.
      if (!absl::SimpleAtoi(identity.name.substr(slash + 1), &rank)) continue;
      identity.rank = rank;
      identity.name.resize(slash);
    }
    if (!identity.name.empty()) out.push_back(std::move(identity));
  }
  if (!ours && !common_name.empty()) out.push_back({std::string(common_name), std::nullopt});
  return out;
}

std::vector<Identity> identities_of(x509_st* certificate) {
  return identities_of(uris(certificate), common_name(certificate));
}

std::string describe(const std::vector<Identity>& identities) {
  if (identities.empty()) return "no worker";
  return absl::StrJoin(identities, " or ", [](std::string* out, const Identity& identity) {
    absl::StrAppend(out, "'", identity.name.substr(0, 128), "'");
    if (identity.rank.has_value()) absl::StrAppend(out, " (rank ", *identity.rank, ")");
  });
}

bool matches(const std::vector<Identity>& identities, std::string_view name,
             std::optional<uint32_t> rank) {
  return std::any_of(identities.begin(), identities.end(), [&](const Identity& identity) {
    if (identity.name != name) return false;
    return !identity.rank.has_value() || !rank.has_value() || *identity.rank == *rank;
  });
}

Credentials configured_credentials(const Config& config) {
  return {.ca_file = config.tls_ca,
          .cert_file = config.tls_cert,
          .key_file = config.tls_key,
          .refresh = config.tls_refresh,
          .shared_certificate = config.tls_shared_certificate,
          .token_file = config.token_file};
}

StatusOr<CheckedCredentials> check_credentials(const Credentials& credentials, Runtime& runtime) {
  const File ca_file{credentials.ca_file, "CA file", "ca_file", "WEFT_TLS_CA"};
  const File cert_file{credentials.cert_file, "certificate file", "cert_file", "WEFT_TLS_CERT"};
  const File key_file{credentials.key_file, "key file", "key_file", "WEFT_TLS_KEY"};
  std::vector<std::string> missing;
  for (const File* file : {&ca_file, &cert_file, &key_file}) {
    if (file->path.empty()) missing.push_back(absl::StrCat(file->field, " (", file->variable, ")"));
  }
  if (missing.size() == 3) {
    return refused(
        "a cluster token travels only inside TLS: ca_file (WEFT_TLS_CA), cert_file "
        "(WEFT_TLS_CERT) and key_file (WEFT_TLS_KEY) are needed with it");
  }
  if (!missing.empty()) {
    return wrong(absl::StrCat("TLS takes three files, and there is no ",
                              absl::StrJoin(missing, " and no ")));
  }
  const absl::Duration refresh = credentials.refresh;
  if (refresh < absl::Seconds(1) || refresh > absl::Hours(24) ||
      refresh != absl::Trunc(refresh, absl::Seconds(1))) {
    return wrong(absl::StrCat("refresh is ", absl::FormatDuration(refresh),
                              ", allowed are whole seconds from 1s to 24h"));
  }
  CheckedCredentials out;
  out.files = credentials;
  WEFT_ASSIGN_OR_RETURN(out.token, read_token(credentials, runtime));
  out.files.token.clear();

  WEFT_ASSIGN_OR_RETURN(const std::string ca_text, read_file(ca_file, runtime));
  WEFT_ASSIGN_OR_RETURN(const std::string cert_text, read_file(cert_file, runtime));
  WEFT_ASSIGN_OR_RETURN(std::string key_text, read_file(key_file, runtime));
  StatusOr<KeyRef> key = parse_key(key_file, key_text);
  OPENSSL_cleanse(key_text.data(), key_text.size());
  WEFT_RETURN_IF_ERROR(key.status());
  WEFT_ASSIGN_OR_RETURN(const std::vector<CertRef> ca, parse_certificates(ca_file, ca_text));
  WEFT_ASSIGN_OR_RETURN(const std::vector<CertRef> chain, parse_certificates(cert_file, cert_text));
  WEFT_RETURN_IF_ERROR(check_fits(key_file, *key, cert_file, chain[0].get()));
  WEFT_RETURN_IF_ERROR(check_chain(ca_file, ca, cert_file, chain));
  out.identities = identities_of(chain[0].get());
  if (out.identities.empty() && !credentials.shared_certificate) {
    return wrong(absl::StrCat("the ", named(cert_file), " (",
                              name_text(X509_get_subject_name(chain[0].get())),
                              ") names no worker: give it the URI ", view(kUriPrefix),
                              "<name> or a common name, or set shared_certificate"));
  }
  return out;
}

StatusOr<ClientTls> check_client_files(const Credentials& files, Runtime& runtime) {
  const File ca_file{files.ca_file, "CA file", "ca_file", "the URL's ca="};
  const File cert_file{files.cert_file, "certificate file", "cert_file", "the URL's cert="};
  const File key_file{files.key_file, "key file", "key_file", "the URL's key="};
  if (ca_file.path.empty()) {
    return wrong("a certificate to show and no ca_file (the URL's ca=) with whom to believe");
  }
  if (cert_file.path.empty() != key_file.path.empty()) {
    return wrong(
        "cert_file (the URL's cert=) and key_file (key=) are given together or not at all");
  }
  ClientTls out;
  WEFT_ASSIGN_OR_RETURN(out.ca, read_file(ca_file, runtime));
  WEFT_ASSIGN_OR_RETURN(const std::vector<CertRef> ca, parse_certificates(ca_file, out.ca));
  const auto in_date = [&](const CertRef& cert) { return check_in_date(ca_file, cert).ok(); };
  if (std::none_of(ca.begin(), ca.end(), in_date)) return check_in_date(ca_file, ca.front());
  if (cert_file.path.empty()) return out;
  WEFT_ASSIGN_OR_RETURN(out.cert, read_file(cert_file, runtime));
  WEFT_ASSIGN_OR_RETURN(out.key, read_file(key_file, runtime));
  WEFT_ASSIGN_OR_RETURN(const std::vector<CertRef> chain, parse_certificates(cert_file, out.cert));
  WEFT_ASSIGN_OR_RETURN(const KeyRef key, parse_key(key_file, out.key));
  WEFT_RETURN_IF_ERROR(check_fits(key_file, key, cert_file, chain[0].get()));
  WEFT_RETURN_IF_ERROR(check_in_date(cert_file, chain.front()));
  return out;
}

bool same_secret(std::string_view a, std::string_view b) {
  // Digests have one length, so nothing is told about those of the secrets.
  unsigned char of_a[SHA256_DIGEST_LENGTH];
  unsigned char of_b[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(a.data()), a.size(), of_a);
  SHA256(reinterpret_cast<const unsigned char*>(b.data()), b.size(), of_b);
  const auto digest = [](const unsigned char* of) {
    return std::string_view(reinterpret_cast<const char*>(of), SHA256_DIGEST_LENGTH);
  };
  const bool same = same_bytes_in_constant_time(digest(of_a), digest(of_b));
  OPENSSL_cleanse(of_a, sizeof of_a);
  OPENSSL_cleanse(of_b, sizeof of_b);
  return same;
}

}  // namespace weft::internal
