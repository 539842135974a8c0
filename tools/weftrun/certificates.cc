#include "weft/tools/weftrun/certificates.h"

#include <openssl/bio.h>
#include <openssl/bn.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <ctime>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace weft::launch {
namespace {

template <class T, void (*F)(T*)>
struct Free {
  void operator()(T* p) const { F(p); }
};
using KeyRef = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;
using CertRef = std::unique_ptr<X509, Free<X509, X509_free>>;
using ExtensionRef = std::unique_ptr<X509_EXTENSION, Free<X509_EXTENSION, X509_EXTENSION_free>>;
void free_bio(BIO* bio) { BIO_free(bio); }
using BioRef = std::unique_ptr<BIO, Free<BIO, free_bio>>;

absl::Status openssl_failed(absl::string_view what) {
  const unsigned long code = ERR_get_error();  // NOLINT(google-runtime-int): OpenSSL's type
  ERR_clear_error();
  const char* const reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return absl::InternalError(
      absl::StrCat("OpenSSL cannot ", what, ": ", reason == nullptr ? "no reason given" : reason));
}

absl::Status extend(X509* cert, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, cert, nullptr, nullptr, 0);
  const ExtensionRef extension(X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str()));
  if (extension == nullptr || X509_add_ext(cert, extension.get(), -1) != 1) {
    return openssl_failed(absl::StrCat("write the extension ", value));
  }
  return absl::OkStatus();
}

// Without extensions and signature. Version 3, a random serial number.
absl::StatusOr<CertRef> blank(const std::string& name, EVP_PKEY* key, absl::Time from,
                              absl::Time to) {
  CertRef cert(X509_new());
  unsigned char serial[16];
  if (cert == nullptr || RAND_bytes(serial, sizeof serial) != 1) {
    return openssl_failed("make a certificate");
  }
  serial[0] = static_cast<unsigned char>((serial[0] & 0x7f) | 0x40);  // positive, never zero
  BIGNUM* const number = BN_bin2bn(serial, sizeof serial, nullptr);
  X509_NAME* const subject = X509_get_subject_name(cert.get());
  const bool ok =
      number != nullptr &&
      BN_to_ASN1_INTEGER(number, X509_get_serialNumber(cert.get())) != nullptr &&
      X509_set_version(cert.get(), 2) == 1 &&
      ASN1_TIME_set(X509_getm_notBefore(cert.get()), absl::ToTimeT(from)) != nullptr &&
      ASN1_TIME_set(X509_getm_notAfter(cert.get()), absl::ToTimeT(to)) != nullptr &&
      // The standard allows 64 characters.
      X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8,
                                 reinterpret_cast<const unsigned char*>(name.substr(0, 64).c_str()),
                                 -1, -1, 0) == 1 &&
      X509_set_pubkey(cert.get(), key) == 1;
  BN_free(number);
  if (!ok) return openssl_failed(absl::StrCat("make a certificate for ", name));
  return cert;
}

absl::StatusOr<std::string> pem_of(X509* cert) {
  const BioRef bio(BIO_new(BIO_s_mem()));
  if (bio == nullptr || PEM_write_bio_X509(bio.get(), cert) != 1) {
    return openssl_failed("write a certificate");
  }
  char* data = nullptr;
  const auto size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(size));
}

absl::StatusOr<std::string> pem_of(EVP_PKEY* key) {
  const BioRef bio(BIO_new(BIO_s_secmem()));
  if (bio == nullptr ||
      PEM_write_bio_PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) != 1) {
    return openssl_failed("write a key");
  }
  char* data = nullptr;
  const auto size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(size));
}

