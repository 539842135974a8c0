// DistributedDataParallel in contexts of distributed autograd: dense layers are averaged, what lies
// at a server gets its gradients by RPC.

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <limits>
#include <thread>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/join.h"
#include "weft/collectives/grad_accessor.h"
#include "weft/common/mutex.h"
#include "weft/store/hash_store.h"
#include "weft/tests/dist_optim/fixture.h"
#include "weft/tests/testing/environment.h"
#include "weft/tests/testing/modules.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

constexpr double kRate = 0.1;
constexpr size_t kServer = 2;

// The server's table; trainers ask the server for it.
RRef<Weights> the_table;
RRef<Weights> table() { return the_table; }

// Dense layers; one of them has no part in some losses.
struct DenseImpl : torch::nn::Module {
  DenseImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    sometimes = register_module("sometimes", torch::nn::Linear(4, 4));
    last = register_module("last", torch::nn::Linear(4, 2));
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& x, bool all = true) {
    const at::Tensor h = torch::tanh(first(x));
    return last(all ? torch::tanh(sometimes(h)) : h);
  }
  torch::nn::Linear first = nullptr, sometimes = nullptr, last = nullptr;
};
using Dense = std::shared_ptr<DenseImpl>;

class TimeLeft final : public GradReadyHook {
 public:
  explicit TimeLeft(absl::Duration* to) : to_(to) {}
  void on_grad_ready(const std::shared_ptr<GradAccessor>& of) override { *to_ = of->time_left(); }

 private:
  absl::Duration* const to_;
};

// Gradients cannot come back through it.
class Fails : public torch::autograd::Function<Fails> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::domain_error("no gradient on purpose");
  }
};
at::Tensor fails_back(const at::Tensor& x) { return Fails::apply(x); }

// Two trainers, workers 0 and 1, and a server, each trainer on a thread of its own.
class DdpHybrid : public DistOptimTest {
 protected:
  DdpHybrid() { library_.def("table", &table).def("fails_back", &fails_back); }

  void run(const std::function<void(const Worker&, ProcessGroup&, const RRef<Weights>&)>& body,
           int trainers = 2) {
    OptimCluster c = make();
    the_table = c.weights[1];
    const auto runtime = make_system_runtime();
    const auto store = std::make_shared<HashStore>(runtime);
    const auto fabric = std::make_shared<InprocFabric>(runtime);
    std::vector<std::thread> threads;
    for (int i = 0; i < trainers; ++i) {
      threads.emplace_back([&, i] {
        try {
          ProcessGroup group = init_process_group({.store = store,
                                                   .rank = i,
                                                   .size = trainers,
                                                   .timeout = std::chrono::seconds(30),
                                                   .runtime = runtime,
                                                   .fabric = fabric});
          const Worker& worker = c[static_cast<size_t>(i)];
          const RRef<Weights> weights = rpc_sync(worker, "worker0", &table);
          body(worker, group, weights);
        } catch (const std::exception& e) {
          ADD_FAILURE() << "trainer " << i << ": " << e.what();
        }
      });
    }
    for (std::thread& one : threads) one.join();
    the_table = RRef<Weights>();
    expect_none(*c.cluster, "num_autograd_contexts");
    expect_none(*c.cluster, "num_current_backward_passes");
  }
  static at::Tensor ids(int step, int rank) {
    return torch::tensor({step % 3, (step + 1 + rank) % 3}, torch::kLong);
  }
  static at::Tensor target(int step, int rank) {
    return torch::full({2, 2}, 0.1 * (step % 7) + 0.2 * rank, torch::kFloat64);
  }
  static at::Tensor mse(const at::Tensor& out, const at::Tensor& want) {
    return (out - want).pow(2).mean();
  }
};

