// The file that the ranks of mpirun or srun meet at: who clears it away, and when.

#include "weft/store/rendezvous.h"

#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/rpc/worker.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class OwnFile : public ::testing::Test {
 protected:
  OwnFile() {
    std::string path = (std::filesystem::temp_directory_path() / "weft-test-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) std::abort();
    directory_ = path;
  }
  ~OwnFile() override { std::filesystem::remove_all(directory_); }

  Environment environment(int rank, int size) const {
    return {{"XDG_RUNTIME_DIR", directory_.string()},
            {"OMPI_COMM_WORLD_RANK", absl::StrCat(rank)},
            {"OMPI_COMM_WORLD_SIZE", absl::StrCat(size)},
            {"OMPI_COMM_WORLD_LOCAL_RANK", absl::StrCat(rank)},
            {"OMPI_COMM_WORLD_LOCAL_SIZE", absl::StrCat(size)},
            {"PMIX_NAMESPACE", "job-1"}};
  }
  std::shared_ptr<Store> open(int rank, int size) {
    RendezvousOptions options;
    options.environment = environment(rank, size);
    options.is_first = rank == 0;
    return value_or_throw(open_rendezvous_store(options, runtime_));
  }
  static void leave_with_the_others(const std::shared_ptr<Store>& store) {
    dynamic_cast<SharedPlace&>(*store).others_are_leaving();
  }
  // But for the directory of this user.
  std::vector<std::string> files() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_)) {
      if (!entry.is_directory()) found.push_back(entry.path().filename().string());
    }
    return found;
  }

  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  std::filesystem::path directory_;
};

TEST_F(OwnFile, RankZeroRemovesItWhenTheOthersHaveReadTheLastWords) {
  std::shared_ptr<Store> first = open(0, 3);
  std::shared_ptr<Store> second = open(1, 3);
  std::shared_ptr<Store> third = open(2, 3);
  ASSERT_TRUE(first->set("last", "words").ok());
  leave_with_the_others(first);
  leave_with_the_others(second);
  std::thread removal([&first] { first = nullptr; });
  second = nullptr;
  // Rank 0 has begun to leave, or will at any moment: it must not matter.
  EXPECT_EQ(*third->get("last", 5s), "words");
  EXPECT_EQ(files().size(), 1u);
  third = nullptr;
  removal.join();
  EXPECT_EQ(files(), std::vector<std::string>{});
}

TEST_F(OwnFile, ARankZeroThatIsDestroyedWaitsForNobody) {
  std::shared_ptr<Store> first = open(0, 3);
  std::shared_ptr<Store> second = open(1, 3);
  std::shared_ptr<Store> third = open(2, 3);
  ASSERT_TRUE(first->set("word", "1").ok());
  // Before the others, who leave on this thread: a wait for them would end only by giving them up,
  // and the file with them.
  first = nullptr;
  EXPECT_EQ(files().size(), 1u);
  EXPECT_EQ(*third->get("word", 5s), "1");
  second = nullptr;
  EXPECT_EQ(*third->get("word", 5s), "1");
  third = nullptr;
  EXPECT_EQ(files(), std::vector<std::string>{});
}

TEST_F(OwnFile, WorkersUseItTheSameWay) {
  const auto network = std::make_shared<InprocNetwork>();
  const auto join = [&](int rank) {
    JoinOptions o;
    o.name = absl::StrCat("worker", rank);
    o.environment = environment(rank, 2);
    o.transport = inproc_transport(network);
    o.heartbeat_interval = 100ms;
    o.lease = 1s;
    return std::make_unique<Worker>(Worker::join(std::move(o)));
  };
  std::vector<std::unique_ptr<Worker>> workers(2);
  const auto everyone = [&](auto what) {
    std::thread other([&] { what(1); });
    what(0);
    other.join();
  };
  everyone([&](int rank) { workers[rank] = join(rank); });
  everyone([&](int rank) { EXPECT_TRUE(workers[rank]->shutdown().status.ok()); });
  EXPECT_EQ(files().size(), 1u);
  everyone([&](int rank) { workers[rank] = nullptr; });
  EXPECT_EQ(files(), std::vector<std::string>{});

  // Rank 0 goes without a word: the other one still finds out by the store, then clears it away.
  everyone([&](int rank) { workers[rank] = join(rank); });
  workers[0] = nullptr;
  EXPECT_EQ(files().size(), 1u);
  const ShutdownResult result = workers[1]->shutdown({.deadline = 20s});
  EXPECT_TRUE(result.status.ok() || error_kind(result.status) == ErrorKind::kPeerLost)
      << result.status;
  workers[1] = nullptr;
  EXPECT_EQ(files(), std::vector<std::string>{});
}

}  // namespace
}  // namespace weft::testing
