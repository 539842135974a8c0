// What is wrong with a snapshot's files, or with what a client asks of it, and what happens while one is cut.

#include <atomic>

#include "absl/strings/str_cat.h"
#include "torch/types.h"
#include "weft/proto/ps_snapshot.pb.h"
#include "weft/ps/internal/ask.h"
#include "weft/ps/internal/snapshot_files.h"
#include "weft/tests/ps/fixture.h"
#include "weft/tests/testing/forwarding_runtime.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using ps::SnapshotInfo;
using ps::Table;
using namespace std::chrono_literals;  // NOLINT

const char* const kFaultsFolder = "/snapshots";

// A snapshot, and one after it, of a table with as many pushes as their number.
struct Two {
  explicit Two(const std::shared_ptr<SimRuntime>& sim) : job(2, 1, Net::kInproc, sim) {
    const Table t = job.clients[0].open_table("w", definition());
    for (int i = 0; i < 2; ++i) {
      t.push(-torch::ones({4})).wait();
      job.clients[0].snapshot(kFaultsFolder);
    }
  }
  static ps::TableDefinition definition() {
    return ps::dense({4}, ps::rule<optim::SGD>({.lr = 1}));
  }
  double value() {
    const Table t = job.clients[0].open_table("w", {.observer = true});
    return t.pull().wait()[3].item<double>();
  }
  PsJob job;
};

// The name of a file of the newest snapshot.
std::string file_of_newest(Files& files, int index) {
  v1::PsSnapshot manifest;
  uint64_t hash = 0;
  const Status read = ps::internal::read_manifest(files, absl::StrCat(kFaultsFolder, "/snapshot"),
                                                  &manifest, &hash);
  EXPECT_TRUE(read.ok()) << read;
  return absl::StrCat(kFaultsFolder, "/", manifest.files(index).name());
}

TEST_F(PsTest, BadInput_a_damaged_snapshot_and_the_one_before_is_used) {
  const auto flip = [](std::string* bytes) { (*bytes)[bytes->size() / 2] ^= 1; };
  const auto cut_short = [](std::string* bytes) { bytes->pop_back(); };
  const auto longer = [](std::string* bytes) { bytes->push_back('x'); };
  const auto empty = [](std::string* bytes) { bytes->clear(); };
  const std::vector<std::function<void(std::string*)>> damages = {flip, cut_short, longer, empty};
  for (size_t i = 0; i < 2 * damages.size(); ++i) {
    in_simulation(50 + i, [&](const std::shared_ptr<SimRuntime>& sim) {
      Two two(sim);
      Files& files = sim->files();
      const bool manifest = i >= damages.size();
      const std::string path =
          manifest ? absl::StrCat(kFaultsFolder, "/snapshot") : file_of_newest(files, 1);
      std::string bytes = *files.read(path);
      damages[i % damages.size()](&bytes);
      ASSERT_TRUE(files.write_atomic(path, bytes).ok());
      const SnapshotInfo info = two.job.clients[0].restore(kFaultsFolder);
      EXPECT_EQ(info.number, 1U);
      EXPECT_NE(info.refused.find(path), std::string::npos) << info.refused;
      EXPECT_EQ(two.value(), 1);
      // The next one does not take the place of the one that is whole.
      EXPECT_EQ(two.job.clients[0].snapshot(kFaultsFolder).number, 3U);
      EXPECT_EQ(two.job.clients[0].restore(kFaultsFolder).refused, "");
    });
  }
}

TEST_F(PsTest, BadInput_no_snapshot_is_whole_or_there_is_none) {
  in_simulation(60, [&](const std::shared_ptr<SimRuntime>& sim) {
    Two two(sim);
    Files& files = sim->files();
    const std::string path = file_of_newest(files, 0);
    ASSERT_TRUE(files.remove(path).ok());
    ASSERT_TRUE(
        files.write_atomic(absl::StrCat(kFaultsFolder, "/snapshot.previous"), "nonsense").ok());
    expect_ps_error(ps_error_of([&] { two.job.clients[0].restore(kFaultsFolder); }),
                    ErrorKind::kInvalidArgument,
                    {path, "cannot be read", "snapshot.previous", "is no manifest"});
    EXPECT_EQ(two.value(), 2) << "nothing has changed";
    expect_ps_error(ps_error_of([&] { two.job.clients[0].restore("/elsewhere"); }),
                    ErrorKind::kNotFound, {"no snapshot in '/elsewhere'"});
    expect_ps_error(
        ps_error_of([&] { two.job.clients[0].snapshot(kFaultsFolder, {.tables = {"x"}}); }),
        ErrorKind::kNotFound, {"no server has a table 'x'"});
    expect_ps_error(ps_error_of([&] { two.job.clients[0].snapshot(""); }),
                    ErrorKind::kInvalidArgument, {"folder"});
  });
}

