// Optimizers of stages: those of LibTorch. What they keep goes by parameter where the class is one of
// LibTorch's that keep something of each parameter by itself, else as one archive of the whole stage.

#include <algorithm>
#include <map>
#include <sstream>
#include <type_traits>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/scalar_tensor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"
#include "torch/serialize/input-archive.h"
#include "torch/serialize/output-archive.h"
#include "weft/pipeline/stage_optimizer.h"

namespace weft::pipeline {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;
using Kept = std::map<std::string, at::Tensor>;  // by name

constexpr const char* kArchiveName = "archive";

Status cannot(std::string_view what) { return make_error(ErrorKind::kInvalidArgument, what); }

std::string shape(const at::Tensor& t) {
  return absl::StrCat("[", absl::StrJoin(t.sizes(), ", "), "]");
}

// ---- what a class keeps of one parameter: f(name, field, whether it may be missing) ---------------

template <class State, class F>
void fields_of_adam(State& s, F f) {
  f("step", s.step(), false);
  f("exp_avg", s.exp_avg(), false);
  f("exp_avg_sq", s.exp_avg_sq(), false);
  f("max_exp_avg_sq", s.max_exp_avg_sq(), true);
}
template <class F>
void fields(torch::optim::AdamParamState& s, F f) {
  fields_of_adam(s, f);
}
template <class F>
void fields(torch::optim::AdamWParamState& s, F f) {
  fields_of_adam(s, f);
}
template <class F>
void fields(torch::optim::SGDParamState& s, F f) {
  f("momentum_buffer", s.momentum_buffer(), true);
}
template <class F>
void fields(torch::optim::AdagradParamState& s, F f) {
  f("step", s.step(), false);
  f("sum", s.sum(), false);
}
template <class F>
void fields(torch::optim::RMSpropParamState& s, F f) {
  f("step", s.step(), false);
  f("square_avg", s.square_avg(), false);
  f("momentum_buffer", s.momentum_buffer(), true);
  f("grad_avg", s.grad_avg(), true);
}

Status take(const std::string& name, const at::Tensor& from, const at::Tensor& parameter,
            int64_t* field) {
  (void)parameter;
  if (!from.defined() || from.numel() != 1 || from.scalar_type() != at::kLong ||
      from.item<int64_t>() < 0) {
    return cannot(absl::StrCat("'", name, "' is one whole number, and not negative"));
  }
  *field = from.item<int64_t>();
  return absl::OkStatus();
}
Status take(const std::string& name, const at::Tensor& from, const at::Tensor& parameter,
            at::Tensor* field) {
  if (!from.defined() || from.sizes() != parameter.sizes()) {
    return cannot(absl::StrCat("'", name, "' is ", from.defined() ? shape(from) : "undefined",
                               ", and its parameter ", shape(parameter)));
  }
  // Its own: what is loaded may be a copy that others have, too.
  *field = from.detach().to(parameter.device()).clone();
  return absl::OkStatus();
}
at::Tensor give(int64_t field) { return at::scalar_tensor(field, at::kLong); }
at::Tensor give(const at::Tensor& field) {
  return field.defined() ? field.detach().clone() : field;
}

// One class of states.
class Kind {
 public:
  virtual ~Kind() = default;
  virtual bool is_of(const OptimizerParamState& state) const = 0;
  virtual Kept get(const OptimizerParamState& state) const = 0;
  virtual StatusOr<std::unique_ptr<OptimizerParamState>> make(
      const std::string& name, Kept from, const at::Tensor& parameter) const = 0;
};

template <class State>
class KindOf final : public Kind {
 public:
  bool is_of(const OptimizerParamState& state) const override {
    return dynamic_cast<const State*>(&state) != nullptr;
  }
  Kept get(const OptimizerParamState& state) const override {
    State copy(static_cast<const State&>(state));  // its fields are shared, not written to
    Kept out;
    fields(copy, [&out](const char* name, auto& field, bool optional) {
      at::Tensor t = give(field);
      if (t.defined() || !optional) out.emplace(name, std::move(t));
    });
    return out;
  }
  StatusOr<std::unique_ptr<OptimizerParamState>> make(const std::string& name, Kept from,
                                                      const at::Tensor& parameter) const override {
    auto out = std::make_unique<State>();
    Status status;
    fields(*out, [&](const char* key, auto& field, bool optional) {
      const auto it = from.find(key);
      if (it == from.end()) {
        if (!optional && status.ok()) {
          status = cannot(absl::StrCat("there is no '", name, "/", key, "'"));
        }
        return;
      }
      const Status taken = take(absl::StrCat(name, "/", key), it->second, parameter, &field);
      if (status.ok()) status = taken;
      from.erase(it);
    });
    if (status.ok() && !from.empty()) {
      status =
          cannot(absl::StrCat("the optimizer keeps no '", name, "/", from.begin()->first, "'"));
    }
    if (!status.ok()) return status;
    return StatusOr<std::unique_ptr<OptimizerParamState>>(std::move(out));
  }
};

template <class Class, class State>
std::unique_ptr<Kind> kind_if(const Optimizer& optimizer) {
  if (dynamic_cast<const Class*>(&optimizer) == nullptr) return nullptr;
  return std::make_unique<KindOf<State>>();
}

// Null: of another class, as LBFGS, whose state is of all parameters together.
std::unique_ptr<Kind> kind_of(const Optimizer& o) {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  if (auto kind = kind_if<Adam, AdamParamState>(o)) return kind;
  if (auto kind = kind_if<AdamW, AdamWParamState>(o)) return kind;
  if (auto kind = kind_if<SGD, SGDParamState>(o)) return kind;
  if (auto kind = kind_if<Adagrad, AdagradParamState>(o)) return kind;
  return kind_if<RMSprop, RMSpropParamState>(o);
}

class TorchOptimizer final : public StageOptimizer {
 public:
  explicit TorchOptimizer(std::unique_ptr<Optimizer> inner)
      : inner_(std::move(inner)), kind_(kind_of(*inner_)) {
    if (kind_ == nullptr) return;
    for (const auto& [parameter, state] : inner_->state()) initial_[parameter] = state->clone();
  }

