#include "weft/tests/pipeline/model.h"

#include <cstdlib>
#include <stdexcept>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include "weft/dist_autograd/service.h"
#include "weft/rref/service.h"

namespace weft::testing {
namespace {

// On some processors (seen on an AMD EPYC) MKL adds up in an order that depends on where its operands lie in
// memory, unless it is told to be reproducible; it reads this once, before its first product.
class SteadyMkl : public ::testing::Environment {
  void SetUp() override { ::setenv("MKL_CBWR", "AUTO", /*overwrite=*/0); }
};
::testing::Environment* const steady_mkl = ::testing::AddGlobalTestEnvironment(new SteadyMkl);

}  // namespace

BlockImpl::BlockImpl(int64_t index, bool shared) : shared(shared) {
  const auto values = [&](double factor, at::IntArrayRef size) {
    int64_t n = 1;
    for (int64_t s : size) n *= s;
    return at::sin(at::arange(n, at::kFloat) * factor + static_cast<double>(index)).reshape(size) /
           2;
  };
  weight = register_parameter("weight", values(0.7, {kWidth, kWidth}));
  bias = register_parameter("bias", values(1.3, {kWidth}));
  scale = register_parameter("scale", values(2.1, {kWidth}) + 1);
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  if (throws_in > 0 && --throws_in == 0) throw std::runtime_error("this block is broken");
  ++forwards;
  graphs += c10::GradMode::is_enabled() ? 1 : 0;
  at::Tensor h = at::linear(x, weight, bias);
  if (shared) h = at::relu(at::linear(h, weight, bias));
  h = (h - h.mean(1, /*keepdim=*/true)) * scale;
  h = x + at::tanh(h);
  return detached ? h.detach() : h;
}

at::Tensor numbers(int64_t n, double factor) {
  return at::cos(at::arange(n * kWidth, at::kFloat) * factor).reshape({n, kWidth});
}

void expect_equal(const std::vector<State>& a, const std::vector<State>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t s = 0; s < a.size(); ++s) {
    ASSERT_EQ(a[s].size(), b[s].size());
    for (const auto& [name, tensor] : a[s]) {
      ASSERT_EQ(b[s].count(name), 1u) << name;
      EXPECT_TRUE(at::equal(tensor, b[s].at(name))) << "stage " << s << " " << name;
    }
  }
}

at::Tensor squares(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).mean();
}

at::Tensor constant(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).mean().detach();
}

Library model_library() {
  Library lib("app");
  module_<BlockImpl>(lib, "Block")
      .constructor<int64_t, bool>()
      .def("forward", &BlockImpl::forward)
      .def("throw_in", &BlockImpl::throw_in)
      .def("detach", &BlockImpl::detach)
      .def("freeze", &BlockImpl::freeze)
      .def("counts", &BlockImpl::counts);
  lib.def("squares", &squares);
  lib.def("constant", &constant);
  lib.merge(dist_optim_library());
  return lib;
}

void add_pipeline_services(JoinOptions* join) {
  join->services.push_back(rref_service());
  join->services.push_back(dist_autograd_service());
  join->services.push_back(dist_optim_service());
  join->services.push_back(pipeline_service());
}

World::World(pipeline::Plan p, pipeline::PipelineOptions options, bool shared,
             std::function<void(int, JoinOptions*)> adjust, const std::string& device)
    : plan(std::move(p)) {
  ClusterOptions o;
  o.size = static_cast<int>(plan.workers.size());
  o.library = model_library();
  o.adjust = [adjust](int index, JoinOptions* join) {
    add_pipeline_services(join);
    if (adjust != nullptr) adjust(index, join);
  };
  cluster = std::make_unique<Cluster>(o);
  for (int s = 0; s < plan.stages(); ++s) {
    blocks.emplace_back((*cluster)[0], "worker" + std::to_string(plan.placement[s]) + "/" + device,
                        int64_t{s}, shared);
  }
  if (options.loss.empty()) options.loss = "app.squares";
  pipe = std::make_unique<pipeline::Pipeline>(make(std::move(options)));
}

pipeline::Pipeline World::make(pipeline::PipelineOptions options) {
  return pipeline::Pipeline((*cluster)[0],
                            std::vector<pipeline::Stage>(blocks.begin(), blocks.end()), plan,
                            std::move(options));
}

void World::expect_nothing_left() {
  for (size_t w = 0; w < cluster->size(); ++w) {
    EXPECT_EQ(counter((*cluster)[w], "pipeline_slots"), 0);
    EXPECT_EQ(counter((*cluster)[w], "pipeline_modules"), 0);
  }
}

World::~World() {
  if (pipe != nullptr) pipe->close();
  for (size_t w = 0; w < cluster->size(); ++w) {
    EXPECT_EQ(counter((*cluster)[w], "pipelines"), 0);
    EXPECT_EQ(counter((*cluster)[w], "pipeline_slots"), 0);
    EXPECT_EQ(counter((*cluster)[w], "pipeline_modules"), 0);
  }
  pipe = nullptr;
  blocks.clear();
  cluster->shutdown();
}

Local::Local(int stages, bool shared, const std::string& device) {
  for (int s = 0; s < stages; ++s) {
    blocks.push_back(std::make_shared<BlockImpl>(s, shared));
    blocks.back()->to(c10::Device(device));
  }
}

double Local::step(const at::Tensor& x, const at::Tensor& y, int micro_batches) {
  const auto xs = at::tensor_split(x, micro_batches);
  const auto ys = at::tensor_split(y, micro_batches);
  double sum = 0;
  for (int i = 0; i < micro_batches; ++i) {
    at::Tensor h = xs[i];
    for (const auto& b : blocks) h = b->forward(h);
    const at::Tensor loss = squares(h, ys[i]);
    const double weight = static_cast<double>(xs[i].size(0)) / static_cast<double>(x.size(0));
    sum += loss.item<double>() * weight;
    (loss * weight).backward();
  }
  return sum;
}

}  // namespace weft::testing
