// The state of any of LibTorch's optimizers by name. An optimizer is saved by its own save(), which
// names parameters by their addresses; here they get the module's names.

#include <optional>
#include <set>
#include <sstream>
#include <typeinfo>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "c10/util/Type.h"
#include "weft/collectives/internal/ddp/checkpoint_contents.h"

namespace weft::internal {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kOptimizer = "optimizer/";

Status unfit(std::string_view what) { return make_error(ErrorKind::kInvalidArgument, what); }

// One value of an optimizer that is no tensor, as a text with its type.
std::string text_of_value(const c10::IValue& value) {
  if (value.isNone()) return "none";
  if (value.isBool()) return value.toBool() ? "bool true" : "bool false";
  if (value.isInt()) return absl::StrCat("int ", value.toInt());
  if (value.isDouble()) return absl::StrFormat("double %.17g", value.toDouble());
  if (value.isString()) return absl::StrCat("string ", value.toStringRef());
  if (value.isTuple()) {
    std::string out = "doubles";
    for (const c10::IValue& one : value.toTupleRef().elements()) {
      absl::StrAppendFormat(&out, " %.17g", one.toDouble());
    }
    return out;
  }
  throw_error(unfit(absl::StrCat("an optimizer's value of type ", value.tagKind())));
}

// What stands behind "TYPE " in `text`; nothing: it is of another type.
std::optional<std::string> behind(const std::string& type, const std::string& text) {
  if (!absl::StartsWith(text, type + " ")) return std::nullopt;
  return text.substr(type.size() + 1);
}

StatusOr<c10::IValue> value_of_text(const std::string& text) {
  if (text == "none") return c10::IValue();
  if (text == "bool true") return c10::IValue(true);
  if (text == "bool false") return c10::IValue(false);
  if (const auto rest = behind("string", text)) return c10::IValue(*rest);
  int64_t number = 0;
  if (const auto rest = behind("int", text); rest && absl::SimpleAtoi(*rest, &number)) {
    return c10::IValue(number);
  }
  double real = 0;
  if (const auto rest = behind("double", text); rest && absl::SimpleAtod(*rest, &real)) {
    return c10::IValue(real);
  }
  if (const auto rest = behind("doubles", text)) {
    std::vector<c10::IValue> all;
    const std::vector<std::string> parts = absl::StrSplit(*rest, ' ');
    for (const std::string& one : parts) {
      if (!absl::SimpleAtod(one, &real)) return unfit(absl::StrCat("'", text, "' is no value"));
      all.emplace_back(real);
    }
    return c10::IValue(c10::ivalue::Tuple::create(std::move(all)));
  }
  return unfit(absl::StrCat("'", text, "' is no value"));
}

// The parameters of the optimizer, group by group, with the names that the module gives them.
struct NamedParameter {
  std::string name{};
  std::string key{};  // by which LibTorch's archives name it
  at::Tensor tensor{};
};
std::vector<std::vector<NamedParameter>> named_groups(const TrainingState& state) {
  std::map<const void*, std::string> names;
  for (const auto& item : state.module->named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  std::vector<std::vector<NamedParameter>> out;
  for (const auto& group : state.optimizer->param_groups()) {
    std::vector<NamedParameter>& all = out.emplace_back();
    for (const at::Tensor& one : group.params()) {
      const void* const impl = one.unsafeGetTensorImpl();
      const auto it = names.find(impl);
      // A parameter that is not the module's is known by its place.
      std::string name =
          it != names.end() ? it->second : absl::StrCat("group", out.size() - 1, ".", all.size());
      all.push_back({std::move(name), std::to_string(reinterpret_cast<size_t>(impl)), one});
    }
  }
  return out;
}

void put_values(InputArchive& archive, const std::string& prefix, CheckpointContents* out) {
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    const std::string name = absl::StrCat(prefix, key);
    if (value.isTensor()) {
      out->tensors.emplace(name, value.toTensor().detach());
    } else {
      out->metadata.emplace(name, text_of_value(value));
    }
  }
}

std::string class_of(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

std::string group_prefix(size_t group) { return absl::StrCat(kOptimizer, "group", group, "/"); }
std::string state_prefix(const std::string& parameter) {
  return absl::StrCat(kOptimizer, parameter, "/");
}

// Calls `take` with each entry of `map` whose name begins with `prefix`, without it.
template <class Map, class Take>
void with_prefix(const Map& map, const std::string& prefix, const Take& take) {
  for (auto it = map.lower_bound(prefix); it != map.end() && absl::StartsWith(it->first, prefix);
       ++it) {
    take(it->first.substr(prefix.size()), it->second);
  }
}

}  // namespace

void put_optimizer_archive(InputArchive& archive, const TrainingState& state,
                           CheckpointContents* out) {
  const auto groups = named_groups(state);
  InputArchive states;
  InputArchive saved_groups;
  archive.read("state", states);
  archive.read("param_groups", saved_groups);
  at::Tensor count;
  saved_groups.read("param_groups/size", count);
  out->metadata["optimizer_groups"] = absl::StrCat(count.item<int64_t>());
  for (size_t g = 0; g < static_cast<size_t>(count.item<int64_t>()); ++g) {
    InputArchive group;
    InputArchive options;
    saved_groups.read(absl::StrCat("param_groups/", g), group);
    group.read("options", options);
    put_values(options, group_prefix(g), out);
    at::Tensor size;
    group.read("params/size", size);
    const size_t parameters = static_cast<size_t>(size.item<int64_t>());
    out->metadata[absl::StrCat("optimizer_group", g)] = absl::StrCat(parameters);
    for (size_t i = 0; i < parameters; ++i) {
      c10::IValue key;
      group.read(absl::StrCat("params/", i), key);
      InputArchive one;
      if (!states.try_read(key.toStringRef(), one)) continue;  // it has made no step
      const bool known = g < groups.size() && i < groups[g].size();
      put_values(one, state_prefix(known ? groups[g][i].name : absl::StrCat("group", g, ".", i)),
                 out);
    }
  }
}

void put_optimizer(const TrainingState& state, CheckpointContents* out) {
  out->metadata["optimizer"] = class_of(*state.optimizer);
  OutputArchive archive;
  state.optimizer->save(archive);
  std::stringstream bytes;
  archive.save_to(bytes);
  InputArchive saved;
  saved.load_from(bytes, at::Device(at::kCPU));
  put_optimizer_archive(saved, state, out);
}

Status check_optimizer(const CheckpointContents& contents, const TrainingState& state) {
  const auto groups = named_groups(state);
  const auto number = [&contents](const std::string& name) {
    const auto it = contents.metadata.find(name);
    int64_t out = -1;
    if (it == contents.metadata.end() || !absl::SimpleAtoi(it->second, &out)) return int64_t{-1};
    return out;
  };
  const int64_t saved = number("optimizer_groups");
  const auto type = contents.metadata.find("optimizer");
  if (saved < 0 || type == contents.metadata.end()) return unfit("it has no optimizer");
  if (const std::string own = class_of(*state.optimizer); type->second != own) {
    return unfit(absl::StrCat("its optimizer is a ", type->second, ", and this one a ", own));
  }
  if (saved != static_cast<int64_t>(groups.size())) {
    return unfit(absl::StrCat("its optimizer has ", saved, " groups of parameters, and this one ",
                              groups.size()));
  }
  std::set<std::string> known;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t parameters = number(absl::StrCat("optimizer_group", g));
    if (parameters != static_cast<int64_t>(groups[g].size())) {
      return unfit(absl::StrCat("group ", g, " of its optimizer has ", parameters,
                                " parameters, and that of this one ", groups[g].size()));
    }
    known.insert(absl::StrCat("group", g));
    for (const NamedParameter& one : groups[g]) known.insert(one.name);
  }
  Status status = absl::OkStatus();
  const auto check = [&](const std::string& name) {
    const std::string owner = name.substr(0, name.find('/'));
    if (status.ok() && !known.contains(owner)) {
      status = unfit(
          absl::StrCat("its optimizer has a state of '", owner, "', which this one does not have"));
    }
  };
  const std::string all(kOptimizer);
  with_prefix(contents.tensors, all,
              [&](const std::string& name, const at::Tensor&) { check(name); });
  with_prefix(contents.metadata, all, [&](const std::string& name, const std::string& text) {
    check(name);
    if (status.ok()) status.Update(value_of_text(text).status());
  });
  return status;
}

