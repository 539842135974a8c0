#include "weft/examples/async_ps/server.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace async_ps {
namespace {

constexpr int64_t kBatchSize = 32;

std::vector<Task> make_tasks(const Images& train, const ServerOptions& options) {
  std::vector<Task> tasks;
  for (const Images& shard : deal(train, options.trainers)) {
    const int64_t batch = std::min(kBatchSize, shard.size());
    tasks.push_back({.pixels = shard.pixels,
                     .labels = shard.labels,
                     .steps = options.epochs * std::max<int64_t>(1, shard.size() / batch),
                     .batch_size = batch,
                     .seed = options.seed + tasks.size() + 1,
                     .index = static_cast<int64_t>(tasks.size())});
  }
  return tasks;
}

int64_t sum_of_steps(const std::vector<Task>& tasks) {
  int64_t sum = 0;
  for (const Task& task : tasks) sum += task.steps;
  return sum;
}

}  // namespace

ParameterServer::ParameterServer(const Images& train, const ServerOptions& options)
    : options_(options),
      tasks_(make_tasks(train, options)),
      total_(sum_of_steps(tasks_)),
      parameters_(initial_parameters(options.seed)),
      optimizer_(parameters_, total_) {
  hidden_ = std::make_shared<Layer>(parameters_[0], parameters_[1], true);
}

Task ParameterServer::enlist(weft::CallContext& context) {
  std::lock_guard lock(mutex_);
  const size_t index = trainers_.size();
  if (index >= tasks_.size() || !trainers_.try_emplace(context.caller().name).second) {
    throw std::invalid_argument("trainer " + context.caller().name +
                                " enlisted twice, or is one more than " +
                                std::to_string(tasks_.size()));
  }
  return tasks_[index];
}

Snapshot ParameterServer::pull() const {
  std::lock_guard lock(mutex_);
  return {.version = version_, .parameters = parameters_};
}

void ParameterServer::push(weft::CallContext& context, const Push& push) {
  std::lock_guard lock(mutex_);
  bool fits = push.gradients.size() == parameters_.size();
  for (size_t i = 0; fits && i < parameters_.size(); ++i) {
    fits = push.gradients[i].sizes() == parameters_[i].sizes() &&
           push.gradients[i].scalar_type() == parameters_[i].scalar_type();
  }
  auto trainer = trainers_.find(context.caller().name);
  if (!fits || push.version < 0 || push.version > version_ || trainer == trainers_.end()) {
    throw std::invalid_argument(
        "a push of " + context.caller().name + " with version " + std::to_string(push.version) +
        " and " + std::to_string(push.gradients.size()) +
        " gradients does not fit the model of version " + std::to_string(version_));
  }
  const int64_t staleness = version_ - push.version;
  parameters_ = optimizer_.step(parameters_, push.gradients);
  count(&trainer->second, push.loss, staleness);
}

void ParameterServer::count(TrainerRecord* record, double loss, int64_t staleness) {
  loss_ = version_ == 0 ? loss : 0.95 * loss_ + 0.05 * loss;
  ++version_;
  ++record->updates;
  record->sum_of_staleness += staleness;
  record->greatest_staleness = std::max(record->greatest_staleness, staleness);
}

weft::RRef<Layer> ParameterServer::hidden(weft::CallContext& context) const {
  return weft::RRef<Layer>::local(context.worker(), hidden_);
}

std::vector<at::Tensor> ParameterServer::first_output() const {
  std::lock_guard lock(mutex_);
  return {parameters_[2], parameters_[3]};
}

void ParameterServer::offer_output(const weft::RRef<Layer>& output) {
  // Outside the lock: completing a promise may run code of others.
  output_.set_value(output);
}

void ParameterServer::report(weft::CallContext& context, const Report& report) {
  std::lock_guard lock(mutex_);
  auto trainer = trainers_.find(context.caller().name);
  if (trainer == trainers_.end()) {
    throw std::invalid_argument("trainer " + context.caller().name + " has not enlisted");
  }
  count(&trainer->second, report.loss, report.staleness);
}

Parameters ParameterServer::take_layers() {
  Parameters out = hidden_->values();
  for (at::Tensor& one : output_.future().wait().rpc_sync(&Layer::values)) {
    out.push_back(std::move(one));
  }
  output_ = weft::Promise<weft::RRef<Layer>>();  // gives the reference back
  return out;
}

void ParameterServer::finish(weft::CallContext& context) {
  bool all = false;
  {
    std::lock_guard lock(mutex_);
    auto trainer = trainers_.find(context.caller().name);
    if (trainer == trainers_.end()) {
      throw std::invalid_argument("trainer " + context.caller().name + " has not enlisted");
    }
    trainer->second.finished = true;
    all = !ended_ && trainers_.size() == tasks_.size() &&
          std::all_of(trainers_.begin(), trainers_.end(),
                      [](const auto& t) { return t.second.finished; });
    ended_ = ended_ || all;
  }
  // Outside the lock: completing a promise may run code of others.
  if (all) finished_.set_value();
}

void ParameterServer::trainer_lost(const std::string& name, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    auto trainer = trainers_.find(name);
    if (ended_ || (trainer != trainers_.end() && trainer->second.finished)) return;
    ended_ = true;
  }
  finished_.set_error(absl::AbortedError("lost " + name + " before it had finished: " + why));
}

Progress ParameterServer::progress() const {
  std::lock_guard lock(mutex_);
  return {.version = version_,
          .total = total_,
          .loss = loss_,
          .started = !trainers_.empty(),
          .trainers = trainers_};
}

Parameters ParameterServer::parameters() const {
  std::lock_guard lock(mutex_);
  return parameters_;
}

weft::Library library(std::shared_ptr<ParameterServer> server) {
  weft::Library lib("async_ps");
  lib.class_<ParameterServer>("ParameterServer")
      .def("enlist", &ParameterServer::enlist)
      .def("pull", &ParameterServer::pull)
      .def("push", &ParameterServer::push)
      .def("hidden", &ParameterServer::hidden)
      .def("first_output", &ParameterServer::first_output)
      .def("offer_output", &ParameterServer::offer_output)
      .def("output", &ParameterServer::output)
      .def("report", &ParameterServer::report)
      .def("finish", &ParameterServer::finish);
  lib.class_<Layer>("Layer", {.concurrent = true})
      .def("forward", &Layer::forward)
      .def("parameters", &Layer::parameters)
      .def("values", &Layer::values);
  if (server != nullptr) lib.instance(kInstance, std::move(server), {.concurrent = true});
  return lib;
}

}  // namespace async_ps
