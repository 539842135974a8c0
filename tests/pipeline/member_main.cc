// One worker of a pipeline as a process, for tests:
//
//   pipeline_member STORE RANK SIZE LEASE_MS US THROWS
//
// Its stages wait for so many microseconds instead of computing (0: they are modules); stage THROWS (-1: none) fails in
// step 2, micro-batch 1. It does what it is told on its standard input, a line each, and answers in
// lines.
//
//   run SCHEDULE MICRO_BATCHES STEPS WITHOUT   makes a pipeline over all workers but WITHOUT (a rank;
//              -1: over all) and trains for so many steps: "going" after the first one, then
//              "ended KIND MESSAGE" or "ended by itself"
//   part       what its part does, or the error that ended it
//   slots      how many tensors wait in slots
//   close      the pipeline, by its maker: "closed"
//   groups SCHEDULE M   of workers 0 and 1 as one replica of two, 2 and 3 as the other: a process group for each
//              stage that it has of a plan: "grouped"
//   train SCHEDULE M    by workers 0 and 2: a step of its replica, with reductions; a number for the gradients
//              of each stage
//   ungroup    no process groups any more: "ungrouped"
//   calls SCHEDULE M    by workers 0 and 2: steps of its replica, with reductions over calls: "going" after the
//              first one, then "ended KIND MESSAGE"
//   alone SCHEDULE M    the same numbers of one process that has both replicas' batches
//   resume SCHEDULE M AFTER THROWS RANK...   trains by a pipeline over the workers of these ranks, its maker's
//              first: "going" after AFTER steps, from when on it is to be disturbed, "ended KIND MESSAGE" when it
//              is, and when it has gone on for five steps more "as undisturbed", if every loss is that of
//              one process. THROWS: the stage that throws then; -1: none
//   quit
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "ATen/Parallel.h"
#include "ATen/ops/zeros.h"
#include "weft/collectives/service.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/local_optimizer.h"
#include "weft/dist_optim/optim.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/reducer.h"
#include "weft/pipeline/schedule.h"
#include "weft/rpc/inspection.h"
#include "weft/rref/remote_module.h"
#include "weft/rref/service.h"
#include "weft/tests/testing/vcompute.h"

