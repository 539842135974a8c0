// Plans as text and JSON.
#include "weft/pipeline/plan.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/pipeline/schedule.h"

namespace weft::pipeline {
namespace {

using ::testing::HasSubstr;

Plan skips() {
  Plan plan;
  plan.schedule = "by-hand";
  plan.micro_batches = 1;
  plan.placement = {0, 1, 0};
  plan.edges = {{0, 1, 0}, {0, 2, 1}, {1, 2}};
  plan.tied = {{0, 2}};
  plan.workers = {{{ActionKind::kForward, 0, 0},
                   {ActionKind::kForward, 2, 0},
                   {ActionKind::kInputGrad, 2, 0},
                   {ActionKind::kWeightGrad, 2, 0},
                   {ActionKind::kReduce, 2},
                   {ActionKind::kBackward, 0, 0},
                   {ActionKind::kStep, 0},
                   {ActionKind::kStep, 2}},
                  {{ActionKind::kForward, 1, 0},
                   {ActionKind::kRecompute, 1, 0},
                   {ActionKind::kBackward, 1, 0},
                   {ActionKind::kStep, 1}}};
  throw_if_error(insert_transfers(&plan));
  return plan;
}

TEST(Plan, TextIsReadable) {
  EXPECT_EQ(to_text(skips()),
            "weft-plan 1\n"
            "schedule by-hand\n"
            "micro_batches 1\n"
            "placement 0 1 0\n"
            "edges 0>1:0 0>2:1 1>2\n"
            "tied 0 2\n"
            "worker 0: F0.0 SF0>1:0.0 RF1>2.0 F2.0 I2.0 SB2>1.0 W2.0 D2 RB1>0:0.0 B0.0 U0 U2\n"
            "worker 1: RF0>1:0.0 F1.0 SF1>2.0 C1.0 RB2>1.0 B1.0 SB1>0:0.0 U1\n");
}

TEST(Plan, PP_1_RoundTrips) {
  std::vector<Plan> plans{skips()};
  for (const std::string& name : schedule_names()) {
    for (int p : {1, 2, 3, 4}) {
      for (int m : {1, 5, 8}) plans.push_back(*make_schedule(name, p, m));
    }
  }
  for (const Plan& plan : plans) {
    const auto text = plan_from_text(to_text(plan));
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_EQ(*text, plan);
    const auto json = plan_from_json(to_json(plan));
    ASSERT_TRUE(json.ok()) << json.status() << to_json(plan);
    EXPECT_EQ(*json, plan);
    EXPECT_EQ(*parse_plan(to_json(plan)), *parse_plan(to_text(plan)));
  }
}

TEST(Plan, BadInput_TextThatIsNoPlan) {
  const std::string good = to_text(one_f_one_b(2, 2));
  const auto error = [&](std::string_view from, std::string_view to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    const auto read = plan_from_text(text);
    EXPECT_FALSE(read.ok()) << text;
    EXPECT_EQ(error_kind(read.status()), ErrorKind::kInvalidArgument);
    return std::string(read.status().message());
  };
  EXPECT_THAT(error("weft-plan 1", "weft-plan 2"), HasSubstr("line 1: expected 'weft-plan 1'"));
  EXPECT_THAT(error("batches 2", "batches 02"), HasSubstr("line 3: expected 'micro_batches N'"));
  EXPECT_THAT(error("batches 2", "batches 99999"), HasSubstr("99999 micro-batches"));
  EXPECT_THAT(error("placement 0 1", "placement 0 2"), HasSubstr("stage 1 is at worker 2 of 2"));
  EXPECT_THAT(error("edges 0>1", "edges 1>0"), HasSubstr("line 6"));  // its transfers are gone
  EXPECT_THAT(error("F0.0", "G0.0"), HasSubstr("line 6: expected an action such as 'F0.1'"));
  EXPECT_THAT(error("F0.0", "F0.2"), HasSubstr("worker 0: an action of stage 0 with micro-batch"));
  EXPECT_THAT(error("F0.0", "F7.0"), HasSubstr("stage 7 of 2"));
  EXPECT_THAT(error("F0.0", "F0.0.0"), HasSubstr("found 'F0.0.0'"));
  EXPECT_THAT(error("U0", "U0.1"), HasSubstr("micro-batch 1"));
  EXPECT_THAT(error("worker 1:", "worker 2:"), HasSubstr("expected 'the next worker'"));
  for (size_t n = 0; n < good.size(); ++n)
    EXPECT_FALSE(plan_from_text(good.substr(0, n)).ok()) << n;
}

TEST(Plan, BadInput_JsonThatIsNoPlan) {
  const std::string good = to_json(one_f_one_b(2, 2));
  for (size_t n = 0; n + 1 < good.size(); ++n) {  // without the last line end it is whole
    const auto read = plan_from_json(good.substr(0, n));
    ASSERT_FALSE(read.ok()) << n;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr("plan, byte"));
  }
  EXPECT_FALSE(plan_from_json(good + "x").ok());
}

TEST(Plan, BadInput_ActionsThatWaitForEachOther) {
  Plan plan;
  plan.schedule = "circle";
  plan.micro_batches = 1;
  plan.placement = {0, 1};
  plan.edges = {{0, 1}};
  plan.workers = {{{ActionKind::kBackward, 0, 0}, {ActionKind::kForward, 0, 0}},
                  {{ActionKind::kForward, 1, 0}, {ActionKind::kBackward, 1, 0}}};
  const Status status = insert_transfers(&plan);
  EXPECT_EQ(error_kind(status), ErrorKind::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("worker 0 at B0.0, worker 1 at F1.0"));
}

}  // namespace
}  // namespace weft::pipeline
