#ifndef WEFT_COMMON_METRICS_H_
#define WEFT_COMMON_METRICS_H_

// Metrics: counters, gauges and histograms of one worker, and their Prometheus text.
//
//   Counter* calls = metrics.counter("weft_rpc_calls_total", "Calls begun", {{"peer", "ps0"}});
//   calls->add();                                   // hot path: one relaxed atomic
//   Histogram* t = metrics.histogram("weft_rpc_call_seconds", "Time of a call", {.first = 1e-6});
//   t->observe(absl::ToDoubleSeconds(elapsed));
//   std::string page = metrics.text();
//
// Names are weft_<module>_<what>_<unit>, lower case, in base units; a counter ends in _total. One
// that ends in _seconds_total is given microseconds, and shows seconds. Look a handle up once and
// keep it: it stays valid as long as the Metrics, and the same name and labels give the same one. A
// family keeps at most kMaxSeries sets of labels; later ones share one series whose label values
// are "other", so that labels made from peers' names cannot exhaust memory.
//
// Threads: all methods from anywhere.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/mutex.h"

namespace weft {

// Name and value; any order, each name once. Values may hold any bytes.
using MetricLabels = std::vector<std::pair<std::string, std::string>>;

class WEFT_API Counter {
 public:
  void add(uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }  // the sum so far

 private:
  std::atomic<uint64_t> value_{0};
};

class WEFT_API Gauge {  // a value that goes up and down
 public:
  void set(int64_t v) { value_.store(v, std::memory_order_relaxed); }  // replaces it
  void add(int64_t n) { value_.fetch_add(n, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }  // its last value

 private:
  std::atomic<int64_t> value_{0};
};

// Upper bounds first, first*factor, first*factor^2, ... (`buckets` of them), and one above all.
struct HistogramOptions {
  double first = 1e-6;
  double factor = 2.0;
  int buckets = 27;  // with the others as they are: 1 us to 67 s
};

class WEFT_API Histogram {
 public:
  explicit Histogram(const HistogramOptions& options);

  // Counts `value` in the first bucket whose bound is not below it. NaN is dropped.
  void observe(double value);

  uint64_t count() const;                                              // values observed
  double sum() const { return sum_.load(std::memory_order_relaxed); }  // of the values
  const std::vector<double>& bounds() const { return bounds_; }        // upper, ascending
  // One more than bounds(): the last is for what is above all.
  std::vector<uint64_t> bucket_counts() const;

 private:
  std::vector<double> bounds_;
  std::unique_ptr<std::atomic<uint64_t>[]> counts_;
  std::atomic<double> sum_{0};
};

// One series at one moment.
struct MetricSample {
  MetricLabels labels{};  // sorted by name; bytes that are not printable ASCII are spelled \xNN
  double value = 0;       // of a counter or gauge
  // For a histogram: bounds as in Histogram, and how many values lie at or below each; `count` is
  // the total.
  std::vector<double> bounds{};
  std::vector<uint64_t> cumulative{};
  uint64_t count = 0;
  double sum = 0;
};

// All series of one name.
struct MetricFamily {
  enum class Kind { kCounter, kGauge, kHistogram };  // as in Prometheus
  std::string name{};
  std::string help{};                   // one sentence
  Kind kind = Kind::kCounter;           // of all its samples
  std::vector<MetricSample> samples{};  // one for each set of labels
};

class WEFT_API Metrics {
 public:
  static constexpr size_t kMaxSeries = 1024;

  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // REQUIRES: a legal name, the same kind each time, and for a histogram the same options.
  Counter* counter(std::string_view name, std::string_view help, const MetricLabels& labels = {});
  Gauge* gauge(std::string_view name, std::string_view help, const MetricLabels& labels = {});
  Histogram* histogram(std::string_view name, std::string_view help,
                       const HistogramOptions& options = {}, const MetricLabels& labels = {});

  // Prometheus text exposition format 0.0.4, sorted by name and labels.
  std::string text() const;

  // Each value by its line's name, `weft_rpc_calls_total{peer="ps0"}`: counters, gauges, and of
  // histograms _count and _sum.
  std::map<std::string, double> snapshot() const;

  // Everything, for other formats and servers; sorted by name and labels.
  std::vector<MetricFamily> families() const;

 private:
  struct Family;
  struct Series;
  using Kind = MetricFamily::Kind;

  Series* find_or_add(Kind kind, std::string_view name, std::string_view help,
                      const MetricLabels& labels, const HistogramOptions& options);

  mutable Mutex mutex_;
  std::map<std::string, std::unique_ptr<Family>> families_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft

#endif  // WEFT_COMMON_METRICS_H_
