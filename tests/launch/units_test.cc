// The parts of weftrun that need no process: command line, plan, lines.
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/store/internal/launch/output.h"
#include "weft/store/internal/launch/plan.h"
#include "weft/tools/weftrun/options.h"

namespace weft::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<Options> parse(const std::vector<std::string>& args,
                              const std::map<std::string, std::string>& variables = {}) {
  return parse_options(args, [&](absl::string_view name) -> std::optional<std::string> {
    auto found = variables.find(std::string(name));
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

std::string parse_error(const std::vector<std::string>& args,
                        const std::map<std::string, std::string>& variables = {}) {
  absl::StatusOr<Options> options = parse(args, variables);
  return options.ok() ? "ok" : std::string(options.status().message());
}

TEST(Launch, OptionsEndAtTheProgram) {
  absl::StatusOr<Options> options = parse({"-n", "4", "prog", "-n", "5", "--help"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->local_size(), 4);
  EXPECT_FALSE(options->help);
  EXPECT_THAT(options->program, ElementsAre("prog", "-n", "5", "--help"));

  options = parse({"--nproc=3", "--", "-odd-name", "x"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->local_size(), 3);
  EXPECT_THAT(options->program, ElementsAre("-odd-name", "x"));
}

TEST(Launch, OptionsInAllSpellings) {
  for (const std::vector<std::string>& spelling : std::vector<std::vector<std::string>>{
           {"-n", "2"}, {"-n2"}, {"--nproc", "2"}, {"--nproc=2"}, {"--nproc_per_node", "2"}}) {
    std::vector<std::string> args = spelling;
    args.push_back("prog");
    absl::StatusOr<Options> options = parse(args);
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_EQ(options->local_size(), 2);
  }
  absl::StatusOr<Options> options =
      parse({"--role", "ps:1", "--role=tr-a:iner:2", "--grace", "500ms", "--pin", "-q", "--log-dir",
             "d", "--tee", "--debug-attach", "--standalone", "prog"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->roles, ElementsAre(RoleSpec{"ps", 1}, RoleSpec{"tr-a:iner", 2}));
  EXPECT_EQ(options->grace, absl::Milliseconds(500));
  EXPECT_TRUE(options->pin && options->quiet && options->tee && options->debug_attach);
  EXPECT_EQ(options->log_dir, "d");
}

TEST(Launch, OptionsThatAreRefused) {
  EXPECT_THAT(parse_error({}), HasSubstr("which program"));
  EXPECT_THAT(parse_error({"-n", "0", "p"}),
              HasSubstr("-n wants an integer from 1 to 4096, got '0'"));
  EXPECT_THAT(parse_error({"-n", "two", "p"}), HasSubstr("got 'two'"));
  EXPECT_THAT(parse_error({"-n"}), HasSubstr("-n wants a value"));
  EXPECT_THAT(parse_error({"--what", "p"}), HasSubstr("unknown option '--what'"));
  EXPECT_THAT(parse_error({"--pin=3", "p"}), HasSubstr("takes no value"));
  EXPECT_THAT(parse_error({"--role", "ps", "p"}), HasSubstr("NAME:COUNT"));
  EXPECT_THAT(parse_error({"--role", "p s:1", "p"}), HasSubstr("letters, digits"));
  EXPECT_THAT(parse_error({"--role", "ps:1", "--role", "ps:2", "p"}), HasSubstr("twice"));
  EXPECT_THAT(parse_error({"--role", "ps:1", "-n", "2", "p"}), HasSubstr("exclude each other"));
  EXPECT_THAT(parse_error({"--role", "a:4000", "--role", "b:4000", "p"}),
              HasSubstr("add up to 8000"));
  EXPECT_THAT(parse_error({"--nnodes", "2", "p"}), HasSubstr("--nnodes wants --node-rank"));
  EXPECT_THAT(parse_error({"--nnodes", "2", "--node-rank", "2", "p"}), HasSubstr("not below"));
  EXPECT_THAT(parse_error({"--nnodes", "2", "--node-rank", "0", "p"}), HasSubstr("--rdzv tcp://"));
  EXPECT_THAT(parse_error({"--rdzv", "http://x", "p"}), HasSubstr("got 'http://x'"));
  EXPECT_THAT(parse_error({"--rdzv", "file://rel", "p"}), HasSubstr("absolute path"));
  EXPECT_THAT(parse_error({"--grace", "soon", "p"}), HasSubstr("got 'soon'"));
  EXPECT_THAT(parse_error({"--grace", "-1", "p"}), HasSubstr("from 0 to a week"));
  EXPECT_THAT(parse_error({"--grace", "nan", "p"}), HasSubstr("from 0 to a week"));
  EXPECT_THAT(parse_error({"--tee", "p"}), HasSubstr("--log-dir"));
}

TEST(Launch, NodeComesFromTheLauncherAround) {
  const std::vector<std::string> args = {"--rdzv", "tcp://h:1", "p"};
  struct Case {
    std::map<std::string, std::string> variables;
    int nnodes;
    int node_rank;
  };
  const std::vector<Case> cases = {
      {{{"OMPI_COMM_WORLD_SIZE", "3"}, {"OMPI_COMM_WORLD_RANK", "2"}}, 3, 2},
      {{{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}, {"SLURM_NNODES", "9"}}, 2, 1},
      {{{"TORCHELASTIC_RUN_ID", "x"}, {"RANK", "1"}, {"WORLD_SIZE", "4"}}, 4, 1},
      {{{"JOB_COMPLETION_INDEX", "1"}, {"WORLD_SIZE", "2"}}, 2, 1},
      {{{"JOB_COMPLETION_INDEX", "1"}}, 1, 0},
      // RANK alone is no launcher: a shell may carry it.
      {{{"RANK", "1"}, {"WORLD_SIZE", "4"}}, 1, 0},
      // A batch script of Slurm: no step, so one weftrun.
      {{{"SLURM_NNODES", "2"}, {"SLURM_PROCID", "0"}}, 1, 0},
      // A job inside a job is a job of its own.
      {{{"WEFT_JOB_ID", "a"}, {"OMPI_COMM_WORLD_SIZE", "3"}, {"OMPI_COMM_WORLD_RANK", "2"}}, 1, 0},
  };
  for (const Case& c : cases) {
    absl::StatusOr<Options> options = parse(args, c.variables);
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_EQ(options->nnodes, c.nnodes) << c.variables.begin()->first;
    EXPECT_EQ(options->node_rank, c.node_rank) << c.variables.begin()->first;
  }
  // What is said beats what is found.
  absl::StatusOr<Options> options = parse({"--nnodes", "1", "p"}, cases[0].variables);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->nnodes, 1);
  EXPECT_THAT(parse_error({"p"}, cases[0].variables),
              HasSubstr("3 nodes (from Open MPI) need a meeting place"));
  EXPECT_THAT(parse_error(args, {{"OMPI_COMM_WORLD_SIZE", "3"}}), HasSubstr("do not name a node"));
  EXPECT_THAT(parse_error(args, {{"JOB_COMPLETION_INDEX", "2"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("started by Kubernetes, but JOB_COMPLETION_INDEX='2' and WORLD_SIZE='2'"));
}

std::string value_of(const ProcessPlan& process, const std::string& name) {
  for (const auto& [key, value] : process.environment) {
    if (key == name) return value;
  }
  return "(unset)";
}

TEST(Launch, PlanCountsOverNodesAndRoles) {
  Job job{.id = "0123",
          .store_url = "tcp://h:1",
          .master_addr = "h",
          .master_port = 7,
          .nodes = {{.host = "a", .roles = {{"ps", 1}, {"trainer", 2}}},
                    {.host = "b", .roles = {{"trainer", 3}}}},
          .restart_count = 2};
  absl::StatusOr<std::vector<ProcessPlan>> second = make_plan(job, 1);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_EQ(second->size(), 3u);
  const ProcessPlan& process = second->at(1);
  EXPECT_EQ(process.name, "trainer3");
  const std::map<std::string, std::string> expected = {{"RANK", "4"},
                                                       {"LOCAL_RANK", "1"},
                                                       {"WORLD_SIZE", "6"},
                                                       {"LOCAL_WORLD_SIZE", "3"},
                                                       {"GROUP_RANK", "1"},
                                                       {"ROLE_RANK", "3"},
                                                       {"GROUP_WORLD_SIZE", "2"},
                                                       {"ROLE_NAME", "trainer"},
                                                       {"MASTER_ADDR", "h"},
                                                       {"MASTER_PORT", "7"},
                                                       {"ROLE_WORLD_SIZE", "5"},
                                                       {"WEFT_JOB_ID", "0123"},
                                                       {"WEFT_RESTART_COUNT", "2"},
                                                       {"WEFT_ROLE", "trainer"},
                                                       {"WEFT_NAME", "trainer3"},
                                                       {"WEFT_STORE", "tcp://h:1"}};
  for (const auto& [name, value] : expected) EXPECT_EQ(value_of(process, name), value) << name;
  EXPECT_EQ(process.environment.size(), expected.size());

  absl::StatusOr<std::vector<ProcessPlan>> first = make_plan(job, 0);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->at(0).name, "ps0");
  EXPECT_EQ(value_of(first->at(2), "RANK"), "2");
}

TEST(Launch, PlanRefusesNamesThatCollide) {
  Job job;
  job.nodes = {{.host = "a", .roles = {{"a", 11}, {"a1", 1}}}};
  absl::StatusOr<std::vector<ProcessPlan>> plan = make_plan(job, 0);
  ASSERT_FALSE(plan.ok());
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("two processes would be called a10"));
}

TEST(Launch, CoresAreSharedOut) {
  const std::vector<int> cores = {0, 1, 4, 5, 6};
  EXPECT_THAT(share_of_cores(cores, 0, 2), ElementsAre(0, 1));
  EXPECT_THAT(share_of_cores(cores, 1, 2), ElementsAre(4, 5, 6));
  EXPECT_THAT(share_of_cores(cores, 6, 7), ElementsAre(1));
}

// Feeds `text` in pieces of every size from 1 to its own: the lines must not depend on how the
// bytes arrive.
std::vector<std::string> split_in_every_way(const std::string& text,
                                            size_t limit = LineSplitter::kDefaultLimit) {
  std::vector<std::string> first;
  for (size_t step = text.size(); step >= 1; --step) {
    std::vector<std::string> lines;
    LineSplitter splitter(
        [&](absl::string_view line, bool continued) {
          lines.push_back(absl::StrCat(continued ? "+" : "", line));
        },
        limit);
    for (size_t at = 0; at < text.size(); at += step) splitter.feed(text.substr(at, step));
    splitter.finish();
    if (step == text.size()) first = lines;
    EXPECT_EQ(lines, first) << "in pieces of " << step;
  }
  return first;
}

TEST(Launch, LinesAreCutHoweverTheBytesArrive) {
  EXPECT_THAT(split_in_every_way("one\ntwo\r\n\nthree"), ElementsAre("one", "two", "", "three"));
  EXPECT_THAT(split_in_every_way("\r10 %\r20 %\r100 %\ndone\n"),
              ElementsAre("10 %", "20 %", "100 %", "done"));
  EXPECT_THAT(split_in_every_way("\n\n"), ElementsAre("", ""));
  EXPECT_THAT(split_in_every_way(std::string("a\0b\xff\n", 5)),
              ElementsAre(std::string("a\0b\xff", 4)));
}

TEST(Launch, LongLinesComeInPieces) {
  EXPECT_THAT(split_in_every_way("abcdefghij\nk\n", 4), ElementsAre("abcd", "+efgh", "+ij", "k"));
  EXPECT_THAT(split_in_every_way("abcd\nefgh", 4), ElementsAre("abcd", "efgh"));
  EXPECT_THAT(split_in_every_way("abcde", 4), ElementsAre("abcd", "+e"));
}

TEST(Launch, LastLinesAreBounded) {
  LastLines last(3);
  for (int i = 0; i < 10; ++i) last.add(absl::StrCat(i));
  EXPECT_THAT(last.lines(), ElementsAre("7", "8", "9"));
  last.add(std::string(5000, 'x'));
  EXPECT_THAT(last.lines().back(), HasSubstr("... (3000 more bytes)"));
  EXPECT_LT(last.lines().back().size(), 2100u);
}

}  // namespace
}  // namespace weft::launch
