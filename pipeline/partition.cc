#include "weft/pipeline/partition.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::pipeline {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
// Maximum of one cost of one layer: sums stay far below the largest number.
constexpr int64_t kMost = int64_t{1} << 48;

Status bad_request(std::string_view what) { return make_error(ErrorKind::kInvalidArgument, what); }

// What a stage of the layers [first, last) costs, in constant time.
class Costing {
 public:
  explicit Costing(const PartitionRequest& request) : request_(request) {
    for (const LayerCost& l : request.layers) {
      time_.push_back(time_.back() + l.forward + l.input_grad + l.weight_grad);
      parameters_.push_back(parameters_.back() + l.parameters);
      activation_.push_back(activation_.back() + l.activation);
    }
  }
  int layers() const { return static_cast<int>(request_.layers.size()); }
  Ticks time(int first, int last) const { return time_[last] - time_[first]; }
  int64_t memory(int stage, int first, int last) const {
    const int64_t live = of(request_.live, stage, 1);
    const int64_t each = activation_[last] - activation_[first];
    const int64_t parameters = parameters_[last] - parameters_[first];
    if (live > 0 && each > (kNever - 1 - parameters) / live) return kNever - 1;
    return parameters + live * each;
  }
  int64_t cap(int stage) const { return of(request_.memory_caps, stage, kNever); }
  bool fits(int stage, int first, int last) const {
    return memory(stage, first, last) <= cap(stage);
  }
  // Bytes over the edge that begins after layer `last` - 1; none leaves the last one.
  int64_t bytes(int last) const { return last == layers() ? 0 : request_.layers[last - 1].output; }
  bool may_cut(int last) const {
    return last == layers() || request_.edge_cap <= 0 || bytes(last) <= request_.edge_cap;
  }
  Ticks transfer(int last) const {
    const int64_t speed = request_.bytes_per_kilotick;
    return speed <= 0 ? 0 : (bytes(last) * 1000 + speed - 1) / speed;
  }
  // The slower of what it computes and what it sends.
  Ticks slowness(int first, int last) const { return std::max(time(first, last), transfer(last)); }

 private:
  static int64_t of(const std::vector<int64_t>& values, int stage, int64_t otherwise) {
    if (values.empty()) return otherwise;
    return values[values.size() == 1 ? 0 : static_cast<size_t>(stage)];
  }
  const PartitionRequest& request_;
  std::vector<int64_t> time_{0};
  std::vector<int64_t> parameters_{0};
  std::vector<int64_t> activation_{0};
};

Status check(const PartitionRequest& r) {
  const size_t n = r.layers.size();
  if (r.stages < 1 || r.stages > kMaxStages || n > kMaxLayers ||
      n < static_cast<size_t>(r.stages)) {
    return bad_request(absl::StrCat(n, " layers for ", r.stages,
                                    " stages: each has at least one, at most ", kMaxStages, " and ",
                                    kMaxLayers));
  }
  const auto wrong = [](int64_t x) { return x < 0 || x > kMost; };
  for (size_t i = 0; i < n; ++i) {
    const LayerCost& l = r.layers[i];
    for (const int64_t x :
         {l.forward, l.input_grad, l.weight_grad, l.parameters, l.activation, l.output}) {
      if (wrong(x)) {
        return bad_request(
            absl::StrCat("layer ", i, " '", l.name, "' has a cost of ", x, ": 0 to ", kMost));
      }
    }
  }
  for (const auto& [list, what] : {std::pair(&r.memory_caps, "memory caps"),
                                   std::pair(&r.live, "numbers of live micro-batches")}) {
    if (list->size() > 1 && list->size() != static_cast<size_t>(r.stages)) {
      return bad_request(absl::StrCat(list->size(), " ", what, " for ", r.stages, " stages"));
    }
    for (const int64_t x : *list) {
      if (x < 0 || (list == &r.live && x > kMaxMicroBatches)) {
        return bad_request(absl::StrCat("of the ", what, " one is ", x));
      }
    }
  }
  return absl::OkStatus();
}

// best[k][j]: of the first j layers in k stages; from[k][j]: where the last of them begins.
struct Table {
  std::vector<std::vector<int64_t>> best;
  std::vector<std::vector<int>> from;
};

