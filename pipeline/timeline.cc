#include "weft/pipeline/timeline.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace weft::pipeline {
namespace {

constexpr double kLeft = 90;
constexpr double kWidth = 1200;
constexpr double kRow = 22;
constexpr double kTop = 58;

struct Look {
  const char* name;
  const char* colour;
};

Look look_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward: return {"forward", "#5b8def"};
    case ActionKind::kBackward: return {"backward", "#2e9e6b"};
    case ActionKind::kInputGrad: return {"input gradient", "#3cb8a5"};
    case ActionKind::kWeightGrad: return {"weight gradient", "#8bc34a"};
    case ActionKind::kRecompute: return {"recompute", "#9a7fd1"};
    case ActionKind::kReduce: return {"reduce", "#c77d3a"};
    case ActionKind::kStep: return {"step", "#6b6b6b"};
    default: return {"transfer", "#222222"};
  }
}
Look look_of(WaitReason reason) {
  switch (reason) {
    case WaitReason::kWarmUp: return {"warm-up", "#efefef"};
    case WaitReason::kDependency: return {"dependency", "#f6c7c2"};
    case WaitReason::kTransport: return {"transport", "#f9d98c"};
    case WaitReason::kDrain: return {"drain", "#dcdcdc"};
  }
  return {"", ""};
}

// The schedule's name is a word and actions are letters, digits and '>', so this is all.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

class Picture {
 public:
  Picture(const Plan& plan, double scale) : plan_(plan), scale_(scale) {}

  void text(double x, double y, const std::string& what) {
    absl::StrAppendFormat(&body_, "<text x=\"%.1f\" y=\"%.1f\">%s</text>\n", x, y, escaped(what));
  }
  void box(double row, Ticks start, Ticks end, const Look& look, const std::string& title,
           const std::string& label) {
    const double x = kLeft + static_cast<double>(start) * scale_;
    const double width = static_cast<double>(end - start) * scale_;
    absl::StrAppendFormat(&body_,
                          "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"%s\" "
                          "stroke=\"#ffffff\" stroke-width=\"0.5\"><title>%s</title></rect>\n",
                          x, row, width, kRow - 2, look.colour, escaped(title));
    // Seven units of width for a letter.
    if (width >= 7.0 * static_cast<double>(label.size()) && !label.empty()) {
      text(x + 3, row + kRow - 8, label);
    }
  }
  void action(double row, const Action& a, Ticks start, Ticks end) {
    if (end <= start) return;
    const std::string name = to_text(plan_, a);
    box(row, start, end, look_of(a.kind),
        absl::StrCat(name, " ", look_of(a.kind).name, " ", start, " to ", end), name);
  }
  void worker(double row, const WorkerTimeline& t) {
    for (const TimedWait& wait : t.waits) {
      const Look look = look_of(wait.reason);
      box(row, wait.start, wait.end, look,
          absl::StrCat("idle: ", look.name, " ", wait.start, " to ", wait.end), "");
    }
    for (const TimedAction& a : t.actions) action(row, a.action, a.start, a.end);
  }
  void legend() {
    double x = kLeft;
    const auto entry = [&](const Look& look) {
      absl::StrAppendFormat(&body_,
                            "<rect x=\"%.1f\" y=\"32\" width=\"12\" height=\"12\" fill=\"%s\"/>\n",
                            x, look.colour);
      text(x + 16, 42, look.name);
      x += 30 + 7.0 * static_cast<double>(std::string_view(look.name).size());
    };
    for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackward,
                                  ActionKind::kInputGrad, ActionKind::kWeightGrad,
                                  ActionKind::kRecompute, ActionKind::kReduce, ActionKind::kStep}) {
      const bool used = std::any_of(
          plan_.workers.begin(), plan_.workers.end(), [&](const std::vector<Action>& list) {
            return std::any_of(list.begin(), list.end(),
                               [&](const Action& a) { return a.kind == kind; });
          });
      if (used) entry(look_of(kind));
    }
    for (const WaitReason reason : {WaitReason::kWarmUp, WaitReason::kDependency,
                                    WaitReason::kTransport, WaitReason::kDrain}) {
      entry(look_of(reason));
    }
  }
  std::string end(double height) const {
    const double width = kLeft + kWidth + 20;
    return absl::StrFormat(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 "
        "%.0f %.0f\" font-family=\"sans-serif\" font-size=\"11\">\n"
        "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n%s</svg>\n",
        width, height, width, height, body_);
  }

 private:
  const Plan& plan_;
  const double scale_;
  std::string body_;
};