  void set_names(const std::vector<std::pair<std::string, at::Tensor>>& parameters) override {
    parameters_ = parameters;
  }
  Status step(const std::vector<at::Tensor>& gradients) override {
    (void)gradients;  // where the class looks for them
    return guarded([&] { inner_->step(); });
  }
  Status set_options(const std::vector<double>& options) override {
    if (options.empty()) return absl::OkStatus();
    return guarded([&] {
      for (auto& group : inner_->param_groups()) group.options().set_lr(options[0]);
    });
  }
  Kept state() const override {
    if (!by_parameter()) return {{kArchiveName, archive()}};
    Kept out;
    for (const auto& [name, parameter] : parameters_) {
      const auto it = inner_->state().find(parameter.unsafeGetTensorImpl());
      if (it == inner_->state().end()) continue;
      for (auto& [key, tensor] : kind_->get(*it->second)) {
        out.emplace(absl::StrCat(name, "/", key), tensor);
      }
    }
    return out;
  }
  Status load_state(const Kept& state) override {
    if (state.size() == 1 && state.begin()->first == kArchiveName) {
      return load_archive(state.begin()->second);
    }
    if (kind_ == nullptr || parameters_.empty()) {
      return cannot(absl::StrCat("the state of this optimizer is one archive of bytes, not ",
                                 state.size(), " tensors"));
    }
    std::map<std::string, Kept> by_name;
    for (const auto& [name, tensor] : state) {
      const size_t slash = name.rfind('/');
      if (slash == std::string::npos)
        return cannot(absl::StrCat("'", name, "' is of no parameter"));
      by_name[name.substr(0, slash)].emplace(name.substr(slash + 1), tensor);
    }
    return guarded([&]() -> Status {
      std::map<void*, std::unique_ptr<OptimizerParamState>> made;
      for (const auto& [parameter, initial] : initial_) made[parameter] = initial->clone();
      for (const auto& [name, parameter] : parameters_) {
        auto of_parameter = by_name.extract(name);
        if (of_parameter.empty()) continue;
        WEFT_ASSIGN_OR_RETURN(made[parameter.unsafeGetTensorImpl()],
                              kind_->make(name, std::move(of_parameter.mapped()), parameter));
      }
      if (!by_name.empty()) {
        return cannot(absl::StrCat("it has the state of '", by_name.begin()->first,
                                   "', which is no parameter of this stage"));
      }
      inner_->state().clear();
      for (auto& [parameter, one] : made) inner_->state()[parameter] = std::move(one);
      return absl::OkStatus();
    });
  }

 private:
  bool by_parameter() const {
    if (kind_ == nullptr) return false;
    size_t known = 0;
    for (const auto& [name, parameter] : parameters_) {
      const auto it = inner_->state().find(parameter.unsafeGetTensorImpl());
      if (it == inner_->state().end()) continue;
      if (!kind_->is_of(*it->second)) return false;
      ++known;
    }
    return !parameters_.empty() && known == inner_->state().size();
  }
  at::Tensor archive() const {
    torch::serialize::OutputArchive archive;
    inner_->save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    const std::string bytes = stream.str();
    at::Tensor out = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::copy(bytes.begin(), bytes.end(), out.data_ptr<uint8_t>());
    return out;
  }
  Status load_archive(const at::Tensor& archive) {
    if (!archive.defined() || archive.scalar_type() != at::kByte) {
      return cannot("an archive of an optimizer is a tensor of bytes");
    }
    return guarded([&] {
      const at::Tensor bytes = archive.contiguous();
      std::istringstream stream(
          std::string(reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()),
                      static_cast<size_t>(bytes.numel())));
      torch::serialize::InputArchive in;
      in.load_from(stream);
      inner_->load(in);
    });
  }
  template <class F>
  static Status guarded(F f) {
    try {
      if constexpr (std::is_void_v<decltype(f())>) {
        f();
      } else {
        return f();
      }
    } catch (...) {
      return status_from_current_exception();
    }
    return absl::OkStatus();
  }

  const std::unique_ptr<Optimizer> inner_;
  const std::unique_ptr<Kind> kind_;
  std::map<void*, std::unique_ptr<OptimizerParamState>> initial_;  // before the first step
  std::vector<std::pair<std::string, at::Tensor>> parameters_;
};

}  // namespace

std::shared_ptr<StageOptimizer> torch_optimizer(std::unique_ptr<torch::optim::Optimizer> inner) {
  if (inner == nullptr) {
    throw_error(make_error(ErrorKind::kInvalidArgument, "torch_optimizer: there is no optimizer"));
  }
  return std::make_shared<TorchOptimizer>(std::move(inner));
}

}  // namespace weft::pipeline