TEST_F(PsTest, BadInput_a_restore_over_another_definition_or_other_servers) {
  in_simulation(61, [&](const std::shared_ptr<SimRuntime>& sim) {
    { Two two(sim); }
    PsJob job(3, 1, Net::kInproc, sim);
    auto other = Two::definition();
    other.shape = {5};
    const Table t = job.clients[0].open_table("w", other);
    t.push(-torch::ones({5})).wait();
    expect_ps_error(ps_error_of([&] { job.clients[0].restore(kFaultsFolder); }),
                    ErrorKind::kInvalidArgument, {"restore at 'ps", "shape is [5] there and [4]"});
    t.push(-torch::ones({5})).wait();
    EXPECT_EQ(t.pull().wait()[0].item<double>(), 2) << "nothing has changed";
    const ps::Client fewer(job.worker(0), {.servers = {"ps0", "ps1"}});
    expect_ps_error(ps_error_of([&] { fewer.snapshot(kFaultsFolder); }), ErrorKind::kUnavailable,
                    {"table 'w'", "2 of its 3 parts"});
  });
}

TEST_F(PsTest, BadInput_a_client_that_does_not_answer_while_a_snapshot_is_cut) {
  in_simulation(62, [&](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(1);
    PsJob job(2, 2, Net::kInproc, sim, [&](int, JoinOptions* join) {
      join->transport = faulty_transport(join->transport, plan);
    });
    const Table a = job.clients[0].open_table("w", Two::definition());
    const Table b = job.clients[1].open_table("w", Two::definition());
    plan->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "c0", .to = "c1"});
    expect_ps_error(ps_error_of([&] { job.clients[0].snapshot(kFaultsFolder, {.pause = 500ms}); }),
                    ErrorKind::kUnavailable, {"the cut was given up", "clients at 'c1'"});
    plan->clear();
    a.push(-torch::ones({4})).wait();  // training goes on
    b.push(-torch::ones({4})).wait();
    EXPECT_EQ(job.clients[0].snapshot(kFaultsFolder).number, 1U);
    expect_ps_error(ps_error_of([&] {
                      b.push(torch::ones({4}), {.position = std::string(70000, 'x')}).wait();
                    }),
                    ErrorKind::kInvalidArgument, {"position has 70000 bytes"});
  });
}

// A runtime whose disk has so much room.
class SmallDisk : public ForwardingRuntime {
 public:
  SmallDisk(std::shared_ptr<Runtime> inner, std::shared_ptr<const std::atomic<uint64_t>> capacity)
      : ForwardingRuntime(std::move(inner)), files_(make_memory_files(std::move(capacity))) {}
  Files& files() override { return *files_; }

 private:
  const std::unique_ptr<Files> files_;
};

