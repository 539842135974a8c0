#include "weft/examples/rl/cartpole.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace rl {
namespace {

State rounded(const CartPole::Exact& at) {
  State state;
  for (size_t i = 0; i < at.size(); ++i) state[i] = static_cast<float>(at[i]);
  return state;
}

std::mt19937_64 generator(uint64_t seed, uint64_t stream) {
  std::seed_seq sequence{seed & 0xffffffff, seed >> 32, stream};
  return std::mt19937_64(sequence);
}

}  // namespace

Draws::Draws(uint64_t seed, uint64_t stream) : bits_(generator(seed, stream)) {}

// The standard leaves open what its distributions draw.
double Draws::next() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }

CartPole::Exact CartPole::advance(const Exact& from, double force) {
  const auto [x, speed, angle, turn] = from;
  const double sin = std::sin(angle);
  const double cos = std::cos(angle);
  const double mass = kCartMass + kPoleMass;
  const double push = (force + kPoleMass * kHalfLength * turn * turn * sin) / mass;
  const double turn_change =
      (kGravity * sin - cos * push) / (kHalfLength * (4.0 / 3.0 - kPoleMass * cos * cos / mass));
  const double speed_change = push - kPoleMass * kHalfLength * turn_change * cos / mass;
  const double new_speed = speed + kTau * speed_change;
  const double new_turn = turn + kTau * turn_change;
  return {x + kTau * new_speed, new_speed, angle + kTau * new_turn, new_turn};
}

bool CartPole::failed(const Exact& at) {
  return std::abs(at[0]) > kMaxPosition || std::abs(at[2]) > kMaxAngle;
}

State CartPole::reset() {
  for (double& number : at_) number = 0.1 * draws_.next() - 0.05;
  steps_ = 0;
  running_ = true;
  return rounded(at_);
}

CartPole::Step CartPole::step(int64_t action) {
  if (!running_) throw std::logic_error("the episode has ended: reset() begins the next");
  if (action != 0 && action != 1) {
    throw std::invalid_argument("action " + std::to_string(action) +
                                ": 0 pushes to the left, 1 to the right");
  }
  at_ = advance(at_, action == 1 ? kForce : -kForce);
  ++steps_;
  running_ = !failed(at_) && steps_ < kMaxSteps;
  return {.state = rounded(at_), .reward = 1, .ended = !running_};
}

}  // namespace rl
