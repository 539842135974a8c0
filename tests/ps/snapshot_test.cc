// Snapshots: what is restored is what was there at the cut, bit by bit and at any number of servers; a cut
// has of each client all pushes up to one number and none after it; damaged files are found.

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "torch/types.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/snapshot_files.h"
#include "weft/tests/ps/fixture.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using ps::SnapshotInfo;
using ps::Table;
using namespace std::chrono_literals;  // NOLINT

const char* const kFolder = "/snapshots";

ps::TableDefinition adam_table() {
  auto out = ps::dense({13, 7}, ps::rule<optim::Adam>({.lr = 0.01}));
  out.init = ps::Init::uniform(-1, 1, 3);
  out.part_bytes = 60;
  return out;
}
ps::TableDefinition adagrad_rows() {
  auto out = ps::sparse(5, ps::rule<optim::RowWiseAdagrad>({.lr = 0.1}));
  out.init = ps::Init::uniform(-1, 1, 4);
  return out;
}
at::Tensor some_keys() { return torch::arange(0, 40, torch::kLong) * 7919; }

// Steps of a training, from one that may be in the middle.
void train(const Table& dense, const Table& rows, int begin, int end) {
  for (int i = begin; i < end; ++i) {
    dense.push(torch::sin(torch::arange(91, torch::kFloat) * (i + 1)).reshape({13, 7})).wait();
    const at::Tensor keys = some_keys().narrow(0, 3 * i, 10);
    rows.push_rows(keys, torch::cos(torch::arange(50, torch::kFloat) + i).reshape({10, 5})).wait();
  }
}
struct Values {
  at::Tensor dense;
  at::Tensor rows;
};
Values values_of(const ps::Client& client) {
  const Table w = client.open_table("w", {.observer = true});
  const Table e = client.open_table("e", {.observer = true});
  return {w.pull().wait().clone(), e.pull_rows(some_keys()).wait().clone()};
}
void expect_equal(const Values& a, const Values& b, const std::string& what) {
  EXPECT_TRUE(torch::equal(a.dense, b.dense)) << what;
  EXPECT_TRUE(torch::equal(a.rows, b.rows)) << what;
}

TEST_F(PsTest, PS_9_ASnapshotIsTheSameAtAnyNumberOfServersBitByBit) {
  in_simulation(41, [](const std::shared_ptr<SimRuntime>& sim) {
    Values kept;
    Values later;
    {
      PsJob job(3, 1, Net::kInproc, sim);
      const Table w = job.clients[0].open_table("w", adam_table());
      const Table e = job.clients[0].open_table("e", adagrad_rows());
      train(w, e, 0, 4);
      kept = values_of(job.clients[0]);
      const SnapshotInfo info = job.clients[0].snapshot(kFolder);
      EXPECT_EQ(info.number, 1U);
      ASSERT_EQ(info.tables.size(), 2U);
      ASSERT_EQ(info.tables[0].clients.size(), 1U);
      EXPECT_EQ(info.tables[0].clients[0].pushes, 4U);
      EXPECT_EQ(info.tables[0].clients[0].worker, "c0");
      train(w, e, 4, 7);
      later = values_of(job.clients[0]);
    }
    for (const int servers : {1, 2, 3, 5}) {
      const std::string what = absl::StrCat(servers, " servers");
      PsJob job(servers, 1, Net::kInproc, sim);
      const SnapshotInfo info = job.clients[0].restore(kFolder);
      EXPECT_EQ(info.refused, "");
      expect_equal(values_of(job.clients[0]), kept, what);
      const Table w = job.clients[0].open_table("w", adam_table());
      const Table e = job.clients[0].open_table("e", adagrad_rows());
      train(w, e, 4, 7);
      expect_equal(values_of(job.clients[0]), later, what + ", and the rule's state");
    }
  });
}

// Each client's pushes add 1 to its column in every row, so all of a column is the number of its pushes.
void push_marks(const ps::Client& client, int column, int pushes, SimRuntime& sim,
                const ps::TableDefinition& definition) {
  const Table t = client.open_table("w", definition);
  at::Tensor mark = torch::zeros({9, 3});
  mark.select(1, column).fill_(-1);
  std::vector<Future<ps::PushResult>> running;
  for (int i = 1; i <= pushes; ++i) {
    sim.sleep(absl::Microseconds(static_cast<int64_t>(sim.random().below(3000))));
    const ps::PushOptions options{.advance = i % 5 == 0, .position = absl::StrCat("read ", i)};
    running.push_back(t.push(mark, options));
  }
  for (const auto& push : running) push.wait();
}

