// weft-plan as it is used: what it prints, draws and refuses, and advise() and timeline_svg() behind
// it.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/pipeline/advice.h"
#include "weft/pipeline/partition.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/timeline.h"
#include "weft/tests/integration/process.h"

namespace weft::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}
int count_of(const std::string& text, const std::string& what) {
  int n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

class PlanTool : public ::testing::Test {
 protected:
  struct Seen {
    int code = -1;
    std::string out;
    std::string errors;
  };
  Seen run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), WEFT_TEST_PLAN);
    Seen seen;
    {
      integration::Process process(
          {.command = std::move(arguments), .error_file = dir_.path("errors")});
      seen.out = process.read_all();
      seen.code = process.wait_exit().value_or(-1);
    }
    seen.errors = read_file(dir_.path("errors"));
    return seen;
  }

  integration::TempDir dir_;
};

TEST_F(PlanTool, PP_15_ProvesAPlanOrNamesWhatIsWrong) {
  const std::string path = dir_.path("plan");
  for (const bool json : {false, true}) {
    std::vector<std::string> make = {"make", "zb-v", "--stages", "4", "--micro-batches", "8"};
    if (json) make.emplace_back("--json");
    const Seen made = run(make);
    ASSERT_EQ(made.code, 0) << made.errors;
    EXPECT_EQ(made.out, json ? to_json(zb_v(4, 8)) : to_text(zb_v(4, 8)));
    write_file(path, made.out);
    const Seen proved = run({"verify", path});
    EXPECT_EQ(proved.code, 0) << proved.errors;
    EXPECT_THAT(proved.out, AllOf(HasSubstr("VERIFY-5 gradients equal"), HasSubstr("accepted\n")));
  }
  const Seen capped = run({"verify", path, "--memory-cap", "3"});
  EXPECT_EQ(capped.code, 1);
  EXPECT_THAT(capped.out, HasSubstr("VERIFY-4"));
  // Sends of both workers before their receives: with sends that wait no worker receives.
  write_file(path,
             "weft-plan 1\nschedule crossed\nmicro_batches 2\nplacement 0 1\nedges 0>1\n"
             "worker 0: F0.0 SF0>1.0 F0.1 SF0>1.1 RB1>0.0 B0.0 RB1>0.1 B0.1 U0\n"
             "worker 1: RF0>1.0 F1.0 B1.0 SB1>0.0 RF0>1.1 F1.1 B1.1 SB1>0.1 U1\n");
  const Seen circle = run({"verify", path});
  EXPECT_EQ(circle.code, 1) << circle.out;
  EXPECT_THAT(circle.out, AllOf(HasSubstr("VERIFY-2"), HasSubstr("SF0>1.1"), HasSubstr("SB1>0.0"),
                                Not(HasSubstr("accepted"))));
  write_file(path,
             "weft-plan 1\nschedule x\nmicro_batches 1\nplacement 0\nworker 0: B0.0 F0.0 U0\n");
  const Seen order = run({"verify", path});
  EXPECT_EQ(order.code, 1);
  EXPECT_THAT(order.out, AllOf(HasSubstr("VERIFY-3"), HasSubstr("B0.0")));
}

