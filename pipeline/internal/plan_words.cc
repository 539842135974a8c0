#include "weft/pipeline/internal/plan_words.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::pipeline {
namespace {

struct KindName {
  ActionKind kind;
  std::string_view name;
};
// Longer names first: a prefix must not hide one.
constexpr std::array<KindName, 11> kKinds{{{ActionKind::kSendForward, "SF"},
                                           {ActionKind::kReceiveForward, "RF"},
                                           {ActionKind::kSendBackward, "SB"},
                                           {ActionKind::kReceiveBackward, "RB"},
                                           {ActionKind::kForward, "F"},
                                           {ActionKind::kBackward, "B"},
                                           {ActionKind::kInputGrad, "I"},
                                           {ActionKind::kWeightGrad, "W"},
                                           {ActionKind::kRecompute, "C"},
                                           {ActionKind::kReduce, "D"},
                                           {ActionKind::kStep, "U"}}};

bool backward_transfer(ActionKind k) {
  return k == ActionKind::kSendBackward || k == ActionKind::kReceiveBackward;
}

}  // namespace

namespace internal {

bool consume(std::string_view* text, std::string_view prefix) {
  if (text->substr(0, prefix.size()) != prefix) return false;
  text->remove_prefix(prefix.size());
  return true;
}

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> out;
  for (size_t end = text.find(at); end != std::string_view::npos; end = text.find(at)) {
    out.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  out.push_back(text);
  return out;
}

std::string found(std::string_view text) {
  return "', found '" + std::string(text.substr(0, 40)) + "'";
}

std::string edge_text(const Edge& e) {
  return e.output < 0 ? absl::StrCat(e.from, ">", e.to)
                      : absl::StrCat(e.from, ">", e.to, ":", e.output);
}

// A number as it is written: no sign, no leading zero.
bool take_number(std::string_view* text, int* out) {
  size_t n = 0;
  while (n < text->size() && (*text)[n] >= '0' && (*text)[n] <= '9') ++n;
  if (n == 0 || n > 7 || (n > 1 && text->front() == '0')) return false;
  *out = 0;
  for (char c : text->substr(0, n)) *out = *out * 10 + (c - '0');
  text->remove_prefix(n);
  return true;
}

static bool take_edge(std::string_view* text, Edge* edge) {
  return take_number(text, &edge->from) && consume(text, ">") && take_number(text, &edge->to) &&
         (!consume(text, ":") || take_number(text, &edge->output));
}

bool is_word(std::string_view text) {
  return !text.empty() && text.size() <= 64 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '+' || c == ':' || c == '.';
  });
}

ActionReader::ActionReader(const Plan& plan) {
  for (size_t e = 0; e < plan.edges.size(); ++e) {
    edges_.emplace(plan.edges[e], static_cast<int>(e));
  }
}

bool ActionReader::read(std::string_view text, Action* out) const {
  for (const auto& [kind, name] : kKinds) {
    if (!consume(&text, name)) continue;
    *out = Action{kind};
    if (name.size() == 2) {
      Edge edge;
      // A gradient goes against its edge: "SB1>0".
      if (!take_edge(&text, &edge)) return false;
      if (backward_transfer(kind)) std::swap(edge.from, edge.to);
      const auto found = edges_.find(edge);
      if (found == edges_.end()) return false;
      out->edge = found->second;
      const bool at_from = kind == ActionKind::kSendForward || kind == ActionKind::kReceiveBackward;
      out->stage = at_from ? edge.from : edge.to;
    } else if (!take_number(&text, &out->stage)) {
      return false;
    }
    if (consume(&text, ".") && !take_number(&text, &out->micro_batch)) return false;
    return text.empty();
  }
  return false;
}

Status set_edges(const std::vector<std::string_view>& words, Plan* plan) {
  for (std::string_view word : words) {
    std::string_view rest = word;
    Edge edge;
    if (!take_edge(&rest, &edge) || !rest.empty()) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("expected an edge such as '0>1", found(word)));
    }
    plan->edges.push_back(edge);
  }
  return absl::OkStatus();
}

Status set_numbers(const std::vector<std::string_view>& words, std::vector<int>* out) {
  for (std::string_view word : words) {
    std::string_view rest = word;
    int number = 0;
    if (!take_number(&rest, &number) || !rest.empty()) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("expected a number such as '0", found(word)));
    }
    out->push_back(number);
  }
  return absl::OkStatus();
}

Status set_actions(const ActionReader& reader, const std::vector<std::string_view>& words,
                   std::vector<Action>* out) {
  for (std::string_view word : words) {
    Action action;
    if (!reader.read(word, &action)) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("expected an action such as 'F0.1", found(word)));
    }
    out->push_back(action);
  }
  return absl::OkStatus();
}

}  // namespace internal

std::string to_text(const Plan& plan, const Action& a) {
  std::string out;
  for (const auto& [kind, name] : kKinds) {
    if (kind == a.kind) out = std::string(name);
  }
  if (a.edge >= 0 && a.edge < static_cast<int>(plan.edges.size())) {
    Edge e = plan.edges[a.edge];
    if (backward_transfer(a.kind)) std::swap(e.from, e.to);
    absl::StrAppend(&out, internal::edge_text(e));
  } else {
    absl::StrAppend(&out, a.stage);
  }
  if (a.micro_batch >= 0) absl::StrAppend(&out, ".", a.micro_batch);
  return out;
}

}  // namespace weft::pipeline
