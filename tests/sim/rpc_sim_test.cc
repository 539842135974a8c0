// Agent, membership and shutdown under the seeded scheduler. Invariants, for every schedule:
//   CALL-1   every call completes exactly once
//   CALL-2   a call that is at_most_once executes at most once
//   INT-1    what was attached to a call is told its end exactly once
//   INT-2    a request comes to an interceptor at most once
//   nothing is left over: no pending call, handler, deadline, received byte, and no deadlock
//   (SIM-3)
// A seed that fails is printed; WEFT_SIM_SEED=<seed> runs it alone, with the last events.

#include <unistd.h>

#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/rpc/call.h"
#include "weft/rpc/group.h"
#include "weft/rpc/worker.h"
#include "weft/store/hash_store.h"
#include "weft/tests/rpc/probe.h"
#include "weft/tests/testing/environment.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

// What one schedule did.
struct Outcome {
  Status status;
  uint64_t hash = 0;
  int64_t completed = 0;
  int64_t succeeded = 0;
  int64_t hits = 0;
  std::vector<std::string> events;
};

// Executions by ticket, which the caller draws: CALL-2 counts them.
struct Ledger {
  std::map<int64_t, int> executed;
};

int64_t plus_one(int64_t x) { return x + 1; }

Library make_library(Ledger* ledger) {
  Library lib("sim");
  lib.def("plus_one", &plus_one, {.inline_ok = true});
  // Takes some time, in which a request may be repeated.
  lib.def("execute", [ledger](CallContext& context, int64_t ticket) {
    ++ledger->executed[ticket];
    Runtime& runtime = context.worker().runtime();
    const auto microseconds = static_cast<int64_t>(runtime.random().next() % 2000);
    runtime.make_parker()->park_until(runtime.now() + absl::Microseconds(microseconds));
    return ticket;
  });
  lib.def("hop", [](CallContext& context, std::string to, int64_t x) {
    return rpc_sync(context.worker(), to, &plus_one, x);
  });
  return lib;
}

// Draws a plan of faults from the seed. Every fault ends, so that the drain can succeed.
void add_faults(uint64_t seed, FaultPlan* plan) {
  struct Choice {
    Fault fault;
    FrameKind kind;
  };
  static constexpr Choice kChoices[] = {
      {Fault::kFailAfter, FrameKind::kRequest},  {Fault::kFailBefore, FrameKind::kRequest},
      {Fault::kCut, FrameKind::kRequest},        {Fault::kLoseUnsent, FrameKind::kRequest},
      {Fault::kFailAfter, FrameKind::kResponse}, {Fault::kCut, FrameKind::kResponse},
      {Fault::kDelay, FrameKind::kRequest},      {Fault::kDelay, FrameKind::kResponse},
      {Fault::kFailBefore, FrameKind::kHello},   {Fault::kFailAfter, FrameKind::kHello},
      {Fault::kCut, FrameKind::kChunk},          {Fault::kCut, FrameKind::kHeartbeat},
  };
  for (uint64_t i = 0; i < seed % 4; ++i) {
    const Choice& choice = kChoices[(seed / 4 + i * 5) % std::size(kChoices)];
    plan->add({.fault = choice.fault,
               .kind = choice.kind,
               .skip = static_cast<int64_t>((seed / 7 + i) % 3),
               .times = 1 + static_cast<int64_t>(seed / 3 % 2),
               .delay = absl::Milliseconds(3)});
  }
}

