#include "weft/rpc/internal/rendezvous.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/files.h"
#include "weft/common/launch_info.h"
#include "weft/rpc/delegating_store.h"
#include "weft/rpc/internal/agent_store.h"

namespace weft::internal {
namespace {

// A file store whose file goes with rank 0, which is the last to need it: it leaves after the
// others have said that they are done.
class OwnFileStore : public DelegatingStore {
 public:
  OwnFileStore(std::shared_ptr<Store> inner, std::shared_ptr<Runtime> runtime, std::string path)
      : DelegatingStore(std::move(inner)), runtime_(std::move(runtime)), path_(std::move(path)) {}
  ~OwnFileStore() override {
    // It may be gone already; there is nobody to tell.
    runtime_->files().remove(path_).IgnoreError();
  }

 private:
  const std::shared_ptr<Runtime> runtime_;
  const std::string path_;
};

// A directory of this user that nobody else can enter, for what the ranks of one machine share.
StatusOr<std::string> private_directory(const Environment& environment) {
  auto runtime_dir = environment.find("XDG_RUNTIME_DIR");
  const std::string base = runtime_dir != environment.end() && !runtime_dir->second.empty()
                               ? runtime_dir->second
                               : "/tmp";
  const std::string path = absl::StrCat(base, "/weft-", ::geteuid());
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return make_error(ErrorKind::kUnavailable, absl::StrCat("cannot make the directory '", path,
                                                            "': ", std::strerror(errno)));
  }
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() ||
      (info.st_mode & 077) != 0) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("'", path,
                                   "' is not a directory that only this user can enter; remove "
                                   "it, or set WEFT_STORE"));
  }
  return path;
}

// Started by torchrun: our store on a port of its own, its address through the agent's store.
StatusOr<std::shared_ptr<Store>> meet_through_agent(const RendezvousOptions& options,
                                                    const LaunchInfo& launch, StoreOptions store,
                                                    std::shared_ptr<Runtime> runtime) {
  AgentStoreAddress at;
  at.host = launch.master_addr;
  at.port = launch.master_port;
  at.key = absl::StrCat("weft/store/", launch.restart_count);
  at.timeout = options.timeout;
  if (!options.is_first) {
    WEFT_ASSIGN_OR_RETURN(const std::string url, read_through_agent_store(at));
    return open_store(url, store, std::move(runtime));
  }
  store.is_server = true;
  const std::string url =
      launch.single_node() ? std::string("tcp://127.0.0.1:0")
                           : absl::StrCat("tcp://", launch.master_addr, ":0",
                                          options.config.allow_insecure ? "?allow_insecure=1" : "");
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<Store> hosted, open_store(url, store, std::move(runtime)));
  WEFT_RETURN_IF_ERROR(publish_through_agent_store(at, hosted->describe()));
  return hosted;
}

}  // namespace

StatusOr<std::shared_ptr<Store>> open_rendezvous_store(const RendezvousOptions& options,
                                                       std::shared_ptr<Runtime> runtime) {
  StoreOptions store;
  store.timeout = options.timeout;
  store.run_id = options.config.job_id;
  if (!options.url.empty() && options.url != "env://") {
    store.is_server = options.is_first;
    return open_store(options.url, store, std::move(runtime));
  }
  WEFT_ASSIGN_OR_RETURN(const LaunchInfo launch, launch_info(options.config, options.environment));
  if (launch.agent_store && launch.master_port != 0) {
    return meet_through_agent(options, launch, store, std::move(runtime));
  }
  if (!launch.master_addr.empty() && launch.master_port != 0) {
    store.is_server = options.is_first;
    return open_store(absl::StrCat("tcp://", launch.master_addr, ":", launch.master_port), store,
                      std::move(runtime));
  }
  if (options.alone && options.url.empty()) return open_store("hash://", store, std::move(runtime));
  // mpirun and srun give ranks but no place to meet. On one machine a file will do.
  if (launch.launcher != Launcher::kNone && !launch.job_key.empty() && launch.single_node()) {
    WEFT_ASSIGN_OR_RETURN(const std::string directory, private_directory(options.environment));
    std::string name = launch.job_key;
    std::replace_if(
        name.begin(), name.end(), [](char c) { return c == '/' || c == '.'; }, '_');
    const std::string path = absl::StrCat(directory, "/", name);
    store.run_id = launch.job_key;
    WEFT_ASSIGN_OR_RETURN(std::shared_ptr<Store> file,
                          open_store(absl::StrCat("file://", path), store, runtime));
    if (!options.is_first) return file;
    return std::make_shared<OwnFileStore>(std::move(file), std::move(runtime), path);
  }
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat(
          "no store to meet at: ", launch.master_addr.empty() ? "MASTER_ADDR" : "MASTER_PORT",
          " is not set; start the program with weftrun, or set WEFT_STORE (tcp://host:port, "
          "file:///path, etcd://host:port/prefix)"));
}

}  // namespace weft::internal
