#include "weft/tools/weftrun/rendezvous.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "weft/store/internal/launch/system.h"

namespace weft::launch {
namespace {

// How soon node 0 sees that a hello was replaced.
constexpr absl::Duration kLook = absl::Milliseconds(250);

// Bounds of what is read from a store that others write to.
constexpr int kMaxNodes = 65536;

std::string hello_key(int node) { return absl::StrCat("hello/", node); }
std::string ack_key(int node) { return absl::StrCat("ack/", node); }
constexpr char kPlanKey[] = "plan";

// What one node says about itself:
// "<nonce> <nnodes> <max restarts> <host> <role> <count> <role> <count> ...".
struct Hello {
  std::string nonce;
  int nnodes = 0;
  int max_restarts = 0;
  Node node;
};

std::string write_hello(const Hello& hello) {
  std::string text =
      absl::StrCat(hello.nonce, " ", hello.nnodes, " ", hello.max_restarts, " ", hello.node.host);
  for (const RoleSpec& role : hello.node.roles)
    absl::StrAppend(&text, " ", role.name, " ", role.count);
  return text;
}

absl::StatusOr<Hello> read_hello(absl::string_view text) {
  std::vector<std::string> words = absl::StrSplit(text, ' ');
  Hello hello;
  bool good = words.size() >= 6 && words.size() % 2 == 0 && words.size() < 10'000 &&
              absl::SimpleAtoi(words[1], &hello.nnodes) &&
              absl::SimpleAtoi(words[2], &hello.max_restarts);
  int sum = 0;
  for (size_t i = 4; good && i < words.size(); i += 2) {
    RoleSpec role{.name = words[i]};
    good = absl::SimpleAtoi(words[i + 1], &role.count) && role.count >= 1 && !role.name.empty() &&
           role.count <= kMaxLocalSize && (sum += role.count) <= kMaxLocalSize;
    hello.node.roles.push_back(std::move(role));
  }
  if (!good) {
    return absl::DataLossError(
        absl::StrCat("not written by a weftrun of this version: '", text.substr(0, 200), "'"));
  }
  hello.nonce = words[0];
  hello.node.host = words[3];
  return hello;
}

// What node 0 says to all: a line "<state> <job id> <master address> <port>", a line with the URL
// of the programs' store (for `abort`: with the reason), and the hello of every node.
enum class PlanState { kPropose, kGo, kAbort };

struct Plan {
  PlanState state = PlanState::kPropose;
  Job job;
  std::string text;
  std::vector<Hello> hellos;
};

std::string write_plan(const Plan& plan) {
  const char* state = plan.state == PlanState::kPropose ? "propose"
                      : plan.state == PlanState::kGo    ? "go"
                                                        : "abort";
  std::string out = absl::StrCat(state, " ", plan.job.id, " ", plan.job.master_addr, " ",
                                 plan.job.master_port, "\n", plan.text);
  for (const Hello& hello : plan.hellos) absl::StrAppend(&out, "\n", write_hello(hello));
  return out;
}

absl::StatusOr<Plan> read_plan(absl::string_view text) {
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  std::vector<std::string> words = absl::StrSplit(lines[0], ' ');
  Plan plan;
  bool known = words[0] == "propose" || words[0] == "go" || words[0] == "abort";
  if (lines.size() < 3 || lines.size() > kMaxNodes + 2 || words.size() != 4 || !known ||
      !absl::SimpleAtoi(words[3], &plan.job.master_port)) {
    return absl::DataLossError(
        absl::StrCat("not written by a weftrun of this version: '", text.substr(0, 200), "'"));
  }
  plan.state = words[0] == "propose" ? PlanState::kPropose
               : words[0] == "go"    ? PlanState::kGo
                                     : PlanState::kAbort;
  plan.job.id = words[1];
  plan.job.master_addr = words[2];
  plan.text = lines[1];
  plan.job.store_url = lines[1];
  for (size_t i = 2; i < lines.size(); ++i) {
    absl::StatusOr<Hello> hello = read_hello(lines[i]);
    if (!hello.ok()) return hello.status();
    plan.job.nodes.push_back(hello->node);
    plan.hellos.push_back(*std::move(hello));
  }
  return plan;
}

std::string node_list(const std::vector<int>& nodes) {
  return absl::StrCat(nodes.size() == 1 ? "node " : "nodes ", absl::StrJoin(nodes, ", "));
}

class Meeting {
 public:
  Meeting(Store& store, const MeetingOptions& options)
      : store_(store), options_(options), deadline_(monotonic_now() + options.timeout) {}