// CL-6: equal to one process that has the whole model. The table gets the sum of what the trainers
// step with, the dense layers the mean.
TEST_P(DdpHybrid, CL_6_EqualsTheModelInOneProcess) {
  for (const bool fused : {false, true}) {
    for (const bool sparse : {false, true}) {
      SCOPED_TRACE(std::string(fused ? "fused" : "stepped") + (sparse ? ", sparse" : ", dense"));
      torch::manual_seed(5);
      const auto start = std::make_shared<DenseImpl>();
      at::Tensor want_table;
      const Dense want = copy_of(start);
      std::vector<double> want_losses;
      constexpr int kSteps = fewer(50, 12);
      run([&](const Worker& worker, ProcessGroup& group, const RRef<Weights>& weights) {
        const int rank = group.rank();
        if (rank == 0) {
          at::Tensor own = weights.rpc_sync(&Weights::value).clone().set_requires_grad(true);
          for (int s = 0; s < kSteps; ++s) {
            std::vector<at::Tensor> all = want->parameters();
            at::Tensor sum = torch::zeros({}, torch::kFloat64);
            for (int r = 0; r < 2; ++r) {
              sum = sum + mse(want->forward(own.index_select(0, ids(s, r))), target(s, r));
            }
            want_losses.push_back(sum.item<double>() / 2);
            all.push_back(own);
            const auto grads = torch::autograd::grad({sum}, all);
            const torch::NoGradGuard no_grad;
            for (size_t i = 0; i < all.size(); ++i) {
              all[i].sub_(grads[i] * (i + 1 == all.size() ? kRate : kRate / 2));
            }
          }
          want_table = own.detach();
        }
        group.barrier();
        const Dense net = copy_of(start);
        DistributedDataParallel ddp(net, group);
        std::vector<RRef<at::Tensor>> parameters = {weights.rpc_sync(&Weights::parameter)};
        for (const at::Tensor& own : net->parameters()) {
          parameters.push_back(RRef<at::Tensor>::local(worker, own));
        }
        DistributedOptimizer<optim::SGD> optimizer(worker, parameters, {.lr = kRate});
        for (int s = 0; s < kSteps; ++s) {
          DistAutogradContext context(worker);
          const at::Tensor rows = weights.rpc_sync(&Weights::rows, ids(s, rank), sparse);
          const at::Tensor loss = mse(ddp.forward(rows), target(s, rank));
          group.barrier();  // no rank steps what another still looks up
          if (fused) {
            optimizer.backward_and_step(context, {loss});
          } else {
            context.backward({loss});
            group.barrier();
            optimizer.step(context);
          }
          at::Tensor mean = loss.detach().clone();
          group.all_reduce(mean, {.op = ReduceOp::kAvg});
          EXPECT_NEAR(mean.item<double>(), want_losses[static_cast<size_t>(s)], 1e-10) << s;
        }
        expect_close(weights.rpc_sync(&Weights::value), want_table);
        for (size_t i = 0; i < net->parameters().size(); ++i) {
          expect_close(net->parameters()[i].detach(), want->parameters()[i].detach());
          EXPECT_FALSE(net->parameters()[i].grad().defined());
          // Replicas are equal, bit for bit.
          std::vector<at::Tensor> both = {torch::empty_like(net->parameters()[i]),
                                          torch::empty_like(net->parameters()[i])};
          group.all_gather(both, net->parameters()[i].detach());
          expect_equal(both[0], both[1]);
        }
      });
    }
  }
}

// The context's gradients are what `.grad` would have been.
TEST_P(DdpHybrid, TheContextHasWhatGradWouldHave) {
  run([](const Worker& worker, ProcessGroup& group, const RRef<Weights>& weights) {
    const auto inside = std::make_shared<DenseImpl>();
    DistributedDataParallel ddp(inside, group,
                                {.bucket_cap_mb = 0.0001, .first_bucket_mb = 0.0001});
    const Dense plain = copy_of(inside);
    DistributedDataParallel local(plain, group);
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = torch::ones({1, 3}, torch::kFloat64) * (1 + i + group.rank());
      local.zero_grad();
      local.forward(x).sum().backward();
      DistAutogradContext context(worker);
      // A sum of two, one through the server: its own gradient is kept and not averaged.
      const at::Tensor there = weights.rpc_sync(&Weights::rows, ids(0, group.rank()), false);
      context.backward({ddp.forward(x).sum() + there.sum() * (1 + group.rank())});
      for (size_t p = 0; p < plain->parameters().size(); ++p) {
        expect_equal(context.gradient(inside->parameters()[p]), plain->parameters()[p].grad());
        EXPECT_FALSE(inside->parameters()[p].grad().defined());
      }
    }
    EXPECT_EQ(ddp.sight().reductions, 3);
  });
}

