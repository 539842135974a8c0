// Parameter servers under the seeded scheduler, with faults: one to four servers, one to three clients,
// tables of every consistency. Each push adds a mark of its own (a digit in a counter of its client), so a
// value tells exactly which pushes are in it. For every schedule the history of calls says:
//   every acknowledged push is in, exactly once; every other at most once; nothing else is in
//   a pull sees what was acknowledged before it began (ASP, SSP); what its clock promises (BSP: the
//   steps below it and nothing else; SSP: no client more than the bound behind; batch: its own last step)
//   every call ends by its deadline; afterwards nothing waits anywhere
//   SIM-3  no deadlock
// With two copies of each part a server joins, parts are moved, a server dies, drains, or is cut off from all
// others or from the other servers for a while, too: every push is acknowledged all the same, and afterwards the two copies of each part are
// equal bit by bit.
// In a third of the schedules snapshots are taken meanwhile, until one is: it is a cut, that is, of each client it has
// every push up to one number and none after it. At the end it is restored where all servers are there, and
// the table is what it was at the cut. In some the disk is late, or stands still for a while: no step waits for it.
// A seed that fails is printed; WEFT_SIM_SEED=<seed> runs it alone, with the last events.

#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/ps/client.h"
#include "weft/ps/internal/service.h"
#include "weft/tests/sim/ps_cut_check.h"
#include "weft/tests/sim/ps_schedule.h"
#include "weft/tests/sim/ps_world.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT
using ps::Consistency;
using ps::Mode;

constexpr int kMostSteps = 12;  // digits of a client's counter

// How the parts of a schedule's table are kept.
struct Kept {
  uint32_t copies = 1;
  bool movable = false;
};
constexpr Kept kTwoCopies{.copies = 2};
constexpr Kept kMovable{.movable = true};

// What one client did, in its order.
struct History {
  uint64_t acknowledged = 0;  // marks
  uint64_t attempted = 0;
  uint64_t dropped = 0;             // marks that some part was told to drop
  std::map<int, uint64_t> of_step;  // BSP: marks that were acknowledged, by step
  int steps = 0;                    // that it has finished
  // By number of the push: its mark, and the row that it is of; -1: all.
  std::vector<std::pair<uint64_t, int64_t>> pushes;
  bool dead = false;
};

class World : public PsWorld {
 public:
  World(uint64_t seed, SimRuntime* sim, const Kept& kept)
      : PsWorld(seed, sim, kept.movable ? trouble_of_movable(seed) : trouble_of(seed, kept.copies),
                kept.copies, kept.movable) {
    sparse_ = below(2) == 0;
    const auto n = static_cast<uint32_t>(clients_);
    switch (seed / kTroubles % 4) {
      case 0: consistency_ = Consistency::asp(); break;
      case 1: consistency_ = Consistency::bsp(n); break;
      case 2: consistency_ = Consistency::ssp(static_cast<uint64_t>(below(4)), n); break;
      default: consistency_ = Consistency::batch(1 + static_cast<uint64_t>(below(clients_)), n);
    }
    parts_ = seed / 11 % 4 == 2;  // several at each server
    // A client has one push in a batch of K.
    bursts_ = seed / 11 % 3 == 0 && consistency_.mode != Mode::kBatch;
    snapshots_ = seed / 13 % 3 == 1 || trouble_ == Trouble::kDisk;
    steps_ = 3 + below(kMostSteps - 3);
    histories_.resize(static_cast<size_t>(clients_));
  }

  void run(const std::shared_ptr<Runtime>& runtime) {
    start(runtime);
    if (failed()) return;
    live_through();
    check_end();
    check_restore();
    leave();
  }

 private:
  // Each client counts in a column of its own, in every row, so every part of the table has its marks.
  static constexpr int64_t kKeys = 9;
  static constexpr const char* kFolder = "/snapshots";
  ps::TableDefinition definition() const override {
    const auto rule = ps::rule<optim::SGD>({.lr = 1});
    auto out = sparse_ ? ps::sparse(clients_, rule) : ps::dense({kKeys, clients_}, rule);
    out.dtype = c10::ScalarType::Double;
    out.consistency = consistency_;
    out.copies = copies_;
    out.movable = movable_;
    if (!sparse_ && parts_) out.part_bytes = 24;
    return out;
  }

