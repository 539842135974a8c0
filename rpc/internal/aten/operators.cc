#include "weft/rpc/internal/aten/operators.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/function_schema.h"
#include "ATen/core/ivalue.h"
#include "ATen/core/jit_type.h"
#include "ATen/core/stack.h"
#include "weft/rpc/internal/codec/text.h"
#include "weft/rpc/struct.h"

namespace weft {
namespace {

// What travels of at::TensorOptions.
struct WireOptions {
  std::optional<int64_t> dtype;
  std::optional<int64_t> layout;
  std::optional<std::string> device;
  std::optional<bool> pinned_memory;
  std::optional<bool> requires_grad;
};
WEFT_STRUCT(WireOptions, dtype, layout, device, pinned_memory, requires_grad);

bool legal_dtype(int64_t v) { return v >= 0 && v < int64_t{c10::NumScalarTypes} - 1; }
bool legal_layout(int64_t v) {
  return v == static_cast<int64_t>(at::kStrided) || v == static_cast<int64_t>(at::kSparse);
}
bool legal_memory_format(int64_t v) {
  return v >= 0 && v < static_cast<int64_t>(at::MemoryFormat::NumOptions);
}

}  // namespace

void Codec<at::Scalar>::encode(Encoder& out, const at::Scalar& value) {
  if (value.isBoolean()) {
    out.put_bool(value.toBool());
  } else if (value.isIntegral(/*includeBool=*/false)) {
    out.put_int(value.type() == at::ScalarType::UInt64 ? internal::WireInt::of(value.toUInt64())
                                                       : internal::WireInt::of(value.toLong()));
  } else if (value.isFloatingPoint()) {
    out.put_float(value.toDouble());
  } else if (value.isComplex()) {
    const c10::complex<double> c = value.toComplexDouble();
    out.put(std::tuple<double, double>(c.real(), c.imag()));
  } else {
    out.fail(make_error(ErrorKind::kInvalidArgument, "a symbolic scalar cannot be sent"));
  }
}

StatusOr<at::Scalar> Codec<at::Scalar>::decode(Decoder& in) {
  switch (in.next()) {
    case ValueKind::kBool: {
      WEFT_ASSIGN_OR_RETURN(const bool value, in.take_bool());
      return at::Scalar(value);
    }
    case ValueKind::kInt: {
      WEFT_ASSIGN_OR_RETURN(const internal::WireInt value, in.take_int());
      if (value.above) return at::Scalar(static_cast<uint64_t>(value.bits));
      return at::Scalar(value.bits);
    }
    case ValueKind::kFloat: {
      WEFT_ASSIGN_OR_RETURN(const double value, in.take_float());
      return at::Scalar(value);
    }
    case ValueKind::kTuple: {
      WEFT_ASSIGN_OR_RETURN(const auto parts, (in.take<std::tuple<double, double>>()));
      return at::Scalar(c10::complex<double>(std::get<0>(parts), std::get<1>(parts)));
    }
    default: return in.fail("expected a scalar, found another kind");
  }
}

void Codec<at::TensorOptions>::encode(Encoder& out, const at::TensorOptions& value) {
  WireOptions wire;
  if (value.has_dtype()) {
    wire.dtype = static_cast<int64_t>(c10::typeMetaToScalarType(value.dtype()));
  }
  if (value.has_layout()) wire.layout = static_cast<int64_t>(value.layout());
  if (value.has_device()) wire.device = value.device().str();
  if (value.has_pinned_memory()) wire.pinned_memory = value.pinned_memory();
  if (value.has_requires_grad()) wire.requires_grad = value.requires_grad();
  out.put(wire);
}

StatusOr<at::TensorOptions> Codec<at::TensorOptions>::decode(Decoder& in) {
  WEFT_ASSIGN_OR_RETURN(const WireOptions wire, in.take<WireOptions>());
  at::TensorOptions value;
  if (wire.dtype.has_value()) {
    if (!legal_dtype(*wire.dtype)) return in.fail("expected a dtype, found another number");
    value = value.dtype(static_cast<at::ScalarType>(*wire.dtype));
  }
  if (wire.layout.has_value()) {
    if (!legal_layout(*wire.layout)) return in.fail("expected a layout, found another number");
    value = value.layout(static_cast<at::Layout>(*wire.layout));
  }
  if (wire.device.has_value()) {
    try {
      value = value.device(c10::Device(*wire.device));
    } catch (const std::exception&) {
      return in.fail("expected the name of a device, found another string");
    }
  }
  if (wire.pinned_memory.has_value()) value = value.pinned_memory(*wire.pinned_memory);
  if (wire.requires_grad.has_value()) value = value.requires_grad(*wire.requires_grad);
  return value;
}

namespace internal {
namespace {

enum class Base { kTensor, kScalar, kInt, kFloat, kBool, kString, kOptions, kDefault };
enum class Check { kNothing, kDtype, kLayout, kMemoryFormat };

// One argument of the signature; kOptions stands for four of the schema, kDefault for one that
// never travels.
struct Plan {
  Base base = Base::kTensor;
  bool list = false;
  bool optional = false;
  Check check = Check::kNothing;
  bool has_default = false;
  std::string name;
};

std::optional<Base> base_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType: return Base::kTensor;
    case c10::TypeKind::NumberType: return Base::kScalar;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType: return Base::kInt;
    case c10::TypeKind::FloatType: return Base::kFloat;
    case c10::TypeKind::BoolType: return Base::kBool;
    case c10::TypeKind::StringType: return Base::kString;
    default: return std::nullopt;
  }
}

std::optional<Plan> plan_of(const c10::TypePtr& type) {
  Plan plan;
  c10::TypePtr inner = type;
  if (inner->kind() == c10::TypeKind::OptionalType) {
    plan.optional = true;
    inner = inner->castRaw<c10::OptionalType>()->getElementType();
  }
  if (inner->kind() == c10::TypeKind::ListType) {
    plan.list = true;
    inner = inner->castRaw<c10::ListType>()->getElementType();
  }
  const std::optional<Base> base = base_of(*inner);
  if (!base.has_value()) return std::nullopt;
  plan.base = *base;
  if (plan.list && plan.base == Base::kString) return std::nullopt;
  switch (inner->kind()) {
    case c10::TypeKind::ScalarTypeType: plan.check = Check::kDtype; break;
    case c10::TypeKind::LayoutType: plan.check = Check::kLayout; break;
    case c10::TypeKind::MemoryFormatType: plan.check = Check::kMemoryFormat; break;
    default: break;
  }
  return plan;
}

bool is_options_group(const std::vector<c10::Argument>& arguments, size_t at) {
  static constexpr const char* kNames[] = {"dtype", "layout", "device", "pin_memory"};
  if (at + 4 > arguments.size()) return false;
  for (size_t i = 0; i < 4; ++i) {
    if (arguments[at + i].name() != kNames[i]) return false;
  }
  return true;
}

StatusOr<std::vector<Plan>> plans_of(const c10::FunctionSchema& schema) {
  std::vector<Plan> plans;
  const std::vector<c10::Argument>& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    Plan plan;
    if (is_options_group(arguments, i)) {
      plan.base = Base::kOptions;
      plan.has_default = arguments[i].default_value().has_value();
      i += 3;
    } else {
      const std::optional<Plan> known = plan_of(arguments[i].real_type());
      if (known.has_value()) {
        plan = *known;
        plan.has_default = arguments[i].default_value().has_value();
      } else if (arguments[i].real_type()->kind() == c10::TypeKind::OptionalType) {
        plan.base = Base::kDefault;  // Generator?
        plan.has_default = true;
      } else {
        return make_error(
            ErrorKind::kUnimplemented,
            cat("argument '", arguments[i].name(), "' of ", schema.name(), " has type ",
                arguments[i].real_type()->str(), ", which does not travel"));
      }
    }
    plan.name = arguments[i].name();
    plans.push_back(std::move(plan));
  }
  return plans;
}