void expect_cut(const SnapshotInfo& info, const at::Tensor& values, const std::string& what) {
  std::vector<double> pushes(3, 0);
  for (const auto& client : info.tables.at(0).clients) {
    const auto column = static_cast<size_t>(client.worker[1] - '0');
    pushes[column] += static_cast<double>(client.pushes);
    EXPECT_EQ(client.position, client.pushes == 0 ? "" : absl::StrCat("read ", client.pushes));
  }
  for (int64_t c = 0; c < 3; ++c) {
    const double expected = pushes[static_cast<size_t>(c)];
    EXPECT_TRUE(torch::equal(values.select(1, c), torch::full({9}, expected)))
        << what << ", client " << c << ", " << expected << " pushes: " << values;
  }
}

TEST_F(PsTest, PS_9_CUT_1_to_3_EachSnapshotHasOfEachClientEveryPushUpToOneNumber) {
  int in_the_middle = 0;
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    in_simulation(seed, [&](const std::shared_ptr<SimRuntime>& sim) {
      auto definition = ps::dense({9, 3}, ps::rule<optim::SGD>({.lr = 1}));
      definition.part_bytes = 20;
      const auto plan = std::make_shared<FaultPlan>(seed);
      plan->add({.fault = Fault::kDelay, .probability = 0.3, .delay = absl::Milliseconds(4)});
      SnapshotInfo written;
      {
        PsJob job(3, 3, Net::kInproc, sim, [&](int, JoinOptions* join) {
          join->transport = faulty_transport(join->transport, plan);
        });
        std::vector<std::function<void()>> bodies;
        for (int c = 0; c < 3; ++c) {
          bodies.emplace_back([&job, &sim, &definition, c] {
            const ps::Client& client = job.clients[static_cast<size_t>(c)];
            sim->sleep(absl::Milliseconds(15 * c));  // some enter while it is cut
            push_marks(client, c, 30, *sim, definition);
          });
        }
        bodies.emplace_back([&] {
          sim->sleep(absl::Milliseconds(10 + static_cast<int64_t>(sim->random().below(60))));
          auto kept = job.clients[0].try_snapshot(kFolder);
          // While the table is being opened it has not all of its parts.
          while (error_kind(kept.status()) == ErrorKind::kUnavailable) {
            sim->sleep(absl::Milliseconds(5));
            kept = job.clients[0].try_snapshot(kFolder);
          }
          ASSERT_TRUE(kept.ok()) << "seed " << seed << ": " << kept.status();
          written = *kept;
        });
        side_by_side(*sim, std::move(bodies));
        const Table t = job.clients[0].open_table("w", {.observer = true});
        EXPECT_TRUE(torch::equal(t.pull().wait(), torch::full({9, 3}, 30))) << "seed " << seed;
      }
      PsJob job(2, 1, Net::kInproc, sim);
      const SnapshotInfo info = job.clients[0].restore(kFolder);
      const Table t = job.clients[0].open_table("w", {.observer = true});
      expect_cut(info, t.pull().wait(), absl::StrCat("seed ", seed));
      for (const auto& client : info.tables.at(0).clients) {
        in_the_middle += client.pushes > 0 && client.pushes < 30 ? 1 : 0;
      }
      EXPECT_LE(written.held, absl::Seconds(2));
    });
  }
  EXPECT_GT(in_the_middle, 25) << "the cuts came before or after all pushes";
}

