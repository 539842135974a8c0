// What a group shows: metrics, the timeline, flight records.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <iterator>
#include <thread>

#include "ATen/ops/zeros.h"
#include "weft/collectives/flight_recorder.h"
#include "weft/common/trace.h"
#include "weft/tests/collectives/world.h"
#include "weft/tests/integration/process.h"

namespace weft::testing {
namespace {

using integration::Process;
using integration::TempDir;

std::string content_of(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
  }
}

class CollectiveSight : public ::testing::TestWithParam<Backend> {};

TEST_P(CollectiveSight, MetricsCountOperations) {
  const World world(GetParam(), 2);
  std::vector<std::shared_ptr<Metrics>> all(2);
  for (auto& one : all) one = std::make_shared<Metrics>();
  world.run([&](ProcessGroupOptions& o) { o.metrics = all[static_cast<size_t>(*o.rank)]; },
            [&](ProcessGroup& group) {
              Metrics& metrics = *all[static_cast<size_t>(group.rank())];
              for (int i = 0; i < 3; ++i) {
                group.all_reduce(at::zeros({100}), {.algorithm = Algorithm::kRing});
              }
              group.all_to_all_single(at::zeros({10}), at::zeros({10}));
              EXPECT_EQ(metrics.snapshot().at("weft_collectives_groups"), 1);
              group.barrier();
              EXPECT_FALSE(group.try_all_reduce(at::zeros({100 + group.rank()})).ok());
            });
  for (const auto& metrics : all) {
    const std::map<std::string, double> seen = metrics->snapshot();
    const auto of = [&](const std::string& name, const std::string& op) {
      return seen.at("weft_collectives_" + name + "{op=\"" + op + "\"}");
    };
    EXPECT_EQ(of("operations_total", "all_reduce"), 4);
    EXPECT_EQ(of("errors_total", "all_reduce"), 1);
    EXPECT_EQ(of("operations_total", "barrier"), 1);
    EXPECT_EQ(of("errors_total", "barrier"), 0);
    EXPECT_GE(of("tensor_bytes_total", "all_reduce"), 3 * 400);
    EXPECT_EQ(of("tensor_bytes_total", "all_to_all_single"), 40);
    EXPECT_EQ(of("operation_seconds_count", "all_reduce"), 4);
    EXPECT_EQ(seen.at("weft_collectives_group_failures_total"), 1);
    EXPECT_EQ(seen.at("weft_collectives_groups"), 0);
    // Three rings of two ranks: two messages of half the tensor each; the all_to_all: one of half.
    EXPECT_GE(seen.at("weft_collectives_bytes_sent_total"), 3 * 400 + 20);
    EXPECT_GE(seen.at("weft_collectives_messages_sent_total"), 3 * 2 + 1);
  }
}

TEST_P(CollectiveSight, TheTimelineNamesTheAlgorithm) {
  const World world(GetParam(), 2);
  std::vector<std::shared_ptr<TraceWriter>> all(2);
  for (auto& one : all) one = std::make_shared<TraceWriter>(TraceOptions{});
  world.run([&](ProcessGroupOptions& o) { o.trace = all[static_cast<size_t>(*o.rank)]; },
            [&](ProcessGroup& group) {
              group.all_reduce(at::zeros({100}), {.algorithm = Algorithm::kHalvingDoubling});
              group.all_reduce_async(at::zeros({7})).wait();
            });
  for (const auto& trace : all) {
    const std::string json = trace->json();
    expect_words(json, {"\"cat\":\"collectives\"", "\"name\":\"all_reduce\"",
                        "\"algorithm\":\"halving-doubling\"", "\"bytes\":400", "\"bytes\":28",
                        "\"group\":\"world\"", "\"sequence\":2"});
  }
}

TEST_P(CollectiveSight, AFailureWritesTheFlightRecord) {
  const TempDir dir;
  const World world(GetParam(), 2);
  world.run(
      [&](ProcessGroupOptions& o) {
        o.flight_recorder = make_flight_recorder(
            {.file = dir.path("flight.%r.json"),
             .environment = Environment{{"RANK", std::to_string(*o.rank)}, {"WORLD_SIZE", "2"}}});
      },
      [](ProcessGroup& group) {
        ProcessGroup part = group.new_group({0, 1});
        part.barrier();
        group.all_reduce(at::zeros({5}), {.algorithm = Algorithm::kRing});
        EXPECT_FALSE(group.try_all_reduce(at::zeros({4 + group.rank()})).ok());
        // The handles go; the record stays.
      });
  for (const char* name : {"flight.0.json", "flight.1.json"}) {
    const std::string text = content_of(dir.path(name));
    expect_words(text, {"\"failed\":[{\"group\":\"world\",\"generation\":1",
                        "\"group\":\"world/0-1\"", "\"algorithm\":\"ring\"", "\"bytes\":20",
                        "\"op\":\"all_reduce\",\"sequence\":2,\"state\":\"under way\"",
                        "the ranks do different things", setting_text(GetParam())});
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CollectiveSight,
                         ::testing::Values(Backend::kInproc, Backend::kShm, Backend::kTcp),
                         [](const auto& one) { return setting_text(one.param); });

TEST(FlightRecorder, KeepsWhatFailedAndWritesOnRequest) {
  const TempDir dir;
  const auto recorder =
      make_flight_recorder({.file = dir.path("f.json"), .environment = Environment()});
  const World world(Backend::kInproc, 1);
  ProcessGroupOptions options = world.options(0);
  options.flight_recorder = recorder;
  for (int i = 0; i < 20; ++i) {
    options.name = "g" + std::to_string(i);
    ProcessGroup group = init_process_group(options);
    group.abort("it has to");
  }
  options.name = "lives";
  ProcessGroup group = init_process_group(options);
  group.barrier();
  recorder->write();
  const std::string text = content_of(recorder->path());
  expect_words(text, {"\"groups\":[{\"group\":\"lives\"", "\"group\":\"g19\"", "\"group\":\"g4\""});
  EXPECT_EQ(text.find("\"group\":\"g3\""), std::string::npos) << "sixteen are kept";
}

TEST(FlightRecorder, BadInput_flight_recorder) {
  const TempDir dir;
  expect_error(try_make_flight_recorder({.signal = SIGUSR1}).status(), ErrorKind::kInvalidArgument,
               {"without a file"});
  expect_error(try_make_flight_recorder({.file = dir.path("f"), .signal = SIGKILL}).status(),
               ErrorKind::kInvalidArgument, {"signal 9 cannot be taken"});
  expect_error(make_flight_recorder({.environment = Environment()})->try_write(), ErrorKind::kState,
               {"no file"});
  const Status nowhere =
      make_flight_recorder({.file = dir.path("none/f.json"), .environment = Environment()})
          ->try_write();
  EXPECT_FALSE(nowhere.ok());
  EXPECT_NE(std::string(nowhere.message()).find("none/f.json"), std::string::npos) << nowhere;
}

// A rank that hangs says where, at a signal, and goes on.
TEST(FlightRecorder, ASignalWritesWhatIsUnderWay) {
  const TempDir dir;
  const std::string file = dir.path("flight.json");
  std::vector<Process> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(
        Process({.command = {WEFT_TEST_RANK, "file://" + dir.path("store") + "?run_id=t",
                             std::to_string(rank), "2", "shm", file},
                 .environment = {{"OMP_NUM_THREADS", "1"}}}));
  }
  for (Process& one : ranks) EXPECT_EQ(one.read_line(), "made shm");
  EXPECT_TRUE(ranks[0].write_line("sum 1000"));
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  std::string text;
  // Until the operation has begun and waits.
  while (text.find("\"waits_for\":[1]") == std::string::npos &&
         std::chrono::steady_clock::now() < limit) {
    ranks[0].send_signal(SIGUSR1);
    std::this_thread::yield();
    text = content_of(file);
  }
  expect_words(text, {"\"group\":\"world\"", "\"op\":\"all_reduce\"", "\"state\":\"under way\"",
                      "\"waits_for\":[1]"});
  EXPECT_TRUE(ranks[1].write_line("sum 1000"));
  for (Process& one : ranks) {
    EXPECT_EQ(one.read_line().value_or("").rfind("sum 2.0", 0), 0u);
    EXPECT_TRUE(one.write_line("quit"));
    EXPECT_EQ(one.wait_exit(), 0);
  }
}

}  // namespace
}  // namespace weft::testing
