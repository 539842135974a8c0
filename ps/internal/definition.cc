#include "weft/ps/internal/definition.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/ps/placement.h"

namespace weft::ps {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 40;
constexpr uint64_t kMostPartBytes = uint64_t{4} << 30;
constexpr int64_t kMostRowLength = int64_t{1} << 20;
constexpr size_t kMostDimensions = 16;
constexpr uint32_t kMostClients = 1 << 16;
constexpr size_t kMostRuleName = 128;
constexpr size_t kMostRuleOptions = 64;

Status wrong(std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("definition of a table: ", std::string(what)));
}
std::string shape_text(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}
std::string mode_text(const Consistency& c) {
  switch (c.mode) {
    case Mode::kAsp: return "asp";
    case Mode::kBsp: return absl::StrCat("bsp of ", c.clients);
    case Mode::kSsp: return absl::StrCat("ssp ", c.bound, " of ", c.clients);
    case Mode::kBatch: return absl::StrCat("batch ", c.bound, " of ", c.clients);
  }
  return "?";
}
std::string init_text(const Init& init) {
  switch (init.kind) {
    case Init::Kind::kZeros: return "zeros";
    case Init::Kind::kConstant: return absl::StrCat("constant ", init.low);
    case Init::Kind::kUniform:
      return absl::StrCat("uniform ", init.low, " to ", init.high, " seed ", init.seed);
  }
  return "?";
}
std::string eviction_text(Eviction eviction) {
  return eviction == Eviction::kLru ? "kLru" : "kNone";
}
std::string kind_text(TableKind kind) { return kind == TableKind::kDense ? "dense" : "sparse"; }
std::string dtype_text(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Double ? "Double" : "Float";
}
std::string rule_text(const RuleChoice& rule) {
  return absl::StrCat(rule.name, "(", absl::StrJoin(rule.options, ", "), ")");
}

}  // namespace

TableDefinition dense(std::vector<int64_t> shape, RuleChoice rule) {
  TableDefinition out;
  out.shape = std::move(shape);
  out.rule = std::move(rule);
  return out;
}

TableDefinition sparse(int64_t row_length, RuleChoice rule) {
  TableDefinition out;
  out.kind = TableKind::kSparse;
  out.shape = {row_length};
  out.rule = std::move(rule);
  return out;
}

std::string to_string(const TableDefinition& d) {
  return absl::StrCat(kind_text(d.kind), " ", shape_text(d.shape), " ", dtype_text(d.dtype), ", ",
                      rule_text(d.rule), ", ", init_text(d.init), ", ", mode_text(d.consistency),
                      d.eviction == Eviction::kLru ? ", least recently used rows go" : "",
                      d.ttl != absl::ZeroDuration()
                          ? absl::StrCat(", rows go after ", absl::FormatDuration(d.ttl))
                          : "",
                      d.admit_after > 1 ? absl::StrCat(", rows from push ", d.admit_after) : "",
                      d.copies == 2 ? ", two copies" : "", d.movable ? ", movable" : "");
}

namespace internal {

Status check_name(std::string_view name) {
  bool good = !name.empty() && name.size() <= 128;
  for (const char c : name) {
    good &= absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
            std::string_view("-_:./").find(c) != std::string_view::npos;
  }
  if (good) return absl::OkStatus();
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("a table's name is 1 to 128 characters of [A-Za-z0-9-_:./], not '",
                                 std::string(name.substr(0, 128)), "'"));
}

int64_t element_count(const TableDefinition& definition) {
  int64_t count = 1;
  for (const int64_t n : definition.shape) count *= n;
  return count;
}

size_t part_count(const TableDefinition& definition, size_t servers) {
  if (definition.kind == TableKind::kSparse) return servers;
  const auto item = static_cast<int64_t>(c10::elementSize(definition.dtype));
  // Parts differ by an element at most: so many whole ones fit into each.
  return dense_parts(element_count(definition), servers,
                     definition.part_bytes / static_cast<uint64_t>(item));
}

