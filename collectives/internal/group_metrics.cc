#include "weft/collectives/internal/group_metrics.h"

#include <string>

namespace weft::internal {

GroupMetrics::GroupMetrics(std::shared_ptr<Metrics> metrics) : metrics_(std::move(metrics)) {
  if (metrics_ == nullptr) return;
  groups_ = metrics_->gauge("weft_collectives_groups", "Process groups that live");
  failures_ = metrics_->counter("weft_collectives_group_failures_total", "Groups that failed");
  messages_ = metrics_->counter("weft_collectives_messages_sent_total",
                                "Messages sent by operations; shared memory needs none");
  sent_bytes_ = metrics_->counter("weft_collectives_bytes_sent_total",
                                  "Bytes of these messages, without headers");
  far_messages_ = metrics_->counter("weft_collectives_messages_between_hosts_total",
                                    "Messages sent by operations to ranks on other hosts");
  far_bytes_ = metrics_->counter("weft_collectives_bytes_between_hosts_total",
                                 "Bytes of these messages, without headers");
  staged_bytes_ =
      metrics_->counter("weft_collectives_staged_bytes_total",
                        "Bytes copied between GPUs and host memory, in both directions");
  groups_->add(1);
}

GroupMetrics::~GroupMetrics() {
  if (metrics_ != nullptr) groups_->add(-1);
}

const GroupMetrics::Series& GroupMetrics::series(std::string_view op) {
  for (const Series& one : series_) {
    if (one.op == op.data()) return one;
  }
  const MetricLabels labels{{"op", std::string(op)}};
  series_.push_back(
      {op.data(),
       metrics_->counter("weft_collectives_operations_total", "Operations that ended", labels),
       metrics_->counter("weft_collectives_errors_total", "Operations that failed", labels),
       metrics_->counter("weft_collectives_tensor_bytes_total",
                         "Bytes of the tensors of operations at this rank", labels),
       metrics_->histogram("weft_collectives_operation_seconds",
                           "Time of an operation from its turn to its end", {}, labels)});
  return series_.back();
}

void GroupMetrics::operation_ended(std::string_view op, bool ok, absl::Duration took,
                                   uint64_t bytes, const Traffic& sent,
                                   const Traffic& between_hosts, uint64_t staged) {
  if (metrics_ == nullptr) return;
  const Series& one = series(op);
  one.operations->add();
  if (!ok) one.errors->add();
  one.bytes->add(bytes);
  one.seconds->observe(absl::ToDoubleSeconds(took));
  messages_->add(sent.messages - counted_.messages);
  sent_bytes_->add(sent.bytes - counted_.bytes);
  counted_ = sent;
  far_messages_->add(between_hosts.messages - counted_far_.messages);
  far_bytes_->add(between_hosts.bytes - counted_far_.bytes);
  counted_far_ = between_hosts;
  staged_bytes_->add(staged - counted_staged_);
  counted_staged_ = staged;
}

void GroupMetrics::group_failed() {
  if (metrics_ != nullptr) failures_->add();
}

}  // namespace weft::internal
