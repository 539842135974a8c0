// Every order of everything that can happen in small worlds: two and three workers, up to 4 packets
// under way, with losses, repetitions, reordering and the crash of each role. Each state is checked
// against RREF-1 to RREF-5, RREF-8 and RREF-10 when it is reached, and is then brought to rest
// without further faults, where nothing may be left (RREF-6).

#include <iostream>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/tests/rref/world.h"
#include "weft/tests/testing/environment.h"

namespace weft::test {
namespace {

struct Exploration {
  size_t states = 0;
  size_t transitions = 0;
  size_t depth = 0;
  bool is_complete = true;
  std::string violation;
  std::vector<std::string> trace;  // the shortest that ends in the violation
};

// Breadth first, so the first violation has a shortest trace.
Exploration explore(const World& start, size_t max_states) {
  struct Node {
    size_t parent;
    Step step;
  };
  Exploration result;
  std::vector<Node> nodes = {{0, {}}};
  std::vector<std::pair<size_t, World>> level;
  level.emplace_back(0, start);
  std::unordered_set<size_t> seen = {std::hash<std::string>()(start.state())};

  const auto found = [&](size_t node, const std::string& violation) {
    result.violation = violation;
    std::vector<Step> steps;
    for (; node != 0; node = nodes[node].parent) steps.push_back(nodes[node].step);
    World again = start;
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      result.trace.push_back(again.describe(*step));
      again.apply(*step);
    }
  };
  while (!level.empty()) {
    std::vector<std::pair<size_t, World>> next;
    for (const auto& [node, world] : level) {
      for (const Step& step : world.steps()) {
        World after = world;
        after.apply(step);
        ++result.transitions;
        if (!seen.insert(std::hash<std::string>()(after.state())).second) continue;
        nodes.push_back({node, step});
        World rested = after;
        if (rested.violation().empty()) rested.drain();
        if (!rested.violation().empty()) {
          found(nodes.size() - 1, rested.violation());
          result.states = seen.size();
          return result;
        }
        if (seen.size() > max_states) {
          result.is_complete = false;
          result.states = seen.size();
          return result;
        }
        next.emplace_back(nodes.size() - 1, std::move(after));
      }
    }
    level = std::move(next);
    if (!level.empty()) ++result.depth;
  }
  result.states = seen.size();
  return result;
}

std::string to_string(const Exploration& e) {
  std::string text = absl::StrCat(e.violation, "\nafter:\n");
  for (size_t i = 0; i < e.trace.size(); ++i) {
    absl::StrAppend(&text, "  ", i + 1, ". ", e.trace[i], "\n");
  }
  return text + "  and then no further faults\n";
}

struct Case {
  const char* name;
  int workers;
  World::Budget budget;
};

const Case kCases[] = {
    {"creation",
     2,
     {.remotes = 1, .fetches = 1, .errors = 1, .flushes = 1, .repeats = 2, .losses = 2}},
    {"two_creations", 2, {.remotes = 2, .flushes = 1, .losses = 1}},
    {"crash_of_owner_or_creator",
     2,
     {.remotes = 1, .fetches = 1, .flushes = 1, .repeats = 1, .losses = 1, .crashes = 1}},
    {"to_the_owner",
     2,
     {.remotes = 1, .shares = 1, .fetches = 1, .flushes = 1, .repeats = 1, .losses = 1}},
    {"from_the_owner", 2, {.locals = 1, .shares = 2, .losses = 2}},
    {"to_a_third", 3, {.remotes = 1, .shares = 1, .flushes = 2, .repeats = 2}},
    {"to_a_third_lost", 3, {.remotes = 1, .shares = 1, .flushes = 1, .losses = 2, .cancels = 1}},
    {"to_a_third_lost_and_repeated", 3, {.remotes = 1, .shares = 1, .repeats = 1, .losses = 1}},
    {"to_a_third_used", 3, {.remotes = 1, .shares = 1, .fetches = 2, .repeats = 1}},
    {"to_a_third_crash", 3, {.remotes = 1, .shares = 1, .losses = 1, .crashes = 1}},
    {"to_a_third_crash_of_two", 3, {.remotes = 1, .shares = 1, .flushes = 1, .crashes = 2}},
    {"returned", 3, {.remotes = 1, .shares = 1, .returns = 1, .audits = 1}},
    {"returned_lost", 3, {.remotes = 1, .shares = 1, .returns = 1, .losses = 1}},
};

// Maximum number of states of one world; WEFT_RREF_STATES sets another bound. A million of them
// need some gigabytes.
size_t max_states() {
  return weft::testing::environment_number<size_t>("WEFT_RREF_STATES", 100'000);
}

class RRefExplore : public ::testing::TestWithParam<Case> {};

TEST_P(RRefExplore, EveryOrder) {
  const Case& c = GetParam();
  const Exploration e = explore(World(c.workers, c.budget), max_states());
  std::cout << c.name << ": " << e.states << " states, " << e.transitions << " transitions, depth "
            << e.depth << (e.is_complete ? "" : " (bounded)") << "\n";
  EXPECT_TRUE(e.violation.empty()) << to_string(e);
}

INSTANTIATE_TEST_SUITE_P(Worlds, RRefExplore, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

void expect_found(const World& world, const char* what) {
  const Exploration e = explore(world, max_states());
  ASSERT_FALSE(e.violation.empty()) << "the planted bug was not found in " << e.states << " states";
  std::cout << to_string(e) << e.states << " states\n";
  EXPECT_NE(e.violation.find(what), std::string::npos) << e.violation;
}

TEST(RRefExplorePlanted, ADeleteWithoutATombstone) {
  expect_found(World(2, {.remotes = 1}, Bug::kDeleteWithoutTombstone), "RREF-");
}

TEST(RRefExplorePlanted, AParentThatGoesEarly) {
  expect_found(World(3, {.remotes = 1, .shares = 1, .losses = 1}, Bug::kParentGoesEarly), "RREF-");
}

TEST(RRefExplorePlanted, ARefusalThatIsIgnored) {
  expect_found(World(3, {.remotes = 1, .shares = 1, .crashes = 1}, Bug::kRefusalIgnored), "RREF-");
}

}  // namespace
}  // namespace weft::test