namespace {
Status check_shape(const TableDefinition& d) {
  const bool is_dense = d.kind == TableKind::kDense;
  if (!is_dense && (d.shape.size() != 1 || d.shape[0] < 1 || d.shape[0] > kMostRowLength)) {
    return wrong(absl::StrCat("shape is ", shape_text(d.shape),
                              ", of a sparse table it is one number from 1 to ", kMostRowLength,
                              ", the length of a row"));
  }
  if (d.shape.size() > kMostDimensions) {
    return wrong(absl::StrCat("shape has ", d.shape.size(), " dimensions, ", kMostDimensions,
                              " are the most"));
  }
  int64_t count = 1;
  for (const int64_t n : d.shape) {
    if (n < 1 || n > kMostElements / count) {
      return wrong(absl::StrCat("shape is ", shape_text(d.shape), ", it must have 1 to ",
                                kMostElements, " elements"));
    }
    count *= n;
  }
  return absl::OkStatus();
}

Status check_consistency(const Consistency& c) {
  if (c.clients > kMostClients) {
    return wrong(absl::StrCat("clients is ", c.clients, ", the most are ", kMostClients));
  }
  switch (c.mode) {
    case Mode::kAsp: return absl::OkStatus();
    case Mode::kBsp:
    case Mode::kSsp:
      if (c.clients == 0)
        return wrong("clients is 0: BSP and SSP count steps of at least 1 client");
      return absl::OkStatus();
    case Mode::kBatch:
      if (c.bound == 0 || c.bound > c.clients) {
        return wrong(absl::StrCat("batch of ", c.bound, " of ", c.clients,
                                  " clients: it must be from 1 to their number"));
      }
      return absl::OkStatus();
  }
  return wrong("unknown consistency");
}

Status check_rows_that_go(const TableDefinition& d) {
  const bool goes = d.eviction != Eviction::kNone || d.ttl != absl::ZeroDuration();
  if (d.kind == TableKind::kDense) {
    if (d.max_bytes != 0) return wrong("max_bytes is of sparse tables only");
    if (goes || d.admit_after > 1) {
      return wrong("eviction, ttl and admit_after are of sparse tables only");
    }
    return absl::OkStatus();
  }
  if (d.eviction != Eviction::kNone && d.eviction != Eviction::kLru)
    return wrong("unknown eviction");
  if (d.eviction == Eviction::kLru && d.max_bytes == 0) {
    return wrong("eviction is kLru, and max_bytes, above which rows go, is 0");
  }
  if (d.ttl != absl::ZeroDuration() &&
      (d.ttl < absl::Milliseconds(1) || d.ttl == absl::InfiniteDuration())) {
    return wrong(absl::StrCat("ttl is ", absl::FormatDuration(d.ttl),
                              ", it must be 0, for never, or 1 ms or more"));
  }
  const Mode mode = d.consistency.mode;
  if (goes && mode != Mode::kAsp && mode != Mode::kSsp) {
    return wrong(absl::StrCat("eviction and ttl want ASP or SSP, and the table has ",
                              mode_text(d.consistency),
                              ": the rows of pushes that wait for their step cannot go"));
  }
  return absl::OkStatus();
}

std::vector<std::string> rule_names(const UserRules& rules) {
  std::vector<std::string> out = update_rule_names();
  for (const auto& rule : rules) out.push_back(rule->name());
  return out;
}

}  // namespace

Status check_definition(const TableDefinition& d) {
  if (d.kind != TableKind::kDense && d.kind != TableKind::kSparse) return wrong("unknown kind");
  WEFT_RETURN_IF_ERROR(check_shape(d));
  if (d.dtype != c10::ScalarType::Float && d.dtype != c10::ScalarType::Double) {
    return wrong("dtype must be Float or Double");
  }
  if (d.rule.name.empty() || d.rule.name.size() > kMostRuleName) {
    return wrong(absl::StrCat("the rule's name has ", d.rule.name.size(),
                              " bytes, it must have 1 to ", kMostRuleName));
  }
  if (d.rule.options.size() > kMostRuleOptions) {
    return wrong(absl::StrCat("the rule has ", d.rule.options.size(), " options, the most are ",
                              kMostRuleOptions));
  }
  const bool finite = std::isfinite(d.init.low) && std::isfinite(d.init.high);
  if (!finite || d.init.low > d.init.high) {
    return wrong(absl::StrCat("init is from ", d.init.low, " to ", d.init.high));
  }
  WEFT_RETURN_IF_ERROR(check_rows_that_go(d));
  const bool sized = d.part_bytes != TableDefinition{}.part_bytes;
  if (d.kind == TableKind::kSparse && sized) return wrong("part_bytes is of dense tables only");
  if (d.part_bytes < c10::elementSize(d.dtype) || d.part_bytes > kMostPartBytes) {
    return wrong(absl::StrCat("part_bytes is ", d.part_bytes, ", it must be from ",
                              c10::elementSize(d.dtype), ", an element, to ", kMostPartBytes));
  }
  if (d.copies < 1 || d.copies > 2) {
    return wrong(absl::StrCat("copies is ", d.copies, ", it must be 1 or 2"));
  }
  return check_consistency(d.consistency);
}

Status check_rules(const UserRules& rules) {
  std::set<std::string> names;
  for (const std::string& name : update_rule_names()) names.insert(name);
  for (const auto& rule : rules) {
    if (rule == nullptr) return make_error(ErrorKind::kInvalidArgument, "rules: one is null");
    const std::string name = rule->name();
    if (name.empty() || name.size() > kMostRuleName ||
        rule->option_names().size() > kMostRuleOptions) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("rules: '", name.substr(0, kMostRuleName), "' has ",
                                     rule->option_names().size(), " options and a name of ",
                                     name.size(), " bytes; the most are ", kMostRuleOptions,
                                     " and ", kMostRuleName, ", and the least of a name is 1"));
    }
    if (!names.insert(name).second) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("rules: there is another one named '", name, "'"));
    }
  }
  return absl::OkStatus();
}

