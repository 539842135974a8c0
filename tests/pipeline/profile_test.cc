// profile_layers(): it measures by the clock it is given, and leaves the model as it was.
#include "weft/pipeline/profile.h"

#include <torch/csrc/autograd/generated/variable_factories.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "weft/common/sim.h"
#include "weft/tests/pipeline/model.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Profile, PP_7_MeasuresEachLayer) {
  const auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = 1});
  const Status ended = sim->run([&] {
    const auto wait = [&](int64_t us) {
      const auto parker = sim->make_parker();
      const absl::Time until = sim->now() + absl::Microseconds(us);
      while (sim->now() < until) (void)parker->park_until(until);
    };
    std::vector<pipeline::ProfiledLayer> layers;
    std::vector<std::shared_ptr<BlockImpl>> blocks;
    for (int i = 0; i < 3; ++i) {
      const auto block = std::make_shared<BlockImpl>(i, false);
      blocks.push_back(block);
      layers.push_back({"block" + std::to_string(i),
                        [block, wait, i](const at::Tensor& x) {
                          wait(100 * (i + 1));
                          return block->forward(x);
                        },
                        block->parameters()});
    }
    // A gradient that is there stays, and none comes.
    blocks[1]->weight.mutable_grad() = at::ones({kWidth, kWidth});
    const at::Tensor sample = at::ones({5, kWidth});
    const auto costs = pipeline::profile_layers(layers, sample, {.repeats = 2, .runtime = sim});
    ASSERT_TRUE(costs.ok()) << costs.status();
    ASSERT_EQ(costs->size(), 3u);
    for (int i = 0; i < 3; ++i) {
      const pipeline::LayerCost& c = (*costs)[i];
      EXPECT_EQ(c.name, "block" + std::to_string(i));
      EXPECT_EQ(c.forward, 100'000 * (i + 1));
      EXPECT_EQ(c.input_grad, 0);  // no virtual time passes in it
      EXPECT_EQ(c.output, 5 * kWidth * 4);
      EXPECT_EQ(c.activation, 2 * 5 * kWidth * 4);
      EXPECT_EQ(c.parameters, 3 * 4 * (kWidth * kWidth + 2 * kWidth));
    }
    EXPECT_FALSE(blocks[0]->weight.grad().defined());
    EXPECT_TRUE(torch::equal(blocks[1]->weight.grad(), at::ones({kWidth, kWidth})));
    EXPECT_FALSE(sample.requires_grad());
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

TEST(Profile, BadInput_LayersThatCannotBeMeasured) {
  const auto refused = [](std::vector<pipeline::ProfiledLayer> layers, at::Tensor sample,
                          ErrorKind kind) {
    const auto got = pipeline::profile_layers(layers, std::move(sample));
    EXPECT_FALSE(got.ok());
    EXPECT_EQ(error_kind(got.status()), kind) << got.status();
    return std::string(got.status().message());
  };
  const pipeline::ProfiledLayer same{"same", [](const at::Tensor& x) { return x * 2; }, {}};
  const at::Tensor x = at::ones({2, 2});
  EXPECT_THAT(refused({}, x, ErrorKind::kInvalidArgument), HasSubstr("a profile of 0 layers"));
  EXPECT_THAT(refused({same}, {}, ErrorKind::kInvalidArgument), HasSubstr("without a sample"));
  EXPECT_THAT(
      refused({same,
               {"broken",
                [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of ideas"); },
                {}}},
              x, ErrorKind::kUser),
      AllOf(HasSubstr("layer 1 'broken'"), HasSubstr("out of ideas")));
  EXPECT_THAT(refused({{"argmax", [](const at::Tensor& t) { return t.argmax(); }, {}}}, x,
                      ErrorKind::kInvalidArgument),
              AllOf(HasSubstr("layer 0 'argmax'"), HasSubstr("no tensor of floating point")));
}

}  // namespace
}  // namespace weft::testing
