// One worker of a pipeline as a process, for tests:
//
//   pipeline_member STORE RANK SIZE LEASE_MS US THROWS
//
// Its stages wait for so many microseconds instead of computing; stage THROWS (-1: none) fails in
// step 2, micro-batch 1. It does what it is told on its standard input, a line each, and answers in
// lines.
//
//   run SCHEDULE MICRO_BATCHES STEPS WITHOUT   makes a pipeline over all workers but WITHOUT (a rank;
//              -1: over all) and trains for so many steps: "going" after the first one, then
//              "ended KIND MESSAGE" or "ended by itself"
//   part       what its part does, or the error that ended it
//   slots      how many tensors wait in slots
//   close      the pipeline, by its maker: "closed"
//   quit
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/zeros.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/schedule.h"
#include "weft/rpc/inspection.h"
#include "weft/rref/service.h"
#include "weft/tests/testing/vcompute.h"

namespace {

void say(std::string line) {
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::cout << line << std::endl;
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
  const auto make_compute = [us, throws](const weft::ServiceContext& context,
                                         const weft::pipeline::Plan&, int stage) {
    weft::pipeline::StageCost cost;
    cost.forward = us * 1000;
    cost.input_grad = us * 1000;
    cost.weight_grad = us * 1000;
    const std::pair<int64_t, int> at{stage == throws ? 2 : -1, 1};
    return std::make_shared<weft::testing::VCompute>(context.runtime, cost, at);
  };
  const weft::Worker worker = weft::Worker::join(
      {.name = std::string("w") + argv[2],
       .rank = rank,
       .world_size = std::atoi(argv[3]),
       .rendezvous = "file://" + std::string(argv[1]) + "?run_id=test",
       .services = {weft::rref_service(), weft::pipeline_service({.make_compute = make_compute})},
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
    if (what == "quit") break;
  }
  pipe = nullptr;
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
