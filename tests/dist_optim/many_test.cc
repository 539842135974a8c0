// An optimizer over thousands of parameters of one owner: its constructor, a step, its state.

#include <torch/types.h>

#include "weft/tests/dist_optim/fixture.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

// Most of the time is LibTorch's and the state's: once is enough.
int64_t many(Net net) { return kSanitizer || net != Net::kInproc ? 5000 : 50'000; }

class Many {
 public:
  explicit Many(int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      values_.push_back(torch::full({1}, i, torch::kFloat64).set_requires_grad(true));
    }
  }
  at::Tensor sum() const { return torch::cat(values_).sum(); }
  std::vector<RRef<at::Tensor>> parameters(CallContext& context) {
    std::vector<RRef<at::Tensor>> out;
    for (const at::Tensor& v : values_) out.push_back(RRef<at::Tensor>::local(context.worker(), v));
    return out;
  }
  at::Tensor value() const { return torch::cat(values_).detach(); }

 private:
  std::vector<at::Tensor> values_;
};

class DistOptimMany : public DistOptimTest {
 protected:
  DistOptimMany() {
    library_.class_<Many>("Many")
        .constructor<int64_t>()
        .def("sum", &Many::sum)
        .def("parameters", &Many::parameters)
        .def("value", &Many::value);
  }
};

TEST_P(DistOptimMany, DEF_22_adam_over_50000_parameters_of_one_owner) {
  const int64_t n = many(GetParam());
  OptimCluster c = make(1);
  {
    const auto many = remote<Many>(c[0], 1, n);
    const std::vector<RRef<at::Tensor>> parameters = many.rpc_sync(&Many::parameters);
    ASSERT_EQ(parameters.size(), static_cast<size_t>(n));
    DistributedOptimizer<optim::Adam> optimizer(c[0], parameters, {.lr = 0.5});
    {
      DistAutogradContext context(c[0]);
      context.backward({many.rpc_sync(&Many::sum)});
      optimizer.step(context);
    }
    // The first step of Adam is its rate, but for eps.
    expect_close(many.rpc_sync(&Many::value), torch::arange(n, torch::kFloat64) - 0.5 / (1 + 1e-8));
    const std::map<std::string, at::Tensor> state = optimizer.state_dict();
    EXPECT_GE(state.size(), static_cast<size_t>(3 * n));
    EXPECT_EQ(state.at(std::to_string(n - 1) + ".step").item<int64_t>(), 1);
    optimizer.load_state_dict(state);
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimMany, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
