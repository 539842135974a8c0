#include "weft/pipeline/pipeline.h"

#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/tensor_split.h"
#include "absl/strings/str_cat.h"
#include "weft/pipeline/internal/pipeline_state.h"
#include "weft/pipeline/internal/service.h"

namespace weft::pipeline {

using internal::refused;

Pipeline::Pipeline(const Worker& worker, std::vector<Stage> stages, Plan plan,
                   PipelineOptions options) {
  const auto service = worker.service<internal::PipelineService>();
  if (service == nullptr) {
    throw_error(make_error(ErrorKind::kState, absl::StrCat("worker '", worker.name(),
                                                           "' does not list pipeline_service()")));
  }
  state_ = std::make_shared<State>(service->context().worker, std::move(plan), std::move(options));
  state_->open(std::move(stages));
  try {
    state_->tie();
    state_->keep();
  } catch (...) {
    state_->close(/*wait=*/true);
    throw;
  }
}

Pipeline::~Pipeline() {
  if (state_ != nullptr) state_->close(/*wait=*/false);
}
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&& other) noexcept {
  if (state_ != nullptr && state_ != other.state_) state_->close(/*wait=*/false);
  state_ = std::move(other.state_);
  return *this;
}

namespace {

// Cut along the first dimension; `n` is its length.
std::vector<Tensors> micro_batches_of(const Tensors& inputs, const at::Tensor& target, int64_t m,
                                      int64_t* length) {
  if (inputs.empty()) throw_error(refused("a step without inputs"));
  int64_t n = -1;
  Tensors all = inputs;
  if (target.defined()) all.push_back(target);
  for (const at::Tensor& t : all) {
    if (!t.defined() || t.dim() == 0) throw_error(refused("a batch has a first dimension"));
    if (n >= 0 && t.size(0) != n) {
      throw_error(
          refused(absl::StrCat("a batch of ", n, " with an input or target of ", t.size(0))));
    }
    n = t.size(0);
  }
  if (n < m) throw_error(refused(absl::StrCat("a batch of ", n, " for ", m, " micro-batches")));
  std::vector<Tensors> parts(static_cast<size_t>(m));
  for (const at::Tensor& t : inputs) {
    const auto cut = at::tensor_split(t, m);
    for (int64_t i = 0; i < m; ++i) parts[i].push_back(cut[i]);
  }
  *length = n;
  return parts;
}

}  // namespace

Future<StepResult> Pipeline::step_async(const Tensors& inputs, const at::Tensor& target) {
  const int64_t m = plan().micro_batches;
  int64_t n = 0;
  std::vector<Tensors> parts = micro_batches_of(inputs, target, m, &n);
  std::vector<double> weights;
  for (int64_t i = 0; i < m; ++i) {
    weights.push_back(state_->options().reduction == Reduction::kSum
                          ? 1.0
                          : static_cast<double>(parts[i][0].size(0)) / static_cast<double>(n));
  }
  std::vector<at::Tensor> targets;
  if (target.defined()) targets = at::tensor_split(target, m);
  return step_async(std::move(parts), std::move(targets), std::move(weights));
}

Future<StepResult> Pipeline::step_async(std::vector<Tensors> inputs,
                                        std::vector<at::Tensor> targets,
                                        std::vector<double> weights) {
  return state_->begin(std::move(inputs), std::move(targets), std::move(weights));
}

Future<std::vector<Tensors>> Pipeline::forward_async(std::vector<Tensors> inputs) {
  std::vector<double> weights(inputs.size(), 1.0);
  return state_->begin(std::move(inputs), {}, std::move(weights), /*forward_only=*/true)
      .then([](StepResult result) { return std::move(result.outputs); });
}

Tensors Pipeline::forward(const Tensors& inputs) {
  int64_t n = 0;
  auto parts = micro_batches_of(inputs, {}, plan().micro_batches, &n);
  const std::vector<Tensors> by_micro_batch = forward_async(std::move(parts)).wait();
  Tensors merged;
  for (size_t k = 0; k < by_micro_batch[0].size(); ++k) {
    Tensors column;
    for (const Tensors& one : by_micro_batch) column.push_back(one.at(k));
    merged.push_back(at::cat(column));
  }
  return merged;
}

StepResult Pipeline::step(const Tensors& inputs, const at::Tensor& target) {
  return step_async(inputs, target).wait();
}

std::map<std::string, at::Tensor> Pipeline::gradients(int stage) const {
  return state_->fetch(stage, internal::Fetch::kGradients, {}).wait();
}

void Pipeline::zero_grad() const {
  std::vector<Future<std::map<std::string, at::Tensor>>> all;
  for (int s = 0; s < plan().stages(); ++s) {
    all.push_back(state_->fetch(s, internal::Fetch::kZeroGrad, {}));
  }
  for (auto& f : all) f.wait();
}

std::map<std::string, at::Tensor> Pipeline::state_dict(int stage) const {
  return state_->fetch(stage, internal::Fetch::kState, {}).wait();
}

void Pipeline::load_state_dict(int stage, const std::map<std::string, at::Tensor>& state) const {
  state_->fetch(stage, internal::Fetch::kLoadState, state).wait();
  if (state_->options().keep_copies) state_->fetch(stage, internal::Fetch::kKeep, {}).wait();
}

int64_t Pipeline::rebuild(const std::function<Stage(int stage)>& replace,
                          const RebuildOptions& options) {
  state_ = state_->rebuilt(replace, options);
  return state_->next_step();
}

void Pipeline::save_checkpoint(std::string_view path, const CheckpointOptions& options) const {
  state_->save(std::string(path), options);
}

int64_t Pipeline::load_checkpoint(std::string_view path, const CheckpointOptions& options) {
  state_->load(std::string(path), options);
  state_->keep();
  return state_->next_step();
}

Rates& Pipeline::rates() { return state_->rates(); }
int64_t Pipeline::next_step() const { return state_->next_step(); }

const Plan& Pipeline::plan() const { return state_->plan(); }
Status Pipeline::status() const { return state_->status(); }
void Pipeline::close() { state_->close(/*wait=*/true); }

}  // namespace weft::pipeline