TEST_F(PlanTool, PP_15_ComparesSchedulesAndRecommendsOne) {
  const std::string svg = dir_.path("step.svg");
  const std::string trace = dir_.path("step.json");
  const Seen seen =
      run({"pipeline", "--stages", "4", "--micro-batches", "8", "--svg", svg, "--trace", trace});
  ASSERT_EQ(seen.code, 0) << seen.errors;
  // The golden table, in milliseconds.
  EXPECT_THAT(seen.out, ContainsRegex("1f1b +33\\.000 +27\\.3% +33\\.000 +27\\.3% +4\\.00 +48 "));
  EXPECT_THAT(seen.out, ContainsRegex("gpipe +33\\.000 +27\\.3% +33\\.000 +27\\.3% +8\\.00 +48 "));
  EXPECT_THAT(seen.out,
              ContainsRegex("interleaved:2 +28\\.500 +15\\.8% +28\\.500 +15\\.8% +5\\.50 "));
  EXPECT_THAT(seen.out, ContainsRegex("zb-h2 +27\\.000 +11\\.1% +24\\.000 +0\\.0% +7\\.00 "));
  EXPECT_THAT(seen.out, ContainsRegex("zb-v +25\\.500 +5\\.9% +24\\.000 +0\\.0% +4\\.00 +96 "));
  EXPECT_THAT(seen.out, ContainsRegex("pipedream .*asynchronous\n"));
  EXPECT_THAT(seen.out, HasSubstr("recommended: zb-v ("));
  const std::string picture = read_file(svg);
  EXPECT_THAT(picture, AllOf(HasSubstr("<svg"), HasSubstr("zb-v: 8 stages at 4 workers"),
                             HasSubstr("worker 3"), HasSubstr("I7.7 input gradient")));
  EXPECT_THAT(
      read_file(trace),
      AllOf(HasSubstr("{\"traceEvents\": ["),
            HasSubstr("\"tid\": 0, \"name\": \"F0.0\", \"cat\": \"forward\", \"ts\": 0.000, "
                      "\"dur\": 500.000}")));

  // Latency and memory change the choice.
  const std::vector<std::string> slow = {
      "pipeline", "--stages", "4", "--micro-batches", "8", "--costs", "10,12,8", "--latency", "2"};
  EXPECT_THAT(run(slow).out,
              AllOf(ContainsRegex("1f1b +362\\.000"), ContainsRegex("zb-h1 +306\\.0"),
                    HasSubstr("recommended: zb-h2 (")));
  std::vector<std::string> capped = slow;
  capped.insert(capped.end(), {"--memory-cap", "4"});
  EXPECT_THAT(run(capped).out, AllOf(ContainsRegex("zb-h2 .*above the memory cap"),
                                     HasSubstr("recommended: zb-v (")));
  capped.back() = "1";
  const Seen nothing = run(capped);
  EXPECT_THAT(nothing.out, HasSubstr("recommended: sequential ("));

  const Seen json = run({"pipeline", "--stages", "2", "--micro-batches", "2", "--bytes", "100",
                         "--activation", "10,4", "--schedules", "1f1b,gpipe", "--json"});
  ASSERT_EQ(json.code, 0) << json.errors;
  EXPECT_THAT(json.out,
              AllOf(HasSubstr("{\"recommended\": \"1f1b\""),
                    HasSubstr("\"messages\": 4, \"bytes\": 400"), HasSubstr("\"memory\": 20.0")));
}

// Layers as they were measured are divided among the workers, and are what the schedules cost.
TEST_F(PlanTool, PP_15_CostsThatWereMeasured) {
  const std::string path = dir_.path("layers");
  std::vector<LayerCost> layers;
  for (int64_t i = 0; i < 5; ++i) {
    layers.push_back({.name = absl::StrCat("layer", i),
                      .forward = 1'000'000,
                      .input_grad = i == 0 ? 0 : 1'000'000,
                      .weight_grad = 1'000'000,
                      .activation = 100,
                      .output = 10 * (i + 1)});
  }
  layers[4].forward = 2'000'000;
  const auto text = layer_costs_to_text(layers);
  ASSERT_TRUE(text.ok()) << text.status();
  const auto again = layer_costs_from_text(*text);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*layer_costs_to_text(*again), *text);
  write_file(path, *text);
  const Seen seen = run({"pipeline", "--stages", "2", "--micro-batches", "4", "--profile", path,
                         "--schedules", "gpipe", "--bandwidth", "1000000"});
  ASSERT_EQ(seen.code, 0) << seen.errors;
  // 3 layers of 8 ms, and 2 of 7: the first worker's times 4, and what the last micro-batch takes at the
  // second, beside the bytes of layer 2: 30 us each way.
  EXPECT_THAT(seen.out, HasSubstr("worker 0: layers layer0 to layer2\nworker 1: layers layer3 to "
                                  "layer4\n"));
  const Simulation want =
      simulate(gpipe(2, 4), {.stages = {{.forward = 3'000'000,
                                         .input_grad = 2'000'000,
                                         .weight_grad = 3'000'000,
                                         .activation = 300,
                                         .weight_activation = 300},
                                        {.forward = 3'000'000,
                                         .input_grad = 2'000'000,
                                         .weight_grad = 2'000'000,
                                         .activation = 200,
                                         .weight_activation = 200}},
                             .edges = {{.latency = 0, .bytes = 30, .bytes_per_kilotick = 1}}});
  EXPECT_THAT(seen.out, ContainsRegex(absl::StrFormat("gpipe +%.3f ",
                                                      static_cast<double>(want.makespan) / 1e6)));
  EXPECT_THAT(seen.out, ContainsRegex(" 1200 +8 +240 "));  // held, messages, sent

  const auto refused = [&](const std::string& content, std::vector<std::string> more = {}) {
    write_file(path, content);
    more.insert(more.begin(),
                {"pipeline", "--stages", "2", "--micro-batches", "4", "--profile", path});
    const Seen wrong = run(more);
    EXPECT_EQ(wrong.code, 2) << wrong.out;
    return wrong.errors;
  };
  EXPECT_THAT(refused(*text, {"--costs", "1,1,1"}), HasSubstr("--costs is measured in --profile"));
  EXPECT_THAT(refused(""), AllOf(HasSubstr(path), HasSubstr("line 1: expected 'weft-layers 1'")));
  EXPECT_THAT(refused("weft-layers 1\n"), HasSubstr("no layer"));
  EXPECT_THAT(refused("weft-layers 1\na 1 2 3 4 5 6\n"), HasSubstr("1 layers for 2 stages"));
  EXPECT_THAT(refused("weft-layers 1\na 1 2 3 4 5\n"),
              HasSubstr("line 2: expected a name and six"));
  EXPECT_THAT(refused("weft-layers 1\n\na 1 2 3 4 5 -6\n"), HasSubstr("line 3: '-6' is no number"));
  EXPECT_FALSE(layer_costs_to_text({{.name = "two words"}}).ok());
}

