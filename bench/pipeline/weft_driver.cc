// Ours, as a driver of the `pipeline` suite. Commands besides those of the line protocol, at rank 0:
//
//   steps SCHEDULE M U_US COUNT       COUNT steps one after the other, each timed
//                                     {"us": [...], "simulated_us": what the simulator says of one}
//   overlapped SCHEDULE M U_US COUNT  COUNT steps begun at once
//                                     {"us": [time per step, from the middle one to the last]}
//   recorded SCHEDULE M U_US COUNT    steps in turns without and with PipelineOptions::record
//                                     {"without": [us], "with": [us]}
//   shapes SCHEDULE M U_US COUNT      steps in turns: all micro-batches of one shape, each of another
//                                     {"static": [us], "dynamic": [us]}
//   text M COUNT                      steps of pipeline_text's transformer in two stages, 1F1B
//                                     {"us": [...]}
//   replicas U_US BYTES COUNT         two replicas of two stages (replicas.h)
//                                     {"without": [us], "with": [us], "reduce": [us], "late": [us]}
//   split STAGE COUNT                 backward of a stage of stages.h, whole and in two parts
//                                     {"whole": [us], "split": [us]}
//   prove SCHEDULE P M COUNT          the proof of a plan for P workers and M micro-batches
//                                     {"us": [...]}
//   refuse COUNT                      each plan of tests/pipeline/refused_plans.h, from its text to what is wrong
//                                     {"us": [...]}
//
// Stages of a schedule sleep: a worker's whole share takes U for each of forward, input gradient
// and weights' gradient, divided among its stages. How long U is goes before the pipeline to every
// worker, by a call.
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "weft/bench/line_protocol.h"
#include "weft/bench/pipeline/replicas.h"
#include "weft/bench/pipeline/stages.h"
#include "weft/collectives/service.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/service.h"
#include "weft/examples/pipeline_text/model.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/service.h"
#include "weft/pipeline/simulator.h"
#include "weft/pipeline/verifier.h"
#include "weft/rpc/call.h"
#include "weft/rpc/worker.h"
#include "weft/rref/remote_module.h"
#include "weft/rref/service.h"
#include "weft/tests/pipeline/refused_plans.h"
#include "weft/tests/testing/vcompute.h"

namespace weft::bench {
namespace {

constexpr int kWarmUpSteps = 2;

// How long an action of this process's stages sleeps; 0: the stages are modules.
std::atomic<int64_t> sleep_us{0};
void set_sleep(int64_t us) { sleep_us = us; }

pipeline::Costs costs_of(const pipeline::Plan& plan, int64_t u_us) {
  return pipeline::Costs::uniform(plan, u_us * 1000, u_us * 1000, u_us * 1000, /*latency=*/0,
                                  /*activation=*/0);
}

// Gives what it takes, in both directions: what travels has the shape of the micro-batch.
class Passing final : public testing::VCompute {
 public:
  using VCompute::VCompute;
  StatusOr<pipeline::Tensors> forward(pipeline::ForwardCall call) override {
    const pipeline::Tensors taken = call.inputs;
    const std::pair<int64_t, int> key{call.step, call.micro_batch};
    const bool is_last = call.is_last;
    auto made = VCompute::forward(std::move(call));
    if (!made.ok()) return made;
    taken_[key] = taken;
    return is_last ? std::move(made) : taken;
  }
  StatusOr<pipeline::Tensors> input_grad(int64_t step, int micro_batch,
                                         pipeline::Tensors gradients) override {
    auto made = VCompute::input_grad(step, micro_batch, std::move(gradients));
    auto taken = taken_.extract({step, micro_batch});
    if (!made.ok() || taken.empty()) return made;
    return std::move(taken.mapped());
  }
  void drop(const Status& why) override {
    VCompute::drop(why);
    taken_.clear();
  }

