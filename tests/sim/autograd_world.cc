#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "torch/autograd.h"
#include "torch/types.h"
#include "weft/dist_autograd/service.h"
#include "weft/rpc/call.h"
#include "weft/rref/rref.h"
#include "weft/store/hash_store.h"
#include "weft/tests/sim/autograd_schedule.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {

using namespace std::chrono_literals;  // NOLINT
using internal::DistAutogradService;
using torch::autograd::edge_list;

edge_list edges_of(const std::vector<at::Tensor>& losses) {
  edge_list out;
  for (const at::Tensor& loss : losses) {
    out.push_back(torch::autograd::impl::gradient_edge(loss));
  }
  return out;
}

// ---- the schedule ------------------------------------------------------------------------------

void World::join(const std::shared_ptr<Runtime>& runtime) {
  Library library = RandomGraph::library(parameters_);
  Library sim("sim");
  // A loss of another worker, in the same context.
  sim.def("hold", [this](CallContext& context, const at::Tensor& x) {
    const auto rank = static_cast<size_t>(context.worker().rank());
    held_[rank] = (x * parameters_[rank][0]).sum();
  });
  library.merge(sim);
  auto joined =
      join_in_simulation(runtime, size_, library, plan_, &audit_, 1 + static_cast<int>(seed_ % 3));
  if (!joined.ok()) return fail(joined.status());
  workers_ = *std::move(joined);
}

void World::live() {
  const bool early = below(4) == 0;  // faults also while it is recorded
  context_.emplace(workers_[0]);
  if (early && trouble_ == Trouble::kOrder) add_order_faults();
  if (early && trouble_ == Trouble::kNetwork) add_network_faults();
  try {
    record();
  } catch (const Error& error) {
    plan_->clear();
    ++out_.failed;
    if (trouble_ != Trouble::kNetwork) fail(annotate(error.status(), "while it was recorded"));
    losses_.clear();
  }
  if (!losses_.empty()) {
    plan_passes();
    if (trouble_ == Trouble::kOrder || trouble_ == Trouble::kTime) add_order_faults();
    if (trouble_ == Trouble::kNetwork) add_network_faults();
    run_passes();
  }
  plan_->clear();
  if (!released_) {
    const Status released = context_->release().try_wait();
    if (!released.ok() && gone_ != 0) fail(annotate(released, "release"));
  }
  if (gone_ >= 0) sim_->sleep(absl::Seconds(40));
  check_nothing_left();
}

void World::record() {
  alone_ = graph_.alone(parameters_);
  losses_ = graph_.through(workers_[0], parameters_);
  if (losses_.empty() || below(3) > 0) return;
  const int at = 1 + below(size_ - 1);
  rpc_sync(workers_[0], at, FunctionRef<void(at::Tensor)>{"sim.hold"}, losses_[0]);
}

// Which passes there will be, and what each of them needs.
void World::plan_passes() {
  recorded_.emplace(workers_, context_->id());
  int other = 0;
  while (other < size_ && !held_[static_cast<size_t>(other)].defined()) ++other;
  if (other < size_) {
    const auto index = static_cast<size_t>(other);
    passes_.push_back({.root = 0, .losses = losses_, .alone = alone_});
    passes_.push_back({.root = other,
                       .losses = {held_[index]},
                       .alone = {(alone_[0] * parameters_[index][0]).sum()}});
  } else if (losses_.size() == 1 || below(2) == 0) {
    passes_.push_back({.root = 0, .losses = losses_, .alone = alone_, .retain = below(2) == 0});
  } else {
    for (size_t i = 0; i < 2; ++i) {
      passes_.push_back({.root = 0, .losses = {losses_[i]}, .alone = {alone_[i]}});
    }
  }
  std::vector<std::pair<int, torch::autograd::Edge>> all;
  for (Pass& pass : passes_) {
    if (trouble_ == Trouble::kTime && below(2) == 0) {
      pass.deadline = absl::Milliseconds(1 + below(60));
    }
    const edge_list edges = edges_of(pass.losses);
    pass.live = LiveSet(*recorded_, pass.root, edges);
    for (const auto& edge : edges) all.emplace_back(pass.root, edge);
  }
  counter_.watch(*recorded_, all);
}

void World::one_pass(Pass* pass) {
  ++started_;
  pass->begun = sim_->now();
  if (pass->root == 0) {
    pass->status = context_->try_backward(
        pass->losses,
        {.retain_graph = pass->retain, .deadline = absl::ToChronoMilliseconds(pass->deadline)});
  } else {
    const Worker& worker = workers_[static_cast<size_t>(pass->root)];
    const auto service = worker.service<DistAutogradService>();
    const auto context = service->find(context_->id());
    pass->status =
        context == nullptr
            ? make_error(ErrorKind::kState, "the context has been released")
            : service->backward(context, edges_of(pass->losses), {torch::ones({}, torch::kFloat64)},
                                {.retain_graph = pass->retain,
                                 .deadline = absl::ToChronoMilliseconds(pass->deadline)});
  }
  pass->ended = sim_->now();
  sim_->trace("pass", static_cast<uint64_t>(pass->root),
              static_cast<uint64_t>(error_kind(pass->status)));
  if (pass->ended - pass->begun > pass->deadline + kGrace + absl::Milliseconds(1)) {
    fail(absl::StrCat("LIVE-5: a pass ended after ",
                      absl::FormatDuration(pass->ended - pass->begun)));
  }
}