BioRef reader(const std::string& text) {
  return BioRef(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

absl::StatusOr<CertRef> read_certificate(const std::string& pem) {
  const BioRef bio = reader(pem);
  CertRef cert(bio == nullptr ? nullptr : PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
  if (cert == nullptr) {
    ERR_clear_error();
    return absl::InvalidArgumentError("there is no certificate in PEM form");
  }
  return cert;
}

}  // namespace

struct CertificateAuthority::Keys {
  KeyRef key;
  CertRef certificate;
};

CertificateAuthority::CertificateAuthority() : keys_(std::make_unique<Keys>()) {}
CertificateAuthority::CertificateAuthority(CertificateAuthority&&) noexcept = default;
CertificateAuthority::~CertificateAuthority() = default;

absl::StatusOr<CertificateAuthority> CertificateAuthority::make(const std::string& name,
                                                                absl::Time from, absl::Time to) {
  CertificateAuthority out;
  out.keys_->key = KeyRef(EVP_EC_gen("P-256"));
  if (out.keys_->key == nullptr) return openssl_failed("make a key");
  absl::StatusOr<CertRef> cert = blank(name, out.keys_->key.get(), from, to);
  if (!cert.ok()) return cert.status();
  X509* const raw = cert->get();
  X509_set_issuer_name(raw, X509_get_subject_name(raw));
  for (const auto& [nid, value] : {std::pair{NID_basic_constraints, "critical,CA:TRUE,pathlen:0"},
                                   {NID_key_usage, "critical,keyCertSign,cRLSign"},
                                   {NID_subject_key_identifier, "hash"}}) {
    if (absl::Status s = extend(raw, raw, nid, value); !s.ok()) return s;
  }
  if (X509_sign(raw, out.keys_->key.get(), EVP_sha256()) == 0) {
    return openssl_failed("sign the authority's certificate");
  }
  absl::StatusOr<std::string> pem = pem_of(raw);
  if (!pem.ok()) return pem.status();
  out.certificate_ = *std::move(pem);
  out.keys_->certificate = *std::move(cert);
  return out;
}

absl::StatusOr<CertificateAuthority> CertificateAuthority::load(const std::string& certificate,
                                                                const std::string& key) {
  CertificateAuthority out;
  absl::StatusOr<CertRef> cert = read_certificate(certificate);
  if (!cert.ok()) return cert.status();
  const BioRef bio = reader(key);
  // Without a callback OpenSSL would ask a terminal for the passphrase of an encrypted key.
  const auto no_passphrase = [](char*, int, int, void*) { return -1; };
  out.keys_->key =
      KeyRef(bio == nullptr ? nullptr
                            : PEM_read_bio_PrivateKey(bio.get(), nullptr, no_passphrase, nullptr));
  if (out.keys_->key == nullptr) {
    ERR_clear_error();
    return absl::InvalidArgumentError("there is no key in PEM form without a passphrase");
  }
  if (X509_check_private_key(cert->get(), out.keys_->key.get()) != 1) {
    ERR_clear_error();
    return absl::InvalidArgumentError("the key does not belong to the certificate");
  }
  absl::StatusOr<std::string> pem = pem_of(cert->get());
  if (!pem.ok()) return pem.status();
  out.certificate_ = *std::move(pem);
  out.keys_->certificate = *std::move(cert);
  return out;
}

absl::StatusOr<std::string> CertificateAuthority::private_key() const {
  return pem_of(keys_->key.get());
}

absl::StatusOr<absl::Time> valid_until(const std::string& certificate) {
  const absl::StatusOr<CertRef> cert = read_certificate(certificate);
  if (!cert.ok()) return cert.status();
  std::tm end = {};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(cert->get()), &end) != 1) {
    return openssl_failed("read the end of a certificate");
  }
  return absl::FromTM(end, absl::UTCTimeZone());
}

absl::StatusOr<CertifiedKey> CertificateAuthority::issue(const CertificateRequest& request) {
  const KeyRef key(EVP_EC_gen("P-256"));
  if (key == nullptr) return openssl_failed("make a key");
  absl::StatusOr<CertRef> cert = blank(request.name, key.get(), request.from, request.to);
  if (!cert.ok()) return cert.status();
  X509* const raw = cert->get();
  X509* const issuer = keys_->certificate.get();
  X509_set_issuer_name(raw, X509_get_subject_name(issuer));
  std::string names;
  for (const auto& [kind, list] : {std::pair{"URI:", &request.uris}, {"DNS:", &request.dns}}) {
    for (const std::string& name : *list) {
      // The text below is a list, so a comma would begin another name.
      if (absl::StrContains(name, ",")) {
        return absl::InvalidArgumentError(absl::StrCat("the name ", name, " has a comma"));
      }
      absl::StrAppend(&names, names.empty() ? "" : ",", kind, name);
    }
  }
  std::vector<std::pair<int, std::string>> extensions = {
      {NID_basic_constraints, "critical,CA:FALSE"},
      {NID_key_usage, "critical,digitalSignature"},
      {NID_ext_key_usage, "serverAuth,clientAuth"},
      {NID_authority_key_identifier, "keyid"}};
  if (!names.empty()) extensions.emplace_back(NID_subject_alt_name, names);
  for (const auto& [nid, value] : extensions) {
    if (absl::Status s = extend(raw, issuer, nid, value); !s.ok()) return s;
  }
  if (X509_sign(raw, keys_->key.get(), EVP_sha256()) == 0) {
    return openssl_failed(absl::StrCat("sign the certificate of ", request.name));
  }
  absl::StatusOr<std::string> pem = pem_of(raw);
  if (!pem.ok()) return pem.status();
  absl::StatusOr<std::string> key_pem = pem_of(key.get());
  if (!key_pem.ok()) return key_pem.status();
  return CertifiedKey{*std::move(pem), *std::move(key_pem)};
}

}  // namespace weft::launch
