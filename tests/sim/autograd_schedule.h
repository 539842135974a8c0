#ifndef WEFT_TESTS_SIM_AUTOGRAD_SCHEDULE_H_
#define WEFT_TESTS_SIM_AUTOGRAD_SCHEDULE_H_

// What one schedule of autograd_sim_test.cc has and does: autograd_world.cc runs it,
// autograd_invariants.cc looks at it.

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "weft/common/sim.h"
#include "weft/dist_autograd/context.h"
#include "weft/tests/dist_autograd/random_graph.h"
#include "weft/tests/sim/autograd_audit.h"
#include "weft/tests/sim/autograd_world.h"

namespace weft::testing {

inline constexpr absl::Duration kDeadline = absl::Seconds(4);
// A root waits for so long until all have heard of an error; so long after the deadline others end.
inline constexpr absl::Duration kGrace = absl::Seconds(1);

torch::autograd::edge_list edges_of(const std::vector<at::Tensor>& losses);

struct Pass {
  int root = 0;
  std::vector<at::Tensor> losses{};
  std::vector<at::Tensor> alone{};  // the same on one worker
  bool retain = true;
  absl::Duration deadline = kDeadline;
  LiveSet live{};
  Status status{};
  absl::Time begun{};
  absl::Time ended{};
};

class World {
 public:
  World(uint64_t seed, SimRuntime* sim)
      : seed_(seed),
        trouble_(trouble_of(seed)),
        random_(seed * 0x9e3779b97f4a7c15u),
        sim_(sim),
        size_(2 + below(3)),
        graph_(seed, size_),
        parameters_(RandomGraph::make_parameters(size_)),
        held_(static_cast<size_t>(size_)),
        plan_(std::make_shared<FaultPlan>(seed)),
        counter_([this](int worker, const internal::Node* node) { before_run(worker, node); }) {}

  void run(const std::shared_ptr<Runtime>& runtime) {
    join(runtime);
    if (!out_.status.ok()) return;
    try {
      live();
    } catch (const Error& error) {
      fail(annotate(error.status(), "unexpected"));
    }
    leave();
  }
  Outcome take() {
    out_.hits = plan_->hits();
    out_.runs = counter_.runs();
    out_.messages = static_cast<int64_t>(audit_.sent().size());
    for (const Audit::Sent& one : audit_.sent()) out_.closes += one.kind == "close" ? 1 : 0;
    return std::move(out_);
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  void fail(const std::string& what) { fail(make_error(ErrorKind::kInternal, what)); }
  void fail(const Status& why) {
    if (out_.status.ok()) out_.status = why;
  }
  bool is_gone(int worker) const { return worker == gone_; }

  void join(const std::shared_ptr<Runtime>& runtime);
  void live();
  void record();
  void plan_passes();
  void run_passes();
  void act();
  void one_pass(Pass* pass);
  void again();
  void before_run(int worker, const internal::Node* node);
  void add_order_faults();
  void add_network_faults();
  void judge(const Pass& pass);
  void check_messages();
  void check_gradients(const std::vector<Pass>& passes);
  void check_no_pass(const char* when);
  void check_nothing_left();
  void leave();

  const uint64_t seed_;
  const Trouble trouble_;
  std::mt19937_64 random_;
  SimRuntime* const sim_;
  const int size_;
  const RandomGraph graph_;
  const RandomGraph::Parameters parameters_;
  std::vector<at::Tensor> held_;  // losses at other workers
  const std::shared_ptr<FaultPlan> plan_;
  RunCounter counter_;
  Audit audit_;
  std::vector<Worker> workers_{};
  std::optional<DistAutogradContext> context_{};
  std::optional<Recorded> recorded_{};
  std::vector<at::Tensor> losses_{};
  std::vector<at::Tensor> alone_{};
  std::vector<Pass> passes_{};
  const Pass* only_ = nullptr;  // the pass that runs, when it is the only one
  size_t started_ = 0;
  std::set<const internal::Node*> final_{};  // checked, in that pass
  int64_t throw_at_ = 0;                     // the run of a send or recv that does, counted down
  int64_t sleep_at_ = 0;
  int gone_ = -1;
  bool released_ = false;
  Outcome out_{};
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_SIM_AUTOGRAD_SCHEDULE_H_
