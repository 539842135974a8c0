// weft-plan: proves, compares and draws plans of pipelines (docs/pipeline.md), and compares the
// algorithms of process groups (docs/collectives.md).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "weft/pipeline/advice.h"
#include "weft/pipeline/partition.h"
#include "weft/pipeline/plan.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/simulator.h"
#include "weft/pipeline/timeline.h"
#include "weft/pipeline/verifier.h"
#include "weft/tools/weft_plan/arguments.h"
#include "weft/tools/weft_plan/collectives.h"

namespace weft::pipeline {
namespace {

using plan_tool::allow;
using plan_tool::Arguments;
using plan_tool::number;
using plan_tool::parse;
using plan_tool::size_of;
using plan_tool::usage;

using plan_tool::kExitRefused;
using plan_tool::kExitUsage;
// What a plan of the most actions fits into.
constexpr size_t kMostBytes = size_t{256} << 20;
// Without --activation memory is counted in activations of a worker's whole share; divides by 2 to
// 16.
constexpr int64_t kShare = 720720;

constexpr char kUsage[] =
    R"(weft-plan: proves, compares and draws plans of pipelines: who computes what when, in one step of training

  weft-plan verify FILE [--memory-cap N]
  weft-plan pipeline --stages P --micro-batches M [options]
  weft-plan make SCHEDULE --stages P --micro-batches M [--json]
  weft-plan collectives --ranks P --alpha T --beta T --gamma T [options]

  weft-plan make zb-v --stages 4 --micro-batches 8 > plan.txt
  weft-plan verify plan.txt
  weft-plan pipeline --stages 4 --micro-batches 8 --costs 20,24,16 --latency 4 --svg step.svg
  weft-plan collectives --ranks 64 --alpha 5us --beta 0.1ns --gamma 0.02ns

verify prints what was proved of a plan (text or JSON, - for the standard input), or the circle of actions that wait for
each other, or the first wrong action. --memory-cap: the live activations that a worker may hold.

pipeline prints, for every schedule, how long a step takes, the time per step when steps follow each other without a
barrier, the bubble, the most that a worker holds, what travels and why workers idle, and recommends one schedule.
make prints the plan of one.

  --stages P           workers; a schedule with several stages per worker divides their shares
  --micro-batches M    of a step
  --costs F,I,W        forward, gradient of the inputs, gradient of the weights, of one worker's whole share and one
                       micro-batch; of each worker when they differ: F,I,W/F,I,W/... (default 1,1,1)
  --profile FILE       instead: layers as they were measured (layer_costs_to_text(), pipeline_digits --profile),
                       divided so that the slowest worker is as fast as possible; with --bandwidth also what travels
  --latency T          of a message, one way (default 0)
  --bytes N            of what a stage gives to the next, per micro-batch, each way
  --bandwidth N        bytes per second between two workers (default: bytes cost no time)
  --activation A[,Aw]  bytes that a worker's share keeps of a micro-batch from its forward, and of these what the
                       gradient of the weights needs (default: the same)
  --memory-cap N       bytes of activations that a worker may hold; without --activation: how many activations
  --overlapped         recommend for steps that follow each other without a barrier
  --schedules A,B,...  only these
  --plan FILE          compare this plan, too
  --svg FILE           draw the predicted step of the plan of --plan, else of the first of --schedules, else of the
                       recommended schedule
  --trace FILE         the same as a trace, for chrome://tracing or Perfetto
  --json               for programs
  --help, --version

Times are milliseconds (20, 0.5) or have a unit (500us, 2s).

collectives prints, for every algorithm of an operation of process groups, how long it takes by its formula and by a
simulation of the schedules that the ranks would run, what it sends, and which one to use.