// Three workers join, call each other from two threads each, and leave together.
Outcome run_schedule(uint64_t seed, size_t keep_events = 0) {
  Outcome out;
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed, .keep_events = keep_events});
  auto network = std::make_shared<InprocNetwork>();
  auto plan = std::make_shared<FaultPlan>(seed);
  add_faults(seed, plan.get());
  Ledger ledger;
  std::vector<std::shared_ptr<Probe>> probes;
  for (int i = 0; i < 3; ++i) probes.push_back(std::make_shared<Probe>());
  std::map<int64_t, bool> once;  // tickets, and whether the call was answered
  int64_t issued = 0;
  const Status ended = sim->run([&] {
    auto store = std::make_shared<HashStore>(sim);
    std::vector<Worker> workers(3);
    {
      std::vector<std::unique_ptr<Thread>> joins;
      for (int i = 0; i < 3; ++i) {
        joins.push_back(sim->spawn("join", [&, i] {
          JoinOptions o;
          o.name = absl::StrCat("w", i);
          o.rank = i;
          o.world_size = 3;
          o.library = make_library(&ledger);
          o.store = store->new_client();
          o.transport = faulty_transport(inproc_transport(network), plan);
          o.services = {group_service(), [probe = probes[static_cast<size_t>(i)]](
                                             const ServiceContext&) { return probe; }};
          o.worker_threads = 1 + static_cast<int>(seed % 3);
          o.runtime = sim;
          o.log_level = Severity::kOff;
          o.environment = Environment{};
          StatusOr<Worker> w = Worker::try_join(std::move(o));
          if (w.ok()) {
            workers[static_cast<size_t>(i)] = *std::move(w);
          } else if (out.status.ok()) {
            out.status = annotate(w.status(), "join");
          }
        }));
      }
    }
    if (!out.status.ok()) return;
    {
      std::vector<std::unique_ptr<Thread>> callers;
      for (int i = 0; i < 3; ++i) {
        callers.push_back(sim->spawn("caller", [&, i] {
          const Worker& w = workers[static_cast<size_t>(i)];
          const std::string next = absl::StrCat("w", (i + 1) % 3);
          const std::string other = absl::StrCat("w", (i + 2) % 3);
          const FunctionRef<int64_t(int64_t)> execute{"sim.execute"};
          const FunctionRef<int64_t(std::string, int64_t)> hop{"sim.hop"};
          std::vector<std::pair<int64_t, Future<int64_t>>> tickets;
          for (int k = 0; k < 2; ++k) {
            const int64_t ticket = i * 10 + k;
            once[ticket] = false;
            tickets.emplace_back(ticket, rpc_async(w, k == 0 ? next : other,
                                                   {.retry = Retry::kAtMostOnce}, execute, ticket));
            ++issued;
          }
          ++issued;
          const StatusOr<int64_t> hopped = try_rpc_sync(w, next, hop, other, 41);
          ++out.completed;
          if (hopped.ok()) ++out.succeeded;
          for (auto& [ticket, future] : tickets) {
            const auto result = future.try_wait();
            ++out.completed;
            if (result.ok()) {
              ++out.succeeded;
              once[ticket] = true;
            } else if ((error_kind(result.status()) == ErrorKind::kMaybeExecuted ||
                        error_kind(result.status()) == ErrorKind::kDeadline) &&
                       out.status.ok()) {
              out.status = annotate(result.status(), "a call that is at_most_once was given up");
            }
          }
        }));
      }
    }
    {
      std::vector<std::unique_ptr<Thread>> leaves;
      for (Worker& w : workers) {
        leaves.push_back(sim->spawn("leave", [&] {
          const ShutdownResult r = w.shutdown();
          if (!r.status.ok() && out.status.ok()) out.status = annotate(r.status, "shutdown");
        }));
      }
    }
    for (const Worker& w : workers) {
      const auto info = w.debug_info();
      for (const char* name :
           {"calls_pending", "handlers_running", "deadlines", "receive_bytes", "connections"}) {
        if (info.at(name) != 0 && out.status.ok()) {
          out.status = make_error(ErrorKind::kInternal, absl::StrCat(w.name(), " has ", name, " = ",
                                                                     info.at(name), " left"));
        }
      }
    }
  });
  if (!ended.ok()) out.status = ended;
  int64_t attached = 0;
  int64_t arrived = 0;
  for (const auto& probe : probes) {
    attached += probe->count("attached");
    arrived += probe->count("arrived");
    if (out.status.ok() && (probe->count("told") != probe->count("attached") ||
                            probe->count("ended") != probe->count("arrived") ||
                            probe->most_arrivals() > 1 || probe->count("undelivered_ok") > 0)) {
      out.status = make_error(ErrorKind::kInternal, "INT-1 or INT-2 is broken");
    }
  }
  if (out.status.ok() && (attached < issued || arrived > attached)) {
    out.status = make_error(ErrorKind::kInternal,
                            absl::StrCat(attached, " requests attached to, ", arrived, " arrived"));
  }
  for (const auto& [ticket, times] : ledger.executed) {
    if (times > 1 && out.status.ok()) {
      out.status = make_error(ErrorKind::kInternal,
                              absl::StrCat("ticket ", ticket, " ran ", times, " times"));
    }
  }
  for (const auto& [ticket, answered] : once) {
    if (answered && ledger.executed[ticket] != 1 && out.status.ok()) {
      out.status = make_error(ErrorKind::kInternal,
                              absl::StrCat("ticket ", ticket, " answered, not executed"));
    }
  }
  if (out.completed != issued && out.status.ok()) {
    out.status = make_error(ErrorKind::kInternal,
                            absl::StrCat(issued, " calls, ", out.completed, " completed"));
  }
  out.hash = sim->trace_hash();
  out.hits = plan->hits();
  out.events = sim->last_events();
  return out;
}