// A model of dense layers around a part at another worker.
struct HybridImpl : torch::nn::Module {
  HybridImpl(RRef<Weights> remote, Dense dense) : there(std::move(remote)), net(std::move(dense)) {
    register_module("net", net);
  }
  at::Tensor forward(const at::Tensor& x) {
    return net->forward(there.rpc_sync(&Weights::forward, x).t());
  }
  RRef<Weights> there;
  Dense net;
};

// Without it, around the dense layers, or around all of the model; with the other part at the
// server or at the trainer itself. Trainers have opposite losses, so that the mean is known.
TEST_P(DdpHybrid, DA_59_and_DA_60_and_DA_61_and_DA_64_inside_outside_local_remote) {
  enum class Where { kNowhere, kInside, kOutside };
  for (const Where where : {Where::kNowhere, Where::kInside, Where::kOutside}) {
    for (const bool is_remote : {true, false}) {
      run([&](const Worker& worker, ProcessGroup& group, const RRef<Weights>& weights) {
        torch::manual_seed(9);  // of one rank or the other: wrapping makes them equal
        const RRef<Weights> part =
            is_remote ? weights
                      : RRef<Weights>::local(worker, Weights(weights.rpc_sync(&Weights::value)));
        const auto dense = std::make_shared<DenseImpl>();
        for (at::Tensor& one : dense->parameters()) one.detach().fill_(0.25);
        const auto model = std::make_shared<HybridImpl>(part, dense);
        const at::Tensor x = torch::ones({3, 2}, torch::kFloat64);
        const auto expected = torch::autograd::grad(
            {dense->forward(torch::matmul(weights.rpc_sync(&Weights::value), x).t()).sum()},
            dense->parameters());
        std::optional<DistributedDataParallel<DenseImpl>> inside;
        std::optional<DistributedDataParallel<HybridImpl>> outside;
        if (where == Where::kInside) inside.emplace(dense, group);
        if (where == Where::kOutside) outside.emplace(model, group);
        DistAutogradContext context(worker);
        at::Tensor out;
        if (inside) out = inside->forward(part.rpc_sync(&Weights::forward, x).t());
        if (outside) out = outside->forward(x);
        if (!out.defined()) out = model->forward(x);
        const double mine = group.rank() == 0 ? 3 : -1;
        context.backward({out.sum() * mine});
        const double factor = where == Where::kNowhere ? mine : 1;  // the mean of 3 and -1
        for (size_t i = 0; i < expected.size(); ++i) {
          expect_close(context.gradient(dense->parameters()[i]), expected[i] * factor);
        }
      });
    }
  }
}

// The trainer with fewer batches waits for the other, whose passes go on.
TEST_P(DdpHybrid, DA_62_ddp_outside_uneven_inputs) {
  run([](const Worker& worker, ProcessGroup& group, const RRef<Weights>& weights) {
    const auto dense = std::make_shared<DenseImpl>();
    for (at::Tensor& one : dense->parameters()) one.detach().fill_(0.25);
    const auto model = std::make_shared<HybridImpl>(weights, dense);
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.0001, .first_bucket_mb = 0.0001});
    const at::Tensor x = torch::ones({3, 2}, torch::kFloat64);
    const auto whole = torch::autograd::grad(
        {dense->forward(torch::matmul(weights.rpc_sync(&Weights::value), x).t()).sum()},
        dense->parameters());
    const std::vector<int> batches = {2, 4};
    Join join({ddp});
    for (int s = 0; s < batches[static_cast<size_t>(group.rank())]; ++s) {
      DistAutogradContext context(worker);
      context.backward({ddp.forward(x).sum() * (1 + group.rank())});
      // The mean of 1 and 2, then of none and 2.
      const double factor = s < 2 ? 1.5 : 1;
      for (size_t i = 0; i < whole.size(); ++i) {
        expect_close(context.gradient(dense->parameters()[i]), whole[i] * factor);
      }
    }
    join.wait();
    for (const at::Tensor& one : dense->parameters()) EXPECT_FALSE(one.grad().defined());
    EXPECT_EQ(ddp.sight().reductions, 4);
  });
}

struct TableImpl : torch::nn::Module {
  TableImpl() {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 3).sparse(true)));
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& ids) { return table(ids); }
  torch::nn::Embedding table = nullptr;
};

