#include "weft/collectives/internal/algorithm_table.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

// "4-16", "0-max".
bool parse_range(absl::string_view text, uint64_t* first, uint64_t* last) {
  const std::vector<absl::string_view> ends = absl::StrSplit(text, '-');
  if (ends.size() != 2 || !absl::SimpleAtoi(ends[0], first)) return false;
  if (ends[1] == "max") {
    *last = UINT64_MAX;
    return true;
  }
  return absl::SimpleAtoi(ends[1], last) && *first <= *last;
}

}  // namespace

bool offers(OpKind op, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto: return true;
    case Algorithm::kRecursiveDoubling: return op == OpKind::kAllReduce || op == OpKind::kAllGather;
    case Algorithm::kRing:
      return op == OpKind::kAllReduce || op == OpKind::kAllGather || op == OpKind::kReduceScatter;
    case Algorithm::kDirect:
      return op == OpKind::kAllReduce || op == OpKind::kBroadcast || op == OpKind::kAllGather ||
             op == OpKind::kReduceScatter || op == OpKind::kGather || op == OpKind::kScatter;
    case Algorithm::kBruck: return op == OpKind::kAllGather || op == OpKind::kAllToAll;
    case Algorithm::kRecursiveHalving: return op == OpKind::kReduceScatter;
    case Algorithm::kBinomialTree:
      return op == OpKind::kBroadcast || op == OpKind::kGather || op == OpKind::kScatter;
    case Algorithm::kScatterAllGather: return op == OpKind::kBroadcast;
    case Algorithm::kPairwise: return op == OpKind::kAllToAll;
    default: return op == OpKind::kAllReduce && static_cast<uint8_t>(algorithm) < kAlgorithms;
  }
}

std::string table_name(Algorithm algorithm) {
  std::string out;
  for (const char c : algorithm_name(static_cast<uint8_t>(algorithm))) {
    out.push_back(absl::ascii_isalnum(static_cast<unsigned char>(c)) ? absl::ascii_tolower(c)
                                                                     : '_');
  }
  return out;
}

Algorithm algorithm_named(std::string_view name) {
  for (uint8_t i = 1; i < kAlgorithms; ++i) {
    if (table_name(static_cast<Algorithm>(i)) == name) return static_cast<Algorithm>(i);
  }
  return Algorithm::kAuto;
}

StatusOr<AlgorithmTable::Rule> AlgorithmTable::parse_rule(std::string_view text) {
  const auto wrong = [text](const auto&... why) {
    return make_error(ErrorKind::kInvalidArgument,
                      cat("the rule '", text, "' of a table of algorithms ", why...));
  };
  const std::vector<absl::string_view> parts =
      absl::StrSplit(view(text), absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
  const std::vector<absl::string_view> head = absl::StrSplit(parts[0], ':');
  Rule out;
  absl::string_view name = head[0];
  if (const size_t dot = name.find('.'); dot != absl::string_view::npos) {
    out.op = OpKind::kNone;
    for (const OpKind op :
         {OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kAllGather, OpKind::kReduceScatter}) {
      if (std_view(name.substr(0, dot)) == op_name(static_cast<uint8_t>(op))) out.op = op;
    }
    if (out.op == OpKind::kNone) {
      return wrong(
          "is of an operation that tables do not decide about: all_reduce, broadcast, "
          "all_gather and reduce_scatter");
    }
    name = name.substr(dot + 1);
  }
  out.algorithm = algorithm_named(std_view(name));
  if (out.algorithm == Algorithm::kAuto) return wrong("names no algorithm");
  if (!offers(out.op, out.algorithm)) {
    return wrong("names an algorithm that ", op_name(static_cast<uint8_t>(out.op)),
                 " does not have");
  }
  if (head.size() != 2 || !parse_range(head[1], &out.first, &out.last)) {
    return wrong("has no range of bytes: write NAME:FIRST-LAST or NAME:FIRST-max");
  }
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(parts[i], absl::MaxSplits('=', 1));
    if (pair.first == "ranks") {
      if (parse_range(pair.second, &out.least_ranks, &out.most_ranks)) continue;
    } else if (pair.first == "hosts") {
      out.hosts = pair.second == "one"    ? Hosts::kOne
                  : pair.second == "some" ? Hosts::kSome
                  : pair.second == "each" ? Hosts::kEach
                                          : Hosts::kAny;
      if (out.hosts != Hosts::kAny) continue;
    } else if (pair.first == "on") {
      out.on = std::string(pair.second);
      if (out.on == "inproc" || out.on == "shm" || out.on == "tcp" || out.on == "shm+tcp") continue;
    }
    return wrong(
        "has the condition '", std_view(parts[i]),
        "': write ranks=FIRST-LAST, hosts=one, some or each, or on=inproc, shm, tcp or shm+tcp");
  }
  return out;
}

StatusOr<AlgorithmTable> AlgorithmTable::parse(std::string_view text, std::string_view backend) {
  if (text.size() > kMaxTableBytes) {
    return make_error(ErrorKind::kInvalidArgument,
                      cat("a table of algorithms of ", text.size(), " bytes; at most ",
                          kMaxTableBytes, " are allowed"));
  }
  AlgorithmTable out;
  for (const absl::string_view line : absl::StrSplit(view(text), '\n')) {
    const absl::string_view rules = line.substr(0, line.find('#'));
    for (const absl::string_view one : absl::StrSplit(rules, ';')) {
      const absl::string_view rule = absl::StripAsciiWhitespace(one);
      if (rule.empty()) continue;
      WEFT_ASSIGN_OR_RETURN(Rule parsed, parse_rule(std_view(rule)));
      if (!backend.empty() && !parsed.on.empty() && parsed.on != backend) continue;
      out.rules_.push_back(std::move(parsed));
    }
  }
  return out;
}

Algorithm AlgorithmTable::find(OpKind op, uint64_t bytes, int size,
                               const Topology& topology) const {
  if (rules_.empty()) return Algorithm::kAuto;
  const int hosts = topology.hosts();
  const Hosts kind = hosts == 1 ? Hosts::kOne : hosts == size ? Hosts::kEach : Hosts::kSome;
  const auto ranks = static_cast<uint64_t>(size);
  for (const Rule& rule : rules_) {
    if (rule.op != op || bytes < rule.first || bytes > rule.last) continue;
    if (ranks < rule.least_ranks || ranks > rule.most_ranks) continue;
    if (rule.hosts == Hosts::kAny || rule.hosts == kind) return rule.algorithm;
  }
  return Algorithm::kAuto;
}

}  // namespace weft::internal
