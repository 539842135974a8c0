#include "weft/tools/weftrun/tls.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "weft/store/internal/launch/system.h"
#include "weft/tools/weftrun/certificates.h"

namespace weft::launch {
namespace {

// The clock of a worker may be behind; a job may run for weeks, and gets no new certificates.
constexpr absl::Duration kClockSkew = absl::Minutes(5);
constexpr absl::Duration kValid = absl::Hours(30 * 24);

std::string join(const std::string& directory, const std::string& file) {
  return absl::StrCat(directory, "/", file);
}

// Only this user may read it, from the first moment on.
absl::Status write_private(const std::string& path, const std::string& content) {
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.valid()) return os_error(errno, absl::StrCat("open ", path));
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t n = write(fd.get(), content.data() + done, content.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, absl::StrCat("write ", path));
    done += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

bool is_there(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

void add_variables(const std::string& directory, ProcessPlan& process) {
  process.environment.emplace_back("WEFT_TLS_CA", join(directory, "ca.pem"));
  process.environment.emplace_back("WEFT_TLS_CERT", join(directory, process.name + ".pem"));
  process.environment.emplace_back("WEFT_TLS_KEY", join(directory, process.name + ".key"));
  const std::string token = join(directory, "token");
  if (is_there(token)) process.environment.emplace_back("WEFT_TOKEN_FILE", token);
}

}  // namespace

absl::Status make_credentials(const std::string& directory, const std::string& job_id,
                              std::vector<ProcessPlan>& plan) {
  if (mkdir(directory.c_str(), 0700) != 0)
    return os_error(errno, absl::StrCat("mkdir ", directory));
  const absl::Time now = absl::Now();
  absl::StatusOr<CertificateAuthority> authority =
      CertificateAuthority::make(absl::StrCat("weft job ", job_id), now - kClockSkew, now + kValid);
  if (!authority.ok()) return authority.status();
  absl::Status status = write_private(join(directory, "ca.pem"), authority->certificate());
  for (ProcessPlan& process : plan) {
    if (!status.ok()) return status;
    absl::StatusOr<CertifiedKey> made =
        authority->issue({.name = process.name,
                          .uris = {absl::StrCat("weft://worker/", process.name, "/", process.rank)},
                          .dns = {"worker.weft"},
                          .from = now - kClockSkew,
                          .to = now + kValid});
    if (!made.ok()) return made.status();
    status = write_private(join(directory, process.name + ".pem"), made->certificate);
    if (status.ok()) status = write_private(join(directory, process.name + ".key"), made->key);
    add_variables(directory, process);
  }
  return status;
}

absl::Status use_credentials(const std::string& given, std::vector<ProcessPlan>& plan) {
  const std::string directory = std::filesystem::absolute(given).string();
  for (ProcessPlan& process : plan) {
    for (const std::string& file :
         {std::string("ca.pem"), process.name + ".pem", process.name + ".key"}) {
      if (is_there(join(directory, file))) continue;
      return absl::NotFoundError(absl::StrCat("--tls ", given, ": there is no ",
                                              join(directory, file),
                                              "; each process NAME needs "
                                              "NAME.pem and NAME.key, and all ca.pem"));
    }
    add_variables(directory, process);
  }
  return absl::OkStatus();
}

Credentials own_credentials(const std::string& directory) {
  return {.ca_file = join(directory, "ca.pem"),
          .cert_file = join(directory, "weftrun.pem"),
          .key_file = join(directory, "weftrun.key"),
          .token_file = is_there(join(directory, "token")) ? join(directory, "token") : ""};
}

std::vector<std::string> tls_variables() {
  return {"WEFT_TLS_CA", "WEFT_TLS_CERT", "WEFT_TLS_KEY", "WEFT_TLS_SHARED_CERTIFICATE",
          "WEFT_TOKEN_FILE"};
}

}  // namespace weft::launch
