#include "weft/dist_optim/spi/optimizer_core.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "ATen/Functions.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "weft/common/worker_key.h"
#include "weft/dist_optim/internal/functional.h"
#include "weft/dist_optim/internal/service.h"

namespace weft::internal {
namespace {

// Waits for all; the first error, with the owner that it is of.
template <class T, class Owners>
Status wait_for_all(const std::vector<Future<T>>& futures, const Owners& owners,
                    std::vector<T>* values) {
  Status first;
  for (size_t i = 0; i < futures.size(); ++i) {
    auto result = futures[i].try_wait(absl::InfiniteDuration());
    if (result.ok()) {
      values->push_back(*std::move(result));
    } else if (first.ok()) {
      first = annotate(result.status(), absl::StrCat("owner '", owners[i]->info.name, "'"));
    }
  }
  return first;
}
template <class Owners>
Status wait_for_all(const std::vector<Future<void>>& futures, const Owners& owners) {
  Status first;
  for (size_t i = 0; i < futures.size(); ++i) {
    const Status s = futures[i].try_wait(absl::InfiniteDuration());
    if (!s.ok() && first.ok()) {
      first = annotate(s, absl::StrCat("owner '", owners[i]->info.name, "'"));
    }
  }
  return first;
}

Status wrong_key(const std::string& key, std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("load_state_dict: '", key, "' ", std::string(what)));
}

}  // namespace

MakeLink functional_link_factory(std::string_view rule) {
  return make_link_factory<FunctionalOptimizer>(std::string(rule));
}

OptimizerCore::OptimizerCore(const Worker& worker, std::string_view name, OptimizerOptions options,
                             MakeLink make)
    : name_(name),
      options_(options),
      make_(std::move(make)),
      service_(DistOptimService::of(worker)),
      number_(++service_->last_optimizer),
      rule_(make_update_rule(name)) {}

const Worker& OptimizerCore::worker() const { return service_->worker(); }

std::string OptimizerCore::text() const {
  return rule_ == nullptr ? "optimizer of a user's class" : absl::StrCat("optimizer ", name_);
}

CallOptions OptimizerCore::call_options() const {
  return CallOptions{.deadline = options_.deadline.value_or(worker().rpc_timeout()),
                     .retry = Retry::kAtMostOnce,
                     .backpressure = Backpressure::kWait};
}

std::vector<OptimizerCore::OwnerRef> OptimizerCore::owners() const {
  MutexLock lock(&mutex_);
  return owners_;
}

size_t OptimizerCore::num_groups() const {
  MutexLock lock(&mutex_);
  return groups_.size();
}

void OptimizerCore::add_group(const std::vector<RRef<at::Tensor>>& parameters,
                              PackedOptions options) {
  if (rule_ != nullptr) throw_if_error(rule_->check_options(options));
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].valid()) continue;
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat(text(), ": parameter ", i, " of ", parameters.size(),
                                        " is an RRef that refers to nothing")));
  }
  MutexLock lock(&mutex_);
  std::vector<OwnerRef> owners = owners_;
  const auto group = static_cast<int64_t>(groups_.size());
  const size_t had = parameters_;
  lock.unlock();
  try {
    add_at_owners(parameters, options, group, &owners);
  } catch (...) {
    throw Error(annotate(status_from_current_exception(),
                         absl::StrCat(text(), " over ", parameters.size(), " parameters")));
  }
  lock.lock();
  if (parameters_ != had || groups_.size() != static_cast<size_t>(group)) {
    lock.unlock();
    throw_error(make_error(ErrorKind::kState, "two groups were added to an optimizer at once"));
  }
  owners_ = std::move(owners);
  groups_.push_back(std::move(options));
  parameters_ += parameters.size();
}

