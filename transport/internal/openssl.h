#ifndef WEFT_TRANSPORT_INTERNAL_OPENSSL_H_
#define WEFT_TRANSPORT_INTERNAL_OPENSSL_H_

// Owners of OpenSSL's objects, for sources that use several of them. Included by sources only.

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

namespace weft::internal {

template <class T, void (*F)(T*)>
struct OpensslFree {
  void operator()(T* p) const { F(p); }
};
inline void free_openssl_bio(BIO* bio) { BIO_free(bio); }
using BioRef = std::unique_ptr<BIO, OpensslFree<BIO, free_openssl_bio>>;
using KeyRef = std::unique_ptr<EVP_PKEY, OpensslFree<EVP_PKEY, EVP_PKEY_free>>;
using CertRef = std::unique_ptr<X509, OpensslFree<X509, X509_free>>;

// Reads `text` while it lives.
inline BioRef memory_bio(const std::string& text) {
  return BioRef(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}
// Never asks for a passphrase.
inline int no_passphrase(char*, int, int, void*) { return 0; }

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_OPENSSL_H_
