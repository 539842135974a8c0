// Whose turn it is on an object (rpc/internal/agent/object_turns.h), without any call.

#include "weft/rpc/internal/agent/object_turns.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace weft::testing {
namespace {

using Order = std::vector<uint64_t>;

class ObjectTurns : public ::testing::Test {
 protected:
  void write(uint64_t turn, const std::vector<uint64_t>& holding = {}) {
    turns_.acquire(turn, /*is_const=*/false, holding, [this, turn] { ran_.push_back(turn); });
  }
  void read(uint64_t turn, const std::vector<uint64_t>& holding = {}) {
    turns_.acquire(turn, /*is_const=*/true, holding, [this, turn] { ran_.push_back(turn); });
  }
  // Which of them run because this one has ended.
  Order end(uint64_t turn) {
    ran_.clear();
    turns_.release(turn);
    return ran_;
  }

  internal::ObjectTurns turns_;
  Order ran_;
};

TEST_F(ObjectTurns, OBJ_1_one_at_a_time_and_in_order_of_arrival) {
  for (uint64_t turn : {1, 2, 3}) write(turn);
  EXPECT_EQ(ran_, Order({1}));
  EXPECT_EQ(end(1), Order({2}));
  EXPECT_EQ(end(2), Order({3}));
  EXPECT_EQ(end(3), Order());
  write(4);
  EXPECT_EQ(ran_, Order({4}));
}

TEST_F(ObjectTurns, OBJ_2_const_calls_run_together_unless_another_one_waits_before_them) {
  read(1);
  read(2);
  EXPECT_EQ(ran_, Order({1, 2}));
  write(3);
  read(4);
  read(5);
  EXPECT_EQ(ran_, Order({1, 2}));
  EXPECT_EQ(end(1), Order());  // 2 still runs, and 4 does not overtake 3
  EXPECT_EQ(end(2), Order({3}));
  read(6);
  EXPECT_EQ(end(3), Order({4, 5, 6}));
  EXPECT_EQ(end(5), Order());
  EXPECT_EQ(end(4), Order());
  write(7);
  EXPECT_EQ(end(6), Order({7}));
}

TEST_F(ObjectTurns, OBJ_3_a_call_of_the_holders_chain_is_let_in_before_all_who_wait) {
  write(1);
  write(2);
  read(3);
  write(4, {9, 1});
  EXPECT_EQ(ran_, Order({1, 4}));
  read(5, {1});      // 4 is innermost now: it waits until that has ended
  write(6, {1, 4});  // and on top of 4
  EXPECT_EQ(ran_, Order({1, 4, 6}));
  EXPECT_EQ(end(6), Order());
  EXPECT_EQ(end(4), Order({5}));  // wherever it stands in the line
  EXPECT_EQ(end(5), Order());
  EXPECT_EQ(end(1), Order({2}));
  EXPECT_EQ(end(2), Order({3}));
}

TEST_F(ObjectTurns, OBJ_3_a_nested_group_is_of_its_chain_only) {
  read(1);
  read(2);
  read(3, {2});  // of one of the group
  EXPECT_EQ(ran_, Order({1, 2, 3}));
  read(4);
  write(5, {1});
  EXPECT_EQ(ran_, Order({1, 2, 3}));
  EXPECT_EQ(end(3), Order({4, 5}));  // 4 joins the group of 1 and 2, 5 goes on top
  EXPECT_EQ(end(1), Order());
  EXPECT_EQ(end(2), Order());
  read(6);
  EXPECT_EQ(ran_, Order());  // 5 is on top
  EXPECT_EQ(end(5), Order({6}));
}

TEST_F(ObjectTurns, AHolderMayEndBeforeWhatItNested) {
  write(1);
  write(2, {1});
  write(3, {2});
  write(4);
  EXPECT_EQ(end(2), Order());
  EXPECT_EQ(end(1), Order());
  read(5, {1});  // of a chain whose part here has ended: in the line as any other call
  EXPECT_EQ(end(3), Order({4}));
  EXPECT_EQ(end(4), Order({5}));
}

TEST_F(ObjectTurns, WhatWaitsMayGiveItsPlaceUp) {
  const auto held = std::make_shared<int>();
  read(1);
  turns_.acquire(2, false, {}, [held] { FAIL() << "it was given up"; });
  read(3);
  write(4);
  EXPECT_EQ(held.use_count(), 2);
  EXPECT_EQ(end(2), Order({3}));  // no call waits before it any more
  EXPECT_EQ(held.use_count(), 1);
  EXPECT_EQ(end(2), Order());  // it is not here
  EXPECT_EQ(end(1), Order());
  EXPECT_EQ(end(3), Order({4}));
}

// What is given up may end others by its end.
TEST_F(ObjectTurns, WhatIsGivenUpIsDestroyedWithoutTheLock) {
  struct Ends {
    explicit Ends(internal::ObjectTurns* of) : turns(of) {}
    ~Ends() { turns->release(1); }
    internal::ObjectTurns* const turns;
  };
  write(1);
  turns_.acquire(2, false, {}, [ends = std::make_shared<Ends>(&turns_)] {});
  write(3);
  EXPECT_EQ(end(2), Order({3}));
}

}  // namespace
}  // namespace weft::testing
