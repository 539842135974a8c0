// Outputs that have no gradient: an error where a stage then could not train, and none where nothing
// before them trains.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/pipeline/internal/service.h"
#include "weft/rpc/inspection.h"
#include "weft/tests/pipeline/model.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Status error_of_step(const World& world) {
  try {
    world.pipe->step({numbers(8, 0.37)}, numbers(8, 0.91));
  } catch (const Error& error) {
    return error.status();
  }
  return absl::OkStatus();
}

// Without an error the stages before it, and its own weights, would stay as they are without a word.
TEST(PipelineOutputs, BadInput_AnOutputWithoutAGradient) {
  const auto ends_at = [](const pipeline::Plan& plan, const std::string& where) {
    SCOPED_TRACE(plan.schedule + " " + where);
    World world(plan);
    EXPECT_TRUE(error_of_step(world).ok());
    world.blocks[1].rpc_sync(&BlockImpl::detach);
    const Status status = error_of_step(world);
    EXPECT_EQ(error_kind(status), ErrorKind::kInvalidArgument) << status;
    const auto wanted = AllOf(
        HasSubstr("pipeline step 1, worker 'worker1', stage 1, micro-batch 0, action " + where),
        HasSubstr("no output has a gradient, and what it is made of has: 1 tensors, the first [2, "
                  "6]"));
    EXPECT_THAT(std::string(status.message()), wanted);
    for (size_t w = 0; w < world.cluster->size(); ++w) {
      Inspection seen(100);
      (*world.cluster)[w].service<pipeline::internal::PipelineService>()->put_inspection(&seen);
      EXPECT_THAT(seen.text(), wanted) << w;
    }
    world.expect_nothing_left();
  };
  ends_at(pipeline::one_f_one_b(3, 4), "F1.0");
  ends_at(pipeline::zb_h1(3, 4), "F1.0");
  // The first forward records no graph.
  ends_at(pipeline::with_recompute(pipeline::one_f_one_b(3, 4)), "C1.0");
}

// A stage that is frozen, and has nothing that trains before it, is no error, and has no gradient.
TEST(PipelineOutputs, FrozenStagesAtTheBeginningGiveOutputsWithoutAGradient) {
  for (const std::string schedule : {"1f1b", "zb-h1", "zb-v"}) {
    SCOPED_TRACE(schedule);
    World world(*pipeline::make_schedule(schedule, 2, 4));
    Local local(world.plan.stages());
    world.blocks[0].rpc_sync(&BlockImpl::freeze);
    local.blocks[0]->freeze();
    const at::Tensor x = numbers(9, 0.37);
    const at::Tensor y = numbers(9, 0.91);
    EXPECT_EQ(world.pipe->step({x}, y).loss, local.step(x, y, 4));
    EXPECT_TRUE(world.pipe->gradients(0).empty());
    for (int s = 1; s < world.plan.stages(); ++s) {
      const auto got = world.pipe->gradients(s);
      for (const auto& item : local.blocks[s]->named_parameters()) {
        ASSERT_EQ(got.count(item.key()), 1u) << item.key();
        EXPECT_TRUE(at::equal(got.at(item.key()), item.value().grad())) << s << " " << item.key();
      }
    }
    // Outputs alone are of no concern.
    world.blocks[1].rpc_sync(&BlockImpl::detach);
    EXPECT_EQ(world.pipe->forward({x})[0].sizes(), x.sizes());
    world.expect_nothing_left();
  }
}

}  // namespace
}  // namespace weft::testing
