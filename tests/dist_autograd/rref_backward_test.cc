// Backward from a loss that an RRef refers to: RPC-121, RPC-122.

#include "weft/dist_autograd/rref_backward.h"

#include <thread>

#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

template <class T>
concept HasBackward = requires(DistAutogradContext& context, const RRef<T>& rref) {
  backward(context, rref);
};
static_assert(HasBackward<at::Tensor>);
static_assert(!HasBackward<int64_t> && !HasBackward<std::vector<at::Tensor>>);

class DistRRefBackward : public DistAutogradTest {
 protected:
  DistRRefBackward() { library_.def("sum_of", &sum_of); }
  static at::Tensor sum_of(const at::Tensor& x) { return x.sum(); }
};

TEST_P(DistRRefBackward, RPC_121_owner_rref_backward) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    // Without a context it is LibTorch's own.
    const auto loss = RRef<at::Tensor>::local((*c)[0], (x * x).sum());
    loss.local_value()->backward();
    expect_equal(x.grad(), (2 * x).detach());
  }
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor y = rpc_sync((*c)[0], "worker1", &mul, x, x);
    const auto loss = RRef<at::Tensor>::local((*c)[0], y.sum());
    backward(context, loss, {.retain_graph = true});
    expect_equal(context.gradient(x), (2 * x).detach());
    backward(context, loss);
    expect_equal(context.gradient(x), (4 * x).detach());
    // Nothing was fetched for it.
    EXPECT_EQ(counter((*c)[0], "autograd_sends"), 1);
    EXPECT_EQ(counter((*c)[1], "autograd_sends"), 1);
    // By a function that ran here, and not yet there when it is asked for.
    backward(context, remote((*c)[0], "worker0", &sum_of, x));
    expect_equal(context.gradient(x), (4 * x + 1).detach());
    // One that is not a scalar.
    const at::Tensor g = torch::tensor({10.0, 100.0}, torch::kFloat64);
    backward(context, RRef<at::Tensor>::local((*c)[0], x * 1), {.gradients = {g}});
    expect_equal(context.gradient(x), (4 * x + 1 + g).detach());
  }
  expect_nothing_left(*c);
}

TEST_P(DistRRefBackward, RPC_122_user_rref_backward) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const auto loss = remote((*c)[0], "worker1", &sum_of, x);
    backward(context, loss, {.retain_graph = true});
    backward(context, loss);
    expect_equal(context.gradient(x), torch::full({2}, 2.0, torch::kFloat64));
    // An RRef of a third worker; by a thread that is not in the context.
    const auto far = remote((*c)[0], "worker2", &mul, x, x);
    const at::Tensor g = torch::tensor({10.0, 100.0}, torch::kFloat64);
    std::thread([&] { backward(context, far, {.gradients = {g}}); }).join();
    expect_equal(context.gradient(x), (2 + 2 * x * g).detach());
  }
  expect_nothing_left(*c);
}

TEST_P(DistRRefBackward, RPC_121_and_RPC_122_errors) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const auto fails = [&](const RRef<at::Tensor>& loss, const BackwardOptions& options = {}) {
      return error_of([&] { backward(context, loss, options); });
    };
    const auto invalid = ErrorKind::kInvalidArgument;
    const auto here = [&](const at::Tensor& value) {
      return RRef<at::Tensor>::local((*c)[0], value);
    };
    expect_error(fails(here(x.detach().sum())), invalid, {"does not require grad"});
    expect_error(fails(here(x * 1)), invalid, {"single element"});
    expect_error(fails(remote((*c)[0], "worker1", &sum_of, x.detach())), invalid,
                 {"does not require grad"});
    expect_error(fails(remote((*c)[0], "worker1", &mul, x, x)), invalid, {"single element"});
    const Status user = fails(remote((*c)[0], "worker1", &fail, x));
    expect_error(user, ErrorKind::kUser, {"on purpose"});
    EXPECT_EQ(error_details(user).origin, "worker1");
    expect_error(fails(remote((*c)[0], "worker0", &fail, x)), ErrorKind::kUser, {"on purpose"});
    expect_error(fails(RRef<at::Tensor>()), ErrorKind::kState, {"refers to nothing"});
    expect_error(fails(RRef<at::Tensor>::local((*c)[1], x.sum())), ErrorKind::kState,
                 {"worker 'worker1' holds", "but not autograd context 0/"});
    expect_error(fails(remote((*c)[0], "worker1", &sum_of, x), {.deadline = 0s}),
                 ErrorKind::kDeadline, {});
    const auto loss = remote((*c)[0], "worker1", &sum_of, x);
    context.release().wait();
    expect_error(fails(loss), ErrorKind::kState, {"autograd context 0/", "has been released"});
    expect_error(fails(here(x.sum())), ErrorKind::kState, {"has been released"});
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistRRefBackward, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