TEST_P(DdpHybrid, DA_65_sparse_grads) {
  run([](const Worker& worker, ProcessGroup& group, const RRef<Weights>& weights) {
    const auto net = std::make_shared<TableImpl>();
    DistributedDataParallel ddp(net, group);
    DistAutogradContext context(worker);
    const at::Tensor mine = torch::tensor({1, 2 + group.rank()}, torch::kLong);
    context.backward({weights.rpc_sync(&Weights::forward, ddp.forward(mine).t()).sum()});
    const at::Tensor grad = context.gradient(net->table->weight);
    ASSERT_TRUE(grad.is_sparse());
    const at::Tensor column = weights.rpc_sync(&Weights::value).sum(0);
    at::Tensor want = torch::zeros({6, 3}, torch::kFloat64);
    want[1] = column;
    want[2] = want[3] = column / 2;
    expect_close(grad.to_dense(), want);
  });
}

// The peer asserts here: a parameter without gradient in the context.
TEST_P(DdpHybrid, DB_10_unused_parameters) {
  run([](const Worker& worker, ProcessGroup& group, const RRef<Weights>&) {
    const auto net = std::make_shared<DenseImpl>();
    DistributedDataParallel ddp(net, group, {.find_unused_parameters = true});
    const at::Tensor x = torch::ones({1, 3}, torch::kFloat64);
    for (const bool used : {true, false, true}) {
      DistAutogradContext context(worker);
      context.backward({ddp.forward(x, used && group.rank() == 1).sum()});
      EXPECT_EQ(context.gradient(net->sometimes->weight).defined(), used);
      EXPECT_TRUE(context.gradient(net->last->weight).defined());
    }
    // Without it: the error of that pass, on both, by name.
    DistributedDataParallel strict(copy_of(net), group);
    DistAutogradContext context(worker);
    const Status failed = context.try_backward({strict.forward(x, group.rank() == 0).sum()});
    expect_error(failed, ErrorKind::kState,
                 {"rank 1: no gradient for 2 of 6 parameters", "'sometimes.weight'"});
    EXPECT_TRUE(context.gradients().empty());
  });
}

// Trainers whose remote gradients differ scale by one factor: that of the joined model's norm. A rank
// whose context cannot be asked is an error on all, and nothing is scaled.
TEST_P(DdpHybrid, ClippingByANormThatAllRanksAgreeOn) {
  for (const double p : {2.0, std::numeric_limits<double>::infinity()}) {
    std::vector<std::vector<at::Tensor>> dense(2);
    std::vector<double> norms(2);
    double want = 0;
    run([&](const Worker& worker, ProcessGroup& group, const RRef<Weights>& weights) {
      const auto rank = static_cast<size_t>(group.rank());
      torch::manual_seed(9);
      const auto net = std::make_shared<DenseImpl>();
      DistributedDataParallel ddp(net, group);
      const at::Tensor own = torch::tensor({1.0 + group.rank()}, torch::kFloat64).requires_grad_();
      DistAutogradContext context(worker);
      const at::Tensor rows = weights.rpc_sync(&Weights::rows, ids(0, group.rank()), false);
      const double factor = 10.0 + 5 * group.rank();
      context.backward({(ddp.forward(rows * own).sum() * factor)});
      if (rank == 0) {
        // The same in one process: the dense part averaged, the rest of each trainer apart.
        const at::Tensor table = weights.rpc_sync(&Weights::value).detach();
        std::vector<at::Tensor> all;
        at::Tensor mean = torch::zeros({}, torch::kFloat64);
        std::vector<at::Tensor> apart;
        for (int r = 0; r < 2; ++r) {
          const at::Tensor looked = table.index_select(0, ids(0, r)).requires_grad_();
          const at::Tensor mine = torch::tensor({1.0 + r}, torch::kFloat64).requires_grad_();
          apart.insert(apart.end(), {looked, mine});
          const at::Tensor loss = net->forward(looked * mine).sum() * (10.0 + 5 * r);
          const auto parts = torch::autograd::grad({loss}, {looked, mine}, {}, true);
          at::Tensor whole = torch::zeros_like(table);
          all.push_back(whole.index_add(0, ids(0, r), parts[0]).flatten());
          all.push_back(parts[1]);
          mean = mean + loss / 2;
        }
        for (const at::Tensor& one : torch::autograd::grad({mean}, net->parameters())) {
          all.push_back(one.flatten());
        }
        want = torch::cat(all).norm(p).item<double>();
      }
      const at::Tensor before = context.gradient(net->last->bias).clone();
      norms[rank] = context.clip_grad_norm(1.5, group, {.norm_type = p});
      for (const at::Tensor& one : net->parameters()) {
        dense[rank].push_back(context.gradient(one).clone());
      }
      expect_close(context.gradient(net->last->bias), before * (1.5 / (norms[rank] + 1e-6)));
      // Nothing to do, on all ranks.
      EXPECT_NEAR(context.clip_grad_norm(1e9, group, {.norm_type = p}), 1.5, 1e-5);
      if (group.rank() == 1) context.release().wait();
      const Status failed = error_of([&] { context.clip_grad_norm(0.1, group, {.norm_type = p}); });
      if (group.rank() == 1) {
        expect_error(failed, ErrorKind::kState, {"has been released"});
      } else {
        expect_error(failed, ErrorKind::kState, {"rank 1 of group", "nothing was scaled"});
        expect_close(context.gradient(net->last->bias), dense[0].back());
      }
    });
    EXPECT_EQ(norms[0], norms[1]);
    EXPECT_NEAR(norms[0], want, 1e-9 * want);
    ASSERT_EQ(dense[0].size(), dense[1].size());
    for (size_t i = 0; i < dense[0].size(); ++i)
      EXPECT_TRUE(torch::equal(dense[0][i], dense[1][i]));
  }
}