void OptimizerCore::add_at_owners(const std::vector<RRef<at::Tensor>>& parameters,
                                  const PackedOptions& options, int64_t group,
                                  std::vector<OwnerRef>* owners) {
  size_t first = 0;
  for (const OwnerRef& owner : *owners) first += owner->parameters.size();
  // The owners that get some, in the order in which they are met.
  std::vector<std::pair<size_t, ParameterPlan>> plans;  // by place in *owners
  std::vector<OwnerRef> old;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const WorkerInfo info = parameters[i].owner();
    size_t at = 0;
    while (at < owners->size() && key_of((*owners)[at]->info) != key_of(info)) ++at;
    size_t plan = 0;
    while (plan < plans.size() && plans[plan].first != at) ++plan;
    if (plan == plans.size()) {
      auto owner = std::make_shared<Owner>();
      owner->info = info;
      if (at == owners->size()) {
        owner->link = make_(worker(), info);
        owners->push_back(nullptr);
      } else {
        owner->link = (*owners)[at]->link;
        owner->parameters = (*owners)[at]->parameters;
        old.push_back((*owners)[at]);
      }
      (*owners)[at] = owner;
      plans.emplace_back(
          at, ParameterPlan{static_cast<int64_t>(options_.isolation), group, {}, options, number_});
    }
    std::const_pointer_cast<Owner>((*owners)[at])->parameters.push_back(first + i);
    plans[plan].second.parameters.push_back(parameters[i]);
  }
  std::vector<Future<void>> futures;
  std::vector<OwnerRef> asked;
  for (auto& [at, plan] : plans) {
    asked.push_back((*owners)[at]);
    futures.push_back(asked.back()->link->add_parameters(call_options(), plan));
  }
  const Status failed = wait_for_all(futures, asked);
  if (failed.ok()) return;
  // Those that are new are dropped with their links.
  std::vector<Future<void>> back;
  for (const OwnerRef& owner : old) {
    back.push_back(owner->link->remove_group(call_options(), group));
  }
  const Status undone = wait_for_all(back, old);
  throw_error(
      undone.ok()
          ? failed
          : annotate(failed, absl::StrCat("(and it could not be undone: ", undone.message(), ")")));
}

double OptimizerCore::lr(size_t group) const {
  MutexLock lock(&mutex_);
  if (group >= groups_.size() || groups_[group].empty()) {
    const size_t count = groups_.size();
    lock.unlock();
    throw_error(
        make_error(ErrorKind::kInvalidArgument,
                   absl::StrCat("lr: group ", group, " of ", count,
                                group < count ? " was given none here: its class has its own"
                                              : " is not there")));
  }
  return groups_[group][0];
}

void OptimizerCore::check_group(std::string_view what, size_t group) const {
  const size_t count = num_groups();
  if (group < count) return;
  throw_error(make_error(ErrorKind::kInvalidArgument,
                         absl::StrCat(std::string(what), ": group ", group, " of ", count,
                                      " is not there; add it by add_param_group()")));
}

PackedOptions OptimizerCore::options(size_t group) const {
  check_group("options", group);
  MutexLock lock(&mutex_);
  return groups_[group];
}

void OptimizerCore::set_options(PackedOptions options, size_t group) {
  check_group("set_options", group);
  if (rule_ != nullptr) throw_if_error(rule_->check_options(options));
  MutexLock lock(&mutex_);
  groups_[group] = std::move(options);
}

std::optional<double> OptimizerCore::option(std::string_view name, size_t group) const {
  if (rule_ == nullptr) return std::nullopt;
  const auto& names = rule_->option_names();
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end()) return std::nullopt;
  return options(group)[static_cast<size_t>(at - names.begin())];
}

void OptimizerCore::set_option(std::string_view name, double value, size_t group) {
  PackedOptions now = options(group);
  const auto& names = rule_->option_names();
  now[static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin())] = value;
  set_options(std::move(now), group);
}

double OptimizerCore::initial_lr(size_t group) {
  const double now = lr(group);
  MutexLock lock(&mutex_);
  return initial_lr_.try_emplace(group, now).first->second;
}

void OptimizerCore::set_initial_lr(double lr, size_t group) {
  MutexLock lock(&mutex_);
  initial_lr_[group] = lr;
}

void OptimizerCore::set_lr(double lr, size_t group) {
  if (!(lr >= 0) || !std::isfinite(lr)) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("set_lr: ", lr, " must be finite and not negative")));
  }
  MutexLock lock(&mutex_);
  if (group >= groups_.size()) {
    const size_t count = groups_.size();
    lock.unlock();
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("set_lr: group ", group, " of ", count, " is not there")));
  }
  if (groups_[group].empty()) groups_[group].resize(1);
  groups_[group][0] = lr;
}

std::vector<int64_t> OptimizerCore::versions() const {
  const std::vector<OwnerRef> owners = this->owners();
  std::vector<Future<std::vector<int64_t>>> futures;
  for (const OwnerRef& owner : owners) futures.push_back(owner->link->versions(call_options()));
  std::vector<std::vector<int64_t>> found;
  throw_if_error(wait_for_all(futures, owners, &found));
  std::vector<int64_t> out;
  for (size_t i = 0; i < owners.size(); ++i) {
    for (size_t k = 0; k < owners[i]->parameters.size(); ++k) {
      const size_t at = owners[i]->parameters[k];
      if (out.size() <= at) out.resize(at + 1);
      out[at] = found[i].at(k);
    }
  }
  return out;
}

