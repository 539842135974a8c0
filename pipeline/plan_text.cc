// Plans as text and as JSON. Both decoders are strict: what they accept, they write again alike.

#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/pipeline/plan.h"

namespace weft::pipeline {
namespace {

struct KindName {
  ActionKind kind;
  std::string_view name;
};
// Longer names first: a prefix must not hide one.
// Abseil's are for its own string_view.
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
std::string in_quotes(const std::string& text) { return "\"" + text + "\""; }
std::string found(std::string_view text) {
  return "', found '" + std::string(text.substr(0, 40)) + "'";
}

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

bool take_edge(std::string_view* text, Edge* edge) {
  return take_number(text, &edge->from) && consume(text, ">") && take_number(text, &edge->to) &&
         (!consume(text, ":") || take_number(text, &edge->output));
}

bool is_word(std::string_view text) {
  return !text.empty() && text.size() <= 64 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '+' || c == ':' || c == '.';
  });
}

// Finds edges by what they connect.
class ActionReader {
 public:
  explicit ActionReader(const Plan& plan) {
    for (size_t e = 0; e < plan.edges.size(); ++e) {
      edges_.emplace(plan.edges[e], static_cast<int>(e));
    }
  }
  bool read(std::string_view text, Action* out) const {
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
        const bool at_from =
            kind == ActionKind::kSendForward || kind == ActionKind::kReceiveBackward;
        out->stage = at_from ? edge.from : edge.to;
      } else if (!take_number(&text, &out->stage)) {
        return false;
      }
      if (consume(&text, ".") && !take_number(&text, &out->micro_batch)) return false;
      return text.empty();
    }
    return false;
  }

 private:
  std::map<Edge, int> edges_;
};

// The parts that both notations share, from lists of words.
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

std::vector<std::string_view> words_of(std::string_view line) {
  if (line.empty()) return {};
  return split(line, ' ');
}

class TextReader {
 public:
  explicit TextReader(std::string_view text) : lines_(split(text, '\n')) {}

  StatusOr<Plan> read() {
    const Status status = fill();
    if (!status.ok()) return annotate(status, absl::StrCat("plan, line ", line_ + 1));
    WEFT_RETURN_IF_ERROR(annotate_if(check_indices(plan_)));
    return std::move(plan_);
  }

 private:
  static Status annotate_if(Status s) { return s.ok() ? s : annotate(s, "plan"); }

  // The rest of the line if it begins with `key`.
  std::optional<std::string_view> take(std::string_view key) {
    if (at_ >= lines_.size()) return std::nullopt;
    std::string_view line = lines_[at_];
    if (!consume(&line, key)) return std::nullopt;
    if (!line.empty() && !consume(&line, " ")) return std::nullopt;
    line_ = at_++;
    return line;
  }
  // Of the line taken last, when that is the one that is wrong.
  Status wrong(std::string_view what) const {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("expected '", std::string(what), found(lines_[line_])));
  }
  Status expected(std::string_view what) {
    line_ = at_;
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("expected '", std::string(what),
                                   found(at_ < lines_.size() ? lines_[at_] : "the end")));
  }
  Status fill() {
    if (take("weft-plan 1") != "") return expected("weft-plan 1");
    const auto schedule = take("schedule");
    if (!schedule.has_value()) return expected("schedule WORD");
    if (!is_word(*schedule)) return wrong("schedule WORD");
    plan_.schedule = std::string(*schedule);
    auto count = take("micro_batches");
    if (!count.has_value()) return expected("micro_batches N");
    if (!take_number(&*count, &plan_.micro_batches) || !count->empty()) {
      return wrong("micro_batches N");
    }
    plan_.asynchronous = take("asynchronous") == "";
    const auto placement = take("placement");
    if (!placement.has_value()) return expected("placement W W ...");
    WEFT_RETURN_IF_ERROR(set_numbers(words_of(*placement), &plan_.placement));
    if (const auto edges = take("edges")) WEFT_RETURN_IF_ERROR(set_edges(words_of(*edges), &plan_));
    while (const auto tied = take("tied")) {
      WEFT_RETURN_IF_ERROR(set_numbers(words_of(*tied), &plan_.tied.emplace_back()));
    }
    const ActionReader reader(plan_);
    while (const auto list = take(absl::StrCat("worker ", plan_.workers.size(), ":"))) {
      WEFT_RETURN_IF_ERROR(set_actions(reader, words_of(*list), &plan_.workers.emplace_back()));
    }
    if (at_ + 1 != lines_.size() || !lines_[at_].empty()) return expected("the next worker");
    return absl::OkStatus();
  }

  const std::vector<std::string_view> lines_;
  size_t at_ = 0;
  size_t line_ = 0;
  Plan plan_;
};

