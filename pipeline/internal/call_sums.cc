#include "weft/pipeline/internal/call_sums.h"

#include "ATen/ops/add.h"
#include "ATen/ops/div.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"

namespace weft::pipeline::internal {
namespace {

std::string bucket_text(const SumMessage& part) {
  return absl::StrCat("bucket ", part.bucket, " of round ", part.round, " of reducer '",
                      part.reducer.substr(0, 80), "'");
}

bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
}

}  // namespace

Status CallSums::add_reducer(const std::string& name, std::vector<WorkerInfo> replicas) {
  MutexLock lock(&mutex_);
  if (!closed_.ok()) return closed_;
  if (!reducers_.emplace(name, Reducer{std::move(replicas), {}}).second) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("this worker has a reducer '", name, "' already"));
  }
  return absl::OkStatus();
}

void CallSums::remove_reducer(const std::string& name) {
  std::vector<Parts> left;
  {
    MutexLock lock(&mutex_);
    if (reducers_.erase(name) == 0) return;
    left = take(name);
  }
  answer(std::move(left),
         make_error(ErrorKind::kState, absl::StrCat("reducer '", name, "' is gone")));
}

Status CallSums::refused(const SumMessage& part, const Parts& parts) const {
  const auto reducer = reducers_.find(part.reducer);
  const bool known = reducer != reducers_.end();
  if (known && !reducer->second.failed.ok()) return reducer->second.failed;
  const auto size = known ? static_cast<int64_t>(reducer->second.replicas.size()) : part.size;
  if (part.size != size || part.rank < 0 || part.rank >= size || part.tensors.empty()) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("replica ", part.rank, " of ", part.size, " gives ",
                                   part.tensors.size(), " gradients to ", bucket_text(part),
                                   known ? absl::StrCat(", which has ", size, " replicas") : ""));
  }
  if (parts.count(part.rank) > 0) {
    return make_error(ErrorKind::kProtocol, absl::StrCat("replica ", part.rank, " gives ",
                                                         bucket_text(part), " a second time"));
  }
  for (const at::Tensor& t : part.tensors) {
    if (t.defined() && t.layout() == at::kStrided) continue;
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("replica ", part.rank, " gives a gradient that is ",
                     t.defined() ? "sparse" : "undefined", " to ", bucket_text(part)));
  }
  if (parts.empty()) return absl::OkStatus();
  const auto& [rank, first] = *parts.begin();
  bool same = first.tensors.size() == part.tensors.size();
  for (size_t k = 0; same && k < part.tensors.size(); ++k) {
    same = same_kind(first.tensors[k], part.tensors[k]);
  }
  if (same) return absl::OkStatus();
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("replicas ", rank, " and ", part.rank, " give ", first.tensors.size(), " and ",
                   part.tensors.size(), " gradients, or others, to ", bucket_text(part),
                   ": their modules differ"));
}

size_t CallSums::drop_late(absl::Time now, std::vector<Parts>* late) {
  size_t early = 0;
  for (auto it = parts_.begin(); it != parts_.end();) {
    Parts& parts = it->second;
    if (reducers_.count(std::get<0>(it->first)) == 0) {
      Parts over;
      for (auto part = parts.begin(); part != parts.end();) {
        const auto here = part++;
        if (here->second.until <= now) over.insert(parts.extract(here));
      }
      early += parts.size();
      if (!over.empty()) late->push_back(std::move(over));
    }
    it = parts.empty() ? parts_.erase(it) : std::next(it);
  }
  return early;
}