namespace {

void say(std::string line) {
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::cout << line << std::endl;
}

// ---- two replicas of a model --------------------------------------------------------------------

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t index) {
    weight = register_parameter(
        "weight",
        at::sin(at::arange(16, at::kDouble) + static_cast<double>(index)).reshape({4, 4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (throws_in > 0 && --throws_in == 0) throw std::runtime_error("this layer is broken");
    return at::tanh(at::matmul(x, weight));
  }
  void throw_in(int64_t n) { throws_in = n; }
  at::Tensor weight;
  int64_t throws_in = 0;
};

at::Tensor squares(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).mean();
}

at::Tensor batch(int replica) {
  return at::cos(at::arange(36, at::kDouble) * (0.3 + replica)).reshape({9, 4});
}

weft::pipeline::Plan plan_of(std::istringstream& in) {
  std::string schedule;
  int micro_batches = 0;
  in >> schedule >> micro_batches;
  return weft::pipeline::with_reductions(
      weft::value_or_throw(weft::pipeline::make_schedule(schedule, 2, micro_batches)));
}

std::string number_of(const at::Tensor& gradient) {
  const at::Tensor places = at::arange(16, at::kDouble).reshape({4, 4}) + 1;
  std::ostringstream out;
  out.precision(12);
  out << " " << (gradient * places).sum().item<double>();
  return out.str();
}

// By stage, of this process.
std::map<int, weft::ProcessGroup> groups;

std::string make_groups(const weft::Worker& worker, int rank, const weft::pipeline::Plan& plan) {
  groups.clear();
  static int round = 0;
  ++round;
  for (int s = 0; s < plan.stages(); ++s) {
    const int at = plan.placement[s];
    if (at != rank % 2) continue;
    groups[s] = weft::init_process_group(
        worker, {.name = "stage" + std::to_string(s) + "." + std::to_string(round)},
        {"w" + std::to_string(at), "w" + std::to_string(2 + at)});
  }
  return "grouped";
}

std::string train(const weft::Worker& worker, int rank, const weft::pipeline::Plan& plan) {
  std::vector<weft::RemoteModule<LayerImpl>> modules;
  for (int s = 0; s < plan.stages(); ++s) {
    modules.emplace_back(worker, "w" + std::to_string(rank + plan.placement[s]), int64_t{s});
  }
  weft::pipeline::Pipeline pipe(worker, {modules.begin(), modules.end()}, plan,
                                {.loss = "app.squares"});
  pipe.step({batch(rank / 2)}, batch(3));
  std::string out = "gradients";
  for (int s = 0; s < plan.stages(); ++s) out += number_of(pipe.gradients(s).at("weight"));
  pipe.close();
  return out;
}

std::string train_over_calls(const weft::Worker& worker, int rank,
                             const weft::pipeline::Plan& plan) {
  std::vector<weft::RemoteModule<LayerImpl>> modules;
  for (int s = 0; s < plan.stages(); ++s) {
    modules.emplace_back(worker, "w" + std::to_string(rank + plan.placement[s]), int64_t{s});
  }
  weft::pipeline::Pipeline pipe(worker, {modules.begin(), modules.end()}, plan,
                                {.loss = "app.squares"});
  for (int step = 0;; ++step) {
    const auto result = pipe.step_async({batch(rank / 2)}, batch(3)).try_wait();
    if (!result.ok()) {
      return "ended " + std::string(weft::kind_name(weft::error_kind(result.status()))) + " " +
             std::string(result.status().message());
    }
    if (step == 0) say("going");
  }
}

std::string train_alone(const weft::pipeline::Plan& plan) {
  std::vector<std::shared_ptr<LayerImpl>> layers;
  for (int s = 0; s < plan.stages(); ++s) layers.push_back(std::make_shared<LayerImpl>(s));
  for (int replica = 0; replica < 2; ++replica) {
    at::Tensor h = batch(replica);
    for (const auto& layer : layers) h = layer->forward(h);
    (squares(h, batch(3)) / 2).backward();
  }
  std::string out = "gradients";
  for (const auto& layer : layers) out += number_of(layer->weight.grad());
  return out;
}

// ---- trouble in the middle of a training ----------------------------------------------------------

weft::OptimizerChoice momentum() {
  return weft::optimizer_choice<weft::optim::SGD>({.lr = 0.05, .momentum = 0.9});
}

at::Tensor input_of(int64_t step) {
  return at::cos(at::arange(48, at::kDouble) * (0.3 + 0.01 * static_cast<double>(step)))
      .reshape({12, 4});
}

std::vector<double> losses_alone(int stages, int micro_batches, int64_t steps) {
  std::vector<std::shared_ptr<LayerImpl>> layers;
  std::vector<std::unique_ptr<weft::LocalOptimizer>> optimizers;
  for (int s = 0; s < stages; ++s) {
    layers.push_back(std::make_shared<LayerImpl>(s));
    optimizers.push_back(weft::value_or_throw(weft::LocalOptimizer::make(
        momentum().name, momentum().options, layers.back()->parameters())));
  }
  const auto targets = at::tensor_split(input_of(-7), micro_batches);
  std::vector<double> losses;
  for (int64_t step = 0; step < steps; ++step) {
    const auto inputs = at::tensor_split(input_of(step), micro_batches);
    double sum = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      at::Tensor h = inputs[i];
      for (const auto& layer : layers) h = layer->forward(h);
      const at::Tensor loss = squares(h, targets[i]);
      const double weight = static_cast<double>(inputs[i].size(0)) / 12;
      sum += loss.item<double>() * weight;
      (loss * weight).backward();
    }
    losses.push_back(sum);
    for (int s = 0; s < stages; ++s) {
      weft::throw_if_error(optimizers[s]->step({layers[s]->weight.grad()}));
      layers[s]->weight.mutable_grad() = at::Tensor();
    }
  }
  return losses;
}