  --ranks P            processes
  --alpha T            latency of a message
  --beta T             time of a byte on its way; 0.1ns are 10 GB/s
  --gamma T            time of a byte that is reduced
  --bytes N,N,...      of the tensor of a rank; of the joined tensors for all_gather and so on (default 4KiB,1MiB,64MiB)
  --operation NAME     all_reduce (default), broadcast, reduce, all_gather, reduce_scatter, all_to_all, gather, scatter,
                       barrier
  --ranks-per-host K   neighbouring ranks share hosts (default: each rank has one of its own); then also
  --local-alpha T, --local-beta T
                       latency and time of a byte inside a host
  --json               for programs

Its times are seconds (2e-6) or have a unit: fs, ps, ns, us, ms, s. An element has 4 bytes.

Exit code: 0, 1 for a plan that is refused or a memory cap that no schedule keeps, 2 for a wrong command line or a file
that holds no plan.
)";

// Ticks are nanoseconds.
Ticks time(const std::string& name, const std::string& text) {
  double milliseconds = 0;
  absl::Duration out = absl::ZeroDuration();
  const bool plain = absl::SimpleAtod(text, &milliseconds) && std::isfinite(milliseconds);
  if (plain) out = absl::Milliseconds(milliseconds);
  if ((plain || absl::ParseDuration(text, &out)) && out >= absl::ZeroDuration() &&
      out <= absl::Hours(1)) {
    return absl::ToInt64Nanoseconds(out);
  }
  usage(
      absl::StrCat(name, " wants times up to an hour, such as 20, 0.5 or 500us, got '", text, "'"));
}

std::vector<StageCost> costs_of(const Arguments& a, int workers) {
  const auto given = a.values.find("--costs");
  const std::string text = given == a.values.end() ? "1,1,1" : given->second;
  std::vector<StageCost> out;
  for (const std::string& share : std::vector<std::string>(absl::StrSplit(text, '/'))) {
    const std::vector<std::string> parts = absl::StrSplit(share, ',');
    if (parts.size() != 3) {
      usage(absl::StrCat("--costs wants F,I,W of all workers or of each, got '", share, "'"));
    }
    StageCost c;
    c.forward = time("--costs", parts[0]);
    c.input_grad = time("--costs", parts[1]);
    c.weight_grad = time("--costs", parts[2]);
    if (c.forward + c.input_grad + c.weight_grad == 0) usage("--costs of nothing");
    out.push_back(c);
  }
  if (out.size() != 1 && static_cast<int>(out.size()) != workers) {
    usage(absl::StrCat("--costs of ", out.size(), " workers for ", workers));
  }
  int64_t activation = kShare;
  int64_t kept = kShare;
  if (a.has("--activation")) {
    const std::vector<std::string> parts = absl::StrSplit(a.values.at("--activation"), ',');
    if (parts.size() > 2 || !absl::SimpleAtoi(parts[0], &activation) || activation < 1 ||
        activation > int64_t{1} << 50) {
      usage(absl::StrCat("--activation wants A or A,Aw in bytes, got '",
                         a.values.at("--activation"), "'"));
    }
    kept = activation;
    if (parts.size() == 2 &&
        (!absl::SimpleAtoi(parts[1], &kept) || kept < 0 || kept > activation)) {
      usage(absl::StrCat("of --activation, Aw is from 0 to A, got '", parts[1], "'"));
    }
  }
  for (StageCost& c : out) {
    c.activation = activation;
    c.weight_activation = kept;
  }
  return out;
}

EdgeCost edge_of(const Arguments& a) {
  EdgeCost edge;
  if (a.has("--latency")) edge.latency = time("--latency", a.values.at("--latency"));
  edge.bytes = number(a, "--bytes", 0, 0, int64_t{1} << 40);
  const int64_t bandwidth = number(a, "--bandwidth", 0, 1'000'000, int64_t{1} << 50);
  // A kilotick is a microsecond.
  edge.bytes_per_kilotick = bandwidth / 1'000'000;
  if (bandwidth > 0 && edge.bytes == 0 && !a.has("--profile")) {
    usage("--bandwidth without --bytes");
  }
  return edge;
}

StatusOr<std::string> read_text(const std::string& path) {
  std::string text;
  const auto take = [&](std::istream& in) {
    char buffer[1 << 16];
    while (text.size() <= kMostBytes && (in.read(buffer, sizeof buffer) || in.gcount() > 0)) {
      text.append(buffer, static_cast<size_t>(in.gcount()));
    }
    return !in.bad();
  };
  bool read = false;
  if (path == "-") {
    read = take(std::cin);
  } else {
    std::ifstream file(path, std::ios::binary);
    read = file.is_open() && take(file);
  }
  if (!read) return make_error(ErrorKind::kNotFound, absl::StrCat("cannot read ", path));
  if (text.size() > kMostBytes) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat(path, " has more than ", kMostBytes, " bytes"));
  }
  return text;
}

StatusOr<Plan> read_plan(const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(const std::string text, read_text(path));
  StatusOr<Plan> plan = parse_plan(text);
  if (!plan.ok()) return annotate(plan.status(), path);
  return plan;
}

int run_verify(const Arguments& a) {
  allow(a, "verify", {"--memory-cap"}, 2);
  if (a.words.size() < 2) usage("which plan? weft-plan verify FILE");
  const Plan plan = value_or_throw(read_plan(a.words[1]));
  const Verdict verdict =
      verify(plan, {.memory_cap = number(a, "--memory-cap", 0, 1, int64_t{1} << 30)});
  std::cout << verdict.certificate();
  return verdict.ok() ? 0 : kExitRefused;
}

