// Tables of a snapshot as one file for other programs: the same whatever the number of servers was.

#include "absl/strings/str_cat.h"
#include "torch/types.h"
#include "weft/rpc/safetensors.h"
#include "weft/tests/ps/fixture.h"

namespace weft::testing {
namespace {

using ps::SnapshotInfo;
using ps::Table;

const char* const kExportFolder = "/snapshots";
const char* const kExported = "/all.safetensors";

std::map<std::string, at::Tensor> read_all(Files& files, const std::string& path) {
  const SafetensorsFile file = value_or_throw(SafetensorsFile::open(files, path));
  std::map<std::string, at::Tensor> out;
  for (const auto& [name, entry] : file.header().tensors) {
    out[name] = value_or_throw(file.read(name));
  }
  return out;
}

std::vector<std::string> names_of(const std::map<std::string, at::Tensor>& tensors) {
  std::vector<std::string> out;
  for (const auto& [name, tensor] : tensors) out.push_back(name);
  return out;
}

TEST_F(PsTest, PS_9_AnExportedSnapshotHasTheTablesWholeAndInOrder) {
  std::map<std::string, at::Tensor> first;
  for (const int servers : {1, 3}) {
    in_simulation(70, [&](const std::shared_ptr<SimRuntime>& sim) {
      PsJob job(servers, 1, Net::kInproc, sim);
      auto adam = ps::dense({13, 7}, ps::rule<optim::Adam>({.lr = 0.01}));
      adam.init = ps::Init::uniform(-1, 1, 3);
      adam.part_bytes = 60;  // several parts at each server
      const Table w = job.clients[0].open_table("dense/w", adam);
      const Table e = job.clients[0].open_table(
          "e", ps::sparse(5, ps::rule<optim::RowWiseAdagrad>({.lr = 0.1})));
      const Table empty =
          job.clients[0].open_table("empty", ps::sparse(2, ps::rule<optim::SGD>({.lr = 0.1})));
      const at::Tensor keys = torch::arange(30, 0, -1, torch::kLong) * 7919;
      for (int i = 0; i < 3; ++i) {
        w.push(torch::sin(torch::arange(91, torch::kFloat) * (i + 1)).reshape({13, 7})).wait();
      }
      e.push_rows(keys, torch::arange(150, torch::kFloat).reshape({30, 5})).wait();
      job.clients[0].snapshot(kExportFolder);
      Files& files = sim->files();
      const SnapshotInfo info =
          ps::export_snapshot(files, kExportFolder, kExported, {.state = true});
      EXPECT_EQ(info.number, 1U);
      ASSERT_EQ(info.tables.size(), 3U);
      auto all = read_all(files, kExported);
      EXPECT_EQ(names_of(all),
                (std::vector<std::string>{"dense/w/exp_avg", "dense/w/exp_avg_sq", "dense/w/steps",
                                          "dense/w/values", "e/keys", "e/steps", "e/sum",
                                          "e/values", "empty/keys", "empty/values"}));
      EXPECT_TRUE(torch::equal(all["dense/w/values"], w.pull().wait()));
      EXPECT_EQ(all["dense/w/exp_avg"].sizes(), (at::IntArrayRef{13, 7}));
      EXPECT_EQ(all["dense/w/steps"].item<int64_t>(), 3);
      EXPECT_TRUE(torch::equal(all["e/keys"], keys.flip(0)));
      EXPECT_TRUE(torch::equal(all["e/values"], e.pull_rows(keys.flip(0)).wait()));
      EXPECT_TRUE(torch::equal(all["e/steps"], torch::ones({30}, torch::kLong)));
      EXPECT_EQ(all["empty/values"].sizes(), (at::IntArrayRef{0, 2}));
      if (first.empty()) first = all;
      for (const auto& [name, tensor] : first) EXPECT_TRUE(torch::equal(tensor, all[name])) << name;

      // Values of one table alone.
      EXPECT_EQ(
          ps::export_snapshot(files, kExportFolder, kExported, {.tables = {"e"}}).tables.size(),
          1U);
      EXPECT_EQ(names_of(read_all(files, kExported)),
                (std::vector<std::string>{"e/keys", "e/values"}));
    });
  }
}

TEST_F(PsTest, BadInput_an_export_of_what_is_not_there) {
  in_simulation(71, [&](const std::shared_ptr<SimRuntime>& sim) {
    Files& files = sim->files();
    expect_ps_error(ps_error_of([&] { ps::export_snapshot(files, kExportFolder, kExported); }),
                    ErrorKind::kNotFound, {"no snapshot in '/snapshots'"});
    PsJob job(1, 1, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("w", ps::dense({4}, ps::rule<optim::SGD>({.lr = 1})));
    job.clients[0].snapshot(kExportFolder);
    expect_ps_error(ps_error_of([&] {
                      ps::export_snapshot(files, kExportFolder, kExported, {.tables = {"x"}});
                    }),
                    ErrorKind::kNotFound, {"the snapshot has no table 'x'"});
    EXPECT_FALSE(files.stamp(kExported).ok()) << "nothing was written";
    // The newest one is damaged: the one before is exported, and it is said.
    job.clients[0].snapshot(kExportFolder);
    ASSERT_TRUE(files.write_atomic(absl::StrCat(kExportFolder, "/snapshot"), "nonsense").ok());
    const SnapshotInfo info = ps::export_snapshot(files, kExportFolder, kExported);
    EXPECT_EQ(info.number, 1U);
    EXPECT_NE(info.refused.find("is no manifest"), std::string::npos) << info.refused;
  });
}

}  // namespace
}  // namespace weft::testing
