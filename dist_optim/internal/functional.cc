#include "weft/dist_optim/internal/functional.h"

#include <cmath>

#include "ATen/Functions.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/dist_optim/internal/parameters.h"

namespace weft::internal {
namespace {

// Beyond it a double does not count one by one.
constexpr double kMostSteps = 1LL << 53;

std::shared_ptr<const UpdateRule> rule_or_throw(const std::string& name) {
  std::shared_ptr<const UpdateRule> rule = make_update_rule(name);
  if (rule == nullptr) {
    throw_error(make_error(ErrorKind::kNotFound,
                           absl::StrCat("there is no optimizer '", name, "'; there are ",
                                        absl::StrJoin(update_rule_names(), ", "))));
  }
  return rule;
}

// Orders updates on a device: a lock says which thread queues, and not what the device does when.
void order_here(Parameter* shared, const at::Tensor& parameter, const ParameterState& state) {
  if (!on_device(parameter)) return;
  std::vector<at::Tensor> all = state.buffers;
  all.push_back(parameter);
  shared->order_here(all);
}

// Beyond it the first rows would be out of the caches again before they are updated.
constexpr int64_t kMostBytesAhead = 1 << 20;
constexpr int64_t kLine = 64;

// Asks for the rows of a table that a sparse gradient names, all at once: LibTorch updates one after the other, and
// would wait for the memory of each.
void fetch_rows(const at::Tensor& table, const at::Tensor& gradient) {
  if (!gradient.is_sparse() || gradient.sparse_dim() != 1 || !table.is_cpu() ||
      !table.is_contiguous()) {
    return;
  }
  const int64_t rows = table.size(0);
  const int64_t row = rows > 0 ? static_cast<int64_t>(table.nbytes()) / rows : 0;
  if (row == 0 || gradient._nnz() > kMostBytesAhead / row) return;
  const at::Tensor indices = gradient._indices().contiguous();
  const auto* const named = indices.const_data_ptr<int64_t>();
  const char* const data = static_cast<const char*>(table.const_data_ptr());
  for (int64_t i = 0; i < indices.numel(); ++i) {
    if (named[i] < 0 || named[i] >= rows) return;  // the update says so
    for (int64_t at = 0; at < row; at += kLine) __builtin_prefetch(data + named[i] * row + at, 1);
  }
}

// One that fails half way counts, too, when it has changed the parameter; what it has queued comes
// before what is next.
void update_one(const UpdateRule& rule, const PackedOptions& options, Parameter* shared,
                const at::Tensor& parameter, const at::Tensor& gradient, ParameterState* state,
                int64_t* touched) {
  const uint32_t before = parameter._version();
  fetch_rows(parameter, gradient);
  try {
    rule.update(options, parameter, gradient, state);
  } catch (...) {
    if (parameter._version() == before) {
      shared->queued_here(parameter);
    } else {
      shared->updated(parameter);
      ++*touched;
    }
    throw;
  }
  shared->updated(parameter);
  ++*touched;
}

Status wrong_state(std::string_view key, std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("load_state_dict: '", std::string(key), "' ", std::string(what)));
}

int64_t step_of(std::string_view key, const at::Tensor& value) {
  if (value.numel() != 1 || value.is_complex()) throw_error(wrong_state(key, "is not one number"));
  const auto number = value.item<double>();
  if (number < 0 || number != std::floor(number) || number > kMostSteps) {
    throw_error(wrong_state(key, absl::StrCat("is ", number, ", and no number of steps")));
  }
  return static_cast<int64_t>(number);
}

// What the optimizer tells its owners of the options of a group: buffers depend on them.
PackedOptions options_of(const OwnerStateDict& state, int64_t group) {
  const std::string key = absl::StrCat(kGroupKey, group);
  const auto at = state.find(key);
  if (at == state.end() || !at->second.defined() || at->second.scalar_type() != at::kDouble ||
      at->second.dim() != 1) {
    throw_error(wrong_state(key, "is missing"));
  }
  const at::Tensor values = at->second.contiguous();
  return PackedOptions(values.data_ptr<double>(), values.data_ptr<double>() + values.numel());
}

}  // namespace

FunctionalOptimizer::FunctionalOptimizer(const std::string& rule) : rule_(rule_or_throw(rule)) {}

ParameterState* FunctionalOptimizer::state_of(size_t slot) {
  MutexLock lock(&states_mutex_);
  return states_[slot].get();
}

void FunctionalOptimizer::added(const std::vector<Slot>& slots, size_t first,
                                const PackedOptions& options) {
  std::vector<std::unique_ptr<ParameterState>> fresh;
  for (size_t i = first; i < slots.size(); ++i) {
    fresh.push_back(std::make_unique<ParameterState>());
    rule_->prepare(options, slots[i].parameter.detach(), fresh.back().get());
    slots[i].shared->queued_here(slots[i].parameter);
  }
  MutexLock lock(&states_mutex_);
  for (auto& one : fresh) states_.push_back(std::move(one));
}

void FunctionalOptimizer::removed(size_t first) {
  MutexLock lock(&states_mutex_);
  states_.resize(first);
}

void FunctionalOptimizer::check_options(const PackedOptions& options) const {
  throw_if_error(rule_->check_options(options));
}

Status FunctionalOptimizer::check_gradient(const Slot&, const at::Tensor& gradient,
                                           const PackedOptions& options) const {
  if (gradient.is_sparse()) return rule_->check_sparse(options);
  if (gradient.layout() != at::kStrided) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("its gradient is ", gradient.toString(),
                                   ": dense and sparse COO ones are supported"));
  }
  return rule_->check_dense(options);
}