  // One that is whole, or none: a server that is lost takes what one copy had along.
  void take_snapshot() {
    while (!opened_ && out_.status.ok()) sim_->sleep(absl::Milliseconds(5));
    sim_->sleep(absl::Milliseconds(below(150)));
    const ps::Client client(client_worker(0), {.servers = server_names()});
    std::string last;
    for (int i = 0; i < 100; ++i) {
      // While messages are lost, parts change their owners again and again, and an owner that has a successor
      // learns of it within 10 s. When that ends a snapshot has to be possible.
      const bool loss = trouble_ == Trouble::kLoss || trouble_ == Trouble::kMovesAndLoss;
      if (i == 40 && loss) plan_->clear();
      if (!out_.status.ok()) return;
      ps::SnapshotOptions options;
      if (trouble_ == Trouble::kDisk) options.deadline = 15s;
      const auto kept = client.try_snapshot(kFolder, options);
      if (kept.ok()) {
        ++out_.cuts;
        return check_cut();
      }
      const ErrorKind kind = error_kind(kept.status());
      const bool lost = kind == ErrorKind::kPeerLost && one_dies();
      const bool late = kind == ErrorKind::kDeadline && trouble_ == Trouble::kDisk;
      if (kind != ErrorKind::kUnavailable && !lost && !late) {
        return fail(absl::StrCat("snapshot: ", kept.status().message()));
      }
      ++out_.given_up;
      last = std::string(kept.status().message());
      sim_->sleep(absl::Milliseconds(20 + below(800)));
    }
    fail(absl::StrCat("no snapshot in its time; the last: ", last));
  }

  void check_cut() {
    const auto cut = read_cut(sim_->files(), kFolder, "t", all_keys());
    if (!cut.ok()) return fail(absl::StrCat("reading the cut: ", cut.status().message()));
    for (int c = 0; c < clients_; ++c) {
      const History& h = histories_[static_cast<size_t>(c)];
      const auto known = cut->pushes.find(absl::StrCat("c", c));
      const uint64_t pushes = known == cut->pushes.end() ? 0 : known->second;
      if (pushes > h.pushes.size()) return fail("a cut with pushes that were not made");
      out_.inside += pushes > 0 && pushes < h.pushes.size() ? 1 : 0;
      for (int64_t row = 0; row < kKeys; ++row) {
        uint64_t due = 0;
        for (uint64_t n = 0; n < pushes; ++n) {
          const auto& [mark, of_row] = h.pushes[n];
          if (of_row < 0 || of_row == row) due |= mark;
        }
        uint64_t applied = 0;
        uint64_t held = 0;
        if (!as_marks(cut->values[row][c].item<double>(), &applied) ||
            !as_marks(-cut->held[row][c].item<double>(), &held)) {
          return fail("CUT-3: a cut that is no sum of marks");
        }
        if ((applied & held) != 0) return fail("CUT-3: a push that is applied and waits");
        const uint64_t in = applied | held;
        if ((in & ~h.attempted) != 0) return fail("CUT-3: marks that were never pushed");
        // One that has left, died, or not entered yet is not among the clients of a cut.
        if (known == cut->pushes.end()) continue;
        if ((in & ~due) != 0) return fail("CUT-2: a push after the cut is in it");
        const uint64_t may_lack = consistency_.mode == Mode::kBatch ? due : 0;
        if ((due & ~in & ~may_lack) != 0) return fail("CUT-3: a push before the cut is not in it");
      }
    }
  }

  void check_restore() {
    if (out_.cuts == 0 || !out_.status.ok()) return;
    if (one_dies() || one_drains()) return;
    const ps::Client client(client_worker(0), {.servers = server_names()});
    std::unique_ptr<Thread> disk;
    if (trouble_ == Trouble::kDisk) disk = sim_->spawn("disk", [this] { trouble_disk(1); });
    const auto back = client.try_restore(kFolder);
    if (disk != nullptr) disk->join();
    if (!back.ok()) return fail(absl::StrCat("restore: ", back.status().message()));
    const auto cut = read_cut(sim_->files(), kFolder, "t", all_keys());
    const auto eye = client.try_open_table("t", std::nullopt, {.observer = true});
    if (!eye.ok()) return fail(absl::StrCat("open what was restored: ", eye.status().message()));
    const auto values = (sparse_ ? eye->pull_rows(all_keys()) : eye->pull()).try_wait();
    if (!values.ok()) return fail(absl::StrCat("what was restored: ", values.status().message()));
    if (!at::equal(*values, cut->values)) return fail("what was restored is not what was kept");
    ++out_.restored;
    sim_->sleep(absl::Seconds(30));
    if (copies_ > 1 || movable_) check_copies();
  }

