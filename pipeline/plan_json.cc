// Plans as JSON. The decoder is strict: what it accepts, it writes again alike but for white space.

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/internal/plan_words.h"
#include "weft/pipeline/plan.h"

namespace weft::pipeline {
namespace {

using internal::ActionReader;
using internal::edge_text;
using internal::found;
using internal::is_word;
using internal::take_number;

std::string in_quotes(const std::string& text) { return "\"" + text + "\""; }

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
    WEFT_RETURN_IF_ERROR(internal::set_edges(edges, &plan_));
    WEFT_RETURN_IF_ERROR(expect(","));
    WEFT_RETURN_IF_ERROR(key("tied"));
    WEFT_RETURN_IF_ERROR(list([&] { return numbers(&plan_.tied.emplace_back()); }));
    WEFT_RETURN_IF_ERROR(expect(","));
    WEFT_RETURN_IF_ERROR(key("workers"));
    const ActionReader reader(plan_);
    WEFT_RETURN_IF_ERROR(list([&]() -> Status {
      WEFT_ASSIGN_OR_RETURN(const auto words, texts());
      return internal::set_actions(reader, words, &plan_.workers.emplace_back());
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

StatusOr<Plan> plan_from_json(std::string_view json) { return JsonReader(json).read(); }

}  // namespace weft::pipeline
