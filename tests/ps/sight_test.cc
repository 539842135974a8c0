// What a worker's timeline shows of tables.

#include <string>
#include <vector>

#include "torch/types.h"
#include "weft/tests/ps/fixture.h"
#include "weft/tests/testing/timeline.h"

namespace weft::testing {
namespace {

using ps::Table;

TEST_F(PsTest, PS_12_TheTimelineHasOperationsMovesAndCuts) {
  const Timelines lines;
  {
    PsJob job(3, 1, Net::kInproc, nullptr,
              [&lines](int, JoinOptions* o) { o->trace_file = lines.path("%r.json"); });
    const auto rule = ps::rule<optim::SGD>({.lr = 1});
    auto definition = ps::dense({6}, rule);
    definition.copies = 2;
    ps::Client& client = job.clients[0];
    const Table dense = client.open_table("numbers", definition);
    auto of_rows = ps::sparse(2, rule);
    of_rows.movable = true;
    const Table rows = client.open_table("words", of_rows);
    for (int i = 0; i < 4; ++i) dense.push_pull(torch::ones({6})).wait();
    dense.pull().wait();
    rows.push_rows(keys_of({1, 2}), torch::ones({2, 2})).wait();
    EXPECT_FALSE(dense.push(torch::full({6}, INFINITY)).try_wait().ok());  // before it leaves
    EXPECT_FALSE(rows.push_rows(keys_of({1}), torch::full({1, 2}, INFINITY)).try_wait().ok());
    client.move_part("numbers", 0, "ps2");
    client.snapshot(lines.path("."));
    client.restore(lines.path("."));
    job.servers[1]->drain();
  }
  const auto count = [&lines](const std::string& file, const std::vector<std::string>& words) {
    std::vector<std::string> all = {"\"cat\":\"ps\""};
    all.insert(all.end(), words.begin(), words.end());
    return lines.events(file, all).size();
  };
  const std::string client = "3.json";
  for (const char* phase : {"\"ph\":\"b\"", "\"ph\":\"e\""}) {
    EXPECT_EQ(count(client, {phase, "\"name\":\"push_pull\""}), 4U) << phase;
    EXPECT_EQ(count(client, {phase, "\"name\":\"pull\""}), 1U) << phase;
    EXPECT_EQ(count(client, {phase, "\"name\":\"push_rows\""}), 2U) << phase;
    EXPECT_EQ(count(client, {phase, "\"name\":\"push\""}), 0U) << phase;
  }
  EXPECT_EQ(count(client, {"\"ph\":\"b\"", "\"name\":\"push_pull\"", "\"table\":\"numbers\"",
                           "\"parts\":3"}),
            4U);
  EXPECT_EQ(count(client, {"\"ph\":\"e\"", "\"name\":\"push_rows\"", "not finite"}), 1U);
  for (const char* what : {"\"move\"", "\"snapshot\"", "\"clients held\"", "\"restore\""}) {
    EXPECT_EQ(count(client, {"\"ph\":\"X\"", what}), 1U) << what;
  }
  EXPECT_EQ(count("1.json", {"\"ph\":\"X\"", "\"drain\""}), 1U);
}

}  // namespace
}  // namespace weft::testing