  // A step of BSP and of a batch is divided by the clients in it, one to three: a mark is 6, 3 or 2 in a
  // digit to the base 16. Otherwise it is a bit.
  bool divides() const {
    return consistency_.mode == Mode::kBsp || consistency_.mode == Mode::kBatch;
  }

  at::Tensor marks(int c, int step) const {
    at::Tensor out =
        at::zeros({kKeys, clients_}, at::TensorOptions().dtype(c10::ScalarType::Double));
    out.select(1, c).fill_(divides() ? -6 * std::ldexp(1.0, 4 * step) : -std::ldexp(1.0, step));
    return out;
  }
  static at::Tensor all_keys() {
    at::Tensor out = at::zeros({kKeys}, at::TensorOptions().dtype(c10::ScalarType::Long));
    for (int64_t k = 0; k < kKeys; ++k) out[k] = k * 1'000'003;
    return out;
  }

  void spawn_more(std::vector<std::unique_ptr<Thread>>* threads) override {
    if (snapshots_) threads->push_back(sim_->spawn("snapshot", [this] { take_snapshot(); }));
  }

  void live(int c) override {
    const ps::Client client(client_worker(c), {.servers = server_names(), .attempt_timeout = 3s});
    const auto opened = client.try_open_table("t", definition());
    if (!opened.ok()) return fail(absl::StrCat("open: ", opened.status().message()));
    if (c == 0) add_faults();
    if (c == clients_ - 1) opened_ = true;
    History& mine = histories_[static_cast<size_t>(c)];
    const int dies_at = trouble_ == Trouble::kDeath && c == clients_ - 1 && clients_ > 1
                            ? below(steps_)
                            : kMostSteps;
    for (int step = 0; step < steps_ && out_.status.ok(); ++step) {
      sim_->sleep(absl::Milliseconds(below(30)));
      if (step == dies_at) {
        mine.dead = true;
        (void)client_worker(c).shutdown({.graceful = false});
        return;
      }
      one_step(c, step, *opened, &mine);
    }
    const ps::TableStats stats = opened->stats();
    out_.repeats += static_cast<int64_t>(stats.repeats);
    out_.dropped += static_cast<int64_t>(stats.dropped);
    out_.moves += static_cast<int64_t>(stats.moves);
    if (consistency_.mode == Mode::kSsp && stats.most_lag > consistency_.bound) {
      fail(absl::StrCat("PSR-6: a pull saw a client ", stats.most_lag, " steps behind"));
    }
  }

  void one_step(int c, int step, const ps::Table& table, History* mine) {
    const uint64_t mark = uint64_t{1} << step;
    mine->attempted |= mark;
    const std::vector<uint64_t> before = acknowledged();
    const absl::Time begun = sim_->now();
    const ps::PushOptions options{.advance = true, .deadline = kDeadline};
    StatusOr<at::Tensor> values = absl::UnknownError("");
    Status pushed;
    const bool apart = below(3) == 0;
    for (int64_t row = 0; apart && bursts_ && row < kKeys; ++row) {
      mine->pushes.emplace_back(mark, row);
    }
    if (!apart || !bursts_) mine->pushes.emplace_back(mark, -1);
    if (apart) {
      // A push that is acknowledged by itself, and the end of the step after it. Or one for each row, all at
      // once, which travel together.
      std::vector<Future<ps::PushResult>> pushes;
      if (bursts_) {
        for (int64_t row = 0; row < kKeys; ++row) pushes.push_back(push_row(c, step, row, table));
      } else {
        const ps::PushOptions plain{.deadline = kDeadline};
        pushes.push_back(sparse_ ? table.push_rows(all_keys(), marks(c, step), plain)
                                 : table.push(marks(c, step), plain));
      }
      bool dropped = false;
      for (const auto& push : pushes) {
        const auto said = push.try_wait();
        if (pushed.ok()) pushed = said.status();
        dropped = said.ok() && said->dropped;
      }
      if (pushed.ok()) acknowledge(mine, mark, step, dropped);
      const Status ended = table.advance(kDeadline).try_wait();
      if (pushed.ok()) pushed = ended;
      values =
          (sparse_ ? table.pull_rows(all_keys(), kDeadline) : table.pull(kDeadline)).try_wait();
    } else {
      const uint64_t dropped = table.stats().dropped;
      values = (sparse_ ? table.push_pull_rows(all_keys(), marks(c, step), all_keys(), options)
                        : table.push_pull(marks(c, step), options))
                   .try_wait();
      pushed = values.status();
      if (pushed.ok()) acknowledge(mine, mark, step, table.stats().dropped != dropped);
    }
    mine->steps = step + 1;
    const absl::Duration took = sim_->now() - begun;
    // With a disk that stands still a snapshot holds clients for its pause at most, again and again.
    const absl::Duration most =
        trouble_ == Trouble::kDisk ? absl::Seconds(12) : 3 * kDeadline + absl::Seconds(1);
    if (took > most) {
      fail(absl::StrCat("a step took ", absl::FormatDuration(took)));
    }
    if (!pushed.ok() || !values.ok()) {
      ++out_.failed;
      const Status why = pushed.ok() ? values.status() : pushed;
      return fail(
          absl::StrCat("a step failed: ", why.message()));  // each trouble is bridged in time
    }
    ++out_.acknowledged;
    ++out_.pulls;
    check_values(*values, before, c, step);
  }

