#ifndef WEFT_DIST_OPTIM_OPTIM_H_
#define WEFT_DIST_OPTIM_OPTIM_H_

// The optimizers that weft computes itself, for DistributedOptimizer: each takes gradients as a
// list and never touches `.grad`. Names, defaults and results are those of torch.optim
// where it has one of the name; `foreach`,
// `fused` and the like are not options here, because they do not change results.
//
//   weft::DistributedOptimizer<weft::optim::Adam> optimizer(worker, parameters, {.lr = 1e-2});
//
// Options are checked when the optimizer is made (kind invalid_argument, naming the option). Sparse
// gradients: SparseAdam, which takes no others, and SGD, Adagrad and RowWiseAdagrad without weight
// decay. Momentum moves every row of a parameter at every step, also those that the gradient does not
// name, as PyTorch's does: such a step costs what a dense one costs.

#include <string_view>

namespace weft::optim {

// Stochastic gradient descent; momentum as in Sutskever et al., "On the importance of
// initialization and momentum in deep learning" (2013), in torch.optim's form: the first step takes
// the gradient itself for the buffer, and lr multiplies the buffer.
struct SGD {
  static constexpr std::string_view kName = "SGD";  // as in state_dict()
  struct Options {
    double lr = 1e-2;
    double momentum = 0;
    double dampening = 0;     // of momentum
    double weight_decay = 0;  // L2 penalty
    bool nesterov = false;    // needs momentum, and no dampening
    bool maximize = false;
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("momentum", o.momentum), f("dampening", o.dampening);
    f("weight_decay", o.weight_decay), f("nesterov", o.nesterov), f("maximize", o.maximize);
  }
};

namespace internal {
struct AdamFields {
  template <class O, class F>
  static void visit(O& o, F f) {
    f("lr", o.lr), f("beta1", o.beta1), f("beta2", o.beta2), f("eps", o.eps);
    f("weight_decay", o.weight_decay), f("amsgrad", o.amsgrad), f("maximize", o.maximize);
  }
};
}  // namespace internal

// Kingma and Ba, "Adam: A method for stochastic optimization" (2014), algorithm 1; amsgrad: Reddi
// et al., "On the convergence of Adam and beyond" (2018).
struct Adam : internal::AdamFields {
  static constexpr std::string_view kName = "Adam";  // as in state_dict()
  struct Options {
    double lr = 1e-3;
    double beta1 = 0.9;       // decay of the first moment
    double beta2 = 0.999;     // decay of the second moment
    double eps = 1e-8;        // added to the denominator
    double weight_decay = 0;  // L2 penalty
    bool amsgrad = false;
    bool maximize = false;  // ascends
  };
};

// Loshchilov and Hutter, "Decoupled weight decay regularization" (2017), algorithm 2.
struct AdamW : internal::AdamFields {
  static constexpr std::string_view kName = "AdamW";  // as in state_dict()
  struct Options {
    double lr = 1e-3;
    double beta1 = 0.9;          // decay of the first moment
    double beta2 = 0.999;        // decay of the second moment
    double eps = 1e-8;           // added to the denominator
    double weight_decay = 1e-2;  // decoupled
    bool amsgrad = false;        // see above
    bool maximize = false;       // ascends
  };
};

// Adam for sparse gradients: a row that the gradient does not name keeps its value and its moments. A
// dense gradient is refused.
struct SparseAdam {
  static constexpr std::string_view kName = "SparseAdam";  // as in state_dict()
  struct Options {
    double lr = 1e-3;
    double beta1 = 0.9;     // decay of the first moment
    double beta2 = 0.999;   // decay of the second moment
    double eps = 1e-8;      // added to the denominator
    bool maximize = false;  // ascends
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("beta1", o.beta1), f("beta2", o.beta2), f("eps", o.eps);
    f("maximize", o.maximize);
  }
};

// Dozat, "Incorporating Nesterov momentum into Adam" (2016).
struct NAdam {
  static constexpr std::string_view kName = "NAdam";  // as in state_dict()
  struct Options {
    double lr = 2e-3;
    double beta1 = 0.9;                   // decay of the first moment
    double beta2 = 0.999;                 // decay of the second moment
    double eps = 1e-8;                    // added to the denominator
    double weight_decay = 0;              // L2 penalty
    double momentum_decay = 4e-3;         // of the schedule of momenta
    bool decoupled_weight_decay = false;  // as AdamW's
    bool maximize = false;
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("beta1", o.beta1), f("beta2", o.beta2), f("eps", o.eps);
    f("weight_decay", o.weight_decay), f("momentum_decay", o.momentum_decay);
    f("decoupled_weight_decay", o.decoupled_weight_decay), f("maximize", o.maximize);
  }
};

// Liu et al., "On the variance of the adaptive learning rate and beyond" (2019).
struct RAdam {
  static constexpr std::string_view kName = "RAdam";  // as in state_dict()
  struct Options {
    double lr = 1e-3;
    double beta1 = 0.9;                   // decay of the first moment
    double beta2 = 0.999;                 // decay of the second moment
    double eps = 1e-8;                    // added to the denominator
    double weight_decay = 0;              // L2 penalty
    bool decoupled_weight_decay = false;  // as AdamW's
    bool maximize = false;
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("beta1", o.beta1), f("beta2", o.beta2), f("eps", o.eps);
    f("weight_decay", o.weight_decay), f("decoupled_weight_decay", o.decoupled_weight_decay);
    f("maximize", o.maximize);
  }
};

// Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992). The averages
// are the buffer "ax" of state_dict().
struct ASGD {
  static constexpr std::string_view kName = "ASGD";  // as in state_dict()
  struct Options {
    double lr = 1e-2;
    double lambd = 1e-4;  // decay
    double alpha = 0.75;  // power by which the rate falls
    double t0 = 1e6;      // steps before averaging begins
    double weight_decay = 0;
    bool maximize = false;
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("lambd", o.lambd), f("alpha", o.alpha), f("t0", o.t0);
    f("weight_decay", o.weight_decay), f("maximize", o.maximize);
  }
};

// Duchi, Hazan and Singer, "Adaptive subgradient methods" (2011).
struct Adagrad {
  static constexpr std::string_view kName = "Adagrad";  // as in state_dict()
  struct Options {
    double lr = 1e-2;
    double lr_decay = 0;                   // of the rate, by steps
    double weight_decay = 0;               // L2 penalty
    double initial_accumulator_value = 0;  // of the sums of squares
    double eps = 1e-10;                    // added to the denominator
    bool maximize = false;                 // ascends
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("lr_decay", o.lr_decay), f("weight_decay", o.weight_decay);
    f("initial_accumulator_value", o.initial_accumulator_value), f("eps", o.eps);
    f("maximize", o.maximize);
  }
};

// Adagrad with one number for each row of the parameter (its first dimension): the sum, over the
// steps, of the mean square of the row's gradient. For embeddings: the state is a row's dimension
// times smaller than the values. torch.optim has none of this name.
struct RowWiseAdagrad {
  static constexpr std::string_view kName = "RowWiseAdagrad";  // as in state_dict()
  struct Options {
    double lr = 1e-2;
    double weight_decay = 0;               // L2 penalty
    double initial_accumulator_value = 0;  // of the sums of squares
    double eps = 1e-10;                    // added to the denominator
    bool maximize = false;                 // ascends
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("weight_decay", o.weight_decay);
    f("initial_accumulator_value", o.initial_accumulator_value), f("eps", o.eps);
    f("maximize", o.maximize);
  }
};

// McMahan et al., "Ad click prediction: a view from the trenches" (2013), algorithm 1, "FTRL-Proximal": the rate of
// an element falls with the sum of its squared gradients, and elements that matter little are exactly 0. With l1 and l2
// 0 it takes the steps of Adagrad with eps `beta`, beginning at whatever values the parameter has. torch.optim has none of
// this name.
struct FTRL {
  static constexpr std::string_view kName = "FTRL";  // as in state_dict()
  struct Options {
    double lr = 1e-1;  // above 0, and to be left as it is: sums are weighted by it
    double beta = 1;   // added to the root of an element's sum of squares
    double l1 = 0;     // elements whose sum is below it are 0
    double l2 = 0;     // L2 penalty, of the values and not of each step
    double initial_accumulator_value = 0;  // of the sums of squares
    bool maximize = false;                 // ascends
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("beta", o.beta), f("l1", o.l1), f("l2", o.l2);
    f("initial_accumulator_value", o.initial_accumulator_value), f("maximize", o.maximize);
  }
};

// Zheng et al., "Asynchronous stochastic gradient descent with delay compensation" (2017): SGD whose gradient g, computed
// with values that others have changed since, is taken to where the parameter is now, by the first order of a Taylor
// series with lambd g g^T as Hessian: g + lambd g g (now - then). `alpha` above 0 is their DC-ASGD-a, where lambd is
// divided by the root of a mean of squares (they use lambd 2 and alpha 0.95, without it 0.04).
// A DistributedOptimizer takes what its own last step left for `then`; a push to a table (ps/client.h) carries it.
struct DelayCompensatedSGD {
  static constexpr std::string_view kName = "DelayCompensatedSGD";  // as in state_dict()
  struct Options {
    double lr = 1e-2;
    double lambd = 0.04;      // how much is compensated; 0: SGD
    double alpha = 0;         // decay of the mean of squares; 0: there is none
    double eps = 1e-7;        // added to that mean
    double weight_decay = 0;  // L2 penalty
    bool maximize = false;    // ascends
    bool own_state =
        true;  // of one trainer, which keeps what its last step left; ps::rule() has it false
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("lambd", o.lambd), f("alpha", o.alpha), f("eps", o.eps);
    f("weight_decay", o.weight_decay), f("maximize", o.maximize), f("own_state", o.own_state);
  }
};

// Zeiler, "Adadelta: An adaptive learning rate method" (2012), algorithm 1, times lr.
struct Adadelta {
  static constexpr std::string_view kName = "Adadelta";  // as in state_dict()
  struct Options {
    double lr = 1.0;
    double rho = 0.9;         // decay of the averages
    double eps = 1e-6;        // added to the denominator
    double weight_decay = 0;  // L2 penalty
    bool maximize = false;    // ascends
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("rho", o.rho), f("eps", o.eps), f("weight_decay", o.weight_decay);
    f("maximize", o.maximize);
  }
};

// Tieleman and Hinton, "Lecture 6.5: RMSprop" (2012); centered: Graves, "Generating sequences with
// recurrent neural networks" (2013).
struct RMSprop {
  static constexpr std::string_view kName = "RMSprop";  // as in state_dict()
  struct Options {
    double lr = 1e-2;
    double alpha = 0.99;      // decay of the mean of squares
    double eps = 1e-8;        // added to the denominator
    double weight_decay = 0;  // L2 penalty
    double momentum = 0;      // 0: none
    bool centered = false;
    bool maximize = false;  // ascends
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("alpha", o.alpha), f("eps", o.eps), f("weight_decay", o.weight_decay);
    f("momentum", o.momentum), f("centered", o.centered), f("maximize", o.maximize);
  }
};

// Kingma and Ba (2014), algorithm 2.
struct Adamax {
  static constexpr std::string_view kName = "Adamax";  // as in state_dict()
  struct Options {
    double lr = 1e-3;
    double beta1 = 0.9;       // decay of the first moment
    double beta2 = 0.999;     // decay of the second moment
    double eps = 1e-8;        // added to the denominator
    double weight_decay = 0;  // L2 penalty
    bool maximize = false;    // ascends
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("beta1", o.beta1), f("beta2", o.beta2), f("eps", o.eps);
    f("weight_decay", o.weight_decay), f("maximize", o.maximize);
  }
};

// Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning" (1993),
// without weight backtracking.
struct Rprop {
  static constexpr std::string_view kName = "Rprop";  // as in state_dict()
  struct Options {
    double lr = 1e-2;  // the first step size
    double eta_minus = 0.5;
    double eta_plus = 1.2;
    double step_min = 1e-6;
    double step_max = 50;
    bool maximize = false;
  };
  template <class O, class F>  // f(name, value) for each option
  static void visit(O& o, F f) {
    f("lr", o.lr), f("eta_minus", o.eta_minus), f("eta_plus", o.eta_plus);
    f("step_min", o.step_min), f("step_max", o.step_max), f("maximize", o.maximize);
  }
};

}  // namespace weft::optim

#endif  // WEFT_DIST_OPTIM_OPTIM_H_
