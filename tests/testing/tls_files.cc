#include "weft/tests/testing/tls_files.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace weft::testing {

TlsFiles::TlsFiles() {
  std::string path = (std::filesystem::temp_directory_path() / "weft-tls-XXXXXX").string();
  EXPECT_NE(mkdtemp(path.data()), nullptr);
  directory_ = path;
  const absl::Time now = absl::Now();
  absl::StatusOr<launch::CertificateAuthority> made =
      launch::CertificateAuthority::make("weft test", now - absl::Hours(24), now + absl::Hours(24));
  EXPECT_TRUE(made.ok()) << made.status();
  if (made.ok()) authority_ = std::make_unique<launch::CertificateAuthority>(*std::move(made));
  write("ca.pem", authority_->certificate());
}

TlsFiles::~TlsFiles() {
  std::error_code error;
  std::filesystem::remove_all(directory_, error);
}

std::string TlsFiles::write(const std::string& file, const std::string& content) {
  const std::string path = directory_ + "/" + file;
  {
    std::ofstream out(path + ".new");
    out << content;
  }
  EXPECT_EQ(std::rename((path + ".new").c_str(), path.c_str()), 0);
  return path;
}

Credentials TlsFiles::make(const std::string& name, const TlsFileOptions& options) {
  launch::CertificateRequest request;
  request.name = name;
  if (!options.only_common_name) {
    std::string uri = "weft://worker/" + name;
    if (options.rank.has_value()) absl::StrAppend(&uri, "/", *options.rank);
    request.uris = {uri};
  }
  request.dns = {options.dns};
  request.from = absl::Now() + options.valid_from;
  request.to = absl::Now() + options.valid_to;
  const absl::StatusOr<launch::CertifiedKey> made = authority_->issue(request);
  EXPECT_TRUE(made.ok()) << made.status();
  Credentials out;
  out.ca_file = directory_ + "/ca.pem";
  out.key_file = write(name + ".key", made.ok() ? made->key : "");
  out.cert_file = write(name + ".pem", made.ok() ? made->certificate : "");
  out.refresh = absl::Seconds(1);
  return out;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace weft::testing