TEST_F(PsTest, BadInput_a_snapshot_on_a_disk_that_is_full) {
  in_simulation(63, [&](const std::shared_ptr<SimRuntime>& sim) {
    const auto room = std::make_shared<std::atomic<uint64_t>>(1 << 20);
    const auto disk = std::make_shared<SmallDisk>(sim, room);
    PsJob job(2, 1, Net::kInproc, disk);
    const Table t = job.clients[0].open_table("w", Two::definition());
    t.push(-torch::ones({4})).wait();
    job.clients[0].snapshot(kFaultsFolder);
    t.push(-torch::ones({4})).wait();
    // For each number of bytes that are left: either the new one is whole, or the one before is.
    uint64_t used = 0;
    for (const std::string& path :
         {file_of_newest(disk->files(), 0), file_of_newest(disk->files(), 1),
          absl::StrCat(kFaultsFolder, "/snapshot")}) {
      used += disk->files().stamp(path)->size;
    }
    int refused = 0;
    uint64_t number = 1;
    for (uint64_t left = 0; left < 2 * used; left += 97) {
      room->store(used + left);
      const auto kept = job.clients[0].try_snapshot(kFaultsFolder);
      if (!kept.ok()) {
        expect_ps_error(kept.status(), ErrorKind::kUnavailable, {kFaultsFolder, "No space left"});
        ++refused;
        EXPECT_EQ(job.clients[0].restore(kFaultsFolder).number, number);
        continue;
      }
      EXPECT_EQ(kept->number, ++number);
      break;
    }
    EXPECT_GT(refused, 3);
    EXPECT_EQ(number, 2U);
    EXPECT_EQ(job.clients[0].restore(kFaultsFolder).number, 2U);
    const Table eye = job.clients[0].open_table("w", {.observer = true});
    EXPECT_EQ(eye.pull().wait()[0].item<double>(), 1) << "as at the restore before";
  });
}

// Bytes that no client of ours sends: nothing of them is done, and no file of another name is written.
TEST_F(PsTest, BadInput_messages_about_snapshots_that_make_no_sense) {
  in_simulation(64, [&](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("w", Two::definition());
    const auto send = [&](std::string_view method, const std::string& bytes) {
      const WorkerInfo server = *job.worker(0).try_get_worker_info("ps0");
      return error_kind(ps::internal::ask_bytes(job.worker(0), server, method,
                                                ps::internal::kCutSignature, bytes,
                                                absl::Seconds(5))
                            .status());
    };
    const auto cut = [&](uint64_t number, uint32_t step, uint64_t pause_us, std::string path = "") {
      v1::PsCut request;
      request.set_number(number);
      request.set_step(step);
      request.set_pause_us(pause_us);
      request.set_path(std::move(path));
      return send(ps::internal::kCutMethod, request.SerializeAsString());
    };
    for (const std::string_view method :
         {ps::internal::kCutMethod, ps::internal::kHoldMethod, ps::internal::kRestoreMethod}) {
      EXPECT_EQ(send(method, "\xff\xff"), ErrorKind::kProtocol) << method;
      EXPECT_EQ(send(method, ""), ErrorKind::kProtocol) << method;
    }
    EXPECT_EQ(cut(1, 1, 0), ErrorKind::kProtocol);
    EXPECT_EQ(cut(1, 1, UINT64_MAX), ErrorKind::kProtocol);
    EXPECT_EQ(cut(1, 9, 1000), ErrorKind::kProtocol);
    EXPECT_EQ(cut(7, 2, 0), ErrorKind::kUnavailable);  // nothing was begun
    EXPECT_EQ(cut(7, 3, 0, "/snapshots/snapshot-1.safetensors"), ErrorKind::kUnavailable);
    EXPECT_EQ(cut(7, 3, 0, "/etc/passwd"), ErrorKind::kProtocol);
    v1::PsRestore restore;
    restore.set_number(1);
    restore.set_step(1);
    EXPECT_EQ(send(ps::internal::kRestoreMethod, restore.SerializeAsString()),
              ErrorKind::kProtocol);
    restore.add_servers("ps0");
    restore.set_path("nowhere");
    EXPECT_EQ(send(ps::internal::kRestoreMethod, restore.SerializeAsString()),
              ErrorKind::kNotFound);
    restore.set_step(2);
    EXPECT_EQ(send(ps::internal::kRestoreMethod, restore.SerializeAsString()),
              ErrorKind::kUnavailable);
    // One that begins a cut and goes on no further holds up no client beyond its time.
    EXPECT_EQ(cut(8, 1, 100'000), ErrorKind::kNone);
    EXPECT_EQ(error_kind(job.clients[0].try_snapshot(kFaultsFolder).status()),
              ErrorKind::kUnavailable);
    const absl::Time then = sim->now();
    const Table late = job.clients[0].open_table("w", Two::definition());
    EXPECT_LE(sim->now() - then, absl::Seconds(1));
    t.push(-torch::ones({4})).wait();
    EXPECT_EQ(job.clients[0].snapshot(kFaultsFolder).number, 1U);
  });
}

}  // namespace
}  // namespace weft::testing
