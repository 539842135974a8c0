#include "weft/tools/weftrun/ca.h"

#include <errno.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "weft/common/files.h"
#include "weft/tools/weftrun/certificates.h"
#include "weft/tools/weftrun/options.h"

namespace weft::launch {
namespace {

constexpr absl::string_view kCaUsage =
    R"(weftrun ca: makes and renews certificates for the processes of a job

  weftrun ca DIR [options] [NAME | ROLE:COUNT]...

  weftrun ca tls worker:8           an authority, if there is none yet, and certificates for worker0 to worker7
  weftrun ca tls                    renews those of which less than a third of the time is left

DIR then has what --tls DIR takes (ca.pem; NAME.pem and NAME.key for each process, and for weftrun itself), and ca.key,
the key of the authority. Copy the rest to the nodes, and leave ca.key where it was made.

  --days N            how long certificates are valid, 1 to 3650 (default 90); the authority, ten times as long
  --all               renew every certificate, however long it is still valid
  --new-authority     make a second authority: ca.pem then has both. Copy ca.pem to all nodes first; when every process
                      has read it, run weftrun ca DIR --all, and copy the rest
  --help

Processes read the files again while they run (WEFT_TLS_REFRESH). Start a program that is itself called ca by
weftrun -- ca.
)";

// The clock of another node may be behind.
constexpr absl::Duration kBefore = absl::Minutes(5);
constexpr absl::string_view kLauncher = "weftrun";

absl::Status wrong(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(what, " (weftrun ca --help lists the options)"));
}

absl::Status in_file(const absl::Status& status, const std::string& path) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

std::string day(absl::Time time) { return absl::FormatTime("%Y-%m-%d", time, absl::UTCTimeZone()); }

// "trainer:2" is trainer0 and trainer1.
absl::Status add_names(const std::string& text, std::vector<std::string>* names) {
  std::string name = text;
  int count = 0;
  const size_t colon = text.rfind(':');
  if (colon != std::string::npos) {
    name = text.substr(0, colon);
    if (!absl::SimpleAtoi(text.substr(colon + 1), &count) || count < 1 || count > kMaxLocalSize) {
      return wrong(absl::StrCat(
          "'", text, "': expected NAME, or ROLE:COUNT with a count from 1 to ", kMaxLocalSize));
    }
  }
  const auto legal = [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_'; };
  if (name.empty() || name.size() > 100 || !std::all_of(name.begin(), name.end(), legal)) {
    return wrong(absl::StrCat("'", text, "': a name has 1 to 100 letters, digits, '-' or '_'"));
  }
  if (name == "ca") return wrong("'ca' is the name of the authority's files");
  if (colon == std::string::npos) names->push_back(name);
  for (int i = 0; i < count; ++i) names->push_back(absl::StrCat(name, i));
  return absl::OkStatus();
}

class Directory {
 public:
  Directory(const CaOptions& options, absl::Time now)
      : options_(options), now_(now), files_(make_system_files()) {}

  absl::StatusOr<std::vector<std::string>> run() {
    if (absl::Status status = open(); !status.ok()) return status;
    if (options_.new_authority) {
      if (absl::Status status = second_authority(); !status.ok()) return status;
      return lines_;
    }
    if (absl::Status status = authority(); !status.ok()) return status;
    std::vector<std::string> names;
    for (const std::string& text : options_.names) {
      if (absl::Status status = add_names(text, &names); !status.ok()) return status;
    }
    if (names.empty()) names = present();
    if (std::find(names.begin(), names.end(), kLauncher) == names.end()) {
      names.emplace_back(kLauncher);
    }
    for (const std::string& name : names) {
      if (absl::Status status = certify(name); !status.ok()) return status;
    }
    return lines_;
  }

 private:
  std::string path(absl::string_view file) const {
    return absl::StrCat(options_.directory, "/", file);
  }

  absl::Status open() {
    if (mkdir(options_.directory.c_str(), 0700) == 0 || errno == EEXIST) return absl::OkStatus();
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot make ", options_.directory));
  }

  absl::Status write(absl::string_view file, const std::string& content) {
    const absl::Status status = files_->write_atomic(path(file), content);
    return status.ok() ? status : in_file(status, path(file));
  }

  // Nothing when there is no such file.
  absl::StatusOr<std::optional<std::string>> read(absl::string_view file) {
    absl::StatusOr<std::string> content = files_->read(path(file));
    if (content.ok()) return *std::move(content);
    if (absl::IsNotFound(content.status())) return std::nullopt;
    return in_file(content.status(), path(file));
  }

  absl::StatusOr<CertificateAuthority> make_authority() {
    // Two authorities of one name would be taken for each other.
    return CertificateAuthority::make(
        absl::StrCat("weft authority ",
                     absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", now_, absl::UTCTimeZone())),
        now_ - kBefore, now_ + absl::Hours(24) * 10 * options_.days);
  }

  absl::Status keep(CertificateAuthority made, const std::string& older) {
    absl::StatusOr<std::string> key = made.private_key();
    if (!key.ok()) return key.status();
    // The key first: without it nothing can be done with the certificate, with it all else can.
    absl::Status status = write("ca.key", *key);
    if (status.ok()) status = write("ca.pem", absl::StrCat(made.certificate(), older));
    authority_ = std::make_unique<CertificateAuthority>(std::move(made));
    return status;
  }

  absl::Status authority() {
    absl::StatusOr<std::optional<std::string>> certificate = read("ca.pem");
    if (!certificate.ok()) return certificate.status();
    absl::StatusOr<std::optional<std::string>> key = read("ca.key");
    if (!key.ok()) return key.status();
    if (!certificate->has_value()) {
      absl::StatusOr<CertificateAuthority> made = make_authority();
      if (!made.ok()) return made.status();
      lines_.push_back(absl::StrCat("ca: made in ", options_.directory));
      return keep(*std::move(made), "");
    }
    if (!key->has_value()) {
      return absl::NotFoundError(absl::StrCat(
          path("ca.key"), " is missing: ", path("ca.pem"),
          " was made elsewhere; run weftrun ca where its key is, or give another DIR"));
    }
    absl::StatusOr<CertificateAuthority> loaded = CertificateAuthority::load(**certificate, **key);
    if (!loaded.ok()) {
      return in_file(loaded.status(), absl::StrCat(path("ca.pem"), " and ca.key"));
    }
    const absl::StatusOr<absl::Time> end = valid_until(**certificate);
    if (!end.ok()) return in_file(end.status(), path("ca.pem"));
    if (*end < now_ + absl::Hours(24) * options_.days) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the authority in ", path("ca.pem"), *end < now_ ? " has expired on " : " expires on ",
          day(*end), ", before certificates of ", options_.days, " days would; run weftrun ca ",
          options_.directory, " --new-authority, or give less --days"));
    }
    authority_ = std::make_unique<CertificateAuthority>(*std::move(loaded));
    return absl::OkStatus();
  }

  absl::Status second_authority() {
    absl::StatusOr<std::optional<std::string>> older = read("ca.pem");
    if (!older.ok()) return older.status();
    absl::StatusOr<CertificateAuthority> made = make_authority();
    if (!made.ok()) return made.status();
    lines_.push_back(absl::StrCat("ca: a new one in ", options_.directory,
                                  "; copy ca.pem to all nodes, then run weftrun ca ",
                                  options_.directory, " --all"));
    return keep(*std::move(made), older->value_or(""));
  }

  // The processes that have a certificate here, in order.
  std::vector<std::string> present() const {
    std::vector<std::string> names;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(options_.directory, error)) {
      const std::filesystem::path file = entry.path();
      if (file.extension() == ".pem" && file.stem() != "ca") names.push_back(file.stem().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::Status certify(const std::string& name) {
    absl::StatusOr<std::optional<std::string>> present = read(name + ".pem");
    if (!present.ok()) return present.status();
    const absl::Duration valid = absl::Hours(24) * options_.days;
    if (present->has_value() && !options_.all) {
      const absl::StatusOr<absl::Time> end = valid_until(**present);
      if (!end.ok()) return in_file(end.status(), path(name + ".pem"));
      if (*end - now_ > valid / 3) {
        lines_.push_back(absl::StrCat(name, ": kept, valid until ", day(*end)));
        return absl::OkStatus();
      }
    }
    absl::StatusOr<CertifiedKey> made =
        authority_->issue({.name = name,
                           .uris = {absl::StrCat("weft://worker/", name)},
                           .dns = {"worker.weft"},
                           .from = now_ - kBefore,
                           .to = now_ + valid});
    if (!made.ok()) return made.status();
    absl::Status status = write(name + ".key", made->key);
    if (status.ok()) status = write(name + ".pem", made->certificate);
    if (!status.ok()) return status;
    lines_.push_back(absl::StrCat(name, present->has_value() ? ": renewed" : ": made",
                                  ", valid until ", day(now_ + valid)));
    return absl::OkStatus();
  }

  const CaOptions& options_;
  const absl::Time now_;
  const std::unique_ptr<Files> files_;
  std::unique_ptr<CertificateAuthority> authority_;
  std::vector<std::string> lines_;
};

}  // namespace

