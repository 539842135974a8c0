// Effects of a backward: what a layer above does with gradients where they become final.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "torch/autograd.h"
#include "torch/types.h"
#include "weft/dist_autograd/leaf_effect.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

using internal::backward_with_effect;
using internal::LeafEffect;
using internal::LeafOutcomes;
using internal::set_leaf_effects;

class DistEffect : public DistAutogradTest {};

// Sums of the gradients that it is shown; keeps those of one element.
class Sums final : public LeafEffect {
 public:
  explicit Sums(std::string data) : said_(std::move(data)) {}
  bool on_final(const at::Tensor&, const at::Tensor& gradient) override {
    EXPECT_TRUE(gradient.defined());
    absl::StrAppend(&said_, " ", gradient.sum().item<double>());
    return gradient.numel() == 1;
  }
  std::string finish() override { return said_; }

 private:
  std::string said_;
};

// The gradient of its second input is undefined.
class FirstOnly : public torch::autograd::Function<FirstOnly> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x,
                            const at::Tensor& y) {
    return x + y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

class Counted : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Counted(int* count) : count_(count) {}
  void operator()(const at::Tensor&) override { ++*count_; }

 private:
  int* const count_;
};

TEST_P(DistEffect, EachFinalGradientIsShownOnceAndWhatIsUsedUpIsNotKept) {
  auto c = make();
  for (size_t i = 0; i < 3; ++i) {
    set_leaf_effects((*c)[i], [i](std::string_view data) -> StatusOr<std::unique_ptr<LeafEffect>> {
      if (i == 2) return std::unique_ptr<LeafEffect>();
      return std::make_unique<Sums>(absl::StrCat(std::string(data), " at ", i));
    });
  }
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3});
  {
    DistAutogradContext context((*c)[0]);
    LeafOutcomes outcomes;
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, x, x).sum() +
                            rpc_sync((*c)[0], "worker2", &mul, y, y).sum();
    const Status ended = backward_with_effect(context, {loss}, {}, "step", &outcomes);
    EXPECT_TRUE(ended.ok()) << ended;
    const auto of = [&](size_t i) { return outcomes[key_of((*c)[i].info())]; };
    EXPECT_EQ(of(0), "step at 0 6 6");  // of x and of y
    EXPECT_EQ(of(1), "step at 1") << "no leaf is there";
    EXPECT_EQ(of(2), "");
    expect_equal(context.gradient(x), x.detach() * 2);
    EXPECT_FALSE(context.gradient(y).defined()) << "used up";
  }
  expect_nothing_left(*c);
}

TEST_P(DistEffect, WhereNoneCanBeMadeThePassFails) {
  for (const size_t where : {0U, 1U}) {
    auto c = make();
    set_leaf_effects((*c)[where], [](std::string_view) -> StatusOr<std::unique_ptr<LeafEffect>> {
      return make_error(ErrorKind::kInvalidArgument, "there is no such step");
    });
    const at::Tensor x = leaf({1, 2});
    {
      DistAutogradContext context((*c)[0]);
      const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, x, x).sum();
      const Status failed = backward_with_effect(context, {loss}, {}, "step", nullptr);
      EXPECT_EQ(error_kind(failed), ErrorKind::kInvalidArgument) << where << ": " << failed;
      EXPECT_NE(std::string(failed.message()).find("there is no such step"), std::string::npos)
          << failed;
      EXPECT_FALSE(context.gradient(x).defined());
    }
    expect_nothing_left(*c);
  }
}

// As in a local backward: neither effect nor hook sees a leaf that gets nothing.
TEST_P(DistEffect, ALeafWithoutAGradientIsShownToNothing) {
  auto c = make();
  set_leaf_effects((*c)[0], [](std::string_view data) -> StatusOr<std::unique_ptr<LeafEffect>> {
    return std::make_unique<Sums>(std::string(data));
  });
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  int hooked = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(y, std::make_unique<Counted>(&hooked));
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor both = FirstOnly::apply(x, y);
    LeafOutcomes outcomes;
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, both, both).sum();
    const Status ended = backward_with_effect(context, {loss}, {}, "step", &outcomes);
    EXPECT_TRUE(ended.ok()) << ended;
    EXPECT_EQ(hooked, 0);
    expect_equal(context.gradient(x), (x.detach() + y.detach()) * 2);
    EXPECT_FALSE(context.gradient(y).defined());
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistEffect, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