TEST_F(PlanTool, APlanOfOnesOwnIsComparedAndDrawn) {
  const std::string path = dir_.path("plan");
  Plan plan = one_f_one_b(3, 4);
  plan.schedule = "mine";
  write_file(path, to_text(plan));
  const std::string svg = dir_.path("mine.svg");
  const Seen seen = run({"pipeline", "--stages", "3", "--micro-batches", "4", "--plan", path,
                         "--costs", "1,1,1/2,2,2/1,1,1", "--svg", svg});
  EXPECT_EQ(seen.code, 0) << seen.errors;
  EXPECT_THAT(seen.out, ContainsRegex("mine +"));
  EXPECT_THAT(read_file(svg), HasSubstr("mine: 3 stages at 3 workers"));
}

TEST_F(PlanTool, BadInput_weft_plan_says_what_it_does_not_take) {
  const std::string garbage = dir_.path("garbage");
  write_file(garbage, "weft-plan 2\n");
  const std::string of_two = dir_.path("two");
  write_file(of_two, to_text(gpipe(2, 2)));
  const std::vector<std::string> sizes = {"pipeline", "--stages", "4", "--micro-batches", "8"};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = sizes;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{}, "verify, pipeline, make or collectives?"},
      {{"prove"}, "no command 'prove'"},
      {{"verify"}, "which plan?"},
      {{"verify", dir_.path("nowhere")}, "cannot read"},
      {{"verify", dir_.path(".")}, "cannot read"},
      {{"verify", garbage}, "line 1: expected 'weft-plan 1', found 'weft-plan 2'"},
      {{"verify", garbage, "more"}, "one too many: more"},
      {{"verify", garbage, "--svg", "x"}, "verify takes no --svg"},
      {{"make"}, "which schedule?"},
      {{"make", "zb-w", "--stages", "2", "--micro-batches", "2"}, "no schedule is called 'zb-w'"},
      {{"make", "gpipe", "--stages", "0", "--micro-batches", "2"}, "from 1 to"},
      {{"make", "gpipe", "--stages", "4096", "--micro-batches", "65536"}, "gpipe"},
      {{"pipeline"}, "how many? --stages"},
      {{"pipeline", "--stages", "4"}, "how many? --micro-batches"},
      {{"pipeline", "--stages"}, "--stages wants a value"},
      {{"pipeline", "--stages", "2", "--stages", "3"}, "given twice"},
      {with({"--stage", "4"}), "no option --stage"},
      {{"pipeline", "--stages", "1024", "--micro-batches", "16384"}, "their product"},
      {with({"--costs", "1,2"}), "--costs wants F,I,W"},
      {with({"--costs", "1,2,-3"}), "--costs wants times"},
      {with({"--costs", "1,2,nan"}), "--costs wants times"},
      {with({"--costs", "0,0,0"}), "--costs of nothing"},
      {with({"--costs", "1,1,1/1,1,1"}), "--costs of 2 workers for 4"},
      {with({"--latency", "soon"}), "--latency wants times"},
      {with({"--bandwidth", "1000000"}), "--bandwidth without --bytes"},
      {with({"--activation", "5,6"}), "from 0 to A"},
      {with({"--schedules", "1f1b,lifo"}), "no schedule is called 'lifo'"},
      {with({"--plan", garbage}), "line 1"},
      {with({"--plan", of_two}), "a plan of 2 workers beside schedules of 4"},
      {{"collectives"}, "how many? --ranks"},
      {{"collectives", "--ranks", "4"}, "how long? --alpha"},
      {{"collectives", "--ranks", "1", "--alpha", "0", "--beta", "0", "--gamma", "0"}, "1 ranks"},
      {{"collectives", "--ranks", "4", "--alpha", "soon"}, "--alpha wants a time"},
      {{"collectives", "--ranks", "4", "--alpha", "-1us"}, "--alpha wants a time"},
      {{"collectives", "--ranks", "4", "--alpha", "1us", "--beta", "0", "--gamma", "0", "--bytes",
        "7"},
       "--bytes wants multiples of 4"},
      {{"collectives", "--ranks", "4", "--alpha", "1us", "--beta", "0", "--gamma", "0",
        "--operation", "rotate"},
       "no operation 'rotate'"},
      {{"collectives", "--ranks", "4", "--stages", "4"}, "takes no --stages"},
      {{"collectives", "--ranks", "4", "--alpha", "1us", "--beta", "0", "--gamma", "0",
        "--local-alpha", "0"},
       "how many ranks share a host?"},
  };
  for (const auto& [arguments, words] : wrong) {
    const Seen seen = run(arguments);
    EXPECT_EQ(seen.code, 2) << words << "\n" << seen.out << seen.errors;
    EXPECT_THAT(seen.errors, HasSubstr(words));
    EXPECT_THAT(seen.out, IsEmpty()) << words;
  }
  const Seen unwritable = run(with({"--svg", dir_.path("no/such/place.svg")}));
  EXPECT_EQ(unwritable.code, 1);
  EXPECT_THAT(unwritable.errors, HasSubstr("cannot write"));
  EXPECT_THAT(run({"--help"}).out, HasSubstr("weft-plan verify FILE"));
  EXPECT_EQ(run({"--version"}).code, 0);
}