 private:
  std::map<std::pair<int64_t, int>, pipeline::Tensors> taken_;
};

std::shared_ptr<pipeline::StageCompute> make_compute(const ServiceContext& context,
                                                     const pipeline::Plan& plan, int stage) {
  if (auto replica = make_replica(context, plan, stage); replica != nullptr) return replica;
  if (sleep_us == 0) return nullptr;
  return std::make_shared<Passing>(context.runtime,
                                   costs_of(plan, sleep_us).stages[static_cast<size_t>(stage)]);
}

void set_all(const Worker& worker, int64_t us) {
  for (const WorkerInfo& w : worker.worker_infos()) rpc_sync(worker, w, &set_sleep, us);
}

std::vector<double> time_steps(int64_t count, const std::function<void()>& step) {
  std::vector<double> us;
  for (int64_t k = -kWarmUpSteps; k < count; ++k) {
    const double took = timed(step) * 1e6;
    if (k >= 0) us.push_back(took);
  }
  return us;
}

struct Sleeping {
  Sleeping(const Worker& worker, std::istream& in, bool record = false) {
    std::string schedule;
    int micro_batches = 0;
    int64_t u_us = 0;
    if (!(in >> schedule >> micro_batches >> u_us >> count) || u_us < 1 || count < 1) {
      throw std::invalid_argument("SCHEDULE MICRO_BATCHES U_US COUNT");
    }
    set_all(worker, u_us);
    const std::vector<WorkerInfo> members = worker.worker_infos();
    const auto plan = value_or_throw(
        pipeline::make_schedule(schedule, static_cast<int>(members.size()), micro_batches));
    std::vector<pipeline::Stage> stages;
    for (const int w : plan.placement) stages.emplace_back(members[static_cast<size_t>(w)]);
    simulated_us =
        static_cast<double>(pipeline::simulate(plan, costs_of(plan, u_us)).makespan) / 1000;
    pipe = std::make_unique<pipeline::Pipeline>(
        worker, std::move(stages), plan,
        pipeline::PipelineOptions{.deadline = std::chrono::minutes(5), .record = record});
    inputs.assign(static_cast<size_t>(micro_batches), {at::zeros({4, 16})});
    weights.assign(static_cast<size_t>(micro_batches), 1.0);
  }
  ~Sleeping() { pipe->close(); }
  Future<pipeline::StepResult> begin() const { return pipe->step_async(inputs, {}, weights); }

