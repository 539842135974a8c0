// RRefs and state by the ten thousand: what is said of them does not fit into a frame's header.

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "weft/rref/remote_module.h"
#include "weft/tests/rref/fixture.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

constexpr int64_t kMany = kSanitizer ? 9000 : 50'000;

// `n` parameters of one element, parameter i is i.
struct ManyImpl : torch::nn::Module {
  explicit ManyImpl(int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      register_parameter("p" + std::to_string(i), at::full({1}, i, at::kDouble));
    }
  }
};
TORCH_MODULE(Many);

double sum_of(const std::vector<RRef<at::Tensor>>& parameters) {
  double sum = 0;
  for (const auto& p : parameters) sum += p.local_value()->item<double>();
  return sum;
}
std::vector<RRef<at::Tensor>> give_back_all(std::vector<RRef<at::Tensor>> all) { return all; }

class RRefMany : public RRefTest {
 protected:
  std::unique_ptr<Cluster> make_many() {
    Library lib("many");
    module_<Many>(lib, "Many").constructor<int64_t>();
    lib.def("sum_of", &sum_of).def("give_back_all", &give_back_all);
    lib_.library.merge(lib);
    return make({.net = GetParam()});
  }
};

TEST_P(RRefMany, DEF_22_50000_rrefs_in_answers_and_arguments) {
  auto c = make_many();
  {
    const RemoteModule<Many> net((*c)[0], "worker1", kMany);
    const std::vector<RRef<at::Tensor>> parameters = net.parameters();
    ASSERT_EQ(parameters.size(), static_cast<size_t>(kMany));
    EXPECT_EQ(rpc_sync((*c)[0], "worker1", &sum_of, parameters), kMany * (kMany - 1) / 2.0);
    // By a third worker, which is told of all of them and tells all of them.
    const auto back = rpc_sync((*c)[0], "worker2", &give_back_all, parameters);
    ASSERT_EQ(back.size(), parameters.size());
    EXPECT_EQ(back.back().to_here().item<double>(), kMany - 1);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefMany, DEF_22_a_modules_state_of_50000_parameters) {
  auto c = make_many();
  {
    const RemoteModule<Many> net((*c)[0], "worker1", kMany);
    StateDict state = net.state_dict();
    ASSERT_EQ(state.size(), static_cast<size_t>(kMany));
    EXPECT_EQ(state.at("p" + std::to_string(kMany - 1)).item<double>(), kMany - 1);
    state.at("p7").fill_(-1);
    net.load_state_dict(state);
    EXPECT_EQ(net.state_dict().at("p7").item<double>(), -1);
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, RRefMany, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
