#include <cmath>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/ps/internal/part_data.h"

namespace weft::ps::internal {

PackedOptions options_with_rate(const UpdateRule& rule, PackedOptions options,
                                const std::optional<double>& rate) {
  if (!rate.has_value()) return options;
  const std::vector<std::string>& names = rule.option_names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == "lr") options[i] = *rate;
  }
  return options;
}

Status check_rate(const UpdateRule& rule, const PackedOptions& options,
                  const std::optional<double>& rate) {
  if (!rate.has_value()) return absl::OkStatus();
  return rule.check_options(options_with_rate(rule, options, rate));
}

Status check_tensor(const at::Tensor& tensor, c10::ScalarType dtype, at::IntArrayRef shape,
                    std::string_view what) {
  const auto wrong = [&](const std::string& is) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat(std::string(what), " ", is, ", and the table's part wants ",
                                   c10::toString(dtype), " [", absl::StrJoin(shape, ", "), "]"));
  };
  if (!tensor.defined()) return wrong("is undefined");
  if (!tensor.device().is_cpu()) return wrong(absl::StrCat("is on ", tensor.device().str()));
  if (tensor.layout() != at::kStrided) return wrong("is not strided");
  if (tensor.scalar_type() != dtype || tensor.sizes() != shape) {
    return wrong(absl::StrCat("is ", c10::toString(tensor.scalar_type()), " [",
                              absl::StrJoin(tensor.sizes(), ", "), "]"));
  }
  return absl::OkStatus();
}

namespace {
template <class T>
Status finite_of(const at::Tensor& values, int64_t row_length) {
  const T* const data = values.const_data_ptr<T>();
  const int64_t n = values.numel();
  // Each product is 0 or NaN. A single sum would wait for the one before it at every element.
  constexpr int64_t kSums = 16;
  T sums[kSums] = {};
  int64_t done = 0;
  for (; done + kSums <= n; done += kSums) {
    for (int64_t k = 0; k < kSums; ++k) sums[k] += data[done + k] * 0;
  }
  T all = 0;
  for (; done < n; ++done) all += data[done] * 0;
  for (const T sum : sums) all += sum;
  if (all == 0) return absl::OkStatus();
  int64_t bad = 0;
  int64_t first = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isfinite(data[i])) continue;
    if (first < 0) first = i;
    ++bad;
  }
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("push with ", bad, " of ", n, " values that are not finite, the first in row ",
                   first / row_length, ", column ", first % row_length,
                   "; nothing of the push was applied"));
}
}  // namespace

Status check_finite(const at::Tensor& contiguous, int64_t row_length) {
  return contiguous.scalar_type() == c10::ScalarType::Double
             ? finite_of<double>(contiguous, row_length)
             : finite_of<float>(contiguous, row_length);
}

std::vector<at::Tensor> image_of(const FrozenData& data) {
  std::vector<at::Tensor> out;
  for (size_t done = 0; data.copy_image(&out, &done);) continue;
  return out;
}

namespace {

std::string_view bytes_of_tensor(const at::Tensor& contiguous) {
  return {static_cast<const char*>(contiguous.const_data_ptr()), contiguous.nbytes()};
}

// Holds tensors that nothing writes to any more.
class FrozenDense final : public FrozenData {
 public:
  void add(std::string name, const at::Tensor& tensor) {
    columns_.push_back({std::move(name), tensor.scalar_type(), tensor.sizes().vec()});
    tensors_.push_back(tensor.contiguous());
  }
  const std::vector<Column>& columns() const override { return columns_; }
  Status write(size_t column, const std::function<Status(std::string_view)>& put) const override {
    return put(bytes_of_tensor(tensors_[column]));
  }
  bool copy_image(std::vector<at::Tensor>* image, size_t* done) const override {
    *image = {tensors_[0], tensors_[1]};
    for (const bool there : buffers_) {
      image->push_back(there ? tensors_[2 + (*done)++] : at::Tensor());
    }
    return false;
  }
  // Which of the rule's buffers there are.
  void has_buffers(std::vector<bool> buffers) { buffers_ = std::move(buffers); }

