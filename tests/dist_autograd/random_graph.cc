#include "weft/tests/dist_autograd/random_graph.h"

#include <random>

#include "torch/types.h"
#include "weft/rpc/call.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/worker.h"
#include "weft/rref/rref.h"

namespace weft::testing {
namespace {

constexpr int kParameters = 2;
constexpr int64_t kOps = 8;
const FunctionRef<std::vector<at::Tensor>(std::vector<int64_t>, int64_t, at::Tensor, at::Tensor)>
    kApply{"random.apply"};

// One or two results. Products are only with parameters, so that numbers grow slowly.
std::vector<at::Tensor> operate(int64_t op, const at::Tensor& a, const at::Tensor& b,
                                const std::vector<at::Tensor>& parameters) {
  switch (op) {
    case 0: return {a + b};
    case 1: return {a * parameters[0]};
    case 2: return {a - b, b * parameters[1]};
    case 3: return {a.relu() + b};
    case 4: {
      at::Tensor c = a * 1;
      c.add_(b);  // in place, on what it has made
      return {c};
    }
    case 5:  // views
      return {a.t().contiguous().view({2, 3}), a.select(0, 1).unsqueeze(0) + b};
    case 6:  // no gradient through the second
      return {a.clone(), b.detach() + 1};
    default:  // passed straight on
      return {a, b};
  }
}

at::Tensor whole(const at::Tensor& x) {
  return x.dim() == 2 && x.size(0) == 2 ? x : x.expand({2, 3});
}

}  // namespace

RandomGraph::RandomGraph(uint64_t seed, int workers) {
  std::mt19937_64 random(seed);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const int64_t count = 3 + below(10);
  for (int64_t i = 0; i < count; ++i) {
    Step step;
    step.how = static_cast<Step::How>(below(4));
    step.op = below(kOps);
    // More of the recent ones.
    const int64_t there = kParameters + i;
    step.a = std::max(below(there), below(there));
    step.b = below(there);
    const int64_t length = step.how == Step::How::kHere ? 1 : 1 + below(3);
    for (int64_t k = 0; k < length; ++k) step.path.push_back(below(workers));
    if (step.how == Step::How::kHere) step.path = {0};
    steps_.push_back(std::move(step));
  }
  const int64_t losses = 1 + below(3);
  for (int64_t i = 0; i < losses; ++i) losses_.push_back(below(kParameters + count));
}

RandomGraph::Parameters RandomGraph::make_parameters(int workers) {
  Parameters out(static_cast<size_t>(workers));
  double next = -2;
  for (auto& list : out) {
    for (int i = 0; i < kParameters; ++i) {
      at::Tensor p = (torch::arange(6, torch::kFloat64).view({2, 3}) + next).remainder(4) - 1;
      list.push_back(p.set_requires_grad(true));
      next += 1;
    }
  }
  return out;
}

Library RandomGraph::library(const Parameters& parameters) {
  Library lib("random");
  lib.def("apply", [parameters](CallContext& context, std::vector<int64_t> path, int64_t op,
                                at::Tensor a, at::Tensor b) {
    const auto& own = parameters.at(static_cast<size_t>(context.worker().rank()));
    auto results = operate(op, a, b, own);
    path.erase(path.begin());
    if (path.empty()) return results;
    const auto next = static_cast<int>(path.front());
    return rpc_sync(context.worker(), next, kApply, path, op, whole(results[0]), b);
  });
  return lib;
}

std::vector<at::Tensor> RandomGraph::run(
    const Parameters& parameters,
    const std::function<std::vector<at::Tensor>(const Step&, const at::Tensor&, const at::Tensor&)>&
        apply) const {
  std::vector<at::Tensor> values = parameters[0];
  std::vector<at::Tensor> extra;
  for (const Step& step : steps_) {
    const auto results =
        apply(step, values[static_cast<size_t>(step.a)], values[static_cast<size_t>(step.b)]);
    values.push_back(whole(results[0]));
    // A second result is used later, now and then, and sometimes never.
    if (results.size() > 1) extra.push_back(whole(results[1]));
  }
  std::vector<at::Tensor> losses;
  for (const int64_t index : losses_) {
    at::Tensor loss = values[static_cast<size_t>(index)].sum();
    if (!extra.empty()) {
      loss = loss + extra[static_cast<size_t>(index) % extra.size()].sum() * 2;
    }
    if (loss.requires_grad()) losses.push_back(loss);
  }
  return losses;
}

std::vector<at::Tensor> RandomGraph::alone(const Parameters& parameters) const {
  return run(parameters, [&](const Step& step, const at::Tensor& a, const at::Tensor& b) {
    std::vector<at::Tensor> results{a};
    for (const int64_t worker : step.path) {
      results = operate(step.op, whole(results[0]), b, parameters[static_cast<size_t>(worker)]);
    }
    return results;
  });
}

std::vector<at::Tensor> RandomGraph::through(const Worker& worker,
                                             const Parameters& parameters) const {
  return run(parameters, [&](const Step& step, const at::Tensor& a, const at::Tensor& b) {
    const auto to = static_cast<int>(step.path.front());
    switch (step.how) {
      case Step::How::kHere: return operate(step.op, a, b, parameters[0]);
      case Step::How::kCall: return rpc_sync(worker, to, kApply, step.path, step.op, a, b);
      case Step::How::kAsync: return rpc_async(worker, to, kApply, step.path, step.op, a, b).wait();
      case Step::How::kRemote: break;
    }
    return remote(worker, to, kApply, step.path, step.op, a, b).to_here();
  });
}

}  // namespace weft::testing