int run_make(const Arguments& a) {
  allow(a, "make", {"--stages", "--micro-batches", "--json"}, 2);
  if (a.words.size() < 2) {
    usage(absl::StrCat("which schedule? ", absl::StrJoin(schedule_names(), ", ")));
  }
  const Plan plan = value_or_throw(make_schedule(a.words[1], size_of(a, "--stages", kMaxStages),
                                                 size_of(a, "--micro-batches", kMaxMicroBatches)));
  std::cout << (a.flags.count("--json") > 0 ? to_json(plan) : to_text(plan));
  return 0;
}

bool in_bytes(const Arguments& a) { return a.has("--activation") || a.has("--profile"); }

// Measured layers, divided among the workers; what they give to each other is set in `edge`.
std::vector<StageCost> profiled(const Arguments& a, int workers, EdgeCost* edge) {
  for (const char* other : {"--costs", "--activation", "--bytes"}) {
    if (a.has(other)) usage(absl::StrCat(other, " is measured in --profile"));
  }
  const std::string& path = a.values.at("--profile");
  const auto layers = [&]() -> StatusOr<std::vector<LayerCost>> {
    WEFT_ASSIGN_OR_RETURN(const std::string text, read_text(path));
    return layer_costs_from_text(text);
  }();
  throw_if_error(annotate(layers.status(), path));
  PartitionRequest request;
  request.layers = *layers;
  request.stages = workers;
  request.bytes_per_kilotick = edge->bytes_per_kilotick;
  const Partition found = value_or_throw(partition(request));
  for (int s = 1; s < workers; ++s) {
    const LayerCost& last = request.layers[static_cast<size_t>(found.begins[s]) - 1];
    edge->bytes = std::max(edge->bytes, last.output);
  }
  if (a.flags.count("--json") == 0) {
    for (int s = 0; s < workers; ++s) {
      absl::PrintF("worker %d: layers %s to %s\n", s, request.layers[found.begins[s]].name,
                   request.layers[found.begins[s + 1] - 1].name);
    }
  }
  return stage_costs(request.layers, found);
}

std::string memory_text(const Arguments& a, int64_t held) {
  if (in_bytes(a)) return absl::StrCat(held);
  return absl::StrFormat("%.2f", static_cast<double>(held) / kShare);
}

double in_ms(Ticks t) { return static_cast<double>(t) / 1e6; }

void print_table(const Arguments& a, const Advice& advice) {
  const bool bytes = a.has("--bytes") || a.has("--profile");
  absl::PrintF("%-14s %11s %7s %11s %7s %11s %9s%s %10s %10s %10s %10s %10s\n", "schedule",
               "step_ms", "bubble", "period_ms", "span", in_bytes(a) ? "bytes" : "held", "messages",
               bytes ? "         sent" : "", "warm_up", "drain", "dependency", "transport",
               "imbalance");
  for (const Candidate& c : advice.candidates) {
    absl::PrintF("%-14s %11.3f %6.1f%% %11.3f %6.1f%% %11s %9d", c.schedule,
                 in_ms(c.one_step.makespan), 100 * c.one_step.makespan_bubble(), in_ms(c.period),
                 100 * c.one_step.span_bubble(), memory_text(a, c.one_step.peak_memory()),
                 c.messages);
    if (bytes) absl::PrintF(" %12d", c.bytes);
    absl::PrintF(" %10.3f %10.3f %10.3f %10.3f %10.3f%s%s\n", in_ms(c.idle.warm_up),
                 in_ms(c.idle.drain), in_ms(c.idle.dependency), in_ms(c.idle.transport),
                 in_ms(c.idle.imbalance), c.fits ? "" : "  above the memory cap",
                 c.synchronous ? "" : "  asynchronous");
  }
  if (advice.best < 0) {
    absl::PrintF("none is recommended: %s\n", advice.why);
  } else {
    absl::PrintF("recommended: %s (%s)\n", advice.candidates[advice.best].schedule, advice.why);
  }
}

