#include "weft/tests/contract/store_world.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/store/file_store.h"
#include "weft/store/hash_store.h"
#include "weft/store/prefix_store.h"

// gRPC is not instrumented, so ThreadSanitizer gets only the kinds without it.
#if defined(__SANITIZE_THREAD__)
#define WEFT_TEST_WITHOUT_GRPC 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WEFT_TEST_WITHOUT_GRPC 1
#endif
#endif

#ifndef WEFT_TEST_WITHOUT_GRPC
#include "weft/store/etcd_store.h"
#include "weft/store/tcp_store.h"
#include "weft/tests/contract/etcd_process.h"
#endif

namespace weft::testing {
namespace {

template <class T>
std::shared_ptr<Store> or_null(StatusOr<std::shared_ptr<T>> store) {
  if (store.ok()) return *std::move(store);
  ADD_FAILURE() << store.status();
  return nullptr;
}

class HashWorld : public StoreWorld {
 public:
  explicit HashWorld(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  std::shared_ptr<Store> client(Timeout timeout) override {
    if (first_ == nullptr) return first_ = std::make_shared<HashStore>(runtime_, timeout);
    return first_->new_client();
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<HashStore> first_;
};

class FileWorld : public StoreWorld {
 public:
  explicit FileWorld(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {
    directory_ = make_temp_dir();
  }
  ~FileWorld() override { std::filesystem::remove_all(directory_); }
  std::shared_ptr<Store> client(Timeout timeout) override {
    return or_null(
        FileStore::open(directory_ + "/store", {.run_id = "run", .timeout = timeout}, runtime_));
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::string directory_;
};

#ifndef WEFT_TEST_WITHOUT_GRPC
class TcpWorld : public StoreWorld {
 public:
  explicit TcpWorld(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {
    auto server = TcpStoreServer::start({}, runtime_);
    EXPECT_TRUE(server.ok()) << server.status();
    if (server.ok()) server_ = *std::move(server);
  }
  std::shared_ptr<Store> client(Timeout timeout) override {
    if (server_ == nullptr) return nullptr;
    // A short default is for operations; connecting may take longer on a busy machine.
    auto store = TcpStore::connect("127.0.0.1", server_->port(), {.timeout = timeout}, runtime_);
    return or_null(std::move(store));
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<TcpStoreServer> server_;
};

// One etcd for the whole program; every world has a part of it.
class EtcdWorld : public StoreWorld {
 public:
  explicit EtcdWorld(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {
    static EtcdProcess process;
    static int worlds = 0;
    EXPECT_EQ(process.problem(), "");
    if (process.problem().empty()) port_ = process.port();
    prefix_ = absl::StrCat("weft-test/\xff", ++worlds);
  }
  std::shared_ptr<Store> client(Timeout timeout) override {
    if (port_ == 0) return nullptr;
    return or_null(
        EtcdStore::connect("127.0.0.1", port_, {.prefix = prefix_, .timeout = timeout}, runtime_));
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::string prefix_;
  int port_ = 0;
};
#endif  // WEFT_TEST_WITHOUT_GRPC

template <class World>
class PrefixWorld : public StoreWorld {
 public:
  explicit PrefixWorld(std::shared_ptr<Runtime> runtime) : world_(std::move(runtime)) {}
  std::shared_ptr<Store> client(Timeout timeout) override {
    auto inner = world_.client(timeout);
    if (inner == nullptr) return nullptr;
    // Neighbours that must not be seen.
    EXPECT_TRUE(inner->set("jobs", "not mine").ok());
    EXPECT_TRUE(inner->set("job-", "not mine").ok());
    return std::make_shared<PrefixStore>("job", std::move(inner));
  }
  size_t key_overhead() const override { return world_.key_overhead() + 4; }

 private:
  World world_;
};

template <class World>
StoreKind kind(std::string name) {
  StoreKind out;
  out.name = std::move(name);
  out.make = [](std::shared_ptr<Runtime> runtime) {
    return std::make_unique<World>(std::move(runtime));
  };
  return out;
}

}  // namespace

std::string make_temp_dir() {
  std::string path = (std::filesystem::temp_directory_path() / "weft-test-XXXXXX").string();
  EXPECT_NE(::mkdtemp(path.data()), nullptr) << path;
  return path;
}

std::vector<StoreKind> all_store_kinds() {
  std::vector<StoreKind> kinds;
  kinds.push_back(kind<HashWorld>("hash"));
  kinds.push_back(kind<FileWorld>("file"));
  kinds.push_back(kind<PrefixWorld<HashWorld>>("prefix_hash"));
  kinds.push_back(kind<PrefixWorld<FileWorld>>("prefix_file"));
#ifndef WEFT_TEST_WITHOUT_GRPC
  kinds.push_back(kind<TcpWorld>("tcp"));
  kinds.push_back(kind<PrefixWorld<TcpWorld>>("prefix_tcp"));
  for (StoreKind etcd : {kind<EtcdWorld>("etcd"), kind<PrefixWorld<EtcdWorld>>("prefix_etcd")}) {
    etcd.missing = EtcdProcess::missing;
    kinds.push_back(std::move(etcd));
  }
#endif
  return kinds;
}

}  // namespace weft::testing