 private:
  std::vector<bool> buffers_;
  std::vector<Column> columns_;
  std::vector<at::Tensor> tensors_;
};

class DenseData final : public PartData {
 public:
  DenseData(const TableDefinition& definition, ElementRange range, AnswerMemory memory,
            RuleRef rule)
      : definition_(definition), rule_(std::move(rule)), range_(range), memory_(std::move(memory)) {
    values_ = at::empty({range.size()}, at::TensorOptions().dtype(definition.dtype));
  }

  void fill(const std::string& table) {
    const FirstValues first(definition_.init, table);
    const auto fill = [&](auto* out) {
      for (int64_t i = 0; i < range_.size(); ++i) {
        out[i] = static_cast<std::remove_pointer_t<decltype(out)>>(
            first.at(static_cast<uint64_t>(range_.begin + i), 0));
      }
    };
    if (definition_.dtype == c10::ScalarType::Double) {
      fill(values_.mutable_data_ptr<double>());
    } else {
      fill(values_.mutable_data_ptr<float>());
    }
    // What the rule keeps is asked for now, so that a push does not fail for want of memory.
    rule_->prepare(definition_.rule.options, values_, &state_);
  }

  size_t push_tensors() const override { return rule_->compensates_delay() ? 2 : 1; }
  size_t pull_tensors() const override { return 0; }

  StatusOr<Push> accept(const PushHeader& header, std::vector<at::Tensor> tensors) override {
    WEFT_RETURN_IF_ERROR(
        check_tensor(tensors[0], definition_.dtype, {range_.size()}, "a push of values that"));
    WEFT_RETURN_IF_ERROR(check_rate(*rule_, definition_.rule.options, header.rate));
    Push push{header.kind, header.rate, {}, tensors[0].contiguous()};
    WEFT_RETURN_IF_ERROR(check_finite(push.values, 1));
    if (tensors.size() == 1 || (tensors[1].defined() && tensors[1].numel() == 0)) return push;
    WEFT_RETURN_IF_ERROR(check_tensor(tensors[1], definition_.dtype, {range_.size()},
                                      "a push of values for which what it was computed with"));
    push.then = tensors[1].contiguous();
    WEFT_RETURN_IF_ERROR(check_finite(push.then, 1));
    return push;
  }

  void apply(std::vector<Push> pushes, uint64_t divisor) override {
    if (pushes.empty() || range_.size() == 0) return;
    thaw();
    if (pushes[0].kind == PushKind::kAssign) {
      values_.copy_(pushes[0].values);
      return;
    }
    at::Tensor gradient = pushes[0].values;
    if (pushes.size() > 1 || divisor > 1) gradient = gradient.clone();
    for (size_t i = 1; i < pushes.size(); ++i) gradient.add_(pushes[i].values);
    if (divisor > 1) gradient.div_(static_cast<double>(divisor));
    const PackedOptions options =
        options_with_rate(*rule_, definition_.rule.options, pushes.back().rate);
    // What goes into one step with others was computed with the values that are there.
    if (pushes.size() == 1 && pushes[0].then.defined()) {
      rule_->update_delayed(options, values_, gradient, pushes[0].then, &state_);
    } else {
      rule_->update(options, values_, gradient, &state_);
    }
  }

  std::vector<at::Tensor> pack(const Push& push) const override {
    if (!rule_->compensates_delay()) return {push.values};
    return {push.values, push.then.defined() ? push.then : at::empty({0}, values_.options())};
  }