std::string kind_text(const Plan& plan) {
  static constexpr const char* kKinds[] = {"tensor", "scalar",         "int", "float", "bool",
                                           "string", "tensor_options", ""};
  std::string text = kKinds[static_cast<int>(plan.base)];
  if (plan.list) text = cat("list<", text, ">");
  if (plan.optional) text = cat("optional<", text, ">");
  return text;
}

StatusOr<c10::IValue> take_plain(Decoder& in, const Plan& plan) {
  switch (plan.base) {
    case Base::kTensor: {
      if (plan.list) {
        WEFT_ASSIGN_OR_RETURN(std::vector<at::Tensor> value, in.take<std::vector<at::Tensor>>());
        for (const at::Tensor& one : value) {
          if (!one.defined())
            return in.fail(cat("argument '", plan.name, "' has an undefined tensor"));
        }
        return c10::IValue(std::move(value));
      }
      WEFT_ASSIGN_OR_RETURN(at::Tensor value, in.take_tensor());
      if (!value.defined()) {
        if (plan.optional) return c10::IValue();
        return in.fail(cat("argument '", plan.name, "' is an undefined tensor"));
      }
      return c10::IValue(std::move(value));
    }
    case Base::kScalar: {
      if (plan.list) {
        WEFT_ASSIGN_OR_RETURN(const std::vector<at::Scalar> value,
                              in.take<std::vector<at::Scalar>>());
        c10::impl::GenericList list(c10::NumberType::get());
        for (const at::Scalar& one : value) list.push_back(c10::IValue(one));
        return c10::IValue(std::move(list));
      }
      WEFT_ASSIGN_OR_RETURN(const at::Scalar value, in.take<at::Scalar>());
      return c10::IValue(value);
    }
    case Base::kInt: {
      if (plan.list) {
        WEFT_ASSIGN_OR_RETURN(std::vector<int64_t> value, in.take<std::vector<int64_t>>());
        return c10::IValue(std::move(value));
      }
      WEFT_ASSIGN_OR_RETURN(const int64_t value, in.take<int64_t>());
      const bool legal = plan.check == Check::kNothing ||
                         (plan.check == Check::kDtype && legal_dtype(value)) ||
                         (plan.check == Check::kLayout && legal_layout(value)) ||
                         (plan.check == Check::kMemoryFormat && legal_memory_format(value));
      if (!legal) return in.fail(cat("argument '", plan.name, "' cannot be ", value));
      return c10::IValue(value);
    }
    case Base::kFloat: {
      if (plan.list) {
        WEFT_ASSIGN_OR_RETURN(std::vector<double> value, in.take<std::vector<double>>());
        return c10::IValue(std::move(value));
      }
      WEFT_ASSIGN_OR_RETURN(const double value, in.take<double>());
      return c10::IValue(value);
    }
    case Base::kBool: {
      if (plan.list) {
        WEFT_ASSIGN_OR_RETURN(const std::vector<bool> value, in.take<std::vector<bool>>());
        c10::List<bool> list;
        for (const bool one : value) list.push_back(one);
        return c10::IValue(std::move(list));
      }
      WEFT_ASSIGN_OR_RETURN(const bool value, in.take<bool>());
      return c10::IValue(value);
    }
    case Base::kString: {
      WEFT_ASSIGN_OR_RETURN(std::string value, in.take<std::string>());
      return c10::IValue(std::move(value));
    }
    case Base::kOptions:
    case Base::kDefault: break;
  }
  return in.fail("expected an argument that travels");
}