[[noreturn]] void no_picture(std::string_view what) {
  throw_error(make_error(ErrorKind::kInvalidArgument, what));
}

void check(const Plan& plan, const Simulation& predicted) {
  if (predicted.workers.size() != plan.workers.size()) {
    no_picture(absl::StrCat("a simulation of ", predicted.workers.size(), " workers for a plan of ",
                            plan.workers.size()));
  }
}

}  // namespace

std::string timeline_svg(const Plan& plan, const Simulation& predicted,
                         const std::vector<std::vector<int64_t>>& measured) {
  check(plan, predicted);
  const Simulation ran = measured.empty() ? Simulation{} : measured_step(plan, measured);
  const Ticks last = std::max({Ticks{1}, predicted.makespan, ran.makespan});
  Picture picture(plan, kWidth / static_cast<double>(last));
  picture.text(kLeft, 20,
               absl::StrFormat("%s: %d stages at %d workers, %d micro-batches; %d ticks, bubble "
                               "%.1f %% of the step, %.1f %% of the span%s",
                               plan.schedule, plan.stages(), plan.workers.size(),
                               plan.micro_batches, predicted.makespan,
                               100 * predicted.makespan_bubble(), 100 * predicted.span_bubble(),
                               measured.empty() ? "" : absl::StrCat("; measured: ", ran.makespan)));
  picture.legend();
  double y = kTop;
  for (size_t w = 0; w < plan.workers.size(); ++w) {
    picture.text(8, y + kRow - 8, absl::StrCat("worker ", w));
    picture.worker(y, predicted.workers[w]);
    y += kRow;
    if (!measured.empty()) {
      picture.text(8, y + kRow - 8, "measured");
      picture.worker(y, ran.workers[w]);
      y += kRow + 6;
    }
  }
  return picture.end(y + 10);
}

std::string timeline_trace(const Plan& plan, const Simulation& predicted,
                           const std::vector<std::vector<int64_t>>& measured) {
  check(plan, predicted);
  std::string out = "{\"traceEvents\": [";
  const auto event = [&](int process, size_t worker, const std::string& name, const char* category,
                         Ticks start, Ticks end) {
    if (end <= start) return;
    absl::StrAppendFormat(&out,
                          ",\n{\"ph\": \"X\", \"pid\": %d, \"tid\": %d, \"name\": \"%s\", "
                          "\"cat\": \"%s\", \"ts\": %.3f, \"dur\": %.3f}",
                          process, worker, name, category, static_cast<double>(start) / 1000,
                          static_cast<double>(end - start) / 1000);
  };
  out +=
      "\n{\"ph\": \"M\", \"pid\": 0, \"name\": \"process_name\", \"args\": {\"name\": "
      "\"predicted\"}}";
  if (!measured.empty()) {
    out +=
        ",\n{\"ph\": \"M\", \"pid\": 1, \"name\": \"process_name\", \"args\": {\"name\": "
        "\"measured\"}}";
  }
  const auto step = [&](int process, const Simulation& of) {
    for (size_t w = 0; w < of.workers.size(); ++w) {
      for (const TimedWait& wait : of.workers[w].waits) {
        event(process, w, absl::StrCat("idle: ", look_of(wait.reason).name), "idle", wait.start,
              wait.end);
      }
      for (const TimedAction& a : of.workers[w].actions) {
        event(process, w, to_text(plan, a.action), look_of(a.action.kind).name, a.start, a.end);
      }
    }
  };
  step(0, predicted);
  if (!measured.empty()) step(1, measured_step(plan, measured));
  return out + "\n]}\n";
}

}  // namespace weft::pipeline