TEST_F(PsTest, PS_9_CUT_4_WhatIsFrozenStaysWhilePushesGoOn) {
  const auto bytes_of = [](const ps::internal::FrozenData& data) {
    std::string out;
    for (size_t c = 0; c < data.columns().size(); ++c) {
      const Status done = data.write(c, [&](std::string_view piece) {
        out.append(piece);
        return absl::OkStatus();
      });
      EXPECT_TRUE(done.ok()) << done;
    }
    return out;
  };
  ps::internal::PushHeader header;
  header.number = header.floor = 1;
  auto rows = *ps::internal::make_sparse_data(adagrad_rows(), "e", 1 << 20, nullptr);
  const auto push_rows = [&](int64_t first, int64_t count) {
    auto push =
        rows->accept(header, {torch::arange(first, first + count), torch::ones({count, 5})});
    ASSERT_TRUE(push.ok()) << push.status();
    std::vector<ps::internal::Push> all;
    all.push_back(*std::move(push));
    rows->apply(std::move(all), 1);
  };
  push_rows(0, 1500);  // two chunks, the second not full
  const auto frozen = rows->freeze();
  const std::string then = bytes_of(*frozen);
  push_rows(1000, 1000);
  EXPECT_EQ(bytes_of(*frozen), then);
  EXPECT_EQ(frozen->columns()[0].shape, std::vector<int64_t>{1500});
  EXPECT_NE(bytes_of(*rows->freeze()), then);

  auto dense = *ps::internal::make_dense_data(adam_table(), "w", {10, 40});
  const auto before = dense->freeze();
  const std::string values = bytes_of(*before);
  auto push = dense->accept(header, {torch::ones({30})});
  ASSERT_TRUE(push.ok());
  std::vector<ps::internal::Push> all;
  all.push_back(*std::move(push));
  dense->apply(std::move(all), 1);
  EXPECT_EQ(bytes_of(*before), values);
  EXPECT_NE(bytes_of(*dense->freeze()), values);
}

TEST_F(PsTest, PS_9_ARestoreWaitsForServersThatHaveNotCome) {
  in_simulation(43, [](const std::shared_ptr<SimRuntime>& sim) {
    {
      PsJob job(2, 1, Net::kInproc, sim);
      const Table t = job.clients[0].open_table("w", adam_table());
      t.push(torch::ones({13, 7})).wait();
      job.clients[0].snapshot(kFolder);
    }
    PsJob job(3, 1, Net::kInproc, sim);
    job.servers[1].reset();
    const auto restored = [&](Timeout deadline) {
      return job.clients[0].try_restore(kFolder, {.deadline = deadline});
    };
    expect_ps_error(restored(300ms).status(), ErrorKind::kState,
                    {"restore at 'ps1'", "serves no tables: make a ps::Server there"});
    const ps::Client beyond(job.worker(0), {.servers = {"ps0", "ps1", "ps9"}});
    expect_ps_error(ps_error_of([&] { beyond.restore(kFolder, {.deadline = 300ms}); }),
                    ErrorKind::kState, {"restore at 'ps1'"});
    side_by_side(*sim, {[&] { EXPECT_EQ(restored(10s)->number, 1U); },
                        [&] {
                          sim->sleep(absl::Seconds(2));
                          job.servers[1] = std::make_unique<ps::Server>(job.server(1));
                        }});
    expect_ps_error(ps_error_of([&] { beyond.restore(kFolder, {.deadline = 300ms}); }),
                    ErrorKind::kNotFound, {"restore at 'ps9'"});
    EXPECT_EQ(job.clients[0].open_table("w", {.observer = true}).pull().wait().size(0), 13);
  });
}

TEST_F(PsTest, PS_9_AClientOfARestoredTableIsToldUpToWhichPushItIsIn) {
  PsJob job(2, 2);
  const std::string folder = ::testing::TempDir() + absl::StrCat("weft_ps_", ::getpid());
  ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
  const auto definition = ps::dense({4}, ps::rule<optim::SGD>({.lr = 1}));
  const Table t = job.clients[0].open_table("w", definition);
  for (int i = 0; i < 3; ++i) t.push(-torch::ones({4})).wait();
  job.clients[1].snapshot(folder);
  t.push(-torch::ones({4})).wait();
  const SnapshotInfo info = job.clients[1].restore(folder);
  ASSERT_EQ(info.tables.size(), 1U);
  EXPECT_EQ(info.tables[0].clients.at(0).pushes, 3U);
  expect_ps_error(ps_error_of([&] { t.push(-torch::ones({4})).wait(); }), ErrorKind::kState,
                  {"table 'w'", "restored from", "pushes up to 3", "open it again"});
  const Table again = job.clients[0].open_table("w", definition);
  EXPECT_TRUE(torch::equal(again.pull().wait(), torch::full({4}, 3)));
  again.push(-torch::ones({4})).wait();
  // A second snapshot keeps the first; a third takes its files away.
  for (uint64_t i = 2; i <= 4; ++i) EXPECT_EQ(job.clients[1].snapshot(folder).number, i);
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++files;
  EXPECT_EQ(files, 6U);  // two manifests, and two servers' files for each
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace weft::testing