// Takes one argument and pushes the one, or four, of the schema.
Status take_argument(Decoder& in, const Plan& plan, c10::Stack* stack, bool* requires_grad) {
  if (plan.base == Base::kOptions) {
    WEFT_ASSIGN_OR_RETURN(const at::TensorOptions options, in.take<at::TensorOptions>());
    stack->emplace_back(c10::optTypeMetaToScalarType(options.dtype_opt()));
    stack->emplace_back(options.layout_opt());
    stack->emplace_back(options.device_opt());
    stack->emplace_back(options.pinned_memory_opt());
    *requires_grad = options.requires_grad();
    return absl::OkStatus();
  }
  if (plan.optional) {
    WEFT_ASSIGN_OR_RETURN(const bool some, in.begin_some());
    if (!some) {
      stack->emplace_back();
      return absl::OkStatus();
    }
  }
  WEFT_ASSIGN_OR_RETURN(c10::IValue value, take_plain(in, plan));
  if (plan.optional) in.end();
  stack->push_back(std::move(value));
  return absl::OkStatus();
}

Status put_result(Encoder& out, const Plan& plan, const c10::IValue& value) {
  const bool matches = plan.base == Base::kTensor
                           ? (plan.list ? value.isTensorList() : value.isTensor())
                       : plan.base == Base::kScalar ? value.isScalar()
                       : plan.base == Base::kInt    ? value.isInt()
                       : plan.base == Base::kFloat  ? value.isDouble()
                       : plan.base == Base::kBool   ? value.isBool()
                                                    : false;
  if (!matches) {
    return make_error(ErrorKind::kInternal, cat("the operator returned ", value.tagKind(),
                                                " where its schema says ", kind_text(plan)));
  }
  switch (plan.base) {
    case Base::kTensor:
      if (plan.list) {
        out.put(value.toTensorVector());
      } else {
        out.put_tensor(value.toTensor());
      }
      break;
    case Base::kScalar: out.put(value.toScalar()); break;
    case Base::kInt: out.put(value.toInt()); break;
    case Base::kFloat: out.put(value.toDouble()); break;
    default: out.put(value.toBool()); break;
  }
  return absl::OkStatus();
}

