// The machine stops at each step of what a snapshot writes: a whole snapshot is there afterwards, and the next
// one leaves nothing of what was begun.

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "torch/types.h"
#include "weft/ps/internal/snapshot_files.h"
#include "weft/tests/ps/fixture.h"
#include "weft/tests/testing/forwarding_runtime.h"
#include "weft/tests/testing/stopping_files.h"

namespace weft::testing {
namespace {

using ps::SnapshotInfo;
using ps::Table;

const char* const kStopFolder = "/snapshots";

class StoppingDisk : public ForwardingRuntime {
 public:
  explicit StoppingDisk(std::shared_ptr<Runtime> inner) : ForwardingRuntime(std::move(inner)) {}
  StoppingFiles& files() override { return files_; }

 private:
  StoppingFiles files_;
};

ps::TableDefinition counter() { return ps::dense({4}, ps::rule<optim::SGD>({.lr = 1})); }

TEST_F(PsTest, PS_9_CUT_5_AStopAtAnyStepOfWritingLeavesAWholeSnapshot) {
  int stops = 0;
  int newer = 0;
  int left_over = 0;
  const auto stop_at_each_step = [&](const std::shared_ptr<SimRuntime>& sim) {
    bool whole = false;  // the whole of it was written, with steps to spare
    for (int64_t steps = 0; !whole; ++steps) {
      const std::string what = absl::StrCat("after ", steps, " steps");
      const auto disk = std::make_shared<StoppingDisk>(sim);
      bool told = false;
      {
        PsJob job(2, 1, Net::kInproc, disk);
        const Table t = job.clients[0].open_table("w", counter());
        for (int i = 0; i < 2; ++i) {  // the second takes the place of the first
          t.push(-torch::ones({4})).wait();
          job.clients[0].snapshot(kStopFolder);
        }
        t.push(-torch::ones({4})).wait();
        disk->files().stop_after(steps);
        const auto kept = job.clients[0].try_snapshot(kStopFolder);
        told = kept.ok();
        whole = !disk->files().stopped();
        EXPECT_TRUE(told || !whole) << what << ": " << kept.status();
        stops += whole ? 0 : 1;
      }
      disk->files().restart(static_cast<uint32_t>(sim->random().below(1 << 30)));
      PsJob job(2, 1, Net::kInproc, disk);
      const SnapshotInfo info = job.clients[0].restore(kStopFolder);
      EXPECT_GE(info.number, told ? 3U : 2U) << what << ": " << info.refused;
      newer += info.number == 3 && !told ? 1 : 0;
      const Table t = job.clients[0].open_table("w", counter());
      EXPECT_EQ(t.pull().wait()[3].item<double>(), static_cast<double>(info.number)) << what;
      const std::vector<std::string> there = *disk->files().list(kStopFolder);
      for (const std::string& name : there) {
        left_over += absl::StrContains(name, ".left") ? 1 : 0;
      }
      // Two snapshots later nothing is there but these: two manifests, and a file of each server.
      job.clients[0].snapshot(kStopFolder);
      const SnapshotInfo last = job.clients[0].snapshot(kStopFolder);
      EXPECT_GE(last.number, info.number + 2) << what;
      EXPECT_EQ(disk->files().list(kStopFolder)->size(), 6U) << what;
    }
  };
  for (uint64_t seed = 80; seed < 88; ++seed) in_simulation(seed, stop_at_each_step);
  EXPECT_GT(stops, 8 * 15);
  EXPECT_GT(newer, 0);
  EXPECT_GT(left_over, 0);
}

TEST_F(PsTest, PS_9_OnlyFilesOfSnapshotsAreTakenForSuch) {
  using ps::internal::is_file_name;
  for (const char* const name :
       {"snapshot-5-17a9647f6259d3a1-5-0.safetensors", "snapshot-12-0-1-31.safetensors",
        "snapshot-5-17a9-5-0.safetensors.Xq2rTz"}) {
    EXPECT_TRUE(is_file_name(name)) << name;
  }
  for (const char* const name :
       {"snapshot", "snapshot.previous", "snapshot.next", "snapshot-5.safetensors",
        "snapshot-best-1-2-3.safetensors", "snapshot-5-17a9-5-.safetensors", "digits.safetensors",
        "snapshot-5-17a9-5-0.safetensorsX", "my-snapshot-5-17a9-5-0.safetensors",
        "snapshot-5-17a9-5-0-1.safetensors", "snapshot--17a9-5-0.safetensors"}) {
    EXPECT_FALSE(is_file_name(name)) << name;
  }
}

}  // namespace
}  // namespace weft::testing
