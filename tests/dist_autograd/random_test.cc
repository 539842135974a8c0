// LIVE-1 to LIVE-8 on computations drawn from seeds: through several workers the gradients are
// those of one worker, whatever of them the losses use; with faults they are, or there is an error.

#include <cstdlib>
#include <iostream>

#include "torch/autograd.h"
#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"
#include "weft/tests/dist_autograd/random_graph.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

constexpr int kWorkers = 4;

int64_t number_from(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

class DistRandom : public DistAutogradTest {
 protected:
  DistRandom() : parameters_(RandomGraph::make_parameters(kWorkers)) {
    library_.merge(RandomGraph::library(parameters_));
  }

  std::vector<at::Tensor> all_parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& list : parameters_) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

  // The gradients of all losses together, by parameter; undefined: none.
  std::vector<at::Tensor> wanted(const RandomGraph& graph) const {
    std::vector<at::Tensor> sums(all_parameters().size());
    for (const at::Tensor& loss : graph.alone(parameters_)) {
      const auto some = torch::autograd::grad({loss}, all_parameters(), {}, true, false, true);
      for (size_t i = 0; i < sums.size(); ++i) {
        if (some[i].defined()) sums[i] = sums[i].defined() ? sums[i] + some[i] : some[i];
      }
    }
    return sums;
  }

  void compare(Cluster& c, const AutogradContextId& id, const std::vector<at::Tensor>& want) {
    size_t index = 0;
    for (int w = 0; w < kWorkers; ++w) {
      std::vector<AutogradGradient> there;
      if (counter(c[static_cast<size_t>(w)], "num_autograd_contexts") > 0) {
        there = autograd_gradients(c[static_cast<size_t>(w)], id);
      }
      for (const at::Tensor& p : parameters_[static_cast<size_t>(w)]) {
        at::Tensor got;
        for (const auto& one : there) {
          if (one.leaf.is_same(p)) got = one.gradient;
        }
        const at::Tensor& expected = want[index++];
        // A leaf that only zeros reach locally may get none here.
        if (!expected.defined() || !got.defined()) {
          EXPECT_FALSE(got.defined());
          if (expected.defined()) {
            EXPECT_EQ(expected.abs().sum().item<double>(), 0);
          }
          continue;
        }
        EXPECT_TRUE(torch::equal(got, expected)) << "worker" << w << got << expected;
      }
    }
  }

  const RandomGraph::Parameters parameters_;
};

TEST_P(DistRandom, LIVE_1_gradients_equal_those_of_one_worker) {
  auto c = make({.size = kWorkers});
  const int64_t graphs = number_from("WEFT_AUTOGRAD_GRAPHS", 1000) / 2;  // on each transport
  const int64_t first = number_from("WEFT_AUTOGRAD_SEED", GetParam() == Net::kInproc ? 0 : 1 << 20);
  for (int64_t seed = first; seed < first + graphs; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomGraph graph(static_cast<uint64_t>(seed), kWorkers);
    const auto want = wanted(graph);
    DistAutogradContext context((*c)[0]);
    const auto losses = graph.through((*c)[0], parameters_);
    if (seed % 2 == 0) {
      if (!losses.empty()) context.backward(losses);
    } else {
      for (const at::Tensor& loss : losses) context.backward({loss}, {.retain_graph = true});
    }
    compare(*c, context.id(), want);
    context.release().wait();  // so that what the next one finds is its own
    if (HasFailure()) break;
  }
  expect_nothing_left(*c);
}

// Connections that break, frames that come late, twice, or in another order: right gradients, or an
// error that says so; and nothing is left over either way.
TEST_P(DistRandom, LIVE_4_and_LIVE_5_with_faults_they_are_right_or_there_is_an_error) {
  auto plan = std::make_shared<FaultPlan>(11);
  auto c = make({.size = kWorkers, .plan = plan});
  const int64_t graphs = number_from("WEFT_AUTOGRAD_GRAPHS", 1000) / 10;
  int64_t failed = 0;
  for (int64_t seed = 0; seed < graphs; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomGraph graph(static_cast<uint64_t>(seed), kWorkers);
    const auto want = wanted(graph);
    const absl::Duration late = absl::Milliseconds(1);
    plan->add({.fault = Fault::kDelay, .probability = 0.1, .delay = late});
    plan->add({.fault = Fault::kReorder, .probability = 0.1, .delay = late});
    plan->add({.fault = Fault::kDuplicate, .probability = 0.05});
    plan->add({.fault = Fault::kFailAfter, .probability = 0.01});
    plan->add({.fault = Fault::kCut, .probability = 0.01});
    DistAutogradContext context((*c)[0]);
    try {
      const auto losses = graph.through((*c)[0], parameters_);
      if (!losses.empty()) context.backward(losses);
      plan->clear();
      compare(*c, context.id(), want);
    } catch (const Error& error) {
      // A call of the user that was cut off; a pass sends its messages again.
      EXPECT_NE(error.kind(), ErrorKind::kInternal) << error.what();
      ++failed;
      plan->clear();
    }
    context.release().wait();
    if (HasFailure()) break;
  }
  EXPECT_GT(plan->hits(), 0);
  EXPECT_LT(failed, graphs);
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistRandom, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
