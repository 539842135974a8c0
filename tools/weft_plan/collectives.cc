#include "weft/tools/weft_plan/collectives.h"

#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "weft/collectives/cost_model.h"
#include "weft/common/error.h"

namespace weft::plan_tool {
namespace {

constexpr uint64_t kElementBytes = 4;

// The number before a unit, times what the unit stands for; nothing for what has no unit of these.
template <size_t N>
bool with_unit(const std::string& text, const std::pair<const char*, double> (&units)[N],
               double* out) {
  for (const auto& [unit, factor] : units) {
    if (!absl::EndsWith(text, unit)) continue;
    const std::string digits = text.substr(0, text.size() - std::string(unit).size());
    if (!absl::SimpleAtod(digits, out)) continue;
    *out *= factor;
    return std::isfinite(*out) && *out >= 0;
  }
  return false;
}

double seconds(const Arguments& a, const std::string& name) {
  if (!a.has(name)) usage(absl::StrCat("how long? ", name, " T"));
  // "s" is last: every other unit ends with it, too.
  static constexpr std::pair<const char*, double> kUnits[] = {
      {"fs", 1e-15}, {"ps", 1e-12}, {"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"", 1}};
  double out = 0;
  if (with_unit(a.values.at(name), kUnits, &out)) return out;
  usage(absl::StrCat(name, " wants a time such as 2us or 2e-6, got '", a.values.at(name), "'"));
}

std::vector<uint64_t> sizes(const Arguments& a) {
  static constexpr std::pair<const char*, double> kUnits[] = {
      {"KiB", 1024}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"", 1}};
  const auto given = a.values.find("--bytes");
  const std::string text = given == a.values.end() ? "4KiB,1MiB,64MiB" : given->second;
  std::vector<uint64_t> out;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ','))) {
    double bytes = 0;
    const bool sound = with_unit(part, kUnits, &bytes) && bytes >= kElementBytes &&
                       bytes <= 0x1.0p50 && std::fmod(bytes, kElementBytes) == 0;
    if (!sound) {
      usage(absl::StrCat("--bytes wants multiples of 4 such as 4096 or 64MiB, got '", part, "'"));
    }
    out.push_back(static_cast<uint64_t>(bytes));
  }
  return out;
}

std::string time_text(double s) {
  if (s < 1e-3) return absl::StrFormat("%.3f us", s * 1e6);
  if (s < 1) return absl::StrFormat("%.3f ms", s * 1e3);
  return absl::StrFormat("%.3f s", s);
}

const char* remark(Agreement agreement) {
  switch (agreement) {
    case Agreement::kAbout: return "  (about)";
    case Agreement::kAtMost: return "  (at most)";
    default: return "";
  }
}

void print_table(uint64_t bytes, const std::vector<CostEstimate>& all) {
  absl::PrintF("%d bytes\n  %-20s %13s %13s %12s %16s\n", bytes, "algorithm", "formula",
               "simulated", "messages", "bytes sent");
  for (const CostEstimate& e : all) {
    absl::PrintF("  %-20s %13s %13s %12d %16d%s\n", e.name, time_text(e.formula),
                 time_text(e.simulated), e.messages, e.bytes, remark(e.agreement));
  }
  absl::PrintF("  recommended: %s\n", fastest(all).name);
}

void print_json(uint64_t bytes, const std::vector<CostEstimate>& all, bool first) {
  absl::PrintF("%s{\"bytes\": %d, \"recommended\": \"%s\", \"algorithms\": [", first ? "" : ",\n",
               bytes, fastest(all).name);
  for (size_t i = 0; i < all.size(); ++i) {
    const CostEstimate& e = all[i];
    absl::PrintF(
        "%s\n  {\"name\": \"%s\", \"formula_s\": %.17g, \"simulated_s\": %.17g, \"exact\": %s, "
        "\"messages\": %d, \"bytes_sent\": %d}",
        i == 0 ? "" : ",", e.name, e.formula, e.simulated,
        e.agreement == Agreement::kExact ? "true" : "false", e.messages, e.bytes);
  }
  absl::PrintF("]}");
}

}  // namespace

int run_collectives(const Arguments& a) {
  allow(a, "collectives",
        {"--ranks", "--alpha", "--beta", "--gamma", "--ranks-per-host", "--local-alpha",
         "--local-beta", "--bytes", "--operation", "--json"},
        1);
  const int ranks = size_of(a, "--ranks", kMostCostRanks);
  CostParameters cost{seconds(a, "--alpha"), seconds(a, "--beta"), seconds(a, "--gamma")};
  if (a.has("--ranks-per-host")) {
    cost.ranks_per_host = size_of(a, "--ranks-per-host", ranks);
    cost.local_alpha = seconds(a, "--local-alpha");
    cost.local_beta = seconds(a, "--local-beta");
  } else if (a.has("--local-alpha") || a.has("--local-beta")) {
    usage("how many ranks share a host? --ranks-per-host K");
  }
  const auto given = a.values.find("--operation");
  const std::string operation = given == a.values.end() ? "all_reduce" : given->second;
  const bool json = a.flags.count("--json") > 0;
  if (json) absl::PrintF("[");
  bool first = true;
  for (const uint64_t bytes : sizes(a)) {
    const std::vector<CostEstimate> all = value_or_throw(
        operation == "all_reduce"
            ? try_estimate_all_reduce(ranks, bytes / kElementBytes, cost, kElementBytes)
            : try_estimate_operation(operation, ranks, bytes / kElementBytes, cost, kElementBytes));
    if (json) {
      print_json(bytes, all, first);
    } else {
      print_table(bytes, all);
    }
    first = false;
  }
  if (json) absl::PrintF("]\n");
  return 0;
}

}  // namespace weft::plan_tool