// The peer's race #100582: passes of several contexts at once, begun in different orders.
TEST_P(DdpHybrid, CL_6_and_DB_9_contexts_at_once) {
  const int rounds = weft::testing::environment_number("WEFT_DDP_CONTEXTS_AT_ONCE", 100) / 2;
  run([rounds](const Worker& worker, ProcessGroup& group, const RRef<Weights>& weights) {
    const auto net = std::make_shared<DenseImpl>();
    DistributedDataParallel ddp(net, group);
    Mutex one_at_a_time;
    std::vector<at::Tensor> got(static_cast<size_t>(rounds) * 2);
    for (int round = 0; round < rounds; ++round) {
      std::vector<std::thread> threads;
      for (int i = 0; i < 2; ++i) {
        const int number = round * 2 + (group.rank() == 0 ? i : 1 - i);
        threads.emplace_back([&, number] {
          try {
            DistAutogradContext context(worker);
            const at::Tensor rows = weights.rpc_sync(&Weights::rows, ids(number, 0), false);
            at::Tensor out;
            {
              MutexLock lock(&one_at_a_time);
              ddp.iteration(number + 1);
              out = ddp.forward(rows * (1 + number));
            }
            context.backward({out.sum() * (1 + group.rank())});
            got[static_cast<size_t>(number)] = context.gradient(net->last->bias);
          } catch (const std::exception& e) {
            ADD_FAILURE() << number << " at " << group.rank() << ": " << e.what();
          }
        });
      }
      for (std::thread& one : threads) one.join();
    }
    // Gradient of the bias: two rows, times the mean of 1 and 2.
    for (const at::Tensor& one : got) expect_close(one, torch::full({2}, 3.0, torch::kFloat64));
    EXPECT_EQ(ddp.sight().reductions, rounds * 2);
  });
}

// DDP-4: a pass that fails at its beginning takes part, with zeros; the next one works.
TEST_P(DdpHybrid, BadInput_a_pass_that_fails_on_one_rank) {
  run([](const Worker& worker, ProcessGroup& group, const RRef<Weights>& weights) {
    const auto net = std::make_shared<DenseImpl>();
    DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 0.0001, .first_bucket_mb = 0.0001});
    for (int i = 0; i < 3; ++i) {
      DistAutogradContext context(worker);
      const at::Tensor rows = weights.rpc_sync(&Weights::rows, ids(i, 0), false);
      at::Tensor out = ddp.forward(rows);
      if (i == 1 && group.rank() == 0) {
        // Its first layer waits for a gradient that does not come.
        out = out.sum() + rpc_sync(worker, "worker2", &fails_back, net->first->weight.sum());
      }
      const Status done = context.try_backward({out.sum()});
      if (i != 1) {
        EXPECT_TRUE(done.ok()) << done;
      } else if (group.rank() == 0) {
        expect_error(done, ErrorKind::kUser, {"no gradient on purpose", "worker2"});
      } else {
        expect_error(done, ErrorKind::kState, {"rank 0: a backward of autograd context"});
      }
    }
    EXPECT_TRUE(group.failure().ok());
    EXPECT_EQ(ddp.sight().reductions, 2);
  });
}