std::map<std::string, at::Tensor> OptimizerCore::state_dict() const {
  const std::vector<OwnerRef> owners = this->owners();
  std::vector<Future<OwnerStateDict>> futures;
  for (const OwnerRef& owner : owners) futures.push_back(owner->link->state_dict(call_options()));
  std::vector<OwnerStateDict> found;
  throw_if_error(wait_for_all(futures, owners, &found));
  std::map<std::string, at::Tensor> out;
  for (size_t i = 0; i < owners.size(); ++i) {
    for (auto& [key, value] : found[i]) {
      const size_t dot = key.find('.');
      size_t slot = 0;
      if (dot != std::string::npos && absl::SimpleAtoi(key.substr(0, dot), &slot)) {
        out[absl::StrCat(owners[i]->parameters.at(slot), key.substr(dot))] = value.cpu();
      } else {  // of the owner as a whole
        out[absl::StrCat("owner.", i, ".", key)] = value.cpu();
      }
    }
  }
  MutexLock lock(&mutex_);
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (size_t o = 0; o < groups_[g].size(); ++o) {
      const std::string name = rule_ == nullptr ? "lr" : rule_->option_names()[o];
      out[absl::StrCat("group.", g, ".", name)] = at::scalar_tensor(groups_[g][o], at::kDouble);
    }
  }
  return out;
}

void OptimizerCore::load_state_dict(const std::map<std::string, at::Tensor>& state) {
  const std::vector<OwnerRef> owners = this->owners();
  std::vector<OwnerStateDict> parts(owners.size());
  std::vector<PackedOptions> groups;
  {
    MutexLock lock(&mutex_);
    groups = groups_;
  }
  std::set<std::pair<size_t, size_t>> missing;  // options of groups
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t o = 0; o < groups[g].size(); ++o) missing.emplace(g, o);
  }
  // Which owner has a parameter, as which of its own.
  std::map<size_t, std::pair<size_t, size_t>> places;
  for (size_t i = 0; i < owners.size(); ++i) {
    for (size_t k = 0; k < owners[i]->parameters.size(); ++k) {
      places[owners[i]->parameters[k]] = {i, k};
    }
  }
  for (const auto& [key, value] : state) {
    const std::vector<std::string> words = absl::StrSplit(key, absl::MaxSplits('.', 2));
    size_t index = 0;
    if (words.size() == 3 && absl::SimpleAtoi(words[1], &index)) {
      if (words[0] == "owner" && index < owners.size()) {
        parts[index][words[2]] = value;
        continue;
      }
      if (words[0] == "group" && index < groups.size()) {
        size_t o = 0;
        if (rule_ != nullptr) {
          const auto& names = rule_->option_names();
          while (o < names.size() && names[o] != words[2]) ++o;
        }
        if (rule_ == nullptr ? words[2] == "lr" : o < groups[index].size()) {
          if (!value.defined() || value.numel() != 1 || value.is_complex()) {
            throw_error(wrong_key(key, "is not one number"));
          }
          if (groups[index].empty()) groups[index].resize(1);
          groups[index][o] = value.item<double>();
          missing.erase({index, o});
          continue;
        }
      }
    }
    bool found = false;
    const size_t dot = key.find('.');
    if (dot != std::string::npos && absl::SimpleAtoi(key.substr(0, dot), &index)) {
      if (const auto at = places.find(index); at != places.end()) {
        parts[at->second.first][absl::StrCat(at->second.second, key.substr(dot))] = value;
        found = true;
      }
    }
    if (!found) throw_error(wrong_key(key, "is of no parameter, group or owner of this optimizer"));
  }
  for (const auto& [g, o] : missing) {
    const std::string name = rule_ == nullptr ? "lr" : rule_->option_names()[o];
    throw_error(wrong_key(absl::StrCat(kGroupKey, g, ".", name), "is missing"));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    if (rule_ == nullptr) {
      if (groups[g].empty() || (std::isfinite(groups[g][0]) && groups[g][0] >= 0)) continue;
      throw_error(
          wrong_key(absl::StrCat(kGroupKey, g, ".lr"),
                    absl::StrCat("is ", groups[g][0], ": a rate is finite and not negative")));
    }
    throw_if_error(rule_->check_options(groups[g]));
    for (OwnerStateDict& part : parts) {
      part[absl::StrCat(kGroupKey, g)] = at::tensor(groups[g], at::kDouble);
    }
  }
  for (const bool commit : {false, true}) {
    std::vector<Future<void>> futures;
    for (size_t i = 0; i < owners.size(); ++i) {
      futures.push_back(owners[i]->link->load_state_dict(call_options(), parts[i], commit));
    }
    throw_if_error(wait_for_all(futures, owners));
  }
  MutexLock lock(&mutex_);
  if (groups_.size() == groups.size()) groups_ = std::move(groups);
}

}  // namespace weft::internal
