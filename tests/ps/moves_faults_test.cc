// What happens to moves of parts at the edges: the store is away, the target starts again under its name, budgets
// are full, there are very many parts.

#include "weft/store/delegating_store.h"
#include "weft/tests/ps/moves_job.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using ps::Table;
using namespace std::chrono_literals;  // NOLINT

// A store of which each answer is, while it is away, that it was not reached.
class StoreThatGoes : public DelegatingStore {
 public:
  StoreThatGoes(std::shared_ptr<Store> inner, std::shared_ptr<SimRuntime> sim, const bool* away)
      : DelegatingStore(std::move(inner)), sim_(std::move(sim)), away_(away) {}

  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reached());
    return inner()->set(key, value, timeout);
  }
  StatusOr<std::optional<std::string>> try_get(std::string_view key, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reached());
    return inner()->try_get(key, timeout);
  }
  // What was asked is done at times, and only the answer is lost.
  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout) override {
    const bool done = !*away_ || sim_->random().below(2) == 0;
    StatusOr<std::string> said = std::string();
    if (done) said = inner()->compare_set(key, expected, desired, timeout);
    WEFT_RETURN_IF_ERROR(reached());
    return said;
  }

 private:
  Status reached() const {
    if (!*away_) return absl::OkStatus();
    sim_->sleep(absl::Milliseconds(200));
    return make_error(ErrorKind::kUnavailable, "the store is away");
  }

  const std::shared_ptr<SimRuntime> sim_;
  const bool* const away_;
};

at::Tensor all_are(int64_t count) { return torch::full({6}, static_cast<double>(count)); }

// A move waits for it, wherever it was, and no push is lost.
TEST_F(PsTest, PS_10_AMoveGoesOnWhenTheStoreIsBack) {
  for (int after = 0; after < 24; after += fewer(1, 8)) {
    in_simulation(static_cast<uint64_t>(60 + after), [&](const std::shared_ptr<SimRuntime>& sim) {
      bool away = false;
      MovesJob job(2, sim, [&](int, JoinOptions* o) {
        o->store = std::make_shared<StoreThatGoes>(o->store, sim, &away);
      });
      const Table t = job.near[0].open_table("w", counters());
      const auto [moved, pushed] = move_while_counting(*sim, job, t, 30s, [&] {
        sim->sleep(absl::Microseconds(150 * after));
        away = true;
        sim->sleep(absl::Seconds(2));
        away = false;
        sim->sleep(absl::Seconds(3));
      });
      EXPECT_TRUE(moved.ok()) << "after " << after << ": " << moved;
      EXPECT_EQ(job.owners("w", 0), std::vector<std::string>{"ps3"}) << "after " << after;
      EXPECT_TRUE(torch::equal(t.pull().wait(), all_are(pushed))) << "after " << after;
    });
  }
}

// It is another server then, and what it was told before is not for it.
TEST_F(PsTest, PS_10_AMoveToAServerThatStartsAgainUnderItsNameLosesNothing) {
  for (int after = 0; after < 16; after += fewer(1, 5)) {
    in_simulation(static_cast<uint64_t>(90 + after), [&](const std::shared_ptr<SimRuntime>& sim) {
      MovesJob job(2, sim);
      const Table t = job.near[0].open_table("w", counters());
      std::optional<Worker> again;
      std::unique_ptr<ps::Server> server;
      const auto [moved, pushed] = move_while_counting(*sim, job, t, 60s, [&] {
        sim->sleep(absl::Microseconds(200 * after));
        job.servers[3].reset();
        (void)job.server(3).shutdown({.graceful = false});
        again = Worker::join(job.cluster->join_options(3, "ps3"));
        server = std::make_unique<ps::Server>(*again);
        sim->sleep(absl::Seconds(5));
      });
      EXPECT_TRUE(moved.ok() || error_kind(moved) == ErrorKind::kPeerLost ||
                  error_kind(moved) == ErrorKind::kState)
          << "after " << after << ": " << moved;
      EXPECT_TRUE(torch::equal(t.pull().wait(), all_are(pushed))) << "after " << after;
      job.near[1].move_part("w", 0, "ps3", 60s);
      EXPECT_TRUE(ps::internal::PsService::of(*again)->parts_by_name().contains({"w", 0}));
      EXPECT_TRUE(torch::equal(t.push_pull(-torch::ones({6})).wait(), all_are(pushed + 1)));
      server.reset();
      (void)again->shutdown({.graceful = false});
      job.cluster->shutdown_all({.graceful = false});
      job.cluster->forget();
    });
  }
}