struct Operator {
  c10::OperatorHandle handle;
  std::vector<Plan> plans;  // of all arguments
  std::vector<Plan> results;

  // Runs with the first `given` arguments that travel.
  void run(size_t given, Payload arguments, Outcome outcome) const;
  Status take_all(size_t given, Payload arguments, c10::Stack* stack, bool* requires_grad) const;
};

Status Operator::take_all(size_t given, Payload arguments, c10::Stack* stack,
                          bool* requires_grad) const {
  const std::vector<c10::Argument>& schema = handle.schema().arguments();
  Decoder in(std::move(arguments));
  WEFT_RETURN_IF_ERROR(in.begin_tuple(given));
  size_t taken = 0;
  for (const Plan& plan : plans) {
    if (plan.base != Base::kDefault && taken < given) {
      WEFT_RETURN_IF_ERROR(take_argument(in, plan, stack, requires_grad));
      ++taken;
      continue;
    }
    for (size_t n = plan.base == Base::kOptions ? 4 : 1; n > 0; --n) {
      stack->push_back(schema[stack->size()].default_value().value_or(c10::IValue()));
    }
  }
  in.end();
  return in.finish();
}

void Operator::run(size_t given, Payload arguments, Outcome outcome) const {
  c10::Stack stack;
  bool requires_grad = false;
  if (Status s = take_all(given, std::move(arguments), &stack, &requires_grad); !s.ok()) {
    outcome.fail(annotate(s, "arguments"));
    return;
  }
  try {
    handle.callBoxed(stack);
    if (requires_grad && !stack.empty() && stack[0].isTensor()) {
      stack[0].toTensor().set_requires_grad(true);
    }
    if (outcome.keeps() && stack.size() == 1 && stack[0].isTensor()) {
      outcome.keep(std::make_shared<at::Tensor>(stack[0].toTensor()));
      return;
    }
    if (outcome.keeps() || stack.size() != results.size()) {
      outcome.fail(make_error(ErrorKind::kUnimplemented,
                              "only operators that return one tensor can keep their result here"));
      return;
    }
    Payload result;
    Encoder out(&result);
    Status put;
    if (results.size() != 1) out.begin_tuple(results.size());
    for (size_t i = 0; i < results.size() && put.ok(); ++i)
      put = put_result(out, results[i], stack[i]);
    if (results.size() != 1) out.end();
    outcome.done(std::move(result), put.ok() ? out.status() : put);
  } catch (...) {
    outcome.fail(status_from_handler_exception());
  }
}