// The JSON that to_json() writes: keys in its order, no escapes, spaces and line ends anywhere.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  StatusOr<Plan> read() {
    Status status = fill();
    if (status.ok()) status = check_indices(plan_);
    if (!status.ok()) return annotate(status, absl::StrCat("plan, byte ", at_));
    return std::move(plan_);
  }

 private:
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool take(std::string_view token) {
    skip();
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }
  Status expected(std::string_view what) {
    skip();
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("expected '", std::string(what), found(text_.substr(at_))));
  }
  Status expect(std::string_view token) { return take(token) ? absl::OkStatus() : expected(token); }
  Status key(std::string_view name) {
    WEFT_RETURN_IF_ERROR(expect(in_quotes(std::string(name))));
    return expect(":");
  }
  StatusOr<std::string_view> text() {
    WEFT_RETURN_IF_ERROR(expect("\""));
    const size_t end = text_.find('"', at_);
    if (end == std::string_view::npos) return expected("a text");
    const std::string_view out = text_.substr(at_, end - at_);
    at_ = end + 1;
    return out;
  }
  Status number(int* out) {
    skip();
    std::string_view rest = text_.substr(at_);
    if (!take_number(&rest, out)) return expected("a number");
    at_ = text_.size() - rest.size();
    return absl::OkStatus();
  }
  // One `item` after the other, in brackets.
  template <class Item>
  Status list(Item item) {
    WEFT_RETURN_IF_ERROR(expect("["));
    if (take("]")) return absl::OkStatus();
    do {
      WEFT_RETURN_IF_ERROR(item());
    } while (take(","));
    return expect("]");
  }
  Status numbers(std::vector<int>* out) {
    return list([&] { return number(&out->emplace_back()); });
  }
  StatusOr<std::vector<std::string_view>> texts() {
    std::vector<std::string_view> out;
    WEFT_RETURN_IF_ERROR(list([&]() -> Status {
      WEFT_ASSIGN_OR_RETURN(out.emplace_back(), text());
      return absl::OkStatus();
    }));
    return out;
  }
  Status fill() {
    WEFT_RETURN_IF_ERROR(expect("{"));
    WEFT_RETURN_IF_ERROR(key("weft_plan"));
    int version = 0;
    WEFT_RETURN_IF_ERROR(number(&version));
    if (version != 1) return expected("version 1");
    WEFT_RETURN_IF_ERROR(expect(","));
    WEFT_RETURN_IF_ERROR(key("schedule"));
    WEFT_ASSIGN_OR_RETURN(const std::string_view schedule, text());
    if (!is_word(schedule)) return expected("a word for the schedule");
    plan_.schedule = std::string(schedule);
    WEFT_RETURN_IF_ERROR(expect(","));
    WEFT_RETURN_IF_ERROR(key("micro_batches"));
    WEFT_RETURN_IF_ERROR(number(&plan_.micro_batches));
    WEFT_RETURN_IF_ERROR(expect(","));
    WEFT_RETURN_IF_ERROR(key("asynchronous"));
    plan_.asynchronous = take("true");
    if (!plan_.asynchronous) WEFT_RETURN_IF_ERROR(expect("false"));
    WEFT_RETURN_IF_ERROR(expect(","));
    WEFT_RETURN_IF_ERROR(key("placement"));
    WEFT_RETURN_IF_ERROR(numbers(&plan_.placement));
    WEFT_RETURN_IF_ERROR(expect(","));
    WEFT_RETURN_IF_ERROR(key("edges"));
    WEFT_ASSIGN_OR_RETURN(const auto edges, texts());
    WEFT_RETURN_IF_ERROR(set_edges(edges, &plan_));
    WEFT_RETURN_IF_ERROR(expect(","));
    WEFT_RETURN_IF_ERROR(key("tied"));
    WEFT_RETURN_IF_ERROR(list([&] { return numbers(&plan_.tied.emplace_back()); }));
    WEFT_RETURN_IF_ERROR(expect(","));
    WEFT_RETURN_IF_ERROR(key("workers"));
    const ActionReader reader(plan_);
    WEFT_RETURN_IF_ERROR(list([&]() -> Status {
      WEFT_ASSIGN_OR_RETURN(const auto words, texts());
      return set_actions(reader, words, &plan_.workers.emplace_back());
    }));
    WEFT_RETURN_IF_ERROR(expect("}"));
    skip();
    return at_ == text_.size() ? absl::OkStatus() : expected("the end");
  }

  const std::string_view text_;
  size_t at_ = 0;
  Plan plan_;
};

}  // namespace