// The algorithms of process groups: both times of each, and which one to use.
TEST_F(PlanTool, CollectivesByFormulaAndBySimulation) {
  std::vector<std::string> arguments = {"collectives", "--ranks", "16",        "--alpha",
                                        "2us",         "--beta",  "0.1ns",     "--gamma",
                                        "10ps",        "--bytes", "1KiB,64MiB"};
  const Seen table = run(arguments);
  EXPECT_EQ(table.code, 0) << table.errors;
  // 30 messages of 4 MiB, and 15 reductions of 4 MiB.
  EXPECT_THAT(table.out, ContainsRegex("ring +13.272 ms +13.272 ms +480 +2013265920"));
  EXPECT_THAT(table.out, ContainsRegex("1024 bytes\n(.*\n)+  recommended: recursive doubling"));
  arguments.push_back("--json");
  const Seen json = run(arguments);
  EXPECT_EQ(json.code, 0) << json.errors;
  EXPECT_THAT(json.out, HasSubstr("\"name\": \"ring\", \"formula_s\": 0.0132"));
  arguments.insert(arguments.end(), {"--operation", "broadcast"});
  const std::string broadcast = run(arguments).out;
  EXPECT_THAT(broadcast, HasSubstr("\"recommended\": \"binomial tree\""));
  EXPECT_THAT(broadcast, HasSubstr("\"recommended\": \"scatter+all_gather\""));
  const Seen hosts =
      run({"collectives", "--ranks", "16", "--alpha", "2us", "--beta", "0.1ns", "--gamma", "0",
           "--ranks-per-host", "4", "--local-alpha", "0", "--local-beta", "0", "--bytes", "64MiB"});
  EXPECT_EQ(hosts.code, 0) << hosts.errors;
  // Six messages of a quarter between the leaders.
  EXPECT_THAT(hosts.out, ContainsRegex("hierarchical ring +10.078 ms +10.078 ms"));
}