void World::run_passes() {
  if (trouble_ == Trouble::kThrow) throw_at_ = 1 + below(12);
  if (trouble_ == Trouble::kTime) sleep_at_ = 1 + below(12);
  const bool acts = trouble_ == Trouble::kRelease || trouble_ == Trouble::kKill;
  Promise<bool> promise(sim_->make_loop("actor"));
  Future<bool> now = promise.future();
  if (acts) audit_.on_arrival(1 + below(16), [&promise] { promise.try_set(true); });
  const bool at_once = passes_.size() == 2 && (passes_[1].root != 0 || below(2) == 0);
  {
    size_t left = passes_.size();
    const auto run_one = [&](Pass* pass) {
      if (!at_once) {
        only_ = pass;
        final_.clear();
      }
      one_pass(pass);
      if (--left == 0) promise.try_set(false);
    };
    std::vector<std::unique_ptr<Thread>> threads;  // joined before what they use is gone
    if (at_once) {
      for (Pass& pass : passes_) {
        threads.push_back(sim_->spawn("pass", [&run_one, &pass] { run_one(&pass); }));
      }
    } else {
      threads.push_back(sim_->spawn("passes", [&] {
        for (Pass& pass : passes_) run_one(&pass);
      }));
    }
    const StatusOr<bool> reached = now.try_wait();
    if (reached.ok() && *reached) act();
  }
  audit_.on_arrival(0, nullptr);
  only_ = nullptr;
  throw_at_ = 0;
  sleep_at_ = 0;
  bool failed = false;
  for (const Pass& pass : passes_) {
    judge(pass);
    failed |= !pass.status.ok();
  }
  if (trouble_ == Trouble::kNone || trouble_ == Trouble::kThrow) check_no_pass("at once");
  plan_->clear();
  if (failed) {
    sim_->sleep(kDeadline + kGrace + absl::Seconds(1));
    check_no_pass("after the deadline");
  } else {
    check_no_pass("after success");
  }
  check_messages();
  if (released_ || gone_ == 0) return;
  check_gradients(passes_);
  if (failed && gone_ < 0 && passes_[0].retain) again();
}

void World::act() {
  out_.acted = true;
  if (trouble_ == Trouble::kRelease) {
    const Status released = context_->release().try_wait();
    if (!released.ok()) fail(annotate(released, "a release while passes run"));
    released_ = true;
    check_nothing_left();
    return;
  }
  gone_ = below(size_);
  (void)workers_[static_cast<size_t>(gone_)].shutdown({.graceful = false});
}

// Nothing of what has failed is in the way of another pass.
void World::again() {
  std::vector<Pass> all;
  for (const Pass& pass : passes_) {
    if (pass.status.ok()) all.push_back(pass);
  }
  Pass more = passes_[0];
  more.deadline = kDeadline;
  one_pass(&more);
  if (!more.status.ok()) return fail(annotate(more.status, "another pass after one that failed"));
  all.push_back(more);
  check_gradients(all);
  ++out_.passes;
}

void World::before_run(int worker, const internal::Node* node) {
  if (only_ != nullptr && trouble_ != Trouble::kKill && final_.insert(node).second) {
    const uint64_t counter = static_cast<uint64_t>(started_);
    const internal::PassId id{context_->id(), key_of(workers_[0].info()), counter};
    if (!audit_.may_be_final(id, *recorded_, 0, edges_of(only_->losses), worker, node)) {
      fail(absl::StrCat("LIVE-3: w", worker, " runs a node and does not know all yet"));
    }
  }
  if (sleep_at_ > 0 && --sleep_at_ == 0) {
    out_.acted = true;
    sim_->sleep(absl::Milliseconds(30));
  }
  if (throw_at_ > 0 && --throw_at_ == 0) {
    out_.acted = true;
    if (seed_ % 2 == 0) throw std::out_of_range("a hook of the user");
    throw 17;  // whatever it is
  }
}

// ---- faults ------------------------------------------------------------------------------------

void World::add_order_faults() {
  const absl::Duration late = absl::Milliseconds(1 + below(40));
  plan_->add({.fault = Fault::kDelay, .probability = 0.15, .delay = late});
  plan_->add({.fault = Fault::kReorder, .probability = 0.15, .delay = late});
  // After a repeated frame cut off a call it is unknown whether it ran: only passes call again.
  if (recorded_.has_value()) plan_->add({.fault = Fault::kDuplicate, .probability = 0.1});
}