// The owner gives the attempt up meanwhile, and the move is asked for until its time is over.
TEST_F(PsTest, PS_10_AMoveToATargetThatWasCutOffForAWhileBeginsAnew) {
  in_simulation(57, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(57);
    MovesJob job(2, sim,
                 [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    const Table t = job.near[0].open_table("w", counters());
    for (const FrameKind kind : {FrameKind::kRequest, FrameKind::kResponse}) {
      plan->add({.fault = Fault::kDrop, .kind = kind, .from = "ps0", .to = "ps3"});
    }
    const auto [moved, pushed] = move_while_counting(*sim, job, t, 30s, [&] {
      sim->sleep(absl::Seconds(8));
      plan->clear();
      sim->sleep(absl::Seconds(5));
    });
    EXPECT_TRUE(moved.ok()) << moved;
    EXPECT_EQ(job.owners("w", 0), std::vector<std::string>{"ps3"});
    EXPECT_TRUE(torch::equal(t.pull().wait(), all_are(pushed)));
  });
}

// A target that does not keep up is given up before it costs more memory than a backup may.
TEST_F(PsTest, BadInput_a_move_for_which_a_budget_is_too_small) {
  in_simulation(59, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(59);
    MovesJob job(2, sim,
                 [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    job.servers[0].reset();
    job.servers[0] =
        std::make_unique<ps::Server>(job.server(0), ps::ServerOptions{.log_bytes = 4096});
    job.servers[3].reset();
    job.servers[3] =
        std::make_unique<ps::Server>(job.server(3), ps::ServerOptions{.table_bytes = 64});
    const Table t = job.near[0].open_table("w", counters());
    const int slow = plan->add({.fault = Fault::kDelay,
                                .kind = FrameKind::kRequest,
                                .from = "ps0",
                                .to = "ps3",
                                .delay = absl::Seconds(1)});
    bool stop = false;
    int64_t pushed = 0;
    Status moved;
    side_by_side(*sim, {[&] { pushed = count_up(*sim, t, stop); },
                        [&] {
                          moved = job.near[1].try_move_part("w", 0, "ps3", 30s);
                          stop = true;
                        }});
    expect_ps_error(moved, ErrorKind::kResource,
                    {"table 'w', part 0", "'ps3'", "cannot follow", "log_bytes is 4096"});
    plan->remove(slow);
    // Its tables have no room for the image.
    auto large = counters(600);
    const Table u = job.near[0].open_table("u", large);
    expect_ps_error(job.near[1].try_move_part("u", 0, "ps3", 30s), ErrorKind::kResource,
                    {"table 'u', part 0", "'ps3'", "table_bytes"});
    EXPECT_EQ(job.owners("w", 0), std::vector<std::string>{"ps0"});
    EXPECT_EQ(job.owners("u", 0), std::vector<std::string>{"ps0"});
    EXPECT_TRUE(torch::equal(t.push_pull(-torch::ones({6})).wait(), all_are(pushed + 1)));
  });
}

TEST_F(PsTest, PS_10_AServerTakesItsShareOfVeryManyParts) {
  in_simulation(58, [](const std::shared_ptr<SimRuntime>& sim) {
    MovesJob job(1, sim);
    constexpr int64_t kElements = fewer(1200, 160);
    auto definition = counters(kElements);
    definition.part_bytes = 4;  // a part each
    const Table t = job.near[0].open_table("w", definition, {.deadline = 600s});
    const at::Tensor one = -torch::ones({kElements});
    bool stop = false;
    int64_t pushed = 0;
    side_by_side(*sim, {[&] {
                          while (!stop) {
                            t.push(one).wait();
                            ++pushed;
                            sim->sleep(absl::Milliseconds(200));
                          }
                        },
                        [&] {
                          EXPECT_EQ(job.servers[3]->join(job.listed, 600s), kElements / 4);
                          job.servers[0]->drain(600s);
                          stop = true;
                        }});
    EXPECT_GT(pushed, 2);
    EXPECT_TRUE(
        torch::equal(t.pull().wait(), torch::full({kElements}, static_cast<double>(pushed))));
  });
}

}  // namespace
}  // namespace weft::testing