Status FunctionalOptimizer::update(const std::vector<Slot>& slots,
                                   const std::vector<Update>& updates, const Options& options,
                                   Isolation isolation, int64_t* touched) {
  for (const Update& one : updates) {
    const Slot& slot = slots[one.slot];
    const PackedOptions& now = options[static_cast<size_t>(slot.group)];
    ParameterState* state = state_of(one.slot);
    // OPT-6: shares memory, and has a version of its own.
    const at::Tensor parameter = slot.parameter.variable_data();
    if (isolation == Isolation::kHogwild && rule_->prepared(now, *state)) {
      order_here(slot.shared.get(), parameter, *state);
      update_one(*rule_, now, slot.shared.get(), parameter, one.gradient, state, touched);
    } else {
      const ParameterLock lock(slot.shared.get());
      WEFT_RETURN_IF_ERROR(lock.status());
      order_here(slot.shared.get(), parameter, *state);
      rule_->prepare(now, parameter, state);
      update_one(*rule_, now, slot.shared.get(), parameter, one.gradient, state, touched);
    }
  }
  return absl::OkStatus();
}

OwnerStateDict FunctionalOptimizer::save(const std::vector<Slot>& slots) {
  OwnerStateDict out;
  for (size_t i = 0; i < slots.size(); ++i) {
    ParameterState* state = state_of(i);
    const ParameterLock lock(slots[i].shared.get());
    throw_if_error(lock.status());
    order_here(slots[i].shared.get(), slots[i].parameter, *state);
    out[absl::StrCat(i, ".step")] = at::scalar_tensor(state->steps.load(), at::kLong);
    for (size_t b = 0; b < state->buffers.size(); ++b) {
      if (!state->buffers[b].defined()) continue;
      out[absl::StrCat(i, ".", rule_->buffer_names()[b])] = state->buffers[b].clone();
    }
  }
  return out;
}

FunctionalOptimizer::Loaded FunctionalOptimizer::look_at(const std::vector<Slot>& slots,
                                                         const OwnerStateDict& state) const {
  Loaded out;
  out.steps.resize(slots.size(), -1);
  out.buffers.resize(slots.size());
  const auto& names = rule_->buffer_names();
  for (auto& buffers : out.buffers) buffers.resize(names.size());
  for (const auto& [key, value] : state) {
    const size_t dot = key.find('.');
    size_t slot = 0;
    if (key.starts_with(kGroupKey)) continue;
    if (dot == std::string::npos || !absl::SimpleAtoi(key.substr(0, dot), &slot) ||
        slot >= slots.size()) {
      throw_error(
          wrong_state(key, absl::StrCat("is of no parameter: this owner has ", slots.size())));
    }
    const std::string name = key.substr(dot + 1);
    if (!value.defined()) throw_error(wrong_state(key, "is undefined"));
    if (name == "step") {
      out.steps[slot] = step_of(key, value);
      continue;
    }
    size_t b = 0;
    while (b < names.size() && names[b] != name) ++b;
    if (b == names.size()) {
      throw_error(wrong_state(key, absl::StrCat("is nothing that ", rule_->name(),
                                                " keeps: ", absl::StrJoin(names, ", "))));
    }
    if (!value.is_floating_point()) {
      throw_error(wrong_state(
          key, absl::StrCat("is ", value.toString(), ", and not of a real floating type")));
    }
    const at::Tensor& parameter = slots[slot].parameter;
    const std::vector<int64_t> shape =
        !rule_->by_row(b) ? parameter.sizes().vec()
                          : std::vector<int64_t>{parameter.dim() == 0 ? 1 : parameter.size(0)};
    if (value.sizes() != shape) {
      throw_error(wrong_state(
          key, absl::StrCat("has the shape [", absl::StrJoin(value.sizes(), ", "), "] and not [",
                            absl::StrJoin(shape, ", "), "]: its parameter is [",
                            absl::StrJoin(parameter.sizes(), ", "), "]")));
    }
    out.buffers[slot][b] = value.to(parameter.options()).detach().clone();
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    if (out.steps[i] < 0) throw_error(wrong_state(absl::StrCat(i, ".step"), "is missing"));
    const PackedOptions options = options_of(state, slots[i].group);
    throw_if_error(rule_->check_options(options));
    for (size_t b = 0; b < names.size(); ++b) {
      if (out.buffers[i][b].defined() || !rule_->first_value(options, b).has_value()) continue;
      throw_error(wrong_state(absl::StrCat(i, ".", names[b]), "is missing"));
    }
  }
  return out;
}

void FunctionalOptimizer::load(const std::vector<Slot>& slots, const OwnerStateDict& state,
                               bool commit) {
  // All is looked at before anything is changed.
  Loaded loaded = look_at(slots, state);
  if (!commit) return;
  for (size_t i = 0; i < slots.size(); ++i) {
    ParameterState* into = state_of(i);
    const ParameterLock lock(slots[i].shared.get());
    throw_if_error(lock.status());
    order_here(slots[i].shared.get(), slots[i].parameter, *into);
    into->buffers = std::move(loaded.buffers[i]);
    into->made_after.clear();
    into->steps.store(loaded.steps[i]);
    slots[i].shared->queued_here(slots[i].parameter);
  }
}

}  // namespace weft::internal
