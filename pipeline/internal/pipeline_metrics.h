#ifndef WEFT_PIPELINE_INTERNAL_PIPELINE_METRICS_H_
#define WEFT_PIPELINE_INTERNAL_PIPELINE_METRICS_H_

// PipelineMetrics: the numbers weft_pipeline_* of a worker, over all parts that it has (docs/sight.md).
// Any thread.

#include <memory>
#include <utility>

#include "weft/common/metrics.h"

namespace weft::pipeline::internal {

class PipelineMetrics {
 public:
  // `metrics` may be null: then nothing is counted.
  explicit PipelineMetrics(std::shared_ptr<Metrics> metrics) : metrics_(std::move(metrics)) {
    if (metrics_ == nullptr) metrics_ = std::make_shared<Metrics>();
    steps =
        metrics_->counter("weft_pipeline_steps_total", "Steps of pipelines that ended well here");
    failures = metrics_->counter("weft_pipeline_failures_total",
                                 "Parts of pipelines that an error has ended");
    messages = metrics_->counter("weft_pipeline_messages_sent_total",
                                 "Messages with results, gradients or sums to other workers");
    bytes = metrics_->counter("weft_pipeline_bytes_sent_total", "Bytes of the tensors in these");
    waited = metrics_->counter("weft_pipeline_waiting_seconds_total",
                               "Time in which an action waited for a tensor of another worker");
    step_seconds = metrics_->histogram("weft_pipeline_step_seconds",
                                       "Time of this worker's part of a step", {.first = 1e-4});
  }

  Counter* steps;
  Counter* failures;
  Counter* messages;
  Counter* bytes;
  Counter* waited;  // microseconds
  Histogram* step_seconds;

 private:
  std::shared_ptr<Metrics> metrics_;
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_PIPELINE_METRICS_H_
