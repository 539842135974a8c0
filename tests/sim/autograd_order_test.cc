// DEF_31: in which order gradients of several messages are added up. Six workers in simulation; seeds
// differ in what is faster.

#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ATen/SequenceNumber.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "torch/types.h"
#include "weft/common/sim.h"
#include "weft/dist_autograd/context.h"
#include "weft/rpc/call.h"
#include "weft/rpc/containers.h"
#include "weft/tests/sim/autograd_world.h"

namespace weft::testing {
namespace {

// A factor times a tensor times the parameter of w5; the second one by way of another worker.
const FunctionRef<at::Tensor(double, at::Tensor)> kTerm{"order.term"};
const FunctionRef<at::Tensor(double, at::Tensor)> kVia{"order.via"};
// In single precision every order of adding these gives something else.
const std::vector<double> kFactors = {1, 1e8, -1e8, 3e-3, 7e7, -7e7, 0.25};

struct Sums {
  uint32_t leaf = 0;   // bits of the gradient of w5's parameter
  uint32_t inner = 0;  // of what goes on from w0's inner tensor
  std::string forward{};
  std::string backward{};  // in which order the terms' nodes have run at w5
};

uint32_t bits_of(const at::Tensor& one) {
  const auto value = one.item<float>();
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

class AutogradOrder : public ::testing::Test {
 protected:
  using Body =
      std::function<at::Tensor(const std::vector<Worker>& workers, const at::Tensor& inner)>;

  // Forward as `body` does it, from w0, and a backward from the sum of what that gives.
  static Sums run(uint64_t seed, BackwardMode mode, const Body& body) {
    Sums out;
    const at::Tensor parameter = torch::full({}, 1.5F).set_requires_grad(true);
    auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed});
    Audit audit;
    const Status ended = sim->run([&] {
      Library library("order");
      library.def("term", [&](double factor, const at::Tensor& x) {
        absl::StrAppend(&out.forward, factor, " ");
        at::Tensor y = parameter * x * factor;
        y.register_hook(
            [&out, factor](const at::Tensor&) { absl::StrAppend(&out.backward, factor, " "); });
        return y;
      });
      library.def("via", [](CallContext& context, double factor, const at::Tensor& x) {
        return rpc_async(context.worker(), 5, kTerm, factor, x);
      });
      auto joined = join_in_simulation(sim, 6, library, std::make_shared<FaultPlan>(seed), &audit);
      ASSERT_TRUE(joined.ok()) << joined.status();
      std::vector<Worker> workers = *std::move(joined);
      try {
        DistAutogradContext context(workers[0]);
        const at::Tensor x = torch::ones({}, torch::kFloat32).set_requires_grad(true);
        context.backward({body(workers, x * 1)}, {.mode = mode});
        out.inner = bits_of(context.gradient(x));
        for (const auto& one : autograd_gradients(workers[5], context.id())) {
          if (one.leaf.is_same(parameter)) out.leaf = bits_of(one.gradient);
        }
      } catch (const Error& error) {
        ADD_FAILURE() << error.status();
      }
      for (Worker& w : workers) (void)w.shutdown({.graceful = false});
    });
    EXPECT_TRUE(ended.ok()) << ended;
    return out;
  }

  // Many seeds: what is faster differs, and no bit does.
  static void expect_equal_bits(BackwardMode mode, const Body& body) {
    std::set<std::string> forward;
    std::set<std::string> backward;
    const Sums first = run(1, mode, body);
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      SCOPED_TRACE(seed);
      const Sums now = run(seed, mode, body);
      forward.insert(now.forward);
      backward.insert(now.backward);
      ASSERT_EQ(now.leaf, first.leaf) << first.backward << "\n" << now.backward;
      ASSERT_EQ(now.inner, first.inner) << first.backward << "\n" << now.backward;
    }
    EXPECT_GT(forward.size(), 3U) << "the seeds say nothing";
    EXPECT_GT(backward.size(), 3U) << "the seeds say nothing";
  }
};

// All calls at once, over four other workers: answers and gradients are in any order.
at::Tensor all_at_once(const std::vector<Worker>& workers, const at::Tensor& inner) {
  std::vector<Future<at::Tensor>> terms;
  for (size_t i = 0; i < kFactors.size(); ++i) {
    terms.push_back(rpc_async(workers[0], 1 + static_cast<int>(i % 4), kVia, kFactors[i], inner));
  }
  at::Tensor sum = terms[0].wait();
  for (size_t i = 1; i < terms.size(); ++i) sum = sum + terms[i].wait();
  return sum;
}

TEST_F(AutogradOrder, DEF_31_gradients_are_added_by_call_and_not_by_arrival) {
  expect_equal_bits(BackwardMode::kExact, &all_at_once);
}

// Where all is known from the beginning, nothing is held back.
TEST_F(AutogradOrder, DEF_31_gradients_are_added_by_call_in_the_fast_mode_too) {
  expect_equal_bits(BackwardMode::kFast, &all_at_once);
}

// LibTorch counts the nodes of each thread by themselves. In single precision the sum is 3e-3 where this one's gradient is
// the second, and 0 where it is the last.
at::Tensor with_a_node_of_another_thread(const std::vector<Worker>& workers,
                                         const at::Tensor& inner) {
  const at::Tensor last = inner * 3e-3;
  at::Tensor elsewhere;
  std::thread([&elsewhere, &inner, mine = at::sequence_number::peek()] {
    while (at::sequence_number::peek() < mine + 100) at::sequence_number::get_and_increment();
    elsewhere = inner * -1e8;
  }).join();
  const at::Tensor second = elsewhere * 1;
  const at::Tensor sum = inner * 1e8 + second + last;
  return workers.empty() ? sum : sum + rpc_sync(workers[0], 5, kTerm, 1.0, torch::ones({}));
}

TEST_F(AutogradOrder, DEF_31_a_node_of_another_thread_is_added_where_LibTorch_adds_it) {
  const at::Tensor x = torch::ones({}, torch::kFloat32).set_requires_grad(true);
  with_a_node_of_another_thread({}, x * 1).backward();
  EXPECT_NE(bits_of(x.grad()), 0U);
  for (const BackwardMode mode : {BackwardMode::kExact, BackwardMode::kFast}) {
    EXPECT_EQ(run(1, mode, with_a_node_of_another_thread).inner, bits_of(x.grad()));
  }
}

}  // namespace
}  // namespace weft::testing