void World::add_network_faults() {
  static constexpr std::pair<Fault, FrameKind> kChoices[] = {
      {Fault::kFailAfter, FrameKind::kRequest},  {Fault::kFailBefore, FrameKind::kRequest},
      {Fault::kCut, FrameKind::kRequest},        {Fault::kLoseUnsent, FrameKind::kRequest},
      {Fault::kFailAfter, FrameKind::kResponse}, {Fault::kCut, FrameKind::kResponse},
      {Fault::kDrop, FrameKind::kRequest},       {Fault::kDrop, FrameKind::kResponse},
  };
  const int rules = 1 + below(3);
  for (int i = 0; i < rules; ++i) {
    const auto& [fault, kind] = kChoices[below(static_cast<int>(std::size(kChoices)))];
    FaultRule rule{.fault = fault, .kind = kind};
    rule.skip = below(6);
    rule.times = 1 + below(2);
    if (below(2) == 0) rule.from = absl::StrCat("w", below(size_));
    plan_->add(rule);
  }
  if (below(3) == 0) {
    // A link that is down for a while: it breaks, and some attempts to open it again are refused.
    FaultRule rule{.fault = Fault::kCut, .kind = FrameKind::kRequest};
    rule.from = absl::StrCat("w", below(size_));
    rule.skip = below(4);
    rule.times = 1;
    plan_->add(rule);
    plan_->add({.fault = Fault::kFailBefore, .kind = FrameKind::kHello, .times = 1 + below(6)});
  }
  plan_->add({.fault = Fault::kDelay, .probability = 0.1, .delay = absl::Milliseconds(20)});
}

void World::leave() {
  std::vector<std::unique_ptr<Thread>> threads;
  for (int w = 0; w < size_; ++w) {
    threads.push_back(sim_->spawn("leave", [this, w] {
      const ShutdownResult r = workers_[static_cast<size_t>(w)].shutdown({.graceful = gone_ < 0});
      if (!r.status.ok() && gone_ < 0) {
        fail(annotate(r.status, absl::StrCat("shutdown of w", w)));
      }
    }));
  }
}

// ---- from outside -------------------------------------------------------------------------------

StatusOr<std::vector<Worker>> join_in_simulation(const std::shared_ptr<Runtime>& runtime, int size,
                                                 const Library& library,
                                                 const std::shared_ptr<FaultPlan>& plan,
                                                 Audit* audit, int worker_threads) {
  const auto network = std::make_shared<InprocNetwork>();
  const auto store = std::make_shared<HashStore>(runtime);
  std::vector<Worker> workers(static_cast<size_t>(size));
  Status failed;
  {
    std::vector<std::unique_ptr<Thread>> threads;
    for (int i = 0; i < size; ++i) {
      threads.push_back(runtime->spawn("join", [&, i] {
        JoinOptions o;
        o.name = absl::StrCat("w", i);
        o.rank = i;
        o.world_size = size;
        o.library = library;
        o.store = store->new_client();
        o.transport = faulty_transport(inproc_transport(network), plan);
        o.services = {rref_service(), dist_autograd_service(), audit->service(i)};
        o.worker_threads = worker_threads;
        o.rpc_timeout = 5s;
        o.shutdown_timeout = 300s;
        o.runtime = runtime;
        o.log_level = Severity::kOff;
        o.environment = Environment{};
        StatusOr<Worker> w = Worker::try_join(std::move(o));
        if (!w.ok()) {
          failed = annotate(w.status(), "join");
        } else {
          workers[static_cast<size_t>(i)] = *std::move(w);
        }
      }));
    }
  }
  if (!failed.ok()) return failed;
  return workers;
}

const char* name_of(Trouble trouble) {
  switch (trouble) {
    case Trouble::kNone: return "none";
    case Trouble::kOrder: return "order";
    case Trouble::kNetwork: return "network";
    case Trouble::kThrow: return "throw";
    case Trouble::kTime: return "time";
    case Trouble::kRelease: return "release";
    case Trouble::kKill: return "kill";
  }
  return "";
}

Trouble trouble_of(uint64_t seed) {
  if (seed % 3 == 0) return Trouble::kNone;
  return static_cast<Trouble>(1 + seed / 3 % (kTroubles - 1));
}

Outcome run_autograd_schedule(uint64_t seed, size_t keep_events) {
  Outcome out;
  // On a thread of its own: LibTorch numbers the nodes of its graphs by thread, and the order in
  // which they run follows these numbers.
  std::thread([&] {
    auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed, .keep_events = keep_events});
    auto world = std::make_unique<World>(seed, sim.get());
    const Status ended = sim->run([&] { world->run(sim); });
    out = world->take();
    if (!ended.ok()) out.status = ended;
    world.reset();
    out.hash = sim->trace_hash();
    out.events = sim->last_events();
  }).join();
  return out;
}

}  // namespace weft::testing