std::string resume(const weft::Worker& worker, std::istringstream& in) {
  std::string schedule;
  int micro_batches = 0;
  int64_t after = 0;
  int throws = -1;
  in >> schedule >> micro_batches >> after >> throws;
  std::vector<std::string> members;
  for (int rank = 0; in >> rank;) members.push_back("w" + std::to_string(rank));
  const weft::pipeline::Plan plan = weft::value_or_throw(
      weft::pipeline::make_schedule(schedule, static_cast<int>(members.size()), micro_batches));
  std::vector<weft::RemoteModule<LayerImpl>> layers;
  for (int s = 0; s < plan.stages(); ++s) {
    layers.emplace_back(worker, members[static_cast<size_t>(plan.placement[s])], int64_t{s});
  }
  weft::pipeline::Pipeline pipe(
      worker, {layers.begin(), layers.end()}, plan,
      {.loss = "app.squares", .optimizer = momentum(), .keep_copies = true});
  std::vector<double> losses;
  int64_t until = 1'000'000;  // the test disturbs it long before
  for (int64_t step = 0; step < until;) {
    if (step == after) {
      if (throws >= 0) {
        layers[static_cast<size_t>(throws % plan.stages())].rpc_sync(&LayerImpl::throw_in,
                                                                     int64_t{micro_batches + 1});
      }
      say("going");
      after = -1;
    }
    const auto result = pipe.step_async({input_of(step)}, input_of(-7)).try_wait();
    losses.resize(static_cast<size_t>(step));
    if (result.ok()) {
      losses.push_back(result->loss);
      ++step;
      continue;
    }
    say("ended " + std::string(weft::kind_name(weft::error_kind(result.status()))) + " " +
        std::string(result.status().message()));
    step = pipe.rebuild([&](int stage) -> weft::pipeline::Stage {
      // At the maker, beside the stages that it has.
      return layers[static_cast<size_t>(stage)] =
                 weft::RemoteModule<LayerImpl>(worker, members[0], int64_t{stage});
    });
    until = step + 5;
  }
  pipe.close();
  const std::vector<double> want = losses_alone(plan.stages(), micro_batches, until);
  for (size_t k = 0; k < want.size(); ++k) {
    if (losses.at(k) == want[k]) continue;
    return "loss " + std::to_string(losses[k]) + " in step " + std::to_string(k) + " instead of " +
           std::to_string(want[k]);
  }
  return "as undisturbed";
}

std::string run(const weft::Worker& worker, int world_size, std::istringstream& in,
                std::unique_ptr<weft::pipeline::Pipeline>* pipe) {
  std::string schedule;
  int micro_batches = 0;
  int steps = 0;
  int without = 0;
  in >> schedule >> micro_batches >> steps >> without;
  std::vector<weft::WorkerInfo> members;
  for (int rank = 0; rank < world_size; ++rank) {
    if (rank != without) members.push_back(worker.get_worker_info("w" + std::to_string(rank)));
  }
  const weft::pipeline::Plan plan = weft::value_or_throw(
      weft::pipeline::make_schedule(schedule, static_cast<int>(members.size()), micro_batches));
  std::vector<weft::pipeline::Stage> stages;
  for (const int w : plan.placement) stages.emplace_back(members[w]);
  *pipe = std::make_unique<weft::pipeline::Pipeline>(worker, stages, plan);
  const std::vector<weft::pipeline::Tensors> inputs(plan.micro_batches, {at::zeros({1})});
  const std::vector<double> weights(plan.micro_batches, 1.0);
  for (int step = 0; step < steps; ++step) {
    const auto result = (*pipe)->step_async(inputs, {}, weights).try_wait();
    if (!result.ok()) {
      return "ended " + std::string(weft::kind_name(weft::error_kind(result.status()))) + " " +
             std::string(result.status().message());
    }
    if (step == 0) say("going");
  }
  return "ended by itself";
}

