// weft-inspect: shows what a running worker does (docs/inspect.md).

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "weft/common/condition.h"
#include "weft/common/config.h"
#include "weft/common/mutex.h"
#include "weft/rpc/inspect.h"
#include "weft/rpc/inspection.h"
#include "weft/store/store.h"
#include "weft/tools/weft_inspect/html.h"

namespace weft {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

constexpr char kUsage[] =
    R"(weft-inspect: shows what a running worker does: its peers, the calls that run there and that it waits for, its RRefs

  weft-inspect [options] ADDRESS
  weft-inspect [options] --store URL [NAME]

  weft-inspect 127.0.0.1:40123/local-13bb385ca1ae91a2
  weft-inspect --store tcp://10.0.0.1:29400 ps0
  weft-inspect --store tcp://10.0.0.1:29400 --html job.html

ADDRESS is what the worker's log says: "joined job ... at ADDRESS". With --store (tcp:// or etcd://) the worker is found by
its name; without a name those that are there are listed.

  --json             for programs
  --counters         all counters too
  --rows N           at most so many rows of each table (default 1000)
  --timeout T        to reach the worker and hear from it (default 10 s)
  --watch T          again after so long, until interrupted; on a terminal the same place shows what is new
  --html FILE        a picture of the job in FILE instead: workers, connections, calls, passes; with --store of all workers
  --job ID           which of the jobs in the store
  --tls DIR          credentials: DIR/ca.pem, DIR/NAME.pem, DIR/NAME.key and, if it is there, DIR/token, of --name
  --name NAME        under which to come; with credentials it must be that of the certificate
  --help, --version

Without --tls the variables WEFT_TLS_CA, WEFT_TLS_CERT, WEFT_TLS_KEY and WEFT_TOKEN_FILE count, as for a worker. Times
are seconds (10, 0.5) or have a unit (500ms, 2m).

Exit code: 0 when the worker has answered, 1 when it has not, 2 for a wrong command line.
)";

struct Arguments {
  InspectOptions inspect;
  std::string store;
  std::string job;
  std::string worker;  // by name, in the store
  std::string tls;
  std::string html;
  absl::Duration watch = absl::ZeroDuration();
  bool help = false;
  bool version = false;
};

int fail(int code, const std::string& what) {
  std::cerr << "weft-inspect: " << what << "\n";
  return code;
}

Status usage_error(const std::string& what) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat(what, " (weft-inspect --help lists the options)"));
}

StatusOr<absl::Duration> parse_time(const std::string& flag, const std::string& text) {
  double seconds = 0;
  absl::Duration out;
  if (absl::SimpleAtod(text, &seconds)) {
    out = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(text, &out)) {
    out = absl::ZeroDuration();
  }
  if (out > absl::ZeroDuration() && out <= absl::Hours(24)) return out;
  return usage_error(
      absl::StrCat(flag, " wants a time up to a day, such as 10, 0.5 or 500ms, got '", text, "'"));
}

StatusOr<Arguments> parse(const std::vector<std::string>& words) {
  Arguments out;
  std::vector<std::string> plain;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& flag = words[i];
    if (!absl::StartsWith(flag, "-")) {
      plain.push_back(flag);
      continue;
    }
    if (flag == "--json" || flag == "--counters" || flag == "--help" || flag == "--version") {
      out.inspect.json = out.inspect.json || flag == "--json";
      out.inspect.counters = out.inspect.counters || flag == "--counters";
      out.help = out.help || flag == "--help";
      out.version = out.version || flag == "--version";
      continue;
    }
    const std::pair<const char*, std::string*> texts[] = {{"--store", &out.store},
                                                          {"--job", &out.job},
                                                          {"--tls", &out.tls},
                                                          {"--html", &out.html},
                                                          {"--name", &out.inspect.name}};
    const std::pair<const char*, absl::Duration*> times[] = {{"--timeout", &out.inspect.deadline},
                                                             {"--watch", &out.watch}};
    const bool known =
        flag == "--rows" ||
        std::any_of(std::begin(texts), std::end(texts), [&](auto& t) { return flag == t.first; }) ||
        std::any_of(std::begin(times), std::end(times), [&](auto& t) { return flag == t.first; });
    if (!known) return usage_error(absl::StrCat("there is no option ", flag));
    if (++i == words.size()) return usage_error(absl::StrCat(flag, " wants a value"));
    const std::string& value = words[i];
    for (const auto& [name, to] : texts) {
      if (flag == name) *to = value;
    }
    for (const auto& [name, to] : times) {
      if (flag != name) continue;
      WEFT_ASSIGN_OR_RETURN(*to, parse_time(flag, value));
    }
    if (flag == "--rows" && (!absl::SimpleAtoi(value, &out.inspect.most_rows) ||
                             out.inspect.most_rows < 1 || out.inspect.most_rows > 100'000)) {
      return usage_error(absl::StrCat("--rows wants a number from 1 to 100000, got '", value, "'"));
    }
  }
  if (out.help || out.version) return out;
  if (plain.size() > 1) return usage_error(absl::StrCat("one worker at a time, not ", plain[1]));
  if (plain.empty() && out.store.empty()) return usage_error("which worker? ADDRESS or --store");
  if (!plain.empty()) (out.store.empty() ? out.inspect.address : out.worker) = plain[0];
  // Opening the file as another run than the job's would take it away from the job.
  if (absl::StartsWith(out.store, "file:") || absl::StartsWith(out.store, "hash:")) {
    return usage_error(absl::StrCat("--store ", out.store,
                                    " cannot be read from outside of its job; give the worker's "
                                    "ADDRESS, which its log has"));
  }
  if (!out.html.empty() && out.inspect.json) return usage_error("either --html or --json");
  if (!out.tls.empty() && out.inspect.name.empty()) {
    return usage_error("--tls DIR wants --name NAME: whose certificate of those in it");
  }
  return out;
}

