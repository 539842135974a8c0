#include "weft/store/store_url.h"

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "weft/store/etcd_store.h"
#include "weft/store/file_store.h"
#include "weft/store/hash_store.h"
#include "weft/store/internal/address.h"
#include "weft/store/store.h"
#include "weft/store/tcp_store.h"

namespace weft {
namespace {

// The server of a hosted store: ends when the last client in this process has gone.
struct HostedServer {
  explicit HostedServer(std::unique_ptr<TcpStoreServer> server_in) : server(std::move(server_in)) {}
  // The other workers may still be saying goodbye; an exception that unwinds does not wait for
  // them.
  ~HostedServer() {
    const bool unwinding = std::uncaught_exceptions() > exceptions;
    server->stop(unwinding ? Timeout(absl::ZeroDuration()) : Timeout());
  }
  const std::unique_ptr<TcpStoreServer> server;
  const int exceptions = std::uncaught_exceptions();
};

struct KeepsServer {
  std::shared_ptr<HostedServer> hosted;
};

// The bases are destroyed from last to first: the client says goodbye before its server stops.
class HostedStore : private KeepsServer, public DelegatingStore, public ForkableStore {
 public:
  HostedStore(std::shared_ptr<HostedServer> server, std::shared_ptr<Store> client)
      : KeepsServer{std::move(server)}, DelegatingStore(std::move(client)) {}
  std::shared_ptr<Store> new_client() override {
    return std::make_shared<HostedStore>(hosted, static_cast<TcpStore&>(*inner()).new_client());
  }
};

StatusOr<std::shared_ptr<Store>> open_tcp(StoreUrl url, const StoreOptions& options,
                                          std::shared_ptr<Runtime> runtime) {
  const std::string allow = url.take("allow_insecure", "0");
  WEFT_RETURN_IF_ERROR(url.nothing_left());
  StatusOr<internal::HostPort> at = internal::parse_store_address(url.rest, -1);
  if (!at.ok()) return url.error(std::string(at.status().message()));
  const TcpStoreOptions client_options{.timeout = options.timeout,
                                       .credentials = options.credentials};
  if (!options.is_server) {
    if (at->port == 0) return url.error("only the server can take port 0");
    return TcpStore::connect(at->host, at->port, client_options, std::move(runtime));
  }
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<TcpStoreServer> server,
                        TcpStoreServer::start({.host = at->host,
                                               .port = at->port,
                                               .allow_insecure = allow != "0",
                                               .credentials = options.credentials},
                                              runtime));
  const int port = server->port();
  auto hosted = std::make_shared<HostedServer>(std::move(server));
  // An address for "all" is none to connect to.
  const bool any = at->host == "0.0.0.0" || at->host == "::";
  const std::string own = !any ? at->host : at->host == "::" ? "::1" : "127.0.0.1";
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<Store> client,
                        TcpStore::connect(own, port, client_options, std::move(runtime)));
  return std::make_shared<HostedStore>(std::move(hosted), std::move(client));
}

StatusOr<std::shared_ptr<Store>> open_etcd(StoreUrl url, const StoreOptions& options,
                                           std::shared_ptr<Runtime> runtime) {
  const std::string allow = url.take("allow_insecure", "0");
  EtcdStoreOptions etcd{.timeout = options.timeout,
                        .user = url.take("user", ""),
                        .password_file = url.take("password_file", ""),
                        .allow_insecure = allow != "0",
                        .ca_file = url.take("ca", ""),
                        .cert_file = url.take("cert", ""),
                        .key_file = url.take("key", "")};
  WEFT_RETURN_IF_ERROR(url.nothing_left());
  const size_t slash = url.rest.find('/');
  std::vector<EtcdEndpoint> endpoints;
  for (absl::string_view part : absl::StrSplit(url.rest.substr(0, slash), ',')) {
    if (absl::StrContains(part, '@')) {
      // The error does not repeat the password that may stand there.
      url.text = absl::StrCat("etcd://...", url.text.substr(url.text.rfind('@')));
      return url.error("a user stands behind '?': ?user=NAME&password_file=FILE");
    }
    StatusOr<internal::HostPort> at =
        internal::parse_store_address(std::string_view(part.data(), part.size()), 2379);
    if (!at.ok()) return url.error(std::string(at.status().message()));
    endpoints.push_back({at->host, at->port});
  }
  etcd.prefix = slash == std::string::npos ? "" : url.rest.substr(slash + 1);
  if (etcd.prefix.empty()) return url.error("it needs a prefix for the job: etcd://host:port/job");
  return EtcdStore::connect(endpoints, etcd, std::move(runtime));
}

}  // namespace

std::string StoreUrl::take(const std::string& name, const std::string& fallback) {
  auto it = query.find(name);
  if (it == query.end()) return fallback;
  std::string value = std::move(it->second);
  query.erase(it);
  return value;
}

Status StoreUrl::nothing_left() const {
  if (query.empty()) return absl::OkStatus();
  return error(
      absl::StrCat("unknown parameter '", query.begin()->first, "' of a ", scheme, " store"));
}

Status StoreUrl::error(std::string_view why) const {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("store URL '", text, "': ", std::string(why)));
}

StatusOr<StoreUrl> parse_store_url(std::string_view text) {
  StoreUrl url;
  url.text = text;
  const size_t colon = text.find("://");
  if (colon == std::string_view::npos || colon == 0) {
    return url.error("it does not begin with hash://, file://, tcp:// or etcd://");
  }
  url.scheme = text.substr(0, colon);
  const std::string_view rest = text.substr(colon + 3);
  const size_t question = rest.find('?');
  url.rest = rest.substr(0, question);
  if (question == std::string_view::npos) return url;
  const std::string query(rest.substr(question + 1));
  for (absl::string_view part : absl::StrSplit(query, '&', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(part, absl::MaxSplits('=', 1));
    url.query.insert(pair);
  }
  return url;
}

StatusOr<std::shared_ptr<Store>> open_store(std::string_view text, const StoreOptions& options,
                                            std::shared_ptr<Runtime> runtime) {
  WEFT_ASSIGN_OR_RETURN(StoreUrl url, parse_store_url(text));
  if (url.scheme == "tcp") return open_tcp(std::move(url), options, std::move(runtime));
  if (url.scheme == "hash") {
    WEFT_RETURN_IF_ERROR(url.nothing_left());
    if (!url.rest.empty()) return url.error("a hash store has no name");
    return std::make_shared<HashStore>(std::move(runtime), options.timeout);
  }
  if (url.scheme == "file") {
    const std::string run_id = url.take("run_id", options.run_id);
    WEFT_RETURN_IF_ERROR(url.nothing_left());
    if (url.rest.empty() || url.rest[0] != '/') {
      return url.error("it needs an absolute path: file:///path");
    }
    return FileStore::open(url.rest, {.run_id = run_id, .timeout = options.timeout},
                           std::move(runtime));
  }
  if (url.scheme == "etcd") return open_etcd(std::move(url), options, std::move(runtime));
  if (url.scheme == "env") {
    return url.error("env:// is for weft::join, which reads the launcher's variables");
  }
  return url.error(
      absl::StrCat("unknown scheme '", url.scheme, "'; there are hash, file, tcp and etcd"));
}

}  // namespace weft
