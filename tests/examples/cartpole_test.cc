// The environment of examples/rl: its physics against steps worked out by hand, its ends, its seed.

#include "weft/examples/rl/cartpole.h"

#include <cmath>
#include <set>
#include <stdexcept>
#include <vector>

#include "gtest/gtest.h"

namespace rl {
namespace {

constexpr double kTiny = 1e-12;

void expect_near(const CartPole::Exact& got, const CartPole::Exact& want) {
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], kTiny) << "number " << i;
}

TEST(CartPolePhysics, UprightAndAtRestItIsPushedByTheForceAlone) {
  // sin 0 = 0, cos 0 = 1: push = 10/1.1 = 100/11. The pole turns back with
  // -(100/11) / (0.5 (4/3 - 0.1/1.1)) = -(100/11) / (41/66) = -600/41, the cart speeds up with
  // 100/11 + 0.05 (600/41) / 1.1 = 100/11 + 300/451 = 400/41.
  const double speed = 0.02 * 400 / 41;
  const double turn = -0.02 * 600 / 41;
  expect_near(CartPole::advance({0, 0, 0, 0}, 10), {0.02 * speed, speed, 0.02 * turn, turn});
  expect_near(CartPole::advance({0, 0, 0, 0}, -10), {-0.02 * speed, -speed, -0.02 * turn, -turn});
}

TEST(CartPolePhysics, SpeedsCarryOnWithoutForce) {
  // Upright nothing pulls; the new places follow from the new speeds.
  expect_near(CartPole::advance({1, 2, 0, 0}, 0), {1.04, 2, 0, 0});
  // With the pole turning, sin 0 = 0 still leaves both speeds as they are.
  expect_near(CartPole::advance({0, 0, 0, 3}, 0), {0, 0, 0.06, 3});
}

TEST(CartPolePhysics, ALeaningPoleFallsAndPushesTheCartAway) {
  // Angle pi/6, sin = 1/2, cos^2 = 3/4, turning with 2 rad/s: push = 0.05 * 4 * 0.5 / 1.1 = 1/11.
  const double cos = std::sqrt(3.0) / 2;
  const double angle = std::asin(0.5);
  const double turn_change = (4.9 - cos / 11) / (0.5 * (4.0 / 3 - 0.075 / 1.1));
  const double speed_change = 1.0 / 11 - turn_change * cos / 22;
  const double speed = 0.02 * speed_change;
  const double turn = 2 + 0.02 * turn_change;
  expect_near(CartPole::advance({0, 0, angle, 2}, 0),
              {0.02 * speed, speed, angle + 0.02 * turn, turn});
  EXPECT_GT(turn_change, 0);
  EXPECT_LT(speed_change, 0);
}

TEST(CartPolePhysics, LeftMirrorsRight) {
  const CartPole::Exact right = CartPole::advance({0.3, -0.2, 0.1, 0.7}, 10);
  const CartPole::Exact left = CartPole::advance({-0.3, 0.2, -0.1, -0.7}, -10);
  for (size_t i = 0; i < right.size(); ++i) EXPECT_EQ(right[i], -left[i]);
}

TEST(CartPoleEnds, TheTrackAndTheAngleHaveLimitsOnBothSides) {
  const double angle = 12 * std::acos(-1.0) / 180;
  for (const double side : {-1.0, 1.0}) {
    EXPECT_FALSE(CartPole::failed({side * 2.4, 9, 0, 9}));
    EXPECT_TRUE(CartPole::failed({side * 2.4001, 0, 0, 0}));
    EXPECT_FALSE(CartPole::failed({0, 9, side * (angle - 1e-6), 9}));
    EXPECT_TRUE(CartPole::failed({0, 0, side * (angle + 1e-6), 0}));
  }
}

TEST(CartPoleEnds, PushedToOneSideThePoleFallsSoonAndTheEpisodeIsOver) {
  CartPole game(Draws(1, 1));
  game.reset();
  int steps = 0;
  CartPole::Step now;
  while (!now.ended) {
    now = game.step(1);
    EXPECT_EQ(now.reward, 1);
    ASSERT_LE(++steps, 20);
  }
  EXPECT_LT(now.state[2], -0.2F) << "it falls to the left";
  EXPECT_THROW(game.step(1), std::logic_error);
  game.reset();
  EXPECT_FALSE(game.step(1).ended);
}

TEST(CartPoleEnds, ABalancedEpisodeEndsAfter200Steps) {
  // Pushes to where the pole leans and turns: good enough for any start.
  CartPole game(Draws(2, 1));
  CartPole::Step now{.state = game.reset()};
  int steps = 0;
  while (!now.ended) {
    const bool right = now.state[2] + now.state[3] + 0.1F * (now.state[0] + now.state[1]) > 0;
    now = game.step(right ? 1 : 0);
    ++steps;
  }
  EXPECT_EQ(steps, 200);
  EXPECT_LT(std::abs(now.state[2]), 0.2F) << "it stands";
}

TEST(CartPoleEnds, OnlyTwoActionsAndOnlyInAnEpisode) {
  CartPole game(Draws(1, 1));
  EXPECT_THROW(game.step(0), std::logic_error);
  game.reset();
  EXPECT_THROW(game.step(2), std::invalid_argument);
  EXPECT_THROW(game.step(-1), std::invalid_argument);
}

TEST(CartPoleSeed, EqualSeedsGiveEqualEpisodesAndStartsAreWithinBounds) {
  const auto play = [](uint64_t seed, uint64_t stream) {
    CartPole game(Draws(seed, stream));
    std::vector<State> seen;
    for (int episode = 0; episode < 50; ++episode) {
      seen.push_back(game.reset());
      for (const float number : seen.back()) EXPECT_LE(std::abs(number), 0.05F);
      for (CartPole::Step now; !now.ended;) seen.push_back((now = game.step(0)).state);
    }
    return seen;
  };
  EXPECT_EQ(play(7, 1), play(7, 1));
  EXPECT_NE(play(7, 1), play(7, 2));
  EXPECT_NE(play(7, 1), play(8, 1));
  EXPECT_NE(play(7, 1), play(7 + (uint64_t{1} << 32), 1));
}

TEST(CartPoleSeed, DrawsFillTheUnitInterval) {
  Draws draws(1, 1);
  std::set<int> tenths;
  for (int i = 0; i < 1000; ++i) {
    const double x = draws.next();
    ASSERT_GE(x, 0);
    ASSERT_LT(x, 1);
    tenths.insert(static_cast<int>(10 * x));
  }
  EXPECT_EQ(tenths.size(), 10);
}

}  // namespace
}  // namespace rl
