#include "weft/common/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "weft/common/log.h"

namespace weft {
namespace {

bool legal_name(std::string_view name) {
  if (name.rfind("weft_", 0) != 0) return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
}

bool legal_label(std::string_view name) {
  if (name.empty() || name.rfind("__", 0) == 0 || (name[0] >= '0' && name[0] <= '9')) return false;
  return name != "le" && std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
         });
}

// The format is UTF-8 with three escapes; other bytes that might break a line are replaced.
std::string escaped(std::string_view value, bool quotes) {
  std::string out;
  for (const char c : value) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && quotes) {
      out += "\\\"";
    } else if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) {
      absl::StrAppendFormat(&out, "\\\\x%02x", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out;
}

// Values as escaped() spells them, but for the escapes that are the format's own.
MetricLabels printable(MetricLabels labels) {
  std::sort(labels.begin(), labels.end());
  for (auto& [name, value] : labels) {
    std::string out;
    for (const char c : value) {
      const auto byte = static_cast<unsigned char>(c);
      if (c != '\n' && (byte < 0x20 || byte >= 0x7f)) {
        absl::StrAppendFormat(&out, "\\x%02x", byte);
      } else {
        out += c;
      }
    }
    value = std::move(out);
  }
  return labels;
}

std::string label_text(MetricLabels labels) {
  std::sort(labels.begin(), labels.end());
  std::string out;
  for (const auto& [name, value] : labels) {
    absl::StrAppend(&out, out.empty() ? "" : ",", name, "=\"", escaped(value, true), "\"");
  }
  return out;
}

// `name{labels,extra}`, without braces when there is nothing between them.
std::string line_name(const std::string& name, const std::string& labels,
                      const std::string& extra = "") {
  if (labels.empty() && extra.empty()) return name;
  return absl::StrCat(name, "{", labels, labels.empty() || extra.empty() ? "" : ",", extra, "}");
}

// Counters hold integers; those of time hold microseconds.
bool holds_micros(const std::string& name) { return absl::EndsWith(name, "_seconds_total"); }
double shown(const std::string& name, const Counter& counter) {
  return static_cast<double>(counter.value()) * (holds_micros(name) ? 1e-6 : 1);
}

std::string number(double v) {
  if (std::isinf(v)) return v > 0 ? "+Inf" : "-Inf";
  return absl::StrFormat("%.9g", v);
}

}  // namespace

Histogram::Histogram(const HistogramOptions& options) {
  WEFT_CHECK(options.first > 0 && options.factor > 1 && options.buckets >= 1)
      << "first=" << options.first << " factor=" << options.factor
      << " buckets=" << options.buckets;
  double bound = options.first;
  for (int i = 0; i < options.buckets; ++i) {
    bounds_.push_back(bound);
    bound *= options.factor;
  }
  counts_ = std::make_unique<std::atomic<uint64_t>[]>(bounds_.size() + 1);
}