  Future<ps::PushResult> push_row(int c, int step, int64_t row, const ps::Table& table) const {
    const ps::PushOptions plain{.deadline = kDeadline};
    const at::Tensor all = marks(c, step);
    if (sparse_) {
      return table.push_rows(all_keys().narrow(0, row, 1), all.narrow(0, row, 1), plain);
    }
    at::Tensor one = at::zeros_like(all);
    one[row] = all[row];
    return table.push(one, plain);
  }

  void acknowledge(History* mine, uint64_t mark, int step, bool dropped) {
    if (dropped) {
      mine->dropped |= mark;
    } else {
      mine->acknowledged |= mark;
      mine->of_step[step] = mark;
    }
  }
  std::vector<uint64_t> acknowledged() const {
    std::vector<uint64_t> out;
    for (const History& h : histories_) out.push_back(h.acknowledged);
    return out;
  }
  static uint64_t marks_below(int step) { return (uint64_t{1} << step) - 1; }

  std::string described() const override {
    return absl::StrCat(sparse_ ? "sparse" : "dense", ", mode ",
                        static_cast<int>(consistency_.mode));
  }

  // Row by row, since each lies at some server. Marks that were applied twice are no set of marks.
  void check_values(const at::Tensor& values, const std::vector<uint64_t>& before, int c,
                    int step) {
    for (int64_t row = 0; row < kKeys; ++row) {
      for (int other = 0; other < clients_; ++other) {
        const History& theirs = histories_[static_cast<size_t>(other)];
        const double value = values[row][other].item<double>();
        uint64_t in = 0;
        if (!as_marks(value, &in))
          return fail(absl::StrCat("a value that is no sum of marks: ", value));
        if ((in & ~theirs.attempted) != 0) return fail("marks that were never pushed");
        const bool mine = other == c;
        switch (consistency_.mode) {
          case Mode::kAsp:
          case Mode::kSsp:
            if ((before[static_cast<size_t>(other)] & ~in) != 0) {
              return fail("an acknowledged push is not in a later pull");
            }
            if (mine && in != marks_below(step + 1)) return fail("a pull without its own pushes");
            if (consistency_.mode == Mode::kSsp && !theirs.dead && trouble_ != Trouble::kDeath) {
              const int seen = step + 1 - static_cast<int>(consistency_.bound);
              if (seen > 0 && (marks_below(seen) & ~in) != 0) return fail("PSR-6: too stale");
            }
            break;
          case Mode::kBsp:
            if (trouble_ != Trouble::kDeath && in != marks_below(step + 1)) {
              return fail(absl::StrCat("PSR-5: marks ", in, " after step ", step));
            }
            break;
          case Mode::kBatch:
            if (mine && (theirs.acknowledged & ~in) != 0)
              return fail("PSR-7: its own step is not in");
            break;
        }
      }
    }
  }

  // False: it is no sum of marks, each once.
  bool as_marks(double value, uint64_t* in) const {
    *in = 0;
    if (value < 0 || value >= std::ldexp(1.0, 52) || value != std::floor(value)) return false;
    const auto whole = static_cast<uint64_t>(value);
    for (int step = 0; step < kMostSteps; ++step) {
      const uint64_t digit = divides() ? whole >> (4 * step) & 15 : whole >> step & 1;
      if (digit == 0) continue;
      if (divides() && digit != 6 && digit != 3 && digit != 2) return false;
      *in |= uint64_t{1} << step;
    }
    return whole >> (divides() ? 4 * kMostSteps : kMostSteps) == 0;
  }

