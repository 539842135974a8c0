#include "weft/collectives/internal/ddp/reduction_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/collectives/internal/group_handle.h"
#include "weft/common/trace.h"

namespace weft::internal {
namespace {

constexpr std::string_view kCategory = "ddp";
constexpr uint64_t kBucketsOfAnId = 4096;

}  // namespace

ReductionWatch::ReductionWatch(const ProcessGroup& group, std::string module)
    : core_(group.handle()->shared_core()), module_(std::move(module)) {
  const auto& metrics = core_->options().metrics;
  if (metrics == nullptr) return;
  reductions_ = metrics->counter("weft_ddp_reductions_total", "Reductions that succeeded");
  failures_ = metrics->counter("weft_ddp_failures_total", "Reductions that failed");
  reduced_buckets_ = metrics->counter("weft_ddp_buckets_total", "Buckets that were reduced");
  early_buckets_ = metrics->counter("weft_ddp_buckets_early_total",
                                    "Buckets that left before the last gradient was ready");
  bytes_ = metrics->counter("weft_ddp_bytes_total", "Bytes of the buckets that were reduced");
  exposed_ =
      metrics->histogram("weft_ddp_exposed_seconds",
                         "Time that a backward waited for its buckets after its last gradient");
  reducing_ =
      metrics->histogram("weft_ddp_reducing_seconds",
                         "Time from the first bucket that left to the last that was reduced");
}

void ReductionWatch::forward_ended(absl::Time begun) {
  const absl::Duration took = now() - begun;
  {
    MutexLock lock(&mutex_);
    last_forward_ = took;
  }
  if (core_->options().trace == nullptr) return;
  core_->options().trace->complete(kCategory, "forward", begun, took, {{"module", module_}});
}

void ReductionWatch::begin(int64_t forward, size_t buckets) {
  forward_ = forward;
  id_ = core_->sequence() * kBucketsOfAnId;
  begun_ = now();
  gradients_ended_ = absl::InfiniteFuture();
  buckets_.assign(buckets, Bucket());
  unreduced_ = 0;
  MutexLock lock(&mutex_);
  shown_forward_ = forward;
}

void ReductionWatch::ready(size_t bucket) { buckets_[bucket].ready = now(); }

void ReductionWatch::launched(size_t bucket, int64_t bytes) {
  buckets_[bucket].launched = now();
  buckets_[bucket].bytes = bytes;
}

void ReductionWatch::reduced(size_t bucket) {
  buckets_[bucket].reduced = now();
  unreduced_ = std::max(unreduced_, bucket + 1);
}

void ReductionWatch::gradients_ended() { gradients_ended_ = now(); }

void ReductionWatch::waits_for(std::string what) {
  const absl::Time from = now();
  MutexLock lock(&mutex_);
  waits_for_ = std::move(what);
  since_ = from;
}

void ReductionWatch::end(int64_t early) {
  ReductionTimes times;
  int64_t left = 0;
  int64_t bytes = 0;
  absl::Time first = absl::InfiniteFuture();
  absl::Time last = begun_;
  for (const Bucket& one : buckets_) {
    if (one.bytes < 0) continue;
    ++left;
    bytes += one.bytes;
    first = std::min(first, one.launched);
    last = std::max(last, one.reduced);
  }
  times.backward = gradients_ended_ - begun_;
  if (left > 0) {
    times.reducing = last - first;
    times.overlap = std::max(absl::ZeroDuration(), std::min(last, gradients_ended_) - first);
    times.exposed = std::max(absl::ZeroDuration(), last - std::max(first, gradients_ended_));
  }
  if (reductions_ != nullptr) {
    reductions_->add();
    reduced_buckets_->add(static_cast<uint64_t>(left));
    early_buckets_->add(static_cast<uint64_t>(early));
    bytes_->add(static_cast<uint64_t>(bytes));
    exposed_->observe(absl::ToDoubleSeconds(times.exposed));
    reducing_->observe(absl::ToDoubleSeconds(times.reducing));
  }
  if (core_->options().trace != nullptr) trace(times);
  MutexLock lock(&mutex_);
  waits_for_.clear();
  failed_.clear();
  ++done_;
  times.forward = last_forward_;
  last_ = times;
  sums_.forward += times.forward;
  sums_.backward += times.backward;
  sums_.reducing += times.reducing;
  sums_.overlap += times.overlap;
  sums_.exposed += times.exposed;
}

void ReductionWatch::fail(std::string why) {
  if (failures_ != nullptr) failures_->add();
  MutexLock lock(&mutex_);
  waits_for_.clear();
  failed_ = std::move(why);
}

void ReductionWatch::trace(const ReductionTimes& times) const {
  TraceWriter& out = *core_->options().trace;
  const std::string_view group = core_->options().name;
  out.async_begin(kCategory, "reduction", id_, begun_,
                  {{"module", module_}, {"group", group}, {"forward", forward_}});
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const Bucket& one = buckets_[i];
    if (one.bytes < 0) continue;
    const uint64_t id = id_ + 1 + i;
    const auto number = static_cast<int64_t>(i);
    out.async_begin(kCategory, "bucket ready", id, one.ready,
                    {{"bucket", number}, {"bytes", one.bytes}, {"forward", forward_}});
    out.async_end(kCategory, "bucket ready", id, one.launched);
    out.async_begin(kCategory, "bucket reduced", id, one.launched, {{"bucket", number}});
    out.async_end(kCategory, "bucket reduced", id, one.reduced);
  }
  out.async_end(kCategory, "reduction", id_, now());
  out.complete(kCategory, "exposed", gradients_ended_, times.exposed,
               {{"forward", forward_}, {"overlap_us", absl::ToInt64Microseconds(times.overlap)}});
}

std::string ReductionWatch::doing() const {
  std::string what;
  {
    MutexLock lock(&mutex_);
    what = waits_for_;
    // The pass and its reduction have one deadline, and either may be the first to see that it is over.
    if (what.empty()) return failed_.empty() ? "" : absl::StrCat("its reduction: ", failed_);
  }
  const std::string awaited = ranks();
  return absl::StrCat("its reduction: ", what, awaited.empty() ? "" : ", which waits for ",
                      awaited);
}

std::string ReductionWatch::ranks() const { return awaited_text(*core_, core_->state()); }

ReductionTimes ReductionWatch::last() const {
  MutexLock lock(&mutex_);
  return last_;
}

ReductionTimes ReductionWatch::sums() const {
  MutexLock lock(&mutex_);
  return sums_;
}

GroupUser::Row ReductionWatch::row() const {
  const absl::Time at = now();
  MutexLock lock(&mutex_);
  return {module_, done_, shown_forward_, waits_for_,
          waits_for_.empty() ? absl::ZeroDuration() : at - since_};
}

}  // namespace weft::internal