  int64_t count = 0;
  double simulated_us = 0;
  std::unique_ptr<pipeline::Pipeline> pipe;
  std::vector<pipeline::Tensors> inputs;
  std::vector<double> weights;
};

std::string steps(const Worker& worker, std::istream& in) {
  const Sleeping sleeping(worker, in);
  const auto us = time_steps(sleeping.count, [&] { sleeping.begin().wait(); });
  return "{\"us\":" + json_array(us) +
         ",\"simulated_us\":" + std::to_string(sleeping.simulated_us) + "}";
}

std::string recorded(const Worker& worker, std::istream& in) {
  std::string line;
  std::getline(in, line);
  std::istringstream first(line);
  std::istringstream second(line);
  const Sleeping plain(worker, first);
  const Sleeping with(worker, second, /*record=*/true);
  std::vector<double> us[2];
  for (int64_t k = -kWarmUpSteps; k < plain.count; ++k) {
    for (const bool record : {false, true}) {
      const Sleeping& one = record ? with : plain;
      const double took = timed([&] { one.begin().wait(); }) * 1e6;
      if (k >= 0) us[record ? 1 : 0].push_back(took);
    }
  }
  return "{\"without\":" + json_array(us[0]) + ",\"with\":" + json_array(us[1]) + "}";
}

// Shapes, types and counts. About as many bytes in a step of either kind.
std::string shapes(const Worker& worker, std::istream& in) {
  Sleeping sleeping(worker, in);
  const std::vector<pipeline::Tensors> equal = sleeping.inputs;
  const auto count = static_cast<int64_t>(equal.size());
  const int64_t elements = equal[0][0].numel();
  std::vector<pipeline::Tensors> other;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t rows = 2 * elements * (i + 1) / (count + 1) / 8;
    switch (i % 4) {
      case 0: other.push_back({at::zeros({rows, 8})}); break;
      case 1: other.push_back({at::zeros({2, rows, 4})}); break;
      case 2: other.push_back({at::zeros({rows, 4}, at::kDouble)}); break;
      default: other.push_back({at::zeros({rows, 4}), at::zeros({4 * rows})});
    }
  }
  std::vector<double> us[2];
  for (int64_t k = -kWarmUpSteps; k < sleeping.count; ++k) {
    for (const bool dynamic : {false, true}) {
      sleeping.inputs = dynamic ? other : equal;
      const double took = timed([&] { sleeping.begin().wait(); }) * 1e6;
      if (k >= 0) us[dynamic ? 1 : 0].push_back(took);
    }
  }
  return "{\"static\":" + json_array(us[0]) + ",\"dynamic\":" + json_array(us[1]) + "}";
}

std::string overlapped(const Worker& worker, std::istream& in) {
  const Sleeping sleeping(worker, in);
  if (sleeping.count < 2) throw std::invalid_argument("two steps at least");
  std::vector<Future<pipeline::StepResult>> begun;
  for (int64_t k = 0; k < sleeping.count; ++k) begun.push_back(sleeping.begin());
  const int64_t middle = sleeping.count / 2;
  begun[static_cast<size_t>(middle - 1)].wait();
  const auto start = Clock::now();
  begun.back().wait();
  const double us = seconds_since(start) * 1e6 / static_cast<double>(sleeping.count - middle);
  return "{\"us\":" + json_array({us}) + "}";
}

// The same sizes as peer_torch_pipelining.py.
std::string text(const Worker& worker, std::istream& in) {
  int micro_batches = 0;
  int64_t count = 0;
  if (!(in >> micro_batches >> count)) throw std::invalid_argument("text M COUNT");
  set_all(worker, 0);
  constexpr pipeline_text::ModelSizes kSizes{
      .symbols = 96, .context = 64, .width = 128, .heads = 4, .layers = 4};
  std::vector<RemoteModule<pipeline_text::StageImpl>> stages;
  for (int64_t s = 0; s < 2; ++s) {
    stages.emplace_back(worker, "w" + std::to_string(s), 2 * s, 2 * s + 2, kSizes.symbols,
                        kSizes.context, kSizes.width, kSizes.heads, kSizes.layers, int64_t{1});
  }
  pipeline::Pipeline pipe(worker, {stages.begin(), stages.end()},
                          pipeline::one_f_one_b(2, micro_batches), {.loss = "bench.loss"});
  const int64_t n = 4 * micro_batches;
  const at::Tensor x = at::randint(kSizes.symbols, {n, kSizes.context}, at::kLong);
  const at::Tensor y = at::randint(kSizes.symbols, {n, kSizes.context}, at::kLong);
  const auto us = time_steps(count, [&] {
    pipe.step({x}, y);
    pipe.zero_grad();
  });
  pipe.close();
  return "{\"us\":" + json_array(us) + "}";
}

std::string split(std::istream& in) {
  std::string stage;
  int count = 0;
  if (!(in >> stage >> count) || count < 1) throw std::invalid_argument("split STAGE COUNT");
  const auto [whole, parts] = time_split(stage, count);
  return "{\"whole\":" + json_array(whole) + ",\"split\":" + json_array(parts) + "}";
}

std::string prove(std::istream& in) {
  std::string schedule;
  int workers = 0;
  int micro_batches = 0;
  int count = 0;
  if (!(in >> schedule >> workers >> micro_batches >> count) || count < 1) {
    throw std::invalid_argument("prove SCHEDULE P M COUNT");
  }
  const auto plan = value_or_throw(pipeline::make_schedule(schedule, workers, micro_batches));
  return "{\"us\":" +
         json_array(time_steps(count, [&] { throw_if_error(pipeline::verify(plan).status()); })) +
         "}";
}

std::string refuse(std::istream& in) {
  int count = 0;
  if (!(in >> count) || count < 1) throw std::invalid_argument("refuse COUNT");
  std::vector<double> us;
  for (const char* text : {testing::kSendsThatMeetNobody, testing::kSwappedReceives,
                           testing::kEveryWorkerSendsFirst, testing::kASendBehindWhatWaitsForIt}) {
    for (const double one : time_steps(count, [text] {
           const auto plan = value_or_throw(pipeline::plan_from_text(text));
           if (pipeline::verify(plan).ok()) throw std::logic_error("it is proved");
         })) {
      us.push_back(one);
    }
  }
  return "{\"us\":" + json_array(us) + "}";
}

int run(int argc, char** argv) {
  const std::string path = option(argc, argv, "--path", "bench-pipeline");
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  at::set_num_threads(1);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  Library library("bench");
  module_<pipeline_text::StageImpl>(library, "Stage")
      .constructor<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>()
      .def("forward", &pipeline_text::StageImpl::forward);
  library.def("loss", &pipeline_text::loss);
  library.def("set_sleep", &set_sleep);
  def_replicas(&library);
  // Between hosts: the address of this one.
  const std::string host = option(argc, argv, "--listen", "");
  Worker worker = Worker::join({
      .name = "w" + std::to_string(rank),
      .rank = rank,
      .world_size = std::stoi(option(argc, argv, "--world", "4")),
      .library = library,
      .rendezvous = "file://" + path + ".store?run_id=bench",
      .listen = {.host = host, .advertise = {}, .allow_insecure = !host.empty()},
      .services = {rref_service(), collectives_service(), dist_autograd_service(),
                   dist_optim_service(), pipeline_service({.make_compute = make_compute})},
  });
  {
    Operations operations;
    operations.more["steps"] = [&worker](std::istream& in) { return steps(worker, in); };
    operations.more["recorded"] = [&worker](std::istream& in) { return recorded(worker, in); };
    operations.more["shapes"] = [&worker](std::istream& in) { return shapes(worker, in); };
    operations.more["overlapped"] = [&worker](std::istream& in) { return overlapped(worker, in); };
    operations.more["text"] = [&worker](std::istream& in) { return text(worker, in); };
    operations.more["replicas"] = [&worker](std::istream& in) { return replicas(worker, in); };
    operations.more["split"] = [](std::istream& in) { return split(in); };
    operations.more["prove"] = [](std::istream& in) { return prove(in); };
    operations.more["refuse"] = [](std::istream& in) { return refuse(in); };
    serve(&operations);
  }
  const ShutdownResult result = worker.shutdown({.deadline = std::chrono::seconds(5)});
  if (!result.status.ok()) throw std::runtime_error(std::string(result.status.message()));
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("weft_pipeline_driver", weft::bench::run, argc, argv);
}