  // When all have ended: what is in, and that nothing waits.
  void check_end() {
    if (!out_.status.ok()) return;
    sim_->sleep(absl::Seconds(40));  // leases, late copies, clients that leave
    int living = 0;
    while (histories_[static_cast<size_t>(living)].dead) ++living;
    const ps::Client client(client_worker(living), {.servers = server_names()});
    const auto eye = client.try_open_table("t", std::nullopt, {.observer = true});
    if (!eye.ok()) return fail(absl::StrCat("the last look: ", eye.status().message()));
    const auto values = (sparse_ ? eye->pull_rows(all_keys()) : eye->pull()).try_wait();
    if (!values.ok()) return fail(absl::StrCat("the last look: ", values.status().message()));
    for (int64_t row = 0; row < kKeys; ++row) {
      for (int c = 0; c < clients_; ++c) {
        const History& h = histories_[static_cast<size_t>(c)];
        uint64_t in = 0;
        if (!as_marks((*values)[row][c].item<double>(), &in))
          return fail("the end is no sum of marks");
        if ((h.acknowledged & ~in) != 0) return fail("an acknowledged push is lost");
        if ((in & ~(h.acknowledged | h.dropped)) != 0 && !h.dead) return fail("a push too many");
      }
    }
    if (copies_ > 1 || movable_) return check_copies();
    for (int s = 0; s < servers_; ++s) {
      const auto info = worker(s).debug_info();
      out_.together += info.at("ps_requests") - info.at("ps_messages");
      const auto report = ps::internal::PsService::of(worker(s))->reports()["t"];
      if (report.clients != 0 || report.parked != 0) {
        fail(absl::StrCat("PSR-8, PSR-9: ", report.clients, " clients and ", report.parked,
                          " pulls are left at ps", s));
      }
      if (report.held != 0 && consistency_.mode != Mode::kBatch) fail("a push waits for no step");
    }
  }

  bool sparse_ = false;
  bool bursts_ = false;
  bool parts_ = false;
  bool snapshots_ = false;
  Consistency consistency_;
  int steps_ = 0;
  std::vector<History> histories_;
};

Outcome run_schedule(uint64_t seed, const Kept& kept = {}, size_t keep_events = 0) {
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed, .keep_events = keep_events});
  auto world = std::make_unique<World>(seed, sim.get(), kept);
  const Status ended = sim->run([&] { world->run(sim); });
  Outcome out = world->take();
  if (!ended.ok()) out.status = ended;
  world.reset();
  out.hash = sim->trace_hash();
  out.events = sim->last_events();
  return out;
}

// The schedule of WEFT_SIM_SEED, with its events, if one is given.
bool ran_alone(const Kept& kept) {
  const auto seed = environment_number<uint64_t>("WEFT_SIM_SEED", 0);
  if (seed == 0) return false;
  const Outcome out = run_schedule(seed, kept, events_shown());
  for (const std::string& event : out.events) std::printf("%s\n", event.c_str());
  EXPECT_TRUE(out.status.ok()) << "seed " << seed << ": " << out.status;
  return true;
}

// Runs this test's share of schedules, `by_default` of them, every 50th twice; or the one of WEFT_SIM_SEED alone, and is
// false then. `add` gets the outcome of each.
bool run_schedules(int by_default, const Kept& kept,
                   const std::function<void(uint64_t seed, const Outcome& out)>& add) {
  at::set_num_threads(1);
  if (ran_alone(kept)) return false;
  const Share share(by_default);
  Cuts cuts;
  for (uint64_t seed = 1; share.goes_on(seed - 1); ++seed) {
    const Outcome out = run_schedule(seed, kept);
    EXPECT_TRUE(out.status.ok()) << "seed " << seed << ": " << out.status;
    if (!out.status.ok()) return false;
    if (seed % 50 == 0) {
      EXPECT_EQ(run_schedule(seed, kept).hash, out.hash) << "seed " << seed;
    }
    add(seed, out);
    cuts.add(out);
  }
  cuts.expect_some();
  return true;
}