  absl::StatusOr<Job> lead();
  absl::StatusOr<Job> follow();

 private:
  absl::Duration left() const {
    return std::max(deadline_ - monotonic_now(), absl::ZeroDuration());
  }
  Hello own_hello() const {
    return {.nonce = random_hex(8),
            .nnodes = options_.nnodes,
            .max_restarts = options_.max_restarts,
            .node = options_.self};
  }
  absl::Status collect(std::vector<Hello>& hellos);
  // True when all have agreed, false when a node has said hello anew.
  absl::StatusOr<bool> agree(const Plan& plan);
  absl::Status missing(const std::vector<int>& nodes, absl::string_view what) const;

  Store& store_;
  const MeetingOptions& options_;
  const absl::Duration deadline_;
};

absl::Status Meeting::missing(const std::vector<int>& nodes, absl::string_view what) const {
  return absl::DeadlineExceededError(
      absl::StrCat("after ", absl::FormatDuration(options_.timeout), " ", node_list(nodes), " of ",
                   options_.nnodes, " ", nodes.size() == 1 ? "has" : "have", " not ", what,
                   " (meeting place ", store_.describe(), ")"));
}

// Waits for a hello of every node.
absl::Status Meeting::collect(std::vector<Hello>& hellos) {
  std::vector<int> absent;
  for (int node = 1; node < options_.nnodes; ++node) {
    // First a look: with no time left it still tells who else is absent.
    absl::StatusOr<std::optional<std::string>> text = store_.try_get(hello_key(node));
    if (text.ok() && !text->has_value()) {
      text = store_.wait_change(hello_key(node), std::nullopt, left());
      if (!text.ok() && is_deadline(text.status())) {
        absent.push_back(node);
        continue;
      }
    }
    if (!text.ok()) return text.status();
    absl::StatusOr<Hello> hello = read_hello(text->value_or(""));
    if (!hello.ok()) return annotate(hello.status(), absl::StrCat("hello of node ", node));
    hellos[node] = *std::move(hello);
  }
  if (!absent.empty()) return missing(absent, "come");
  return absl::OkStatus();
}

absl::StatusOr<bool> Meeting::agree(const Plan& plan) {
  for (int node = 1; node < options_.nnodes; ++node) {
    const std::string wanted = absl::StrCat(plan.job.id, " ", plan.hellos[node].nonce);
    absl::StatusOr<std::optional<std::string>> ack = store_.try_get(ack_key(node));
    while (true) {
      if (!ack.ok() && !is_deadline(ack.status())) return ack.status();
      if (ack.ok() && *ack == wanted) break;
      if (ack.ok() && absl::StartsWith(ack->value_or(""), absl::StrCat(wanted, " "))) {
        const Hello& theirs = plan.hellos[node];
        const bool size = theirs.nnodes != options_.nnodes;
        const absl::string_view flag = size ? " --nnodes " : " --max-restarts ";
        return absl::FailedPreconditionError(
            absl::StrCat("node ", node, " (host ", theirs.node.host, ") was started with", flag,
                         size ? theirs.nnodes : theirs.max_restarts, ", node 0 with", flag,
                         size ? options_.nnodes : options_.max_restarts));
      }
      absl::StatusOr<std::optional<std::string>> hello = store_.try_get(hello_key(node));
      if (!hello.ok()) return hello.status();
      if (*hello != write_hello(plan.hellos[node])) return false;
      if (left() == absl::ZeroDuration())
        return missing({node}, "come (an old hello of it is there)");
      std::optional<std::string> seen = ack.ok() ? *ack : std::nullopt;
      ack = store_.wait_change(ack_key(node), seen, std::min(left(), kLook));
      if (!ack.ok() && is_deadline(ack.status())) ack = store_.try_get(ack_key(node));
    }
  }
  return true;
}

absl::StatusOr<Job> Meeting::lead() {
  Plan plan;
  plan.hellos.resize(options_.nnodes);
  plan.hellos[0] = own_hello();
  plan.job.master_port = options_.master_port;
  absl::Status status;
  while (status.ok()) {
    status = collect(plan.hellos);
    if (!status.ok()) break;
    plan.state = PlanState::kPropose;
    plan.job.id = random_hex(16);
    plan.job.nodes.clear();
    bool one_host = true;
    for (const Hello& hello : plan.hellos) {
      plan.job.nodes.push_back(hello.node);
      one_host = one_host && hello.node.host == options_.self.host;
    }
    plan.job.master_addr = !options_.master_addr.empty() ? options_.master_addr
                           : one_host                    ? "127.0.0.1"
                                                         : options_.self.host;
    plan.job.store_url = options_.store_url(plan.job);
    plan.text = plan.job.store_url;
    status = store_.set(kPlanKey, write_plan(plan), left());
    if (!status.ok()) break;
    absl::StatusOr<bool> agreed = agree(plan);
    if (!agreed.ok()) {
      status = agreed.status();
    } else if (*agreed) {
      plan.state = PlanState::kGo;
      status = store_.set(kPlanKey, write_plan(plan));
      if (status.ok()) return plan.job;
    }
  }
  // So that those who are there do not wait for their own deadline.
  plan.state = PlanState::kAbort;
  plan.text = absl::StrJoin(absl::StrSplit(status.message(), '\n'), " ");
  if (plan.job.id.empty()) plan.job.id = "none";
  if (plan.job.master_addr.empty()) plan.job.master_addr = "none";
  for (Hello& hello : plan.hellos) {
    if (hello.nonce.empty())
      hello = {.nonce = "none", .node = {.host = "none", .roles = {{"none", 1}}}};
  }
  store_.set(kPlanKey, write_plan(plan), absl::Seconds(1)).IgnoreError();  // the first error counts
  return status;
}

absl::StatusOr<Job> Meeting::follow() {
  const Hello own = own_hello();
  if (absl::Status status = store_.set(hello_key(options_.node), write_hello(own), left());
      !status.ok()) {
    return status;
  }
  std::optional<std::string> seen;
  bool named_somebody_else = false;
  absl::Status status;
  while (status.ok()) {
    absl::StatusOr<std::optional<std::string>> text = store_.wait_change(kPlanKey, seen, left());
    if (!text.ok()) {
      status = text.status();
      if (!is_deadline(status)) break;
      std::vector<int> absent = {0};
      for (int node = 1; node < options_.nnodes; ++node) {
        absl::StatusOr<bool> there = store_.check({hello_key(node)}, absl::Seconds(1));
        if (there.ok() && !*there) absent.push_back(node);
      }
      // Without a plan node 0 may be there and wait for the others; with one, it is an old plan.
      if (absent.size() > 1 && !named_somebody_else) absent.erase(absent.begin());
      status = missing(absent, "come");
      if (named_somebody_else) {
        status = annotate(status, absl::StrCat("the plan there names another node ", options_.node,
                                               " (of an old run, or --node-rank is given twice)"));
      }
      break;
    }
    seen = *text;
    if (!seen) continue;  // taken away: the next change counts
    absl::StatusOr<Plan> plan = read_plan(*seen);
    if (!plan.ok()) {
      status = annotate(plan.status(), "plan of node 0");
      break;
    }
    auto size = static_cast<int>(plan->hellos.size());
    if (size <= options_.node || plan->hellos[options_.node].nonce != own.nonce) {
      named_somebody_else = true;  // of an old run, or node 0 has not seen our hello yet
      continue;
    }
    named_somebody_else = false;
    if (plan->state == PlanState::kAbort) {
      status = absl::AbortedError(absl::StrCat("node 0 gave up: ", plan->text));
    } else if (plan->state == PlanState::kGo) {
      return plan->job;
    } else {
      // Only the answer shows that this hello is alive, so only here a difference counts.
      bool agreed =
          size == options_.nnodes && plan->hellos[0].max_restarts == options_.max_restarts;
      std::string answer = absl::StrCat(plan->job.id, " ", own.nonce, agreed ? "" : " refused");
      status = store_.set(ack_key(options_.node), answer, left());
    }
  }
  // No other node shall count on this node.
  store_.delete_key(hello_key(options_.node), absl::Seconds(1)).status().IgnoreError();
  return status;
}

}  // namespace

absl::StatusOr<Job> meet(Store& store, const MeetingOptions& options) {
  Meeting meeting(store, options);
  return options.node == 0 ? meeting.lead() : meeting.follow();
}

}  // namespace weft::launch