// One seed in a hundred is run again in another process.
constexpr uint64_t kCompared = 100;

std::string trace_line(uint64_t seed, uint64_t hash) {
  return absl::StrFormat("trace %d %016x", seed, hash);
}

// Prints the hash of every hundredth seed: run by the test below in a second process.
TEST(RpcSim, PrintTraceHashes) {
  const uint64_t schedules = weft::testing::environment_number<uint64_t>("WEFT_SIM_PRINT", 100);
  for (uint64_t seed = kCompared; seed <= schedules; seed += kCompared) {
    std::printf("%s\n", trace_line(seed, run_schedule(seed).hash).c_str());
  }
}

// The same program, with the test above alone.
std::vector<std::string> traces_of_another_process(uint64_t schedules) {
  char path[4096] = {0};
  EXPECT_GT(::readlink("/proc/self/exe", path, sizeof path - 1), 0);
  const std::string run =
      absl::StrCat("env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX WEFT_SIM_PRINT=", schedules,
                   " '", path, "' --gtest_filter=RpcSim.PrintTraceHashes");
  FILE* pipe = ::popen(run.c_str(), "r");
  if (pipe == nullptr) return {};
  std::string output;
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) output += buffer;
  EXPECT_EQ(::pclose(pipe), 0) << output;
  std::vector<std::string> traces;
  for (const absl::string_view line : absl::StrSplit(output, '\n')) {
    if (absl::StartsWith(line, "trace ")) traces.emplace_back(line);
  }
  return traces;
}

TEST(RpcSim, RandomSchedulesWithFaultsKeepTheInvariants) {
  const uint64_t only = weft::testing::environment_number<uint64_t>("WEFT_SIM_SEED", 0);
  if (only != 0) {
    const Outcome out = run_schedule(only, 400);
    for (const std::string& event : out.events) std::printf("%s\n", event.c_str());
    ASSERT_TRUE(out.status.ok()) << "seed " << only << ": " << out.status;
    return;
  }
  const uint64_t schedules =
      weft::testing::environment_number<uint64_t>("WEFT_SIM_SCHEDULES", 10'000);
  int64_t succeeded = 0;
  int64_t hits = 0;
  std::vector<std::string> traces;
  for (uint64_t seed = 1; seed <= schedules; ++seed) {
    const Outcome out = run_schedule(seed);
    ASSERT_TRUE(out.status.ok()) << "seed " << seed << ": " << out.status;
    succeeded += out.succeeded;
    hits += out.hits;
    if (seed % kCompared == 0) traces.push_back(trace_line(seed, out.hash));
  }
  EXPECT_GT(hits, static_cast<int64_t>(schedules) / 4) << "the faults must hit something";
  EXPECT_GT(succeeded, static_cast<int64_t>(schedules) * 5);
  // Event for event the same, with other addresses, other hash seeds and another time of day.
  EXPECT_EQ(traces_of_another_process(schedules), traces);
  std::printf("%d schedules, %d calls succeeded, %d faults hit, %d traces compared\n",
              static_cast<int>(schedules), static_cast<int>(succeeded), static_cast<int>(hits),
              static_cast<int>(traces.size()));
}

TEST(RpcSim, DifferentSeedsGiveDifferentTraces) {
  EXPECT_NE(run_schedule(4).hash, run_schedule(8).hash);
}

}  // namespace
}  // namespace weft::testing