  StatusOr<at::Tensor> read(const std::vector<at::Tensor>&) override {
    return memory_.copy_of(values_);
  }
  int64_t rows() const override { return range_.size(); }
  int64_t bytes() const override {
    auto sum = static_cast<int64_t>(values_.nbytes());
    for (const at::Tensor& buffer : state_.buffers) {
      if (buffer.defined()) sum += static_cast<int64_t>(buffer.nbytes());
    }
    return sum;
  }

  std::shared_ptr<const FrozenData> freeze() override {
    auto out = std::make_shared<FrozenDense>();
    out->add("values", values_);
    out->add("steps", at::full({1}, state_.steps.load(), at::kLong));
    std::vector<bool> there;
    for (size_t b = 0; b < state_.buffers.size(); ++b) {
      there.push_back(state_.buffers[b].defined());
      if (there.back()) out->add(rule_->buffer_names()[b], state_.buffers[b]);
    }
    out->has_buffers(std::move(there));
    frozen_ = true;
    return out;
  }
  std::vector<std::string> buffer_names() const override {
    std::vector<std::string> out = rule_->buffer_names();
    for (size_t b = 0; b < out.size(); ++b) {
      if (!state_.buffers[b].defined()) out[b].clear();
    }
    return out;
  }

  Status load(const std::vector<at::Tensor>& image,
              const std::function<void()>& /*between*/) override {
    thaw();
    if (image.size() != 2 + state_.buffers.size()) {
      return make_error(ErrorKind::kProtocol,
                        absl::StrCat("image of ", image.size(), " tensors, and a part has ",
                                     2 + state_.buffers.size()));
    }
    const auto check = [](const at::Tensor& from, const at::Tensor& to) -> Status {
      if (from.defined() != to.defined()) {
        return make_error(ErrorKind::kProtocol,
                          "image without a buffer of the rule, or with another");
      }
      if (!to.defined()) return absl::OkStatus();
      return check_tensor(from, to.scalar_type(), to.sizes().vec(), "image that");
    };
    WEFT_RETURN_IF_ERROR(check(image[0], values_));
    WEFT_RETURN_IF_ERROR(check_tensor(image[1], c10::ScalarType::Long, {1}, "steps that"));
    for (size_t b = 0; b < state_.buffers.size(); ++b) {
      WEFT_RETURN_IF_ERROR(check(image[b + 2], state_.buffers[b]));
    }
    values_.copy_(image[0]);
    state_.steps.store(image[1].item<int64_t>());
    for (size_t b = 0; b < state_.buffers.size(); ++b) {
      if (state_.buffers[b].defined()) state_.buffers[b].copy_(image[b + 2]);
    }
    return absl::OkStatus();
  }

 private:
  // Before a change: what was frozen stays as it is.
  void thaw() {
    if (!frozen_) return;
    values_ = values_.clone();
    for (at::Tensor& buffer : state_.buffers) {
      if (buffer.defined()) buffer = buffer.clone();
    }
    frozen_ = false;
  }

  const TableDefinition definition_;
  const RuleRef rule_;
  const ElementRange range_;
  AnswerMemory memory_;
  at::Tensor values_;
  ParameterState state_;
  bool frozen_ = false;
};

}  // namespace

StatusOr<std::unique_ptr<PartData>> make_dense_data(const TableDefinition& definition,
                                                    const std::string& table, ElementRange range,
                                                    AnswerMemory memory, RuleRef rule) {
  const at::AutoGradMode no_grad(false);
  if (rule == nullptr) rule = make_update_rule(definition.rule.name);
  try {
    auto data = std::make_unique<DenseData>(definition, range, std::move(memory), std::move(rule));
    data->fill(table);
    return data;
  } catch (const std::exception&) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat("no memory for elements ", range.begin, " to ", range.end,
                                   " of table '", table, "'"));
  }
}

Status PartData::evict(const std::vector<uint64_t>& keys) {
  if (keys.empty()) return absl::OkStatus();
  return make_error(ErrorKind::kProtocol, "rows that go, of a part that has none");
}

}  // namespace weft::ps::internal
