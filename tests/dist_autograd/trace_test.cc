// DA-47: what a backward does, on the timelines of its workers.

#include <algorithm>

#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"
#include "weft/tests/testing/timeline.h"

namespace weft::testing {
namespace {

class DistTrace : public DistAutogradTest {
 protected:
  std::unique_ptr<Cluster> traced() {
    ClusterOptions o;
    o.size = 3;
    o.net = GetParam();
    o.library = library_;
    o.adjust = [this](int, JoinOptions* join) {
      join->services.push_back(dist_autograd_service());
      join->trace_file = lines_.path("%r.json");
    };
    return std::make_unique<Cluster>(o);
  }

  const Timelines lines_;
};

TEST_P(DistTrace, DA_47_dist_autograd_profiling) {
  auto c = traced();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor y = rpc_sync((*c)[0], "worker1", &mul, x, x);
    const at::Tensor z = rpc_sync((*c)[0], "worker2", &mul, y, y);
    context.backward({z.sum()});
  }
  expect_nothing_left(*c);
  c->shutdown();
  for (const std::string file : {"0.json", "1.json", "2.json"}) {
    SCOPED_TRACE(file);
    // The pass at this worker, from its beginning to its end.
    const auto begun = lines_.events(file, {"\"ph\":\"b\"", "\"cat\":\"backward\""});
    const auto ended = lines_.events(file, {"\"ph\":\"e\"", "\"cat\":\"backward\""});
    ASSERT_EQ(begun.size(), 1U);
    ASSERT_EQ(ended.size(), 1U);
    EXPECT_EQ(id_of(begun[0]), id_of(ended[0]));
    for (const char* word : {"backward 1 of autograd context 0/", "\"root\":\"worker0\""}) {
      EXPECT_NE(begun[0].find(word), std::string::npos) << begun[0];
    }
    // Two tensors of 16 bytes in each message, but for y, which is sent as both arguments.
    const bool root = file == "0.json";
    EXPECT_EQ(number_of(ended[0], "gradients_received"), root ? 2 : 1) << ended[0];
    EXPECT_EQ(number_of(ended[0], "gradients_sent"), root ? 2 : 1);
    EXPECT_EQ(number_of(ended[0], "bytes_received"), root ? 64 : 16) << ended[0];
    EXPECT_EQ(number_of(ended[0], "bytes_sent"), root ? 32 : 32) << ended[0];
    EXPECT_GT(number_of(ended[0], "nodes"), 1);
    // What ran, node by node.
    EXPECT_EQ(lines_.events(file, {"\"ph\":\"X\"", "\"cat\":\"node\"", "MulBackward0"}).size(),
              root ? 0U : 1U);
    int64_t nodes = 0;
    for (const auto& run : lines_.events(file, {"\"ph\":\"X\"", "\"cat\":\"run\"", "backward 1"})) {
      nodes += number_of(run, "nodes");
    }
    EXPECT_EQ(nodes, number_of(ended[0], "nodes"));
  }
  // The forward operation at another worker.
  EXPECT_EQ(lines_.events("1.json", {"\"cat\":\"run\"", "app.mul"}).size(), 1U);
  // Each arrow ends where it should.
  const auto arrows = [this](const std::string& file, const std::string& phase) {
    std::vector<std::string> ids;
    for (const auto& one :
         lines_.events(file, {"\"ph\":\"" + phase + "\"", "\"cat\":\"backward\""})) {
      ids.push_back(id_of(one));
    }
    std::sort(ids.begin(), ids.end());
    return ids;
  };
  const auto both = [](std::vector<std::string> a, const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    std::sort(a.begin(), a.end());
    return a;
  };
  EXPECT_EQ(arrows("0.json", "s"), both(arrows("1.json", "f"), arrows("2.json", "f")));
  EXPECT_EQ(arrows("0.json", "f"), both(arrows("1.json", "s"), arrows("2.json", "s")));
  EXPECT_EQ(arrows("0.json", "s").size(), 2U);
}

TEST_P(DistTrace, AFailedPassEndsWithItsError) {
  auto c = traced();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor bad = rpc_sync((*c)[0], "worker1", &no_way_back, x);
    EXPECT_FALSE(context.try_backward({bad.sum()}).ok());
  }
  expect_nothing_left(*c);
  c->shutdown();
  for (const std::string file : {"0.json", "1.json"}) {
    EXPECT_EQ(lines_.events(file, {"\"ph\":\"e\"", "\"cat\":\"backward\"", "no way back"}).size(),
              1U)
        << file;
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, DistTrace, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