void CallSums::give(SumMessage part, absl::Time now, absl::Time until, Done done) {
  Parts all;
  Status why;
  bool tell = false;  // the others that wait
  std::vector<Parts> late;
  {
    MutexLock lock(&mutex_);
    why = closed_;
    if (why.ok() && reducers_.count(part.reducer) == 0 && drop_late(now, &late) >= kMaxEarly) {
      why = make_error(ErrorKind::kResource,
                       absl::StrCat(kMaxEarly,
                                    " parts wait at this worker for reducers that it does "
                                    "not have, '",
                                    part.reducer.substr(0, 80), "' among them"));
    }
    if (why.ok()) {
      const Name name{part.reducer, part.round, part.bucket};
      Parts& parts = parts_[name];
      why = refused(part, parts);
      tell = !why.ok() && error_kind(why) == ErrorKind::kInvalidArgument;
      if (why.ok()) {
        parts.emplace(part.rank, Part{std::move(part.tensors), until, std::move(done)});
      }
      if (tell || parts.empty() || static_cast<int64_t>(parts.size()) == part.size) {
        all = std::move(parts);
        parts_.erase(name);
      }
    }
  }
  answer(std::move(late), make_error(ErrorKind::kDeadline, "its caller does not wait any more"));
  if (!why.ok()) {
    if (tell) {
      std::vector<Parts> others;
      others.push_back(std::move(all));
      answer(std::move(others), why);
    }
    return done(why);
  }
  if (all.empty()) return;
  std::vector<at::Tensor> sum = all.begin()->second.tensors;
  {
    const c10::AutoGradMode off(false);
    for (auto it = std::next(all.begin()); it != all.end(); ++it) {
      for (size_t k = 0; k < sum.size(); ++k) sum[k] = at::add(sum[k], it->second.tensors[k]);
    }
    if (part.mean) {
      for (at::Tensor& t : sum) t = at::div(t, static_cast<double>(part.size));
    }
  }
  for (auto& [rank, one] : all) one.done(sum);
}

std::vector<CallSums::Parts> CallSums::take(const std::string& name) {
  std::vector<Parts> taken;
  for (auto it = parts_.lower_bound({name, 0, 0});
       it != parts_.end() && std::get<0>(it->first) == name; it = parts_.erase(it)) {
    taken.push_back(std::move(it->second));
  }
  return taken;
}

void CallSums::fail(const std::string& name, const Status& why) {
  std::vector<Parts> ended;
  {
    MutexLock lock(&mutex_);
    const auto it = reducers_.find(name);
    if (it == reducers_.end()) return;
    if (it->second.failed.ok()) it->second.failed = why;
    ended = take(name);
  }
  answer(std::move(ended), why);
}

void CallSums::on_worker_gone(const WorkerInfo& worker, const Status& why) {
  std::vector<std::pair<std::string, size_t>> concerned;
  {
    MutexLock lock(&mutex_);
    for (const auto& [name, reducer] : reducers_) {
      for (size_t rank = 0; rank < reducer.replicas.size(); ++rank) {
        if (reducer.replicas[rank] == worker) concerned.emplace_back(name, rank);
      }
    }
  }
  for (const auto& [name, rank] : concerned) {
    fail(name, annotate(gone_error(rank, worker, why), absl::StrCat("reducer '", name, "'")));
  }
}

Status CallSums::gone_error(size_t rank, const WorkerInfo& worker, const Status& why) {
  return make_error(ErrorKind::kPeerLost, absl::StrCat("replica ", rank, ", worker '", worker.name,
                                                       "', is gone: ", std::string(why.message())));
}

void CallSums::close(const Status& why) {
  std::vector<Parts> ended;
  {
    MutexLock lock(&mutex_);
    if (closed_.ok()) closed_ = why;
    for (auto& [name, parts] : parts_) ended.push_back(std::move(parts));
    parts_.clear();
  }
  answer(std::move(ended), why);
}

int64_t CallSums::waiting() const {
  MutexLock lock(&mutex_);
  int64_t n = 0;
  for (const auto& [name, parts] : parts_) n += static_cast<int64_t>(parts.size());
  return n;
}

void CallSums::answer(std::vector<Parts> all, const Status& why) {
  for (Parts& parts : all) {
    for (auto& [rank, part] : parts) part.done(why);
  }
}

}  // namespace weft::pipeline::internal