// `combine(so far, first, last)`: with one stage more. `hopeless(time, best)`: a stage that takes so
// long is not worth a look, nor is a longer one.
template <class Combine, class Hopeless>
Table fill(const Costing& costing, int stages, Combine combine, Hopeless hopeless) {
  const int n = costing.layers();
  Table t;
  t.best.assign(stages + 1, std::vector<int64_t>(n + 1, kNever));
  t.from.assign(stages + 1, std::vector<int>(n + 1, -1));
  t.best[0][0] = 0;
  for (int k = 1; k <= stages; ++k) {
    // The other stages have at least a layer each.
    const int most = n - (stages - k);
    for (int j = k; j <= most; ++j) {
      if (!costing.may_cut(j)) continue;
      // From the smallest stage on: what does not fit does not fit with more layers either.
      for (int i = j - 1; i >= k - 1; --i) {
        if (!costing.fits(k - 1, i, j) || hopeless(costing.time(i, j), t.best[k][j])) break;
        if (t.best[k - 1][i] == kNever) continue;
        const int64_t with = combine(t.best[k - 1][i], i, j);
        if (with < t.best[k][j]) {
          t.best[k][j] = with;
          t.from[k][j] = i;
        }
      }
    }
  }
  return t;
}

// Why there is none: a layer that fits nowhere, or all of them together.
Status no_partition(const PartitionRequest& r, const Costing& costing) {
  for (int i = 0; i < costing.layers(); ++i) {
    bool somewhere = false;
    int64_t least = kNever;
    int64_t most = 0;
    for (int s = 0; s < r.stages; ++s) {
      somewhere = somewhere || costing.fits(s, i, i + 1);
      least = std::min(least, costing.memory(s, i, i + 1));
      most = std::max(most, costing.cap(s));
    }
    if (somewhere) continue;
    return make_error(ErrorKind::kResource,
                      absl::StrCat("layer ", i, " '", r.layers[i].name, "' needs ", least,
                                   " bytes, and no stage may hold more than ", most));
  }
  return make_error(
      ErrorKind::kResource,
      absl::StrCat("no partition of ", costing.layers(), " layers into ", r.stages,
                   " stages keeps every stage within its memory and every edge within its bytes"));
}

bool like(std::string_view text, std::string_view pattern) {
  size_t t = 0;
  size_t p = 0;
  size_t star = std::string_view::npos;
  size_t resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

StatusOr<std::vector<int>> begins_of_list(std::string_view text, const PartitionRequest& r) {
  std::vector<int> begins{0};
  while (true) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string_view word = text.substr(0, comma);
    int count = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), count);
    if (error != std::errc() || end != word.data() + word.size() || count < 1 ||
        count > kMaxLayers || begins.size() > kMaxStages) {
      return bad_request(
          absl::StrCat("a partition is auto, uniform, match:PATTERN or numbers of layers "
                       "such as 3,2,2,1; got '",
                       std::string(word.substr(0, 40)), "'"));
    }
    begins.push_back(begins.back() + count);
    if (comma == text.size()) break;
    text.remove_prefix(comma + 1);
  }
  if (static_cast<int>(begins.size()) - 1 != r.stages) {
    return bad_request(
        absl::StrCat("a list of ", begins.size() - 1, " stages for a plan of ", r.stages));
  }
  if (begins.back() != static_cast<int>(r.layers.size())) {
    return bad_request(
        absl::StrCat("a list of ", begins.back(), " layers for a model of ", r.layers.size()));
  }
  return begins;
}

}  // namespace