int serve(char** argv) {
  const int rank = std::atoi(argv[2]);
  const int64_t us = std::atoll(argv[5]);
  const int throws = std::atoi(argv[6]);
  const auto make_compute = [us, throws](
                                const weft::ServiceContext& context, const weft::pipeline::Plan&,
                                int stage) -> std::shared_ptr<weft::pipeline::StageCompute> {
    if (us == 0) return nullptr;  // modules
    weft::pipeline::StageCost cost;
    cost.forward = us * 1000;
    cost.input_grad = us * 1000;
    cost.weight_grad = us * 1000;
    const std::pair<int64_t, int> at{stage == throws ? 2 : -1, 1};
    return std::make_shared<weft::testing::VCompute>(context.runtime, cost, at);
  };
  const auto make_reducer = [](const weft::ServiceContext& context,
                               const weft::pipeline::Plan& plan, int stage) {
    const auto group = groups.find(stage);
    if (group != groups.end()) {
      return weft::pipeline::group_reducer(group->second, {.bucket_bytes = 1});
    }
    const int at = plan.placement[static_cast<size_t>(stage)];
    return weft::pipeline::call_reducer(
        context, {"w" + std::to_string(at), "w" + std::to_string(2 + at)},
        {.name = "stage" + std::to_string(stage), .bucket_bytes = 1});
  };
  weft::Library library("app");
  weft::module_<LayerImpl>(library, "Layer")
      .constructor<int64_t>()
      .def("forward", &LayerImpl::forward)
      .def("throw_in", &LayerImpl::throw_in);
  library.def("squares", &squares);
  const weft::Worker worker =
      weft::Worker::join({.name = std::string("w") + argv[2],
                          .rank = rank,
                          .world_size = std::atoi(argv[3]),
                          .library = std::move(library),
                          .rendezvous = "file://" + std::string(argv[1]) + "?run_id=test",
                          .services = {weft::rref_service(), weft::collectives_service(),
                                       weft::dist_autograd_service(),
                                       weft::pipeline_service({.make_compute = make_compute,
                                                               .make_reducer = make_reducer})},
                          .heartbeat_interval = std::chrono::milliseconds(200),
                          .lease = std::chrono::milliseconds(std::atoi(argv[4])),
                          .log_level = weft::Severity::kError});
  const auto service = worker.service<weft::pipeline::internal::PipelineService>();
  say("joined");
  std::unique_ptr<weft::pipeline::Pipeline> pipe;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string what;
    in >> what;
    if (what == "run") say(run(worker, std::atoi(argv[3]), in, &pipe));
    if (what == "part") {
      weft::Inspection seen(100);
      service->put_inspection(&seen);
      say(seen.text());
    }
    if (what == "slots") say(std::to_string(worker.debug_info().at("pipeline_slots")));
    if (what == "close") {
      pipe->close();
      pipe = nullptr;
      say("closed");
    }
    if (what == "groups") say(make_groups(worker, rank, plan_of(in)));
    if (what == "train") say(train(worker, rank, plan_of(in)));
    if (what == "ungroup") {
      groups.clear();
      say("ungrouped");
    }
    if (what == "calls") say(train_over_calls(worker, rank, plan_of(in)));
    if (what == "alone") say(train_alone(plan_of(in)));
    if (what == "resume") say(resume(worker, in));
    if (what == "quit") break;
  }
  pipe = nullptr;
  groups.clear();
  worker.shutdown({.graceful = false});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::cerr << "usage: pipeline_member STORE RANK SIZE LEASE_MS US THROWS\n";
    return 2;
  }
  at::set_num_threads(1);
  try {
    return serve(argv);
  } catch (const std::exception& error) {
    say(std::string("failed: ") + error.what());
    return 1;
  }
}
