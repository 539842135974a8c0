// Sparse tables whose rows go (least recently used, or not used for a while) and keys that are not admitted at once,
// under the seeded scheduler, with faults (ps_world.h). Each push adds to a row a mark of its own, a bit in the column
// of its client. For every schedule the history of calls says:
//   DATA-4  a row has the pushes that were applied since it was made, each once: of each client those from some push on,
//           without a gap, and every one that was acknowledged before the pull began. So a row that goes takes
//           all of its pushes along, and a copy that has taken over knows what has gone.
//   where all rows have room none goes; nowhere do the rows of a part take more than max_bytes
//   rows that are not used for `ttl` are gone after the next push
//   a key's first push is dropped where two are wanted, and no later one of a row that is there
//   the copies of a part are equal bit by bit at rest (PSR-12)
// A seed that fails is printed; WEFT_SIM_SEED=<seed> runs it alone, with the last events.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/ps/client.h"
#include "weft/ps/internal/service.h"
#include "weft/tests/sim/ps_world.h"

namespace weft::testing {
namespace {

constexpr int kKeys = 16;
constexpr int kMostPushes = 25;  // of a client to one key: bits of a number
constexpr absl::Duration kTtl = absl::Milliseconds(150);

enum class Goes { kNothing, kOldest, kUnused, kOldestAndNotAdmitted };
constexpr std::array kGoes = {"room for all", "oldest", "unused", "oldest, admitted at 2"};

class EvictionWorld : public PsWorld {
 public:
  EvictionWorld(uint64_t seed, SimRuntime* sim)
      : PsWorld(seed, sim, trouble_of(seed, copies_of(seed)), copies_of(seed)),
        goes_(goes_of(seed)),
        marks_(static_cast<size_t>(clients_)) {}

  static uint32_t copies_of(uint64_t seed) { return seed % 4 == 0 ? 1 : 2; }
  static Goes goes_of(uint64_t seed) { return static_cast<Goes>(seed / 4 % 4); }

  void run(const std::shared_ptr<Runtime>& runtime) {
    start(runtime);
    if (failed()) return;
    live_through();
    check_end();
    leave();
  }

  int64_t gone() const { return gone_; }
  int64_t not_admitted() const { return not_admitted_; }

 private:
  // What one client has pushed to each key, as bits.
  struct Marks {
    std::array<uint64_t, kKeys> attempted{};
    std::array<uint64_t, kKeys> acknowledged{};
    bool dead = false;
  };

  std::string described() const override { return kGoes[static_cast<size_t>(goes_)]; }

  ps::TableDefinition definition() const override {
    ps::TableDefinition out = ps::sparse(clients_, ps::rule<optim::SGD>({.lr = 1}));
    out.dtype = c10::ScalarType::Double;
    out.copies = copies_;
    if (goes_ == Goes::kUnused) {
      out.ttl = kTtl;
    } else {
      out.eviction = ps::Eviction::kLru;
      const int64_t rows = goes_ == Goes::kNothing ? 2 * kKeys : 5;
      out.max_bytes = static_cast<uint64_t>(rows * row_bytes());
    }
    if (goes_ == Goes::kOldestAndNotAdmitted) out.admit_after = 2;
    return out;
  }

  int64_t row_bytes() const { return 8 * clients_ + 56; }  // with key, steps and place in the order

  at::Tensor tensor_of(const std::vector<int>& keys) const {
    at::Tensor out = at::zeros({static_cast<int64_t>(keys.size())},
                               at::TensorOptions().dtype(c10::ScalarType::Long));
    for (size_t k = 0; k < keys.size(); ++k) out[static_cast<int64_t>(k)] = 1'000'003 * keys[k];
    return out;
  }
  std::vector<int> some_keys(int most) {
    std::set<int> out;
    for (int k = 1 + below(most); k > 0; --k) out.insert(below(kKeys));
    return {out.begin(), out.end()};
  }

  void live(int c) override {
    const ps::Client client(
        client_worker(c), {.servers = server_names(), .attempt_timeout = std::chrono::seconds(3)});
    const auto opened = client.try_open_table("t", definition());
    if (!opened.ok()) return fail(absl::StrCat("open: ", opened.status().message()));
    if (c == 0) add_faults();
    if (c == clients_ - 1) opened_ = true;
    const int steps = 6 + below(kMostPushes - 7);
    const int dies_at =
        trouble_ == Trouble::kDeath && c == clients_ - 1 && clients_ > 1 ? below(steps) : steps;
    for (int step = 0; step < steps && !failed(); ++step) {
      sim_->sleep(absl::Milliseconds(below(goes_ == Goes::kUnused ? 120 : 30)));
      if (step == dies_at) {
        marks_[static_cast<size_t>(c)].dead = true;
        (void)client_worker(c).shutdown({.graceful = false});
        return;
      }
      if (push(c, some_keys(4), *opened)) pull(*opened);
    }
  }