StatusOr<Partition> evaluate_partition(const PartitionRequest& request, std::vector<int> begins) {
  WEFT_RETURN_IF_ERROR(check(request));
  const Costing costing(request);
  if (static_cast<int>(begins.size()) != request.stages + 1 || begins.front() != 0 ||
      begins.back() != costing.layers()) {
    return bad_request(absl::StrCat("a partition of ", begins.size(), " numbers from ",
                                    begins.empty() ? -1 : begins.front(), " to ",
                                    begins.empty() ? -1 : begins.back(), " for ", request.stages,
                                    " stages and ", costing.layers(), " layers"));
  }
  Partition out;
  for (int s = 0; s < request.stages; ++s) {
    const int first = begins[s];
    const int last = begins[s + 1];
    if (last <= first || last > costing.layers()) {
      return bad_request(absl::StrCat("stage ", s, " has the layers ", first, " to ", last - 1));
    }
    if (!costing.fits(s, first, last)) {
      return make_error(
          ErrorKind::kResource,
          absl::StrCat("stage ", s, " with the layers ", first, " to ", last - 1, " needs ",
                       costing.memory(s, first, last), " bytes, and may hold ", costing.cap(s)));
    }
    if (!costing.may_cut(last)) {
      return make_error(
          ErrorKind::kResource,
          absl::StrCat("the edge after layer ", last - 1, " carries ", costing.bytes(last),
                       " bytes, and may carry ", request.edge_cap));
    }
    out.slowest = std::max(out.slowest, costing.slowness(first, last));
    out.edge_bytes += costing.bytes(last);
  }
  out.begins = std::move(begins);
  return out;
}

StatusOr<Partition> partition(const PartitionRequest& request) {
  WEFT_RETURN_IF_ERROR(check(request));
  const Costing costing(request);
  const int stages = request.stages;
  const int n = costing.layers();
  const Table fastest = fill(
      costing, stages,
      [&](int64_t so_far, int first, int last) {
        return std::max(so_far, costing.slowness(first, last));
      },
      [](Ticks time, int64_t best) { return time >= best; });
  const int64_t slowest = fastest.best[stages][n];
  if (slowest == kNever) return no_partition(request, costing);
  // Among those that are as fast, the fewest bytes: a second programme, since a prefix that is
  // slower than another may still be fast enough.
  const Table lightest = fill(
      costing, stages,
      [&](int64_t so_far, int first, int last) {
        return costing.slowness(first, last) > slowest ? kNever : so_far + costing.bytes(last);
      },
      [slowest](Ticks time, int64_t) { return time > slowest; });
  std::vector<int> begins(stages + 1, n);
  for (int k = stages; k > 0; --k) begins[k - 1] = lightest.from[k][begins[k]];
  return evaluate_partition(request, std::move(begins));
}

StatusOr<Partition> partition_by(std::string_view how, const PartitionRequest& request) {
  WEFT_RETURN_IF_ERROR(check(request));
  if (how == "auto") return partition(request);
  constexpr std::string_view kMatch = "match:";
  if (how == "uniform") {
    const int n = static_cast<int>(request.layers.size());
    std::vector<int> begins{0};
    for (int s = 0; s < request.stages; ++s) {
      begins.push_back(begins.back() + n / request.stages + (s < n % request.stages ? 1 : 0));
    }
    return evaluate_partition(request, std::move(begins));
  }
  if (how.substr(0, kMatch.size()) == kMatch) {
    PartitionRequest weighed = request;
    weighed.bytes_per_kilotick = 0;
    bool any = false;
    for (LayerCost& l : weighed.layers) {
      const bool matches = like(l.name, how.substr(kMatch.size()));
      any = any || matches;
      l.forward = matches ? 1 : 0;
      l.input_grad = 0;
      l.weight_grad = 0;
    }
    if (!any) {
      return bad_request(absl::StrCat("no layer's name is like '",
                                      std::string(how.substr(kMatch.size()).substr(0, 80)), "'"));
    }
    WEFT_ASSIGN_OR_RETURN(Partition found, partition(weighed));
    return evaluate_partition(request, std::move(found.begins));
  }
  WEFT_ASSIGN_OR_RETURN(std::vector<int> begins, begins_of_list(how, request));
  return evaluate_partition(request, std::move(begins));
}

std::vector<StageCost> stage_costs(const std::vector<LayerCost>& layers,
                                   const Partition& partition) {
  std::vector<StageCost> out(static_cast<size_t>(std::max(partition.stages(), 0)));
  for (int s = 0; s < partition.stages(); ++s) {
    StageCost& c = out[s];
    c.activation = 0;
    for (int i = partition.begins[s]; i < partition.begins[s + 1]; ++i) {
      c.forward += layers[i].forward;
      c.input_grad += layers[i].input_grad;
      c.weight_grad += layers[i].weight_grad;
      c.activation += layers[i].activation;
    }
    c.weight_activation = c.activation;
  }
  return out;
}

}  // namespace weft::pipeline
