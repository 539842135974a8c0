// Plans as text. The decoder is strict: what it accepts, it writes again alike.

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/pipeline/internal/plan_words.h"
#include "weft/pipeline/plan.h"

namespace weft::pipeline {
namespace {

using internal::ActionReader;
using internal::consume;
using internal::edge_text;
using internal::found;
using internal::is_word;
using internal::split;
using internal::take_number;

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
  // The error for the line taken last, when that is the one that is wrong.
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
    WEFT_RETURN_IF_ERROR(internal::set_numbers(words_of(*placement), &plan_.placement));
    if (const auto edges = take("edges"))
      WEFT_RETURN_IF_ERROR(internal::set_edges(words_of(*edges), &plan_));
    while (const auto tied = take("tied")) {
      WEFT_RETURN_IF_ERROR(internal::set_numbers(words_of(*tied), &plan_.tied.emplace_back()));
    }
    const ActionReader reader(plan_);
    while (const auto list = take(absl::StrCat("worker ", plan_.workers.size(), ":"))) {
      WEFT_RETURN_IF_ERROR(
          internal::set_actions(reader, words_of(*list), &plan_.workers.emplace_back()));
    }
    if (at_ + 1 != lines_.size() || !lines_[at_].empty()) return expected("the next worker");
    return absl::OkStatus();
  }

  const std::vector<std::string_view> lines_;
  size_t at_ = 0;
  size_t line_ = 0;
  Plan plan_;
};

}  // namespace

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

StatusOr<Plan> plan_from_text(std::string_view text) { return TextReader(text).read(); }
StatusOr<Plan> parse_plan(std::string_view text) {
  return text.substr(0, 1) == "{" ? plan_from_json(text) : plan_from_text(text);
}

}  // namespace weft::pipeline