// Two tensors of so many elements together broadcast to at most 128 x 128: computed sooner than a
// thread of the pool wakes up.
constexpr int64_t kFewElements = 256;

// Elementwise on at most two tensors.
bool is_arithmetic(std::string_view name) {
  static constexpr std::string_view kNames[] = {
      "aten::abs",        "aten::add.Scalar", "aten::add.Tensor", "aten::clone",
      "aten::div.Scalar", "aten::div.Tensor", "aten::exp",        "aten::log",
      "aten::maximum",    "aten::minimum",    "aten::mul.Scalar", "aten::mul.Tensor",
      "aten::neg",        "aten::relu",       "aten::sigmoid",    "aten::sqrt",
      "aten::square",     "aten::sub.Scalar", "aten::sub.Tensor", "aten::tanh"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

}  // namespace

StatusOr<std::vector<MethodEntry>> aten_entries(const std::string& name) {
  const std::vector<std::string> allowed = default_aten_operators();
  if (!std::binary_search(allowed.begin(), allowed.end(), name)) {
    return make_error(
        ErrorKind::kPermission,
        cat("'", name, "' is not on the list of operators that may be called by others"));
  }
  const size_t dot = name.find('.');
  const std::optional<c10::OperatorHandle> handle = c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), dot == std::string::npos ? std::string() : name.substr(dot + 1)});
  if (!handle.has_value()) {
    return make_error(ErrorKind::kNotFound, cat("this LibTorch has no operator '", name, "'"));
  }
  const c10::FunctionSchema& schema = handle->schema();
  if (schema.is_mutable()) {
    return make_error(ErrorKind::kPermission, cat("'", name, "' changes its arguments"));
  }
  WEFT_ASSIGN_OR_RETURN(std::vector<Plan> plans, plans_of(schema));
  std::vector<Plan> results;
  std::string result_text;
  for (const c10::Argument& result : schema.returns()) {
    const std::optional<Plan> plan = plan_of(result.real_type());
    if (!plan.has_value() || plan->optional || (plan->list && plan->base != Base::kTensor)) {
      return make_error(ErrorKind::kUnimplemented,
                        cat("'", name, "' returns ", result.real_type()->str()));
    }
    if (!result_text.empty()) result_text.push_back(',');
    result_text.append(kind_text(*plan));
    results.push_back(*plan);
  }
  if (results.size() != 1) result_text = cat("tuple<", result_text, ">");

  const auto op = std::make_shared<const Operator>(Operator{*handle, plans, std::move(results)});
  std::vector<MethodEntry> entries;
  std::string arguments;
  size_t given = 0;
  // The signature may end wherever everything that follows has a default.
  for (size_t i = 0; i <= plans.size(); ++i) {
    const bool may_end = std::all_of(plans.begin() + static_cast<std::ptrdiff_t>(i), plans.end(),
                                     [](const Plan& plan) { return plan.has_default; });
    const bool repeats = i > 0 && plans[i - 1].base == Base::kDefault && !entries.empty();
    if (may_end && !repeats) {
      entries.push_back(make_entry(name, cat("(", arguments, ")->", result_text),
                                   /*inline_ok=*/false,
                                   [op, given](CallContext&, const std::shared_ptr<void>&,
                                               Payload payload, Outcome outcome) {
                                     op->run(given, std::move(payload), std::move(outcome));
                                   }));
      if (is_arithmetic(name)) entries.back().method.inline_elements = kFewElements;
    }
    if (i == plans.size() || plans[i].base == Base::kDefault) continue;
    if (given++ > 0) arguments.push_back(',');
    arguments.append(kind_text(plans[i]));
  }
  return entries;
}

}  // namespace internal
}  // namespace weft