  bool push(int c, const std::vector<int>& keys, const ps::Table& table) {
    Marks& mine = marks_[static_cast<size_t>(c)];
    at::Tensor gradient = at::zeros({static_cast<int64_t>(keys.size()), clients_},
                                    at::TensorOptions().dtype(c10::ScalarType::Double));
    std::vector<std::pair<int, uint64_t>> made;
    for (size_t k = 0; k < keys.size(); ++k) {
      const auto key = static_cast<size_t>(keys[k]);
      const uint64_t mark = mine.attempted[key] + 1;  // the next bit
      mine.attempted[key] |= mark;
      made.emplace_back(keys[k], mark);
      gradient[static_cast<int64_t>(k)][c] = -static_cast<double>(mark);
    }
    const auto said =
        table.push_rows(tensor_of(keys), gradient, {.deadline = kDeadline}).try_wait();
    if (!said.ok()) {
      fail(absl::StrCat("a push failed: ", said.status().message()));
      return false;
    }
    ++out_.acknowledged;
    for (const auto& [key, mark] : made) mine.acknowledged[static_cast<size_t>(key)] |= mark;
    return true;
  }

  void pull(const ps::Table& table) {
    const std::vector<int> keys = some_keys(6);
    const std::vector<Marks> before = marks_;
    const auto values = table.pull_rows(tensor_of(keys), kDeadline).try_wait();
    if (!values.ok()) return fail(absl::StrCat("a pull failed: ", values.status().message()));
    ++out_.pulls;
    check_rows(keys, *values, before);
  }

  void check_rows(const std::vector<int>& keys, const at::Tensor& values,
                  const std::vector<Marks>& before) {
    for (size_t k = 0; k < keys.size(); ++k) {
      for (int c = 0; c < clients_; ++c) {
        const auto key = static_cast<size_t>(keys[k]);
        const double value = values[static_cast<int64_t>(k)][c].item<double>();
        const std::string where = absl::StrCat("key ", key, " of client ", c, ": ", value);
        if (value < 0 || value != std::floor(value) || value >= std::ldexp(1.0, kMostPushes)) {
          return fail(absl::StrCat(where, " is no sum of marks"));
        }
        const auto in = static_cast<uint64_t>(value);
        if ((in & ~marks_[static_cast<size_t>(c)].attempted[key]) != 0) {
          return fail(absl::StrCat(where, " has marks that were never pushed"));
        }
        const uint64_t known = before[static_cast<size_t>(c)].acknowledged[key];
        if (goes_ == Goes::kNothing && (known & ~in) != 0) {
          return fail(absl::StrCat(where, " lacks of ", known, ", and nothing goes"));
        }
        const uint64_t since = in == 0 ? ~uint64_t{0} : (uint64_t{1} << std::countr_zero(in)) - 1;
        if ((known & ~in & ~since) != 0) {
          return fail(absl::StrCat("DATA-4: ", where, " lacks a push in its midst, of ", known));
        }
      }
    }
  }