// Each was found by a run of more schedules, and is a defect that was fixed since.
TEST(PsSim, PSR_7_and_PSR_10_SeedsThatHaveFailed) {
  at::set_num_threads(1);
  const std::pair<uint64_t, Kept> found[] = {
      {127, kTwoCopies}, {722, kTwoCopies}, {2297, kTwoCopies}, {13226, kMovable}};
  for (const auto& [seed, kept] : found) {
    const Outcome out = run_schedule(seed, kept);
    EXPECT_TRUE(out.status.ok()) << "seed " << seed << ": " << out.status;
  }
}

TEST(PsSim, SchedulesWithFaultsLoseNoAcknowledgedPushAndApplyNoneTwice) {
  std::map<Trouble, Outcome> sums;
  std::map<Trouble, int64_t> counts;
  const bool ran = run_schedules(1500, {}, [&](uint64_t seed, const Outcome& out) {
    Outcome& sum = sums[trouble_of(seed, 1)];
    ++counts[trouble_of(seed, 1)];
    sum.hits += out.hits;
    sum.acknowledged += out.acknowledged;
    sum.pulls += out.pulls;
    sum.repeats += out.repeats;
    sum.dropped += out.dropped;
    sum.together += out.together;
    sum.stood_still += out.stood_still;
  });
  if (!ran) return;
  int64_t dropped = 0;
  int64_t together = 0;
  for (const auto& [trouble, sum] : sums) {
    const int64_t n = counts[trouble];
    std::printf("%-12s %4d schedules, %5d faults hit, %6d steps, %4d requests again, %5d dropped\n",
                kNames[static_cast<size_t>(trouble)], static_cast<int>(n),
                static_cast<int>(sum.hits), static_cast<int>(sum.acknowledged),
                static_cast<int>(sum.repeats), static_cast<int>(sum.dropped));
    dropped += sum.dropped;
    together += sum.together;
    if (trouble == Trouble::kDisk && n >= 5) {
      EXPECT_GT(sum.stood_still, 0) << "nothing ever waited for the disk";
    }
    if (n < 20) continue;
    EXPECT_GT(sum.acknowledged, 5 * n);
    if (trouble == Trouble::kOrder || trouble == Trouble::kLoss) {
      EXPECT_GT(sum.hits, n);
    }
    if (trouble == Trouble::kLoss) {
      EXPECT_GT(sum.repeats, n);
    }
    // Few schedules of one trouble, as a slow machine runs them in the time, need not have one.
    if (n >= 100) {
      EXPECT_GT(sum.dropped, 0) << "no batch ever dropped anything";
    }
  }
  EXPECT_GT(dropped, 0) << "no batch ever dropped anything";
  EXPECT_GT(together, 0) << "no requests ever travelled together";
}

TEST(PsSim, PSR_10_to_14_TwoCopiesSurviveAServerAndEndAlike) {
  std::map<Trouble, Outcome> sums;
  std::map<Trouble, int64_t> counts;
  const bool ran = run_schedules(1000, kTwoCopies, [&](uint64_t seed, const Outcome& out) {
    const Trouble trouble = trouble_of(seed, 2);
    Outcome& sum = sums[trouble];
    ++counts[trouble];
    sum.acknowledged += out.acknowledged;
    sum.moves += out.moves;
    sum.parts_moved += out.parts_moved;
  });
  if (!ran) return;
  for (const auto& [trouble, sum] : sums) {
    std::printf("%-20s %4d schedules, %6d steps, %4d owners found anew, %4d joins, moves, drains\n",
                kNames[static_cast<size_t>(trouble)], static_cast<int>(counts[trouble]),
                static_cast<int>(sum.acknowledged), static_cast<int>(sum.moves),
                static_cast<int>(sum.parts_moved));
    if (trouble >= Trouble::kJoin) {
      EXPECT_GT(sum.parts_moved, 0);
    }
    EXPECT_GT(sum.acknowledged, 2 * counts[trouble]);
    if (trouble == Trouble::kServer && counts[trouble] >= 10) {
      EXPECT_GT(sum.moves, 0);
    }
  }
}

// Servers join and drain, and parts go here and there, with one copy of each.
TEST(PsSim, MOVE_3_PartsOfOneCopyMoveAndLoseNothing) {
  std::map<Trouble, int64_t> moved;
  const bool ran = run_schedules(300, kMovable, [&](uint64_t seed, const Outcome& out) {
    moved[trouble_of_movable(seed)] += out.parts_moved;
  });
  if (!ran) return;
  EXPECT_GT(moved[Trouble::kJoin], 0);
  EXPECT_GT(moved[Trouble::kMovesAndLoss], 0);
}

}  // namespace
}  // namespace weft::testing
