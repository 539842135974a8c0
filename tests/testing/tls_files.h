#ifndef WEFT_TESTS_TESTING_TLS_FILES_H_
#define WEFT_TESTS_TESTING_TLS_FILES_H_

// An authority of its own and certificates of it, as files in a directory that ends with the
// object. Two objects are two authorities, which do not know each other.

#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "weft/tools/weftrun/certificates.h"
#include "weft/transport/credentials.h"

namespace weft::testing {

struct TlsFileOptions {
  std::optional<int> rank{};
  // Without the URI: the common name alone tells who it is.
  bool only_common_name = false;
  // For a server that is dialled by a host's name.
  std::string dns = "worker.weft";
  absl::Duration valid_from = -absl::Hours(1);  // from now
  absl::Duration valid_to = absl::Hours(1);
};

class TlsFiles {
 public:
  TlsFiles();
  ~TlsFiles();
  TlsFiles(const TlsFiles&) = delete;
  TlsFiles& operator=(const TlsFiles&) = delete;

  // Writes <name>.pem and <name>.key, atomically over what was there.
  Credentials make(const std::string& name, const TlsFileOptions& options = {});
  // The path of a file with this content.
  std::string write(const std::string& file, const std::string& content);
  const std::string& directory() const { return directory_; }

 private:
  std::string directory_;
  std::unique_ptr<launch::CertificateAuthority> authority_;
};

std::string read_text(const std::string& path);

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_TLS_FILES_H_