std::string ca_usage() { return std::string(kCaUsage); }

absl::StatusOr<CaOptions> parse_ca_options(const std::vector<std::string>& args) {
  CaOptions options;
  for (size_t at = 0; at < args.size(); ++at) {
    absl::string_view arg = args[at];
    if (arg == "-h" || arg == "--help") {
      options.help = true;
      return options;
    }
    if (arg == "--all") {
      options.all = true;
    } else if (arg == "--new-authority") {
      options.new_authority = true;
    } else if (arg == "--days" || absl::ConsumePrefix(&arg, "--days=")) {
      if (arg == "--days") {
        if (at + 1 == args.size()) return wrong("--days requires a number");
        arg = args[++at];
      }
      if (!absl::SimpleAtoi(arg, &options.days) || options.days < 1 || options.days > 3650) {
        return wrong(absl::StrCat("--days requires a number from 1 to 3650, got '", arg, "'"));
      }
    } else if (absl::StartsWith(arg, "-")) {
      return wrong(absl::StrCat("unknown option '", arg, "'"));
    } else if (options.directory.empty()) {
      options.directory = std::string(arg);
    } else {
      std::vector<std::string> names;
      if (absl::Status status = add_names(std::string(arg), &names); !status.ok()) return status;
      options.names.emplace_back(arg);
    }
  }
  if (options.directory.empty()) return wrong("which directory? weftrun ca DIR [NAME]...");
  if (options.new_authority && (options.all || !options.names.empty())) {
    return wrong("--new-authority makes no certificates: run it alone");
  }
  return options;
}

absl::StatusOr<std::vector<std::string>> run_ca(const CaOptions& options, absl::Time now) {
  return Directory(options, now).run();
}

}  // namespace weft::launch
