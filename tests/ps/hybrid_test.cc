// Data parallelism and tables in one step: dense layers are averaged over the trainers by an all-reduce, rows lie in a
// table, and one backward has the gradients of both.

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch/nn/functional/embedding.h"
#include "torch/types.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/inproc_fabric.h"
#include "weft/collectives/process_group.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/ps/layers.h"
#include "weft/store/hash_store.h"
#include "weft/tests/ps/fixture.h"
#include "weft/tests/testing/modules.h"

namespace weft::testing {
namespace {

constexpr int kTrainers = 2;
constexpr int64_t kWords = 9;
constexpr int64_t kFeatures = 4;
constexpr int kStepsOfBoth = 12;

struct TowerImpl : torch::nn::Module {
  TowerImpl() {
    first = register_module("first", torch::nn::Linear(kFeatures, 6));
    last = register_module("last", torch::nn::Linear(6, 2));
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first = nullptr, last = nullptr;
};
using Tower = std::shared_ptr<TowerImpl>;

at::Tensor words_of(int step, int rank) {
  return (torch::arange(6) * (step + 2) + 5 * rank).fmod(kWords).view({2, 3});
}
at::Tensor wanted_of(int step, int rank) {
  return torch::full({2, 3, 2}, 0.1 * (step % 5) - 0.3 * rank, torch::kFloat64);
}
at::Tensor loss_of(const at::Tensor& out, int step, int rank) {
  return (out - wanted_of(step, rank)).pow(2).mean();
}

struct Rule {
  const char* name;
  ps::RuleChoice choice;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const at::Tensor& rows)> local;
};
std::vector<Rule> rules() {
  return {{"SGD", ps::rule<optim::SGD>({.lr = 0.5}),
           [](const at::Tensor& rows) {
             return std::make_unique<torch::optim::SGD>(std::vector{rows},
                                                        torch::optim::SGDOptions(0.5));
           }},
          {"Adagrad", ps::rule<optim::Adagrad>({.lr = 0.2}), [](const at::Tensor& rows) {
             return std::make_unique<torch::optim::Adagrad>(std::vector{rows},
                                                            torch::optim::AdagradOptions(0.2));
           }}};
}

// What one process computes that has the whole model, and both trainers' batches.
struct Whole {
  at::Tensor rows;
  Tower tower;
};
Whole in_one_process(const at::Tensor& first_rows, const Tower& start, const Rule& rule) {
  Whole out{first_rows.clone().set_requires_grad(true), copy_of(start)};
  const auto of_rows = rule.local(out.rows);
  torch::optim::SGD of_tower(out.tower->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < kStepsOfBoth; ++step) {
    at::Tensor loss = torch::zeros({}, torch::kFloat64);
    for (int rank = 0; rank < kTrainers; ++rank) {
      const at::Tensor rows = torch::nn::functional::embedding(words_of(step, rank), out.rows);
      loss = loss + loss_of(out.tower->forward(rows), step, rank) / kTrainers;
    }
    of_rows->zero_grad();
    of_tower.zero_grad();
    loss.backward();
    of_rows->step();
    of_tower.step();
  }
  return out;
}

// How the gradients of a step come.
enum class Way { kPlain, kContext, kInBackward };

class PsHybrid : public PsTest {
 protected:
  static ps::TableDefinition words(const Rule& rule) {
    auto out = ps::sparse(kFeatures, rule.choice);
    out.dtype = torch::kFloat64;
    out.init = ps::Init::uniform(-1, 1, 11);
    out.consistency = ps::Consistency::bsp(kTrainers);
    return out;
  }

  static void train(const Worker& worker, ps::Client& client, ProcessGroup& group,
                    const Tower& tower, const Rule& rule, Way way) {
    ps::Embedding layer(client.open_table("words", words(rule)));
    DistributedDataParallel ddp(tower, group);
    torch::optim::SGD of_tower(tower->parameters(), torch::optim::SGDOptions(0.1));
    int hooks = 0;
    for (int step = 0; step < kStepsOfBoth; ++step) {
      if (way == Way::kInBackward) layer.step_in_backward();
      std::optional<DistAutogradContext> context;
      if (way == Way::kContext) context.emplace(worker);
      const at::Tensor rows = layer.forward(words_of(step, group.rank()));
      rows.register_hook([&hooks](const at::Tensor&) { ++hooks; });
      const at::Tensor loss = loss_of(ddp.forward(rows), step, group.rank());
      of_tower.zero_grad();
      if (context.has_value()) {
        context->backward({loss});
        context->write_to_grad();
        layer.step(*context).wait();
      } else {
        loss.backward();
        layer.step().wait();
      }
      of_tower.step();
    }
    EXPECT_EQ(hooks, kStepsOfBoth);
  }
};
INSTANTIATE_TEST_SUITE_P(Nets, PsHybrid, ::testing::ValuesIn(nets()), net_name);

TEST_P(PsHybrid, PS_11_DataParallelLayersAboveATableEqualOneProcess) {
  for (const Rule& rule : rules()) {
    for (const Way way : {Way::kPlain, Way::kContext, Way::kInBackward}) {
      SCOPED_TRACE(rule.name + std::to_string(static_cast<int>(way)));
      PsJob job(2, kTrainers + 1, GetParam(), nullptr,
                [](int, JoinOptions* o) { o->services.push_back(dist_autograd_service()); });
      torch::manual_seed(3);
      const auto start = std::make_shared<TowerImpl>();
      const ps::Table table =
          job.clients[kTrainers].open_table("words", words(rule), {.observer = true});
      const at::Tensor first = table.pull_rows(torch::arange(kWords)).wait().clone();
      const auto runtime = make_system_runtime();
      const auto store = std::make_shared<HashStore>(runtime);
      const auto fabric = std::make_shared<InprocFabric>(runtime);
      std::vector<Tower> towers;
      std::vector<std::function<void()>> bodies;
      for (int rank = 0; rank < kTrainers; ++rank) {
        towers.push_back(copy_of(start));
        bodies.emplace_back([&, rank, tower = towers.back()] {
          try {
            ProcessGroup group = init_process_group({.store = store,
                                                     .rank = rank,
                                                     .size = kTrainers,
                                                     .timeout = std::chrono::seconds(30),
                                                     .runtime = runtime,
                                                     .fabric = fabric});
            train(job.worker(rank), job.clients[static_cast<size_t>(rank)], group, tower, rule,
                  way);
          } catch (const std::exception& e) {
            ADD_FAILURE() << "trainer " << rank << ": " << e.what();
          }
        });
      }
      side_by_side(*runtime, std::move(bodies));
      const Whole want = in_one_process(first, start, rule);
      const at::Tensor rows = table.pull_rows(torch::arange(kWords)).wait();
      EXPECT_LE((rows - want.rows).abs().max().item<double>(), 1e-6);
      for (size_t i = 0; i < want.tower->parameters().size(); ++i) {
        const at::Tensor one = towers[0]->parameters()[i];
        EXPECT_LE((one - want.tower->parameters()[i]).abs().max().item<double>(), 1e-6);
        EXPECT_TRUE(torch::equal(one, towers[1]->parameters()[i])) << "replicas are equal";
      }
    }
  }
}

}  // namespace
}  // namespace weft::testing