// A context that is released while its pass runs: the pass fails on all ranks, and the next one works.
TEST_P(DdpHybrid, BadInput_a_context_released_in_its_pass) {
  run([](const Worker& worker, ProcessGroup& group, const RRef<Weights>& weights) {
    const auto net = std::make_shared<DenseImpl>();
    DistributedDataParallel ddp(net, group);
    for (int i = 0; i < 3; ++i) {
      DistAutogradContext context(worker);
      const at::Tensor rows = weights.rpc_sync(&Weights::rows, ids(i, 0), false);
      Future<void> released;
      if (i == 1 && group.rank() == 0) {
        // On this thread, which runs the nodes of the pass that need no other worker.
        rows.register_hook([&](const at::Tensor&) { released = context.release(); });
      }
      const Status done = context.try_backward({ddp.forward(rows).sum()});
      if (i != 1) {
        EXPECT_TRUE(done.ok()) << done;
      } else if (group.rank() == 0) {
        EXPECT_FALSE(done.ok());
        EXPECT_TRUE(context.released());
        released.wait();
      } else {
        expect_error(done, ErrorKind::kState, {"rank 0: a backward of autograd context"});
        EXPECT_TRUE(context.gradients().empty());
      }
    }
    EXPECT_TRUE(group.failure().ok());
    EXPECT_EQ(ddp.sight().reductions, 2);
  });
}

// The end of a part waits for the other ranks no longer than the pass has time.
TEST_P(DdpHybrid, BadInput_ranks_that_do_not_come_to_a_pass) {
  Promise<void> over;
  run([&over](const Worker& worker, ProcessGroup& group, const RRef<Weights>&) {
    const auto net = std::make_shared<DenseImpl>();
    DistributedDataParallel ddp(net, group);
    const at::Tensor x = torch::ones({1, 3}, torch::kFloat64);
    DistAutogradContext context(worker);
    if (group.rank() == 0) {
      // By the pass, or by the reduction in it: both know the time, the bucket and the rank.
      expect_error(
          context.try_backward({ddp.forward(x).sum()}, {.deadline = absl::Milliseconds(300)}),
          ErrorKind::kDeadline, {"bucket 0 of 1 (", "which waits for rank 1"});
      over.set_value();
    } else {
      const at::Tensor loss = ddp.forward(x).sum();
      throw_if_error(over.future().try_wait(absl::Seconds(20)));
      // Ended by rank 0, long before the group's own deadline.
      const Status failed = context.try_backward({loss});
      EXPECT_NE(std::string(failed.message()).find("bucket 0 of 1"), std::string::npos) << failed;
      EXPECT_NE(error_kind(failed), ErrorKind::kDeadline) << failed;
    }
    EXPECT_TRUE(context.gradients().empty());
  });
}

// A pass that was given no deadline has the group's, 30 s here.
TEST_P(DdpHybrid, APassHasTheDeadlineOfItsGroup) {
  run([](const Worker& worker, ProcessGroup& group, const RRef<Weights>&) {
    const auto net = std::make_shared<DenseImpl>();
    DistributedDataParallel ddp(net, group);
    DistributedDataParallel slow(copy_of(net), group, {.timeout = absl::Minutes(5)});
    const at::Tensor x = torch::ones({1, 3}, torch::kFloat64);
    const auto time_of = [&](auto& model) {
      DistAutogradContext context(worker);
      absl::Duration left;
      at::Tensor out = model.forward(x);
      out.grad_fn()->add_post_hook(std::make_unique<TimeLeft>(&left));
      context.backward({out.sum()});
      return left;
    };
    EXPECT_LE(time_of(ddp), absl::Seconds(30));
    EXPECT_GT(time_of(slow), absl::Seconds(60));
  });
}

INSTANTIATE_TEST_SUITE_P(Nets, DdpHybrid, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
