// Operators that compute a result from their arguments and do nothing else. Random ones draw from
// the callee's default generator.

#include <algorithm>

#include "weft/rpc/aten_operators.h"

namespace weft {

std::vector<std::string> default_aten_operators() {
  std::vector<std::string> names = {
      // elementwise, one argument
      "abs", "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil",
      "clone", "conj_physical", "cos", "cosh", "deg2rad", "detach", "digamma", "erf", "erfc",
      "erfinv", "exp", "exp2", "expm1", "floor", "frac", "gelu", "isfinite", "isinf", "isnan",
      "lgamma", "log", "log10", "log1p", "log2", "logical_not", "neg", "nonzero", "positive",
      "rad2deg", "reciprocal", "relu", "round", "round.decimals", "rsqrt", "sgn", "sigmoid", "sign",
      "signbit", "silu", "sin", "sinh", "softplus", "sqrt", "square", "tan", "tanh", "trunc", "t",
      // elementwise, two arguments and more
      "add.Tensor", "add.Scalar", "atan2", "bitwise_and.Tensor", "bitwise_and.Scalar",
      "bitwise_or.Tensor", "bitwise_or.Scalar", "bitwise_xor.Tensor", "bitwise_xor.Scalar",
      "bitwise_left_shift.Tensor", "bitwise_right_shift.Tensor", "div.Tensor", "div.Scalar",
      "div.Tensor_mode", "div.Scalar_mode", "eq.Tensor", "eq.Scalar", "equal", "floor_divide",
      "floor_divide.Scalar", "fmax", "fmin", "fmod.Tensor", "fmod.Scalar", "ge.Tensor", "ge.Scalar",
      "gt.Tensor", "gt.Scalar", "hypot", "le.Tensor", "le.Scalar", "lerp.Scalar", "lerp.Tensor",
      "logical_and", "logical_or", "logical_xor", "lt.Tensor", "lt.Scalar", "maximum", "minimum",
      "mul.Tensor", "mul.Scalar", "ne.Tensor", "ne.Scalar", "pow.Tensor_Tensor",
      "pow.Tensor_Scalar", "pow.Scalar", "remainder.Tensor", "remainder.Scalar", "rsub.Tensor",
      "rsub.Scalar", "sub.Tensor", "sub.Scalar", "true_divide.Tensor", "addcmul", "addcdiv",
      "clamp", "clamp.Tensor", "clamp_min", "clamp_max", "allclose", "isclose", "where.self",
      "masked_fill.Scalar", "masked_fill.Tensor", "masked_select",
      // linear algebra
      "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "dot", "einsum", "linear", "matmul",
      "mm", "mv", "outer", "tensordot", "trace", "tril", "triu", "diag", "diagonal", "kron",
      // reductions
      "all", "all.dim", "amax", "amin", "any", "any.dim", "argmax", "argmin", "argsort",
      "count_nonzero", "cumprod", "cumsum", "logsumexp", "max", "max.dim", "mean", "mean.dim",
      "median", "min", "min.dim", "norm.Scalar", "linalg_vector_norm", "prod", "prod.dim_int",
      "sort", "std", "std.dim", "sum", "sum.dim_IntList", "topk", "unique_dim", "var", "var.dim",
      "bincount", "histc",
      // shapes and selection
      "broadcast_to", "cat", "chunk", "concat", "expand", "flatten.using_ints", "flip", "gather",
      "index_select", "index_add", "movedim.int", "narrow", "permute", "repeat",
      "repeat_interleave.self_int", "reshape", "roll", "scatter.src", "scatter.value",
      "scatter_add", "select.int", "slice.Tensor", "split.Tensor", "split_with_sizes", "squeeze",
      "squeeze.dim", "stack", "swapaxes", "take", "tile", "transpose.int", "unbind.int", "unfold",
      "unsqueeze", "view", "vstack", "hstack", "contiguous", "to.dtype", "to_dense", "to_sparse",
      "coalesce",
      // factories
      "arange", "arange.start", "arange.start_step", "bernoulli", "eye", "eye.m", "full",
      "full_like", "linspace", "multinomial", "ones", "ones_like", "rand", "rand_like", "randint",
      "randint.low", "randn", "randn_like", "randperm", "scalar_tensor", "zeros", "zeros_like",
      // networks
      "adaptive_avg_pool2d", "avg_pool2d", "binary_cross_entropy",
      "binary_cross_entropy_with_logits", "conv1d", "conv2d", "conv3d", "cosine_similarity",
      "cross_entropy_loss", "dropout", "elu", "embedding", "group_norm", "hardtanh", "huber_loss",
      "kl_div", "l1_loss", "layer_norm", "leaky_relu", "log_sigmoid", "log_softmax.int",
      "max_pool2d", "mse_loss", "nll_loss", "one_hot", "pad", "pixel_shuffle", "smooth_l1_loss",
      "softmax.int", "upsample_nearest2d"};
  std::sort(names.begin(), names.end());
  for (std::string& name : names) name.insert(0, "aten::");
  return names;
}

}  // namespace weft
