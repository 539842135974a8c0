#ifndef WEFT_EXAMPLES_RL_CARTPOLE_H_
#define WEFT_EXAMPLES_RL_CARTPOLE_H_

// CartPole: a pole stands on a cart, which is pushed to the left or to the right 50 times a second
// so that the pole does not fall. The problem, its equations and its numbers are those of A. Barto,
// R. Sutton and C. Anderson, "Neuronlike adaptive elements that can solve difficult learning
// control problems", IEEE Transactions on Systems, Man, and Cybernetics 13 (1983), without
// friction.
//
// One thread.

#include <array>
#include <cstdint>
#include <random>

namespace rl {

// Numbers in [0, 1): equal (seed, stream) give equal numbers with every standard library.
class Draws {
 public:
  Draws(uint64_t seed, uint64_t stream);
  double next();

 private:
  std::mt19937_64 bits_;
};

// Position of the cart (m), its speed (m/s), angle of the pole from upright (rad), its speed
// (rad/s).
using State = std::array<float, 4>;

class CartPole {
 public:
  static constexpr double kGravity = 9.8;                                 // m/s^2
  static constexpr double kCartMass = 1.0;                                // kg
  static constexpr double kPoleMass = 0.1;                                // kg
  static constexpr double kHalfLength = 0.5;                              // m
  static constexpr double kForce = 10.0;                                  // N
  static constexpr double kTau = 0.02;                                    // s between two pushes
  static constexpr double kMaxPosition = 2.4;                             // m
  static constexpr double kMaxAngle = 12 * 3.14159265358979323846 / 180;  // rad
  static constexpr int kMaxSteps = 200;

  using Exact = std::array<double, 4>;  // as State
  // Where the system is kTau after `from` when `force` (N, to the right) acts meanwhile. By
  // semi-implicit Euler: first the speeds, then the places with the new speeds.
  static Exact advance(const Exact& from, double force);
  // The cart has left the track, or the pole has fallen.
  static bool failed(const Exact& at);

  struct Step {
    State state{};
    float reward = 0;    // 1 for every step, also the last
    bool ended = false;  // failed, or kMaxSteps are over
  };

  explicit CartPole(const Draws& draws) : draws_(draws) {}

  // A new episode: each number of the state is drawn from [-0.05, 0.05).
  State reset();
  // 0 pushes to the left, 1 to the right. Throws std::invalid_argument for another action,
  // std::logic_error without an episode.
  Step step(int64_t action);

 private:
  Draws draws_;
  Exact at_{};
  int steps_ = 0;
  bool running_ = false;
};

}  // namespace rl

#endif  // WEFT_EXAMPLES_RL_CARTPOLE_H_