StatusOr<Credentials> credentials_for(const Arguments& arguments) {
  Credentials out;
  if (arguments.tls.empty()) {
    WEFT_ASSIGN_OR_RETURN(const Config config, Config::from_environment(process_environment()));
    out.ca_file = config.tls_ca;
    out.cert_file = config.tls_cert;
    out.key_file = config.tls_key;
    out.shared_certificate = config.tls_shared_certificate;
    out.token_file = config.token_file;
    return out;
  }
  const std::string own = absl::StrCat(arguments.tls, "/", arguments.inspect.name);
  out.ca_file = arguments.tls + "/ca.pem";
  out.cert_file = own + ".pem";
  out.key_file = own + ".key";
  const std::string token = arguments.tls + "/token";
  std::error_code ignored;  // one that cannot be looked at cannot be read either, and is told then
  if (std::filesystem::symlink_status(token, ignored).type() !=
      std::filesystem::file_type::not_found) {
    out.token_file = token;
  }
  return out;
}

std::string listed(const std::vector<ListedWorker>& workers, bool json) {
  Inspection out(100'000);
  Inspection::Table& table =
      out.table("workers", {"job", "name", "id", "incarnation", "address", "host", "pid"});
  for (const ListedWorker& w : workers) {
    table.add({w.job_id, w.info.name, int64_t{w.info.id},
               absl::StrCat(absl::Hex(w.info.incarnation, absl::kZeroPad16)), w.address, w.host,
               w.pid});
  }
  return json ? out.json() : out.text();
}

StatusOr<std::vector<ListedWorker>> workers_in_store(const Arguments& arguments,
                                                     const std::shared_ptr<Runtime>& runtime) {
  const StoreOptions options{.timeout = arguments.inspect.deadline,
                             .credentials = arguments.inspect.credentials};
  WEFT_ASSIGN_OR_RETURN(const std::shared_ptr<Store> store,
                        open_store(arguments.store, options, runtime));
  return list_workers(*store, arguments.job, arguments.inspect.deadline);
}

// The address of the one that is meant, or what there is.
StatusOr<std::string> find(Arguments* arguments, const std::shared_ptr<Runtime>& runtime) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<ListedWorker> workers,
                        workers_in_store(*arguments, runtime));
  if (arguments->worker.empty()) return listed(workers, arguments->inspect.json);
  std::vector<ListedWorker> found;
  for (const ListedWorker& w : workers) {
    if (w.info.name == arguments->worker) found.push_back(w);
  }
  if (found.size() == 1) {
    arguments->inspect.address = found[0].address;
    arguments->inspect.wanted = found[0].info;
    return std::string();
  }
  std::vector<std::string> names;
  for (const ListedWorker& w : found.empty() ? workers : found) {
    names.push_back(absl::StrCat("'", w.info.name, "' of job ", w.job_id));
  }
  return make_error(
      ErrorKind::kNotFound,
      absl::StrCat(found.empty() ? "there is no worker '" : "there are several '",
                   arguments->worker, "' at ", arguments->store, ": ",
                   names.empty() ? std::string("nobody is there") : absl::StrJoin(names, ", ")));
}