void load_optimizer(const CheckpointContents& contents, const TrainingState& state) {
  const auto groups = named_groups(state);
  OutputArchive archive;
  OutputArchive states(archive.compilation_unit());
  OutputArchive saved_groups(archive.compilation_unit());
  const auto put_back = [&contents](const std::string& prefix, const at::Device& device,
                                    OutputArchive* out) {
    bool any = false;
    with_prefix(contents.tensors, prefix, [&](const std::string& key, const at::Tensor& tensor) {
      // Counters have no dimension, and stay where they are.
      out->write(key, tensor.dim() == 0 ? tensor : tensor.to(device), /*is_buffer=*/true);
      any = true;
    });
    with_prefix(contents.metadata, prefix, [&](const std::string& key, const std::string& text) {
      out->write(key, value_or_throw(value_of_text(text)));
      any = true;
    });
    return any;
  };
  saved_groups.write("param_groups/size",
                     at::scalar_tensor(static_cast<int64_t>(groups.size()), at::kLong));
  for (size_t g = 0; g < groups.size(); ++g) {
    OutputArchive group(archive.compilation_unit());
    OutputArchive options(archive.compilation_unit());
    group.write("params/size",
                at::scalar_tensor(static_cast<int64_t>(groups[g].size()), at::kLong));
    for (size_t i = 0; i < groups[g].size(); ++i) {
      const NamedParameter& one = groups[g][i];
      group.write(absl::StrCat("params/", i), c10::IValue(one.key));
      OutputArchive own(archive.compilation_unit());
      if (put_back(state_prefix(one.name), one.tensor.device(), &own)) states.write(one.key, own);
    }
    put_back(group_prefix(g), at::Device(at::kCPU), &options);
    group.write("options", options);
    saved_groups.write(absl::StrCat("param_groups/", g), group);
  }
  archive.write("pytorch_version", c10::IValue("1.5.0"));  // which LibTorch's load() asks for
  archive.write("state", states);
  archive.write("param_groups", saved_groups);
  std::stringstream bytes;
  archive.save_to(bytes);
  InputArchive in;
  in.load_from(bytes);
  // load() leaves the state of a parameter that has none in the checkpoint; there is to be none.
  auto before = std::move(state.optimizer->state());
  state.optimizer->state().clear();
  try {
    state.optimizer->load(in);
  } catch (...) {
    state.optimizer->state() = std::move(before);
    throw;
  }
}

}  // namespace weft::internal