void print_json(const Advice& advice) {
  absl::PrintF("{\"recommended\": %s,\n \"schedules\": [",
               advice.best < 0 ? std::string("null")
                               : absl::StrCat("\"", advice.candidates[advice.best].schedule, "\""));
  for (size_t i = 0; i < advice.candidates.size(); ++i) {
    const Candidate& c = advice.candidates[i];
    absl::PrintF(
        "%s\n  {\"schedule\": \"%s\", \"step_ns\": %d, \"period_ns\": %d, \"step_bubble\": %.6f, "
        "\"span_bubble\": %.6f, \"memory\": %.6f, \"messages\": %d, \"bytes\": %d, \"fits\": %s, "
        "\"synchronous\": %s, \"idle_ns\": {\"warm_up\": %d, \"drain\": %d, \"dependency\": %d, "
        "\"transport\": %d, \"imbalance\": %d}}",
        i == 0 ? "" : ",", c.schedule, c.one_step.makespan, c.period, c.one_step.makespan_bubble(),
        c.one_step.span_bubble(), static_cast<double>(c.one_step.peak_memory()), c.messages,
        c.bytes, c.fits ? "true" : "false", c.synchronous ? "true" : "false", c.idle.warm_up,
        c.idle.drain, c.idle.dependency, c.idle.transport, c.idle.imbalance);
  }
  absl::PrintF("]}\n");
}

void write(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) {
    throw_error(make_error(ErrorKind::kUnavailable, absl::StrCat("cannot write ", path)));
  }
}

int run_pipeline(const Arguments& a) {
  allow(a, "pipeline",
        {"--stages", "--micro-batches", "--costs", "--profile", "--latency", "--bytes",
         "--bandwidth", "--activation", "--memory-cap", "--overlapped", "--schedules", "--plan",
         "--svg", "--trace", "--json"},
        1);
  AdviceRequest request;
  request.workers = size_of(a, "--stages", 1024);
  request.micro_batches = size_of(a, "--micro-batches", 1 << 14);
  // Eight steps of a dozen schedules are simulated.
  if (int64_t{request.workers} * request.micro_batches > 1 << 17) {
    usage(absl::StrCat(request.workers, " stages with ", request.micro_batches,
                       " micro-batches: their product is at most ", 1 << 17));
  }
  request.edge = edge_of(a);
  request.shares = a.has("--profile") ? profiled(a, request.workers, &request.edge)
                                      : costs_of(a, request.workers);
  request.memory_cap = number(a, "--memory-cap", 0, 1, int64_t{1} << 50);
  if (!in_bytes(a)) {
    if (request.memory_cap > int64_t{1} << 30) usage("--memory-cap in activations, not in bytes");
    request.memory_cap *= kShare;
  }
  request.overlapped = a.flags.count("--overlapped") > 0;
  if (a.has("--schedules")) {
    request.schedules = absl::StrSplit(a.values.at("--schedules"), ',');
  }
  if (a.has("--plan")) {
    Plan plan = value_or_throw(read_plan(a.values.at("--plan")));
    throw_if_error(verify(plan).status());
    if (int64_t{plan.stages()} * plan.micro_batches > 1 << 17) usage("--plan is too large");
    request.plans.push_back(std::move(plan));
  }
  const Advice advice = advise(request);
  if (a.flags.count("--json") > 0) {
    print_json(advice);
  } else {
    print_table(a, advice);
  }
  int which = advice.best;
  if (a.has("--schedules")) which = 0;
  if (a.has("--plan")) which = static_cast<int>(advice.candidates.size()) - 1;
  if (which >= 0) {
    const Candidate& c = advice.candidates[which];
    if (a.has("--svg")) write(a.values.at("--svg"), timeline_svg(c.plan, c.one_step));
    if (a.has("--trace")) write(a.values.at("--trace"), timeline_trace(c.plan, c.one_step));
  }
  return advice.best < 0 ? kExitRefused : 0;
}

int run(const std::vector<std::string>& words) {
  const Arguments a = parse(words);
  if (a.flags.count("--help") > 0) {
    std::cout << kUsage;
    return 0;
  }
  if (a.flags.count("--version") > 0) {
    std::cout << "weft-plan " WEFT_VERSION "\n";
    return 0;
  }
  if (a.words.empty()) usage("verify, pipeline, make or collectives?");
  if (a.words[0] == "verify") return run_verify(a);
  if (a.words[0] == "pipeline") return run_pipeline(a);
  if (a.words[0] == "make") return run_make(a);
  if (a.words[0] == "collectives") return plan_tool::run_collectives(a);
  usage(absl::StrCat("there is no command '", a.words[0],
                     "': verify, pipeline, make or collectives"));
}

}  // namespace
}  // namespace weft::pipeline

int main(int argc, char** argv) {
  try {
    const int code = weft::pipeline::run(std::vector<std::string>(argv + 1, argv + argc));
    if (std::cout.flush() && std::fflush(stdout) == 0) return code;
    std::cerr << "weft-plan: cannot write the answer\n";
    return weft::pipeline::kExitRefused;
  } catch (const weft::Error& error) {
    std::cerr << "weft-plan: " << error.what() << "\n";
    return error.kind() == weft::ErrorKind::kUnavailable ? weft::pipeline::kExitRefused
                                                         : weft::pipeline::kExitUsage;
  }
}