// What workers wait for is told as intervals, too: with the actions they fill each row.
TEST(Timeline, PP_15_ActionsAndWaitsFillTheStep) {
  for (const std::string& name : schedule_names()) {
    for (const Ticks latency : {0, 300}) {
      const Plan plan = *make_schedule(name, 3, 5);
      const Simulation s = simulate(
          plan, Costs::divided(plan, {{.forward = 1000, .input_grad = 1400, .weight_grad = 600}},
                               {.latency = latency}));
      for (const WorkerTimeline& w : s.workers) {
        Ticks idle = 0;
        std::vector<std::pair<Ticks, Ticks>> all;
        for (const TimedWait& wait : w.waits) {
          idle += wait.end - wait.start;
          all.emplace_back(wait.start, wait.end);
        }
        EXPECT_EQ(idle, w.idle.total()) << name;
        for (const TimedAction& a : w.actions) {
          if (a.end > a.start) all.emplace_back(a.start, a.end);
        }
        std::sort(all.begin(), all.end());
        Ticks at = 0;
        for (const auto& [start, end] : all) {
          EXPECT_EQ(start, at) << name;
          at = end;
        }
        EXPECT_EQ(at, s.makespan) << name;
      }
      const std::string picture = timeline_svg(plan, s);
      int timed = 0;
      for (const WorkerTimeline& w : s.workers) {
        timed += static_cast<int>(w.waits.size());
        for (const TimedAction& a : w.actions) timed += a.end > a.start ? 1 : 0;
      }
      EXPECT_EQ(count_of(picture, "<title>"), timed) << name;
      EXPECT_EQ(count_of(picture, "<title>idle: transport") > 0, latency > 0) << name;
    }
  }
}

// Idle time of a step that ran has the reasons that the simulation gives for the same times, and with the work
// it is all of the step.
TEST(Timeline, PP_15_WhyAStepThatRanIdled) {
  for (const std::string& name : schedule_names()) {
    SCOPED_TRACE(name);
    const Plan plan = *make_schedule(name, 4, 6);
    Costs costs = Costs::uniform(plan, 1000, 1200, 800, 150, 4);
    for (size_t s = 0; s < costs.stages.size(); ++s) costs.stages[s].forward += 130 * s;
    const Simulation want = simulate(plan, costs);
    std::vector<std::vector<int64_t>> times(plan.workers.size());
    for (size_t w = 0; w < times.size(); ++w) {
      for (const TimedAction& a : want.workers[w].actions) {
        times[w].push_back(7'000'000 + a.start);
        times[w].push_back(7'000'000 + a.end);
      }
    }
    const Simulation got = measured_step(plan, times);
    EXPECT_EQ(got.makespan, want.makespan);
    for (size_t w = 0; w < times.size(); ++w) {
      const IdleTime& a = got.workers[w].idle;
      const IdleTime& b = want.workers[w].idle;
      EXPECT_EQ(got.workers[w].busy + a.total(), got.makespan) << w;
      EXPECT_EQ(a.warm_up, b.warm_up) << w;
      EXPECT_EQ(a.drain, b.drain) << w;
      EXPECT_EQ(a.dependency, b.dependency) << w;
      EXPECT_EQ(a.transport, b.transport) << w;
      EXPECT_EQ(a.imbalance, b.imbalance) << w;
    }
  }
}

TEST(Timeline, PP_15_MeasuredUnderPredicted) {
  const Plan plan = one_f_one_b(2, 2);
  const Simulation s = simulate(plan, Costs::uniform(plan, 1000, 1000, 1000));
  std::vector<std::vector<int64_t>> times(2);
  for (size_t w = 0; w < 2; ++w) {
    for (size_t i = 0; i < plan.workers[w].size(); ++i) {
      times[w].push_back(5'000'000 + s.workers[w].actions[i].start * 2);
      times[w].push_back(5'000'000 + s.workers[w].actions[i].end * 2);
    }
  }
  const std::string picture = timeline_svg(plan, s, times);
  EXPECT_EQ(count_of(picture, ">measured<"), 2);
  const std::string trace = timeline_trace(plan, s, times);
  // As many measured actions and waits as predicted ones, each twice as long.
  EXPECT_EQ(count_of(trace, "\"pid\": 1, \"tid\""), count_of(trace, "\"pid\": 0, \"tid\""));
  EXPECT_EQ(count_of(trace, "\"tid\"") - count_of(trace, "\"name\": \"idle"), 16);
  EXPECT_GT(count_of(picture, ">idle: dependency "), 1);
  EXPECT_EQ(
      count_of(trace, "\"name\": \"F1.0\", \"cat\": \"forward\", \"ts\": 2.000, \"dur\": 2.000"),
      1);
  EXPECT_THAT(picture, HasSubstr(absl::StrCat("measured: ", 2 * s.makespan)));
  const auto refused = [&](const Simulation& of, std::vector<std::vector<int64_t>> with) {
    try {
      timeline_svg(plan, of, with);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  times[1].pop_back();
  EXPECT_THAT(refused(s, times), HasSubstr("worker 1 has"));
  EXPECT_THAT(refused(s, {{}}), HasSubstr("times of 1 workers for a plan of 2"));
  EXPECT_THAT(refused({}, {}), HasSubstr("a simulation of 0 workers for a plan of 2"));
}

}  // namespace
}  // namespace weft::pipeline