std::string to_text(const Plan& plan, const Action& a) {
  std::string out;
  for (const auto& [kind, name] : kKinds) {
    if (kind == a.kind) out = std::string(name);
  }
  if (a.edge >= 0 && a.edge < static_cast<int>(plan.edges.size())) {
    Edge e = plan.edges[a.edge];
    if (backward_transfer(a.kind)) std::swap(e.from, e.to);
    absl::StrAppend(&out, edge_text(e));
  } else {
    absl::StrAppend(&out, a.stage);
  }
  if (a.micro_batch >= 0) absl::StrAppend(&out, ".", a.micro_batch);
  return out;
}

std::string to_text(const Plan& plan) {
  std::string out =
      absl::StrCat("weft-plan 1\nschedule ", plan.schedule, "\nmicro_batches ", plan.micro_batches,
                   "\n", plan.asynchronous ? "asynchronous\n" : "", "placement ",
                   absl::StrJoin(plan.placement, " "), "\n");
  if (!plan.edges.empty()) {
    absl::StrAppend(
        &out, "edges ",
        absl::StrJoin(plan.edges, " ", [](std::string* to, const Edge& e) { *to += edge_text(e); }),
        "\n");
  }
  for (const auto& group : plan.tied)
    absl::StrAppend(&out, "tied ", absl::StrJoin(group, " "), "\n");
  for (size_t w = 0; w < plan.workers.size(); ++w) {
    absl::StrAppend(&out, "worker ", w, ":");
    for (const Action& a : plan.workers[w]) absl::StrAppend(&out, " ", to_text(plan, a));
    out += '\n';
  }
  return out;
}

std::string to_json(const Plan& plan) {
  const auto join = [](const auto& items, const auto& text) {
    std::string out = "[";
    for (size_t i = 0; i < items.size(); ++i) {
      absl::StrAppend(&out, i > 0 ? ", " : "", text(items[i]));
    }
    return out + "]";
  };
  const auto number = [](int n) { return absl::StrCat(n); };
  return absl::StrCat(
      "{\"weft_plan\": 1, \"schedule\": ", in_quotes(plan.schedule),
      ", \"micro_batches\": ", plan.micro_batches,
      ", \"asynchronous\": ", plan.asynchronous ? "true" : "false",
      ",\n \"placement\": ", join(plan.placement, number),
      ",\n \"edges\": ", join(plan.edges, [](const Edge& e) { return in_quotes(edge_text(e)); }),
      ",\n \"tied\": ", join(plan.tied, [&](const auto& group) { return join(group, number); }),
      ",\n \"workers\": ",
      join(plan.workers,
           [&](const auto& list) {
             return absl::StrCat(
                 "\n  ", join(list, [&](const Action& a) { return in_quotes(to_text(plan, a)); }));
           }),
      "}\n");
}

StatusOr<Plan> plan_from_text(std::string_view text) { return TextReader(text).read(); }
StatusOr<Plan> plan_from_json(std::string_view json) { return JsonReader(json).read(); }
StatusOr<Plan> parse_plan(std::string_view text) {
  return text.substr(0, 1) == "{" ? plan_from_json(text) : plan_from_text(text);
}

}  // namespace weft::pipeline
