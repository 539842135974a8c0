#include "weft/store/rendezvous.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/files.h"
#include "weft/common/launch_info.h"
#include "weft/store/delegating_store.h"
#include "weft/store/file_store.h"
#include "weft/store/store_url.h"

namespace weft {
namespace {

constexpr char kLetGo[] = "weft/let_go";

// The file store of one job's ranks on one machine. After a shutdown rank 0 removes the file, but
// not before the other ranks have released it: they still read each other's last messages when rank
// 0 has read them all. A rank that died reports nothing, so rank 0 waits for a few seconds only. A
// rank 0 that ends otherwise does not wait, and the last of the other ranks removes the file: until
// then they need it to learn about rank 0.
class OwnFileStore : public DelegatingStore, public ForkableStore, public SharedPlace {
 public:
  OwnFileStore(std::shared_ptr<FileStore> inner, std::shared_ptr<Runtime> runtime, std::string path,
               bool is_first, int world_size)
      : DelegatingStore(inner),
        last_words_(inner->new_client()),  // the other may have been interrupted by then
        runtime_(std::move(runtime)),
        path_(std::move(path)),
        is_first_(is_first),
        others_(world_size - 1) {}
  ~OwnFileStore() override {
    if (is_first_ && others_are_leaving_.load()) {
      wait_for_others();
    } else {
      const StatusOr<int64_t> gone = last_words_->add(kLetGo, 1, absl::Seconds(5));
      if (!gone.ok() || *gone <= others_) return;
    }
    // An error has no recipient here: the file may be gone already.
    runtime_->files().remove(path_).IgnoreError();
  }

  // Removes nothing: that is for the last reference to this one.
  std::shared_ptr<Store> new_client() override {
    return static_cast<FileStore&>(*inner()).new_client();
  }
  void others_are_leaving() override { others_are_leaving_.store(true); }

 private:
  void wait_for_others() {
    const absl::Time end = runtime_->now() + absl::Seconds(5);
    std::optional<std::string> seen;
    while (others_ > 0 && seen != absl::StrCat(others_)) {
      auto changed = last_words_->wait_change(kLetGo, seen, end - runtime_->now());
      if (!changed.ok()) break;
      seen = *std::move(changed);
    }
  }

  const std::shared_ptr<Store> last_words_;
  const std::shared_ptr<Runtime> runtime_;
  const std::string path_;
  const bool is_first_;
  const int others_;
  std::atomic<bool> others_are_leaving_{false};
};

// A directory that only this user can enter, for the files that the ranks of one machine share.
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

// What torchrun's variables say, as a URL: meet by way of the c10d store that its agent keeps at
// MASTER_PORT.
std::string torchrun_url(const LaunchInfo& launch, bool allow_insecure) {
  return absl::StrCat(
      "c10d://", launch.master_addr, ":", launch.master_port, "?key=weft/store/",
      launch.restart_count,
      launch.single_node() ? "&listen=127.0.0.1" : absl::StrCat("&listen=", launch.master_addr),
      allow_insecure ? "&allow_insecure=1" : "");
}

StatusOr<std::shared_ptr<Store>> open(std::string_view url, const RendezvousOptions& options,
                                      const StoreOptions& store, std::shared_ptr<Runtime> runtime) {
  WEFT_ASSIGN_OR_RETURN(const StoreUrl parsed, parse_store_url(url));
  const auto own = options.schemes.find(parsed.scheme);
  if (own != options.schemes.end()) return own->second(url, store, std::move(runtime));
  return open_store(url, store, std::move(runtime));
}

}  // namespace

StatusOr<std::shared_ptr<Store>> open_rendezvous_store(const RendezvousOptions& options,
                                                       std::shared_ptr<Runtime> runtime) {
  StoreOptions store;
  store.timeout = options.timeout;
  store.run_id = options.config.job_id;
  store.credentials = options.credentials;
  if (!options.url.empty() && options.url != "env://") {
    store.is_server = options.is_first;
    return open(options.url, options, store, std::move(runtime));
  }
  WEFT_ASSIGN_OR_RETURN(const LaunchInfo launch, launch_info(options.config, options.environment));
  if (launch.agent_store && launch.master_port != 0) {
    store.is_server = options.is_first;
    return open(torchrun_url(launch, options.config.allow_insecure), options, store,
                std::move(runtime));
  }
  if (!launch.master_addr.empty() && launch.master_port != 0) {
    store.is_server = options.is_first;
    return open_store(absl::StrCat("tcp://", launch.master_addr, ":", launch.master_port,
                                   options.config.allow_insecure ? "?allow_insecure=1" : ""),
                      store, std::move(runtime));
  }
  if (options.alone && options.url.empty()) return open_store("hash://", store, std::move(runtime));
  // mpirun and srun give ranks but no place to meet. On one machine a file will do.
  if (launch.launcher != Launcher::kNone && !launch.job_key.empty() && launch.single_node()) {
    WEFT_ASSIGN_OR_RETURN(const std::string directory, private_directory(options.environment));
    std::string name = launch.job_key;
    std::replace_if(
        name.begin(), name.end(), [](char c) { return c == '/' || c == '.'; }, '_');
    const std::string path = absl::StrCat(directory, "/", name);
    WEFT_ASSIGN_OR_RETURN(
        std::shared_ptr<FileStore> file,
        FileStore::open(path, {.run_id = launch.job_key, .timeout = options.timeout}, runtime));
    return std::make_shared<OwnFileStore>(std::move(file), std::move(runtime), path,
                                          options.is_first, launch.world_size);
  }
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat(
          "no store to meet at: ", launch.master_addr.empty() ? "MASTER_ADDR" : "MASTER_PORT",
          " is not set; start the program with weftrun, or set WEFT_STORE (tcp://host:port, "
          "file:///path, etcd://host:port/prefix)"));
}

}  // namespace weft
