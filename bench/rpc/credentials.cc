#include "weft/bench/rpc/credentials.h"

#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <system_error>

#include "weft/tools/weftrun/certificates.h"

namespace weft::bench {
namespace {

void write(const std::string& path, const std::string& content) {
  std::ofstream file(path);
  file << content;
  if (!file.flush()) throw std::system_error(errno, std::generic_category(), path);
}

}  // namespace

void make_credentials(const std::string& directory) {
  if (mkdir(directory.c_str(), 0700) != 0) {
    throw std::system_error(errno, std::generic_category(), directory);
  }
  const absl::Time now = absl::Now();
  auto authority = launch::CertificateAuthority::make("bench authority", now - absl::Hours(1),
                                                      now + absl::Hours(24));
  if (!authority.ok()) throw std::runtime_error(authority.status().ToString());
  const auto made = authority->issue({.name = "bench",
                                      .uris = {},
                                      .dns = {"worker.weft"},
                                      .from = now - absl::Hours(1),
                                      .to = now + absl::Hours(24)});
  if (!made.ok()) throw std::runtime_error(made.status().ToString());
  write(directory + "/ca.pem", authority->certificate());
  write(directory + "/bench.pem", made->certificate);
  write(directory + "/bench.key", made->key);
}

}  // namespace weft::bench
