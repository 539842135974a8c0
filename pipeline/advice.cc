#include "weft/pipeline/advice.h"

#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/schedule.h"

namespace weft::pipeline {
namespace {

// Steps until they run evenly, and those that are measured then.
constexpr int kSettle = 4;
constexpr int kMeasured = 4;

Candidate judge(Plan plan, const AdviceRequest& request) {
  Candidate c;
  c.schedule = plan.schedule;
  c.synchronous = !plan.asynchronous;
  const Costs costs = Costs::divided(plan, request.shares, request.edge);
  c.one_step = simulate(plan, costs);
  const Simulation many = simulate(plan, costs, {.steps = kSettle + kMeasured});
  c.period = (many.step_ends[kSettle + kMeasured - 1] - many.step_ends[kSettle - 1]) / kMeasured;
  c.messages = count_sends(plan);
  c.bytes = c.messages * request.edge.bytes;
  c.fits = request.memory_cap <= 0 || c.one_step.peak_memory() <= request.memory_cap;
  for (const WorkerTimeline& w : c.one_step.workers) {
    c.idle.warm_up += w.idle.warm_up;
    c.idle.drain += w.idle.drain;
    c.idle.dependency += w.idle.dependency;
    c.idle.transport += w.idle.transport;
    c.idle.imbalance += w.idle.imbalance;
  }
  c.plan = std::move(plan);
  return c;
}

}  // namespace

Advice advise(const AdviceRequest& request) {
  Advice advice;
  std::vector<std::string> names = request.schedules;
  if (names.empty()) {
    names = schedule_names();
    names.emplace_back("interleaved:4");
  }
  for (const std::string& name : names) {
    Plan plan = value_or_throw(make_schedule(name, request.workers, request.micro_batches));
    plan.schedule = name;
    advice.candidates.push_back(judge(std::move(plan), request));
  }
  for (const Plan& plan : request.plans) {
    if (static_cast<int>(plan.workers.size()) != request.workers) {
      throw_error(make_error(ErrorKind::kInvalidArgument,
                             absl::StrCat("a plan of ", plan.workers.size(),
                                          " workers beside schedules of ", request.workers)));
    }
    advice.candidates.push_back(judge(plan, request));
  }
  const auto rank = [&](const Candidate& c) {
    return std::tuple(request.overlapped ? c.period : c.one_step.makespan, c.one_step.peak_memory(),
                      c.messages);
  };
  for (size_t i = 0; i < advice.candidates.size(); ++i) {
    const Candidate& c = advice.candidates[i];
    if (!c.fits || !c.synchronous) continue;
    if (advice.best < 0 || rank(c) < rank(advice.candidates[advice.best])) {
      advice.best = static_cast<int>(i);
    }
  }
  if (advice.best < 0) {
    advice.why =
        absl::StrCat("no synchronous schedule keeps its activations within ", request.memory_cap);
  } else {
    advice.why = absl::StrCat(
        request.overlapped ? "the shortest period of steps that overlap" : "the shortest step",
        request.memory_cap > 0 ? " within the memory" : "",
        "; among equals the least memory, then the fewest messages");
  }
  return advice;
}

}  // namespace weft::pipeline
