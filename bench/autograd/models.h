#ifndef WEFT_BENCH_AUTOGRAD_MODELS_H_
#define WEFT_BENCH_AUTOGRAD_MODELS_H_

// What the trainer (w0) and the server (w1) of the `autograd` suite compute, with the same figures
// as peer_torch_autograd.py:
//
//   pass    a small network: first and last linear layer here, two in between there; forward and
//           backward
//   step    the same, and a step of SGD over all parameters
//   rnn     embedding and decoder there, an LSTM of two layers here; backward, and a step of SGD
//   embed   1,024 rows of a table of 100,000 x 64 there, with a sparse gradient, a dense layer
//           here; backward, and a step of SGD

#include <functional>
#include <istream>
#include <string>
#include <string_view>

#include "weft/dist_autograd/context.h"
#include "weft/rpc/library.h"
#include "weft/rpc/worker.h"

namespace weft::bench {

struct StepHow {
  BackwardMode mode = BackwardMode::kExact;
  bool apart = false;  // backward() and step(), instead of backward_and_step()
};

Library models_library();
// One of them, ready to be done again and again. Throws std::invalid_argument.
std::function<void()> make_model(const Worker& worker, std::string_view name,
                                 const StepHow& how = {});

// As the command `many COUNT`.
std::string many_parameters(const Worker& worker, std::istream& in);

}  // namespace weft::bench

#endif  // WEFT_BENCH_AUTOGRAD_MODELS_H_