void Histogram::observe(double value) {
  if (std::isnan(value)) return;
  const auto it = std::lower_bound(bounds_.begin(), bounds_.end(), value);
  counts_[static_cast<size_t>(it - bounds_.begin())].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

std::vector<uint64_t> Histogram::bucket_counts() const {
  std::vector<uint64_t> out(bounds_.size() + 1);
  for (size_t i = 0; i < out.size(); ++i) out[i] = counts_[i].load(std::memory_order_relaxed);
  return out;
}

uint64_t Histogram::count() const {
  uint64_t total = 0;
  for (const uint64_t n : bucket_counts()) total += n;
  return total;
}

// Exactly one of the three is used; a series never moves, so handles stay valid.
struct Metrics::Series {
  MetricLabels labels;
  Counter counter;
  Gauge gauge;
  std::unique_ptr<Histogram> histogram;
};

struct Metrics::Family {
  Kind kind = Kind::kCounter;
  std::string help;
  HistogramOptions options;
  std::map<std::string, Series> series;  // by label text
};

Metrics::Metrics() = default;
Metrics::~Metrics() = default;

Metrics::Series* Metrics::find_or_add(Kind kind, std::string_view name, std::string_view help,
                                      const MetricLabels& labels, const HistogramOptions& options) {
  WEFT_CHECK(legal_name(name)) << "metric name '" << name << "'";
  for (const auto& [label, value] : labels) {
    WEFT_CHECK(legal_label(label)) << "label '" << label << "' of metric " << name;
  }
  MutexLock lock(&mutex_);
  std::unique_ptr<Family>& family = families_[std::string(name)];
  if (family == nullptr) {
    family = std::make_unique<Family>();
    family->kind = kind;
    family->help = std::string(help);
    family->options = options;
  }
  WEFT_CHECK(family->kind == kind) << "metric " << name << " was registered as another kind";
  WEFT_CHECK(kind != Kind::kHistogram ||
             (family->options.first == options.first && family->options.factor == options.factor &&
              family->options.buckets == options.buckets))
      << "histogram " << name << " was registered with other buckets";
  MetricLabels kept = labels;
  std::string key = label_text(labels);
  if (family->series.count(key) == 0 && family->series.size() >= kMaxSeries) {
    for (auto& [label, value] : kept) value = "other";
    key = label_text(kept);
  }
  const auto [it, added] = family->series.try_emplace(std::move(key));
  if (added) it->second.labels = printable(std::move(kept));
  if (added && kind == Kind::kHistogram)
    it->second.histogram = std::make_unique<Histogram>(options);
  return &it->second;
}

Counter* Metrics::counter(std::string_view name, std::string_view help,
                          const MetricLabels& labels) {
  return &find_or_add(Kind::kCounter, name, help, labels, {})->counter;
}

Gauge* Metrics::gauge(std::string_view name, std::string_view help, const MetricLabels& labels) {
  return &find_or_add(Kind::kGauge, name, help, labels, {})->gauge;
}

Histogram* Metrics::histogram(std::string_view name, std::string_view help,
                              const HistogramOptions& options, const MetricLabels& labels) {
  return find_or_add(Kind::kHistogram, name, help, labels, options)->histogram.get();
}

std::string Metrics::text() const {
  std::string out;
  MutexLock lock(&mutex_);
  for (const auto& [name, family] : families_) {
    const char* const type = family->kind == Kind::kCounter ? "counter"
                             : family->kind == Kind::kGauge ? "gauge"
                                                            : "histogram";
    absl::StrAppend(&out, "# HELP ", name, " ", escaped(family->help, false), "\n# TYPE ", name,
                    " ", type, "\n");
    for (const auto& [labels, series] : family->series) {
      if (family->kind == Kind::kCounter) {
        const std::string value = holds_micros(name) ? number(shown(name, series.counter))
                                                     : absl::StrCat(series.counter.value());
        absl::StrAppend(&out, line_name(name, labels), " ", value, "\n");
      } else if (family->kind == Kind::kGauge) {
        absl::StrAppend(&out, line_name(name, labels), " ", series.gauge.value(), "\n");
      } else {
        const std::vector<uint64_t> counts = series.histogram->bucket_counts();
        uint64_t total = 0;
        for (size_t i = 0; i < counts.size(); ++i) {
          total += counts[i];
          const double bound = i < series.histogram->bounds().size()
                                   ? series.histogram->bounds()[i]
                                   : std::numeric_limits<double>::infinity();
          absl::StrAppend(
              &out, line_name(name + "_bucket", labels, absl::StrCat("le=\"", number(bound), "\"")),
              " ", total, "\n");
        }
        absl::StrAppend(&out, line_name(name + "_sum", labels), " ",
                        number(series.histogram->sum()), "\n", line_name(name + "_count", labels),
                        " ", total, "\n");
      }
    }
  }
  return out;
}

std::vector<MetricFamily> Metrics::families() const {
  std::vector<MetricFamily> out;
  MutexLock lock(&mutex_);
  for (const auto& [name, family] : families_) {
    MetricFamily& f = out.emplace_back();
    f.name = name;
    f.help = family->help;
    f.kind = family->kind;
    for (const auto& [text, series] : family->series) {
      MetricSample& sample = f.samples.emplace_back();
      sample.labels = series.labels;
      if (family->kind == Kind::kCounter) {
        sample.value = shown(name, series.counter);
      } else if (family->kind == Kind::kGauge) {
        sample.value = static_cast<double>(series.gauge.value());
      } else {
        sample.bounds = series.histogram->bounds();
        for (const uint64_t n : series.histogram->bucket_counts()) {
          sample.count += n;
          if (sample.cumulative.size() < sample.bounds.size())
            sample.cumulative.push_back(sample.count);
        }
        sample.sum = series.histogram->sum();
      }
    }
  }
  return out;
}

std::map<std::string, double> Metrics::snapshot() const {
  std::map<std::string, double> out;
  MutexLock lock(&mutex_);
  for (const auto& [name, family] : families_) {
    for (const auto& [labels, series] : family->series) {
      if (family->kind == Kind::kCounter) {
        out[line_name(name, labels)] = shown(name, series.counter);
      } else if (family->kind == Kind::kGauge) {
        out[line_name(name, labels)] = static_cast<double>(series.gauge.value());
      } else {
        out[line_name(name + "_count", labels)] = static_cast<double>(series.histogram->count());
        out[line_name(name + "_sum", labels)] = series.histogram->sum();
      }
    }
  }
  return out;
}

}  // namespace weft