  void check_end() {
    if (failed()) return;
    sim_->sleep(absl::Seconds(40));  // leases, late copies
    int living = 0;
    while (marks_[static_cast<size_t>(living)].dead) ++living;
    const ps::Client client(client_worker(living), {.servers = server_names()});
    if (goes_ == Goes::kUnused) {
      // What was not used for so long goes with a push to its part, and the rows of the push are there.
      const auto table = client.try_open_table("t", definition());
      if (!table.ok()) return fail(absl::StrCat("the last push: ", table.status().message()));
      std::vector<int> all(kKeys);
      std::iota(all.begin(), all.end(), 0);
      for (const int key : all) {
        if (!push(living, {key}, *table)) return;
        sim_->sleep(2 * kTtl);
      }
    }
    sim_->sleep(absl::Seconds(30));  // that client leaves
    const auto eye = client.try_open_table("t", std::nullopt, {.observer = true});
    if (!eye.ok()) return fail(absl::StrCat("the last look: ", eye.status().message()));
    int64_t rows = 0;
    for (int s = 0; s < servers_ + spare_; ++s) {
      const auto service = ps::internal::PsService::of(server_worker(s));
      if (service == nullptr) continue;  // it has died
      for (const auto& [name, part] : service->parts_by_name()) {
        const auto report = part->report();
        const bool owns = report.role == ps::internal::ReplicaProtocol::Role::kOwner;
        rows += owns ? report.rows : 0;
        // Keys that are counted before they have a row are not in max_bytes.
        const auto cap = static_cast<int64_t>(definition().max_bytes);
        if (cap != 0 && report.rows * row_bytes() > cap) {
          fail(absl::StrCat("part ", name.second, " at ", server_name(s), " has ", report.rows,
                            " rows of ", row_bytes(), " bytes, and max_bytes is ", cap));
        }
      }
      const auto counts = server_worker(s).metrics().snapshot();
      const auto count_of = [&](const std::string& what) {
        const auto at = counts.find(absl::StrCat("weft_ps_", what, "_total{table=\"t\"}"));
        return at == counts.end() ? 0 : static_cast<int64_t>(at->second);
      };
      gone_ += count_of("evicted");
      not_admitted_ += count_of("not_admitted");
    }
    if (goes_ == Goes::kNothing && gone_ != 0) fail("a row went, and all had room");
    // One for each part, since every key was pushed to by itself, with pauses.
    if (goes_ == Goes::kUnused && rows > servers_) {
      fail(absl::StrCat(rows, " rows are there at ", servers_,
                        " parts, each of which has used one"));
    }
    std::vector<int> all(kKeys);
    std::iota(all.begin(), all.end(), 0);
    const auto values = eye->pull_rows(tensor_of(all)).try_wait();
    if (!values.ok()) return fail(absl::StrCat("the last look: ", values.status().message()));
    check_rows(all, *values, marks_);
    if (copies_ > 1) check_copies();
  }

  const Goes goes_;
  std::vector<Marks> marks_;
  int64_t gone_ = 0;
  int64_t not_admitted_ = 0;
};

struct Result {
  Outcome outcome;
  int64_t gone = 0;
  int64_t not_admitted = 0;
};

Result run_evictions(uint64_t seed, size_t keep_events = 0) {
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed, .keep_events = keep_events});
  auto world = std::make_unique<EvictionWorld>(seed, sim.get());
  const Status ended = sim->run([&] { world->run(sim); });
  Result out{world->take(), world->gone(), world->not_admitted()};
  if (!ended.ok()) out.outcome.status = ended;
  world.reset();
  out.outcome.hash = sim->trace_hash();
  out.outcome.events = sim->last_events();
  return out;
}

TEST(PsEvictionSim, PS_4_RowsThatGoTakeTheirPushesAlongAndCopiesStayEqual) {
  at::set_num_threads(1);
  if (const uint64_t only = environment_number<uint64_t>("WEFT_SIM_SEED", 0); only != 0) {
    const Outcome out = run_evictions(only, events_shown()).outcome;
    for (const std::string& event : out.events) std::printf("%s\n", event.c_str());
    ASSERT_TRUE(out.status.ok()) << "seed " << only << ": " << out.status;
    return;
  }
  const Share share(200);
  std::array<Result, kGoes.size()> sums;
  std::array<int64_t, kGoes.size()> counts{};
  for (uint64_t seed = 1; share.goes_on(seed - 1); ++seed) {
    const Result out = run_evictions(seed);
    ASSERT_TRUE(out.outcome.status.ok()) << "seed " << seed << ": " << out.outcome.status;
    if (seed % 50 == 0) {
      ASSERT_EQ(run_evictions(seed).outcome.hash, out.outcome.hash) << "seed " << seed;
    }
    const auto kind = static_cast<size_t>(EvictionWorld::goes_of(seed));
    ++counts[kind];
    sums[kind].gone += out.gone;
    sums[kind].not_admitted += out.not_admitted;
    sums[kind].outcome.acknowledged += out.outcome.acknowledged;
    sums[kind].outcome.pulls += out.outcome.pulls;
  }
  for (size_t kind = 0; kind < kGoes.size(); ++kind) {
    std::printf("%-22s %4d schedules, %6d pushes, %6d pulls, %6d rows gone, %5d not admitted\n",
                kGoes[kind], static_cast<int>(counts[kind]),
                static_cast<int>(sums[kind].outcome.acknowledged),
                static_cast<int>(sums[kind].outcome.pulls), static_cast<int>(sums[kind].gone),
                static_cast<int>(sums[kind].not_admitted));
    if (counts[kind] < 10) continue;  // a sanitizer runs few
    if (static_cast<Goes>(kind) != Goes::kNothing) {
      EXPECT_GT(sums[kind].gone, counts[kind]);
    }
    if (static_cast<Goes>(kind) == Goes::kOldestAndNotAdmitted) {
      EXPECT_GT(sums[kind].not_admitted, counts[kind]);
    }
  }
}

}  // namespace
}  // namespace weft::testing