// Looks at every worker of the store, or at the one whose address is known. One that does not answer
// is in the picture, too.
StatusOr<std::vector<inspect_tool::SeenWorker>> look_at_all(
    const Arguments& arguments, const std::shared_ptr<Runtime>& runtime) {
  std::vector<ListedWorker> workers;
  if (arguments.store.empty()) {
    workers.push_back({});
    workers[0].info.name = arguments.inspect.address;
    workers[0].address = arguments.inspect.address;
  } else {
    WEFT_ASSIGN_OR_RETURN(workers, workers_in_store(arguments, runtime));
  }
  std::vector<inspect_tool::SeenWorker> out;
  for (const ListedWorker& worker : workers) {
    if (!arguments.worker.empty() && worker.info.name != arguments.worker) continue;
    InspectOptions one = arguments.inspect;
    one.json = true;
    one.address = worker.address;
    if (!arguments.store.empty()) one.wanted = worker.info;
    const StatusOr<std::string> seen = try_inspect(one);
    // Without a store nothing else is known of it, so its silence is an error of the program.
    if (!seen.ok() && arguments.store.empty()) return seen.status();
    inspect_tool::SeenWorker& to = out.emplace_back();
    to.name = worker.info.name;
    to.address = worker.address;
    if (seen.ok()) {
      to.tables = *seen;
    } else {
      to.error = std::string(seen.status().message());
    }
  }
  return out;
}

Status write_picture(const Arguments& arguments, const std::shared_ptr<Runtime>& runtime) {
  WEFT_ASSIGN_OR_RETURN(const auto workers, look_at_all(arguments, runtime));
  const std::string at =
      absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::Now(), absl::UTCTimeZone());
  const std::string& source = arguments.store.empty() ? arguments.inspect.address : arguments.store;
  // In one step, so that a browser that loads it again finds a whole one.
  const std::string unfinished = absl::StrCat(arguments.html, ".", ::getpid(), ".new");
  std::ofstream out(unfinished);
  out << inspect_tool::page(source, at, workers);
  out.close();
  std::error_code failed;
  if (out) std::filesystem::rename(unfinished, arguments.html, failed);
  if (!out || failed) {
    const std::string why = failed ? failed.message() : std::strerror(errno);
    std::error_code ignored;
    std::filesystem::remove(unfinished, ignored);
    return make_error(ErrorKind::kUnavailable,
                      absl::StrCat("cannot write ", arguments.html, ": ", why));
  }
  std::cout << workers.size() << " workers in " << arguments.html << "\n";
  return absl::OkStatus();
}

// The tables, after the list of the store where no worker is named.
Status print_tables(Arguments* arguments, const std::shared_ptr<Runtime>& runtime) {
  std::string shown;
  if (!arguments->store.empty()) {
    WEFT_ASSIGN_OR_RETURN(shown, find(arguments, runtime));
  }
  if (!arguments->inspect.address.empty()) {
    WEFT_ASSIGN_OR_RETURN(const std::string seen, try_inspect(arguments->inspect));
    shown += seen;
  }
  // On a terminal: at the same place each time, and in one piece, so that nothing flickers.
  const bool live = arguments->watch != absl::ZeroDuration() && ::isatty(STDOUT_FILENO) == 1;
  if (live) {
    const std::string now = absl::FormatTime("%H:%M:%S", absl::Now(), absl::LocalTimeZone());
    shown = absl::StrCat("\033[H\033[2J", now, ", every ", absl::FormatDuration(arguments->watch),
                         "\n\n", shown);
  }
  std::cout << shown;
  return absl::OkStatus();
}

Status run(Arguments arguments) {
  const std::shared_ptr<Runtime> runtime = make_system_runtime();
  arguments.inspect.runtime = runtime;
  WEFT_ASSIGN_OR_RETURN(arguments.inspect.credentials, credentials_for(arguments));
  Mutex mutex;
  Condition never(runtime.get());
  while (true) {
    WEFT_RETURN_IF_ERROR(arguments.html.empty() ? print_tables(&arguments, runtime)
                                                : write_picture(arguments, runtime));
    if (!std::cout.flush()) return make_error(ErrorKind::kUnavailable, "cannot write the answer");
    if (arguments.watch == absl::ZeroDuration()) return absl::OkStatus();
    std::cout << "\n";
    const absl::Time next = runtime->now() + arguments.watch;
    MutexLock lock(&mutex);
    while (never.wait_until(&mutex, next).ok()) {
    }
  }
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  const weft::StatusOr<weft::Arguments> arguments =
      weft::parse(std::vector<std::string>(argv + 1, argv + argc));
  if (!arguments.ok()) {
    return weft::fail(weft::kExitUsage, std::string(arguments.status().message()));
  }
  if (arguments->help || arguments->version) {
    std::cout << (arguments->help ? weft::kUsage : "weft-inspect " WEFT_VERSION "\n");
    return std::cout.flush() ? 0 : weft::kExitFailed;
  }
  const weft::Status status = weft::run(*arguments);
  return status.ok() ? 0 : weft::fail(weft::kExitFailed, std::string(status.message()));
}