std::shared_ptr<const UpdateRule> find_rule(std::string_view name, const UserRules& rules) {
  for (const auto& rule : rules) {
    if (rule->name() == name) return rule;
  }
  return make_update_rule(name);
}

StatusOr<std::shared_ptr<const UpdateRule>> rule_of(const TableDefinition& d,
                                                    const UserRules& rules) {
  const std::shared_ptr<const UpdateRule> rule = find_rule(d.rule.name, rules);
  if (rule == nullptr) {
    return wrong(absl::StrCat("there is no update rule '", d.rule.name.substr(0, 64),
                              "'; there are ", absl::StrJoin(rule_names(rules), ", ")));
  }
  WEFT_RETURN_IF_ERROR(rule->check_options(d.rule.options));
  bool by_row = false;
  for (size_t b = 0; b < rule->buffer_names().size(); ++b) by_row = by_row || rule->by_row(b);
  if (d.kind == TableKind::kDense && by_row) {
    return wrong(absl::StrCat("rule ", d.rule.name,
                              " counts by rows, which a dense table does not have, because its "
                              "servers cut it between any two elements"));
  }
  if (rule->compensates_delay()) {
    const auto& names = rule->option_names();
    const auto own = std::find(names.begin(), names.end(), "own_state");
    if (own != names.end() && d.rule.options[static_cast<size_t>(own - names.begin())] != 0) {
      return wrong(absl::StrCat("rule ", d.rule.name,
                                " with own_state, and a table's state is of all its clients"));
    }
    if (d.kind != TableKind::kDense) {
      return wrong(absl::StrCat("rule ", d.rule.name, " is of dense tables only"));
    }
  }
  return rule;
}

std::string difference(const TableDefinition& there, const TableDefinition& given) {
  const auto differ = [](std::string_view field, const std::string& a, const std::string& b) {
    return absl::StrCat(std::string(field), " is ", a, " there and ", b, " here");
  };
  if (there.kind != given.kind) {
    return differ("kind", kind_text(there.kind), kind_text(given.kind));
  }
  if (there.shape != given.shape) {
    return differ("shape", shape_text(there.shape), shape_text(given.shape));
  }
  if (there.dtype != given.dtype) {
    return differ("dtype", dtype_text(there.dtype), dtype_text(given.dtype));
  }
  if (there.rule != given.rule) {
    return differ("rule", rule_text(there.rule), rule_text(given.rule));
  }
  if (there.init != given.init) {
    return differ("init", init_text(there.init), init_text(given.init));
  }
  if (there.consistency != given.consistency) {
    return differ("consistency", mode_text(there.consistency), mode_text(given.consistency));
  }
  if (there.max_bytes != given.max_bytes) {
    return differ("max_bytes", absl::StrCat(there.max_bytes), absl::StrCat(given.max_bytes));
  }
  if (there.eviction != given.eviction) {
    return differ("eviction", eviction_text(there.eviction), eviction_text(given.eviction));
  }
  if (there.ttl != given.ttl) {
    return differ("ttl", absl::FormatDuration(there.ttl), absl::FormatDuration(given.ttl));
  }
  if (there.admit_after != given.admit_after) {
    return differ("admit_after", absl::StrCat(there.admit_after), absl::StrCat(given.admit_after));
  }
  if (there.copies != given.copies) {
    return differ("copies", absl::StrCat(there.copies), absl::StrCat(given.copies));
  }
  if (there.movable != given.movable) {
    return differ("movable", there.movable ? "true" : "false", given.movable ? "true" : "false");
  }
  if (there.part_bytes != given.part_bytes) {
    return differ("part_bytes", absl::StrCat(there.part_bytes), absl::StrCat(given.part_bytes));
  }
  return "";
}

FirstValues::FirstValues(const Init& init, const std::string& table)
    : init_(init), seed_(mix_bits(init.seed) ^ hash_text(table)) {}

double FirstValues::at(uint64_t row, uint64_t column) const {
  switch (init_.kind) {
    case Init::Kind::kZeros: return 0;
    case Init::Kind::kConstant: return init_.low;
    case Init::Kind::kUniform: break;
  }
  const uint64_t bits = mix_bits(mix_bits(seed_ ^ mix_bits(row)) + column);
  return init_.low + (init_.high - init_.low) * (static_cast<double>(bits >> 11) * 0x1.0p-53);
}

}  // namespace internal
}  // namespace weft::ps
