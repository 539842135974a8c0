// Groups whose members are workers: what they take from them, what they hear of the membership, and
// what observers see.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "ATen/TensorOperators.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "weft/collectives/internal/service.h"
#include "weft/collectives/service.h"
#include "weft/common/sim.h"
#include "weft/rpc/inspection.h"
#include "weft/tests/collectives/world.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/mortal_store.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/tests/testing/tls_files.h"

namespace weft::testing {
namespace {

ClusterOptions workers(int size, std::shared_ptr<Runtime> runtime = nullptr) {
  ClusterOptions out{.size = size, .runtime = std::move(runtime)};
  out.adjust = [](int, JoinOptions* o) { o->services.push_back(collectives_service()); };
  return out;
}

// Runs `body` for each worker at once.
void each(Cluster& c, Runtime& runtime, const std::function<void(size_t)>& body) {
  std::vector<std::unique_ptr<Thread>> threads;
  for (size_t i = 0; i < c.size(); ++i) {
    threads.push_back(runtime.spawn("rank", [&body, i] {
      try {
        body(i);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "worker " << i << ": " << e.what();
      }
    }));
  }
}

// The table `groups` of a worker, as weft-inspect prints it.
std::string groups_table_of(const Worker& worker) {
  Inspection seen(100);
  worker.service<internal::CollectivesService>()->put_inspection(&seen);
  return seen.text();
}

TEST(WorkerGroups, HaveRanksStoreAndNumbersOfTheirWorkers) {
  Cluster c(workers(3));
  const auto runtime = make_system_runtime();
  const int64_t keys = *c.store()->num_keys();
  std::vector<ProcessGroup> groups(3);
  each(c, *runtime, [&](size_t i) {
    ProcessGroup group = init_process_group(c[i], {.name = "g"});
    EXPECT_EQ(group.rank(), c[i].rank());
    EXPECT_EQ(group.size(), 3);
    const at::Tensor t = at::full({4}, group.rank() + 1.0);
    group.all_reduce(t);
    EXPECT_TRUE(at::equal(t, at::full({4}, 6.0)));
    // A part of it, by name and in another order.
    if (i != 1) {
      ProcessGroup pair = init_process_group(c[i], {.name = "pair"}, {"worker2", "worker0"});
      EXPECT_EQ(pair.rank(), i == 2 ? 0 : 1);
      pair.barrier();
    }
    EXPECT_EQ(counter(c[i], "collective_groups"), 1);
    EXPECT_EQ(counter(c[i], "collective_operations"), 1);
    EXPECT_EQ(counter(c[i], "collective_groups_failed"), 0);
    group.barrier();
    groups[i] = std::move(group);
  });
  EXPECT_EQ(*c.store()->num_keys(), keys) << "a group leaves no key";
  // The worker leaves its groups, also where a handle is left.
  c.shutdown();
  const Status later = groups[0].try_barrier();
  expect_error(later, ErrorKind::kState, {"barrier in group 'g'", "which was left"});
}

// The membership alone knows of this death: the group's ranks have no sockets between them.
TEST(WorkerGroups, ADeathReachesTheGroupWithoutItsConnections) {
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = 3});
  const Status status = sim->run([&] {
    ClusterOptions options = workers(3, sim);
    std::shared_ptr<Store> mortal;
    options.adjust = [&](int index, JoinOptions* o) {
      o->services.push_back(collectives_service());
      if (index == 2) mortal = hear_interrupts(o);
    };
    Cluster c(options);
    const auto fabric = std::make_shared<InprocFabric>(sim);
    const absl::Time begin = sim->now();
    each(c, *sim, [&](size_t i) {
      ProcessGroup group = init_process_group(c[i], {.fabric = fabric});
      group.barrier();
      if (i == 2) {
        c.network()->kill("worker2");
        mortal->interrupt();
        sim->sleep(absl::Minutes(5));
        return;
      }
      const Status lost = group.try_all_reduce(at::zeros({8}));
      expect_error(lost, ErrorKind::kPeerLost, {"rank 2", "'worker2'", "all_reduce #2"});
      EXPECT_EQ(counter(c[i], "collective_groups_failed"), 1);
      // It counts as gone at once, and its worker is no member of what comes next.
      const absl::Time failed = sim->now();
      ProcessGroup next = group.rebuild({.timeout = absl::Minutes(3)});
      EXPECT_LT(sim->now() - failed, absl::Minutes(1));
      EXPECT_EQ(next.size(), 2);
      const at::Tensor t = at::full({1}, 1.0);
      next.all_reduce(t);
      EXPECT_EQ(t[0].item<double>(), 2.0);
      // No group is made with a worker that is gone.
      const auto none = try_init_process_group(c[i], {.name = "none", .fabric = fabric});
      expect_error(none.status(), ErrorKind::kPeerLost, {"worker2"});
    });
    EXPECT_LT(sim->now() - begin, absl::Minutes(6));
    c.forget();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(WorkerGroups, ADeathEndsTheMakingOfAGroup) {
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = 4});
  const Status status = sim->run([&] {
    ClusterOptions options = workers(3, sim);
    std::shared_ptr<Store> mortal;
    options.adjust = [&](int index, JoinOptions* o) {
      o->services.push_back(collectives_service());
      if (index == 2) mortal = hear_interrupts(o);
    };
    Cluster c(options);
    const auto fabric = std::make_shared<InprocFabric>(sim);
    each(c, *sim, [&](size_t i) {
      if (i == 2) {
        sim->sleep(absl::Seconds(1));
        c.network()->kill("worker2");
        mortal->interrupt();
        return;
      }
      const absl::Time begin = sim->now();
      const auto made = try_init_process_group(c[i], {.name = "g", .fabric = fabric});
      expect_error(made.status(), ErrorKind::kPeerLost, {"group 'g'", "'worker2'"});
      EXPECT_LT(sim->now() - begin, absl::Minutes(1));
      // The name is free again.
      ProcessGroup two =
          init_process_group(c[i], {.name = "g", .fabric = fabric}, {"worker0", "worker1"});
      two.barrier();
    });
    const std::vector<std::string> keys = *c.store()->list_keys("");
    for (const std::string& key : keys) {
      EXPECT_EQ(key.find("collectives"), std::string::npos) << key;
    }
    c.forget();
  });
  EXPECT_TRUE(status.ok()) << status;
}

#ifndef WEFT_TESTS_THREAD_SANITIZER_  // it cannot see into gRPC
// Groups of workers with certificates prove themselves by those of the workers, and to the names
// that the membership has.
TEST(WorkerGroups, HaveTheCredentialsOfTheirWorkers) {
  TlsFiles files;
  ClusterOptions options = workers(3);
  options.net = Net::kGrpc;
  options.adjust = [&](int index, JoinOptions* o) {
    o->services.push_back(collectives_service());
    o->credentials = files.make("worker" + std::to_string(index), {.rank = index});
  };
  Cluster c(options);
  const auto runtime = make_system_runtime();
  each(c, *runtime, [&](size_t i) {
    // In another order than the workers have ranks.
    const std::vector<std::string> order = {"worker2", "worker0", "worker1"};
    ProcessGroup group = init_process_group(c[i], {.name = "g", .backend = Backend::kTcp}, order);
    const at::Tensor t = at::full({4}, group.rank() + 1.0);
    group.all_reduce(t);
    EXPECT_TRUE(at::equal(t, at::full({4}, 6.0)));
    group.barrier();
    // Rank 2 is worker1, which shows another worker's certificate.
    ProcessGroupOptions o{.name = "h", .backend = Backend::kTcp};
    if (i == 1) {
      o.credentials = files.make("intruder", {.rank = 1});
      o.credentials.shared_certificate = true;  // passes over its own check
    }
    const Status s = try_init_process_group(c[i], o, order).status();
    EXPECT_FALSE(s.ok());
    if (i != 1) expect_error(s, error_kind(s), {"rank 2", "'intruder'", "not of 'worker1'"});
    expect_error(try_init_process_group(c[i], {.worker_name = "worker9"}).status(),
                 ErrorKind::kInvalidArgument, {"worker_name comes from the worker"});
  });
}
#endif

class WorkerGroupsOn : public ::testing::TestWithParam<Backend> {};

// The table of weft-inspect: what is under way, and who is waited for.
TEST_P(WorkerGroupsOn, ObserversSeeWhoIsWaitedFor) {
  Cluster c(workers(3));
  const auto runtime = make_system_runtime();
  const auto fabric =
      GetParam() == Backend::kInproc ? std::make_shared<InprocFabric>(runtime) : nullptr;
  std::atomic<bool> seen{false};
  std::string last;
  // Every rank waits for every other one, not for a neighbour that waits itself.
  const AllReduceOptions naive{.algorithm = Algorithm::kNaive};
  each(c, *runtime, [&](size_t i) {
    ProcessGroup group =
        init_process_group(c[i], {.name = "g", .backend = GetParam(), .fabric = fabric});
    group.barrier();
    if (i == 2) {
      while (!seen.load()) std::this_thread::yield();
    }
    if (i == 0) {
      // Seen from a third thread, while this one waits.
      const auto observer = runtime->spawn("observer", [&] {
        const absl::Time until = runtime->now() + absl::Seconds(30);
        while (!seen.load() && runtime->now() < until) {
          last = groups_table_of(c[0]);
          if (last.find("rank 2 ('worker2')") != std::string::npos) break;
          std::this_thread::yield();
        }
        seen.store(true);
      });
      group.all_reduce(at::zeros({8}), naive);
    } else {
      group.all_reduce(at::zeros({8}), naive);
    }
  });
  EXPECT_NE(last.find("rank 2 ('worker2')"), std::string::npos) << last;
  EXPECT_NE(last.find("all_reduce #2"), std::string::npos) << last;
  EXPECT_NE(last.find(setting_text(GetParam())), std::string::npos) << last;
}

INSTANTIATE_TEST_SUITE_P(Backends, WorkerGroupsOn,
                         ::testing::Values(Backend::kInproc, Backend::kShm, Backend::kTcp),
                         [](const auto& one) { return setting_text(one.param); });

TEST(WorkerGroups, BadInput_a_group_of_workers) {
  Cluster c(workers(2));
  const auto refused = [&](const ProcessGroupOptions& options,
                           const std::vector<std::string>& names, ErrorKind kind,
                           const std::string& word) {
    expect_error(try_init_process_group(c[0], options, names).status(), kind, {word});
  };
  refused({.rank = 0, .size = 1}, {}, ErrorKind::kInvalidArgument, "option rank");
  refused({.store = c.store()}, {}, ErrorKind::kInvalidArgument, "option store");
  refused({}, {"worker0", "worker0"}, ErrorKind::kInvalidArgument, "twice");
  refused({}, {"worker1"}, ErrorKind::kInvalidArgument, "'worker0' is not in the list");
  refused({}, {"worker0", "worker7"}, ErrorKind::kNotFound, "worker7");
  c.shutdown();
  refused({}, {"worker0"}, ErrorKind::kState, "shut down");
  Cluster plain({.size = 1});
  expect_error(try_init_process_group(plain[0]).status(), ErrorKind::kState,
               {"collectives_service()"});
}

}  // namespace
}  // namespace weft::testing
