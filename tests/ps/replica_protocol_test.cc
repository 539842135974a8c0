// ReplicaProtocol alone: three servers, one range, clients that push and read, a store whose answers
// are late, messages that come late, twice or never, and suspicion at any time, right or wrong. Small
// worlds in every order, larger ones in random orders; and each planted bug is found.

#include "weft/ps/internal/replica_protocol.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "weft/tests/testing/environment.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::ps::internal {
namespace {

using Role = ReplicaProtocol::Role;
using Log = std::vector<int>;  // by position: a push's number, or 0 for what changes nothing

struct Limits {
  int pushes = 2;
  int reads = 1;
  int sends = 2;  // of each operation
  int kills = 1;
  int suspicions = 2;
  int copies = 1;  // messages that come again
  int offers = 2;
  int moves = 0;  // a backup that is replaced, or a part that is handed over
};

class World {
 public:
  World(const Limits& limits, ReplicaBug bug)
      : left_(limits), bug_(bug), ops_(limits.pushes + limits.reads) {
    map_ = {1, place(0), {}, false};
    servers_[0].copy = ReplicaProtocol::owner(place(0), map_, bug);
    for (int i = 0; i < limits.pushes; ++i) ops_[static_cast<size_t>(i)].push = i + 1;
  }

  // What may happen next, as numbers for step().
  std::vector<int> actions() const {
    std::vector<int> out;
    for (int s = 0; s < kServers; ++s) {
      const Server& server = servers_[s];
      if (server.write.has_value())
        out.push_back(code(server.answer.has_value() ? kAnswer : kExecute, s));
      if (server.dead || !server.copy.has_value()) continue;
      const Role role = server.copy->role();
      if (left_.kills > 0) out.push_back(code(kKill, s));
      if (role == Role::kBackup && left_.suspicions > 0 && !server.copy->writing()) {
        out.push_back(code(kSuspect, s));
      }
      if (role != Role::kOwner) continue;
      if (server.copy->streams()) {
        if (left_.suspicions > 0) out.push_back(code(kLose, s));
        // One entry, whichever: they overtake each other.
        const uint64_t open = std::min<uint64_t>(3, server.copy->last() - server.copy->confirmed());
        for (uint64_t i = 1; i <= open; ++i) out.push_back(code(kSend, s, static_cast<int>(i)));
        const bool settled = server.copy->map().ready && !server.copy->writing();
        if (server.copy->streams_to_next()) {
          if (left_.suspicions > 0) out.push_back(code(kLoseNext, s));
          const uint64_t more = std::min<uint64_t>(3, server.copy->last() - server.next_confirmed);
          for (uint64_t i = 1; i <= more; ++i) {
            out.push_back(code(kSendNext, s, static_cast<int>(i)));
          }
        } else if (settled && left_.moves > 0 && !server.copy->handing()) {
          out.push_back(code(kHandOver, s));
          for (int to = 0; to < kServers; ++to) {
            if (to != s && server.copy->map().backup != place(to) && !servers_[to].dead) {
              out.push_back(code(kReplace, s, to));
            }
          }
        }
      } else if (left_.offers > 0 && !server.copy->writing()) {
        for (int to = 0; to < kServers; ++to) {
          if (to != s && !servers_[to].dead) out.push_back(code(kOffer, s, to));
        }
      }
      if (!server.copy->takes_requests()) continue;
      for (size_t op = 0; op < ops_.size(); ++op) {
        if (!ops_[op].done && ops_[op].sends < left_.sends && !pending(s, static_cast<int>(op))) {
          out.push_back(code(kAsk, s, static_cast<int>(op)));
        }
      }
    }
    for (size_t m = 0; m < wire_.size(); ++m) {
      if (servers_[wire_[m].to].dead) continue;
      out.push_back(code(kDeliver, 0, static_cast<int>(m)));
      if (left_.copies > 0) out.push_back(code(kCopy, 0, static_cast<int>(m)));
    }
    return out;
  }

  void step(int action) {
    const int what = action / 10000;
    const int s = action / 100 % 100;
    const int arg = action % 100;
    Server& server = servers_[s];
    ReplicaEffects effects;
    switch (what) {
      case kExecute:
        if (map_ == server.write->expected) map_ = server.write->desired;
        server.answer = map_;
        break;
      case kAnswer: {
        const RangeMap now = *server.answer;
        server.write.reset();
        server.answer.reset();
        if (server.dead || !server.copy.has_value()) return;
        server.copy->wrote(now, &effects);
        break;
      }
      case kKill:
        --left_.kills;
        server.dead = true;
        server.copy.reset();
        server.pending.clear();
        return;
      case kSuspect:
        --left_.suspicions;
        server.copy->suspect_owner(&effects);
        break;
      case kLose:
        --left_.suspicions;
        server.copy->lost_backup(server.copy->map().epoch, &effects);
        break;
      case kOffer:
        --left_.offers;
        server.copy->offer(place(arg), &effects);
        break;
      case kLoseNext:
        --left_.suspicions;
        server.copy->lost_next(server.copy->map().epoch, &effects);
        break;
      case kReplace:
        --left_.moves;
        server.next_confirmed = 0;
        server.copy->replace_backup(place(arg), &effects);
        break;
      case kHandOver:
        --left_.moves;
        server.copy->hand_over(&effects);
        break;
      case kSendNext: {
        Message m{s, index_of(server.copy->next()), server.copy->map().epoch, false};
        m.first = server.next_confirmed + static_cast<uint64_t>(arg);
        m.log = {server.log[m.first - 1]};
        m.map = server.copy->map();
        put(m);
        return;
      }
      case kSend: {
        Message m{s, index_of(server.copy->map().backup), server.copy->map().epoch, false};
        m.first = server.copy->confirmed() + static_cast<uint64_t>(arg);
        m.log = {server.log[m.first - 1]};
        m.map = server.copy->map();
        put(m);
        return;
      }
      case kAsk: return ask(s, arg);
      case kDeliver:
      case kCopy: {
        const Message m = wire_[static_cast<size_t>(arg)];
        if (what == kCopy) {
          --left_.copies;
        } else {
          wire_.erase(wire_.begin() + arg);
        }
        return deliver(m);
      }
      default: std::abort();
    }
    perform(s, effects);
  }

  static bool ends(int action) {
    const int what = action / 10000;
    return what == kKill || what == kSuspect || what == kLose || what == kLoseNext;
  }

  // Empty: all is well.
  std::string check() const {
    if (!wrong_.empty()) return wrong_;
    for (int s = 0; s < kServers; ++s) {
      const Server& server = servers_[s];
      const bool trusted = map_.ready && map_.backup == place(s) && !server.dead;
      if (trusted && (!server.copy.has_value() || !follows_map(*server.copy))) {
        return absl::StrCat("PSR-10: ", s, " may take over, and has no copy");
      }
      if (!server.copy.has_value() || server.copy->role() == Role::kGone) continue;
      if (server.log.size() != server.copy->last())
        return "PSR-12: the log and its position differ";
      for (size_t op = 0; op < ops_.size(); ++op) {
        const int push = ops_[op].push;
        if (push != 0 && std::count(server.log.begin(), server.log.end(), push) > 1)
          return "a push is in twice";
      }
      if (!counts(s)) continue;
      for (const int push : seen_) {
        if (std::count(server.log.begin(), server.log.end(), push) != 1) {
          return absl::StrCat("PSR-10: push ", push, " was acknowledged or read, and is not at ",
                              s);
        }
      }
    }
    return "";
  }

  std::string key() const {
    std::string out = absl::StrCat(text(map_), left_.kills, left_.suspicions, left_.copies,
                                   left_.offers, left_.moves, "|");
    for (const Op& op : ops_) absl::StrAppend(&out, op.done, op.sends, ",");
    for (const Server& s : servers_) {
      absl::StrAppend(
          &out, "|", s.dead, s.next_confirmed,
          s.copy.has_value()
              ? absl::StrCat(static_cast<int>(s.copy->role()), text(s.copy->map()),
                             s.copy->confirmed(), ".", s.copy->released(), s.copy->state_text())
              : "",
          ";", absl::StrJoin(s.log, ","), ";",
          s.write.has_value() ? text(s.write->desired) + text(s.write->expected) : "",
          s.answer.has_value() ? text(*s.answer) : "");
      for (const Pending& p : s.pending) {
        absl::StrAppend(&out, "p", p.op, ".", p.position, ".", absl::StrJoin(p.must, ","), ".",
                        absl::StrJoin(p.saw, ","));
      }
    }
    absl::StrAppend(&out, "|", absl::StrJoin(seen_, ","));
    for (const Message& m : wire_) absl::StrAppend(&out, "|", text(m));
    return out;
  }

  int acknowledged() const {
    int n = 0;
    for (const Op& op : ops_) n += op.done ? 1 : 0;
    return n;
  }
  int takeovers() const { return takeovers_; }
  int moved() const { return moved_; }

 private:
  static constexpr int kServers = 3;
  enum What {
    kExecute = 1,
    kAnswer,
    kKill,
    kSuspect,
    kLose,
    kOffer,
    kSend,
    kAsk,
    kDeliver,
    kCopy,
    kReplace,
    kHandOver,
    kSendNext,
    kLoseNext
  };
  struct Op {
    int push = 0;  // 0: a read
    int sends = 0;
    bool done = false;
  };
  struct Pending {
    int op = 0;
    uint64_t position = 0;
    std::set<int> must{};  // of a read
    Log saw{};
  };
  struct Server {
    bool dead = false;
    std::optional<ReplicaProtocol> copy{};
    Log log{};
    std::optional<WriteMap> write{};
    std::optional<RangeMap> answer{};
    std::vector<Pending> pending{};
    uint64_t newest = 0;          // epoch of an image
    uint64_t next_confirmed = 0;  // by the one that is to be its backup
  };
  struct Message {
    int from = 0;
    int to = 0;
    uint64_t epoch = 0;
    bool image = false;
    uint64_t first = 0;  // of a confirmation: 0, and `position`
    Log log{};
    uint64_t position = 0;
    RangeMap map{};
  };

  static int code(int what, int s, int arg = 0) { return what * 10000 + s * 100 + arg; }
  static CopyPlace place(int s) { return {std::string(1, static_cast<char>('a' + s)), 1}; }
  static int index_of(const CopyPlace& p) { return p.name[0] - 'a'; }
  static std::string text(const RangeMap& m) {
    return absl::StrCat(m.epoch, m.owner.name, m.backup.empty() ? "-" : m.backup.name, m.ready,
                        " ");
  }
  static std::string text(const Message& m) {
    return absl::StrCat(m.from, ">", m.to, "e", m.epoch, m.image ? "i" : "l", m.first, ":",
                        absl::StrJoin(m.log, ","), "@", m.position, "/", text(m.map));
  }
  // Two that are alike are one: `copies` says how many come again.
  void put(const Message& m) {
    for (const Message& other : wire_) {
      if (text(other) == text(m)) return;
    }
    wire_.push_back(m);
    std::sort(wire_.begin(), wire_.end(),
              [](const Message& a, const Message& b) { return text(a) < text(b); });
  }
  bool pending(int s, int op) const {
    const auto& all = servers_[s].pending;
    return std::any_of(all.begin(), all.end(), [&](const Pending& p) { return p.op == op; });
  }
  // A backup of the map, as it knows, or will when it hears the next.
  bool follows_map(const ReplicaProtocol& copy) const {
    if (copy.map().epoch >= map_.epoch || copy.writing()) return true;
    return copy.joins() && copy.map().epoch + 1 == map_.epoch && copy.map().owner == map_.owner;
  }
  // Whether the map lets this copy answer, now or later.
  bool counts(int s) const {
    const CopyPlace me = place(s);
    if (map_.owner == me) {
      // The copy of one that took over, or to which the part was handed, and has not heard of it, too.
      const ReplicaProtocol& copy = *servers_[s].copy;
      const bool given =
          map_.ready && copy.map().epoch + 1 == map_.epoch && copy.map().owner == map_.backup;
      return copy.role() == Role::kOwner || copy.writing() || given;
    }
    return map_.backup == me && map_.ready && servers_[s].copy->role() != Role::kGone &&
           follows_map(*servers_[s].copy);
  }

  void ask(int s, int index) {
    Server& server = servers_[s];
    Op& op = ops_[static_cast<size_t>(index)];
    ++op.sends;
    const bool known = std::count(server.log.begin(), server.log.end(), op.push) > 0;
    const bool reads = op.push == 0;
    ReplicaEffects effects;
    const uint64_t before = server.copy->last();
    const uint64_t position = server.copy->append(reads, &effects);
    if (position != before) server.log.push_back(reads || known ? 0 : op.push);
    Pending p{index, position};
    if (reads) {
      p.must = seen_;
      p.saw = server.log;
    }
    server.pending.push_back(std::move(p));
    perform(s, effects);
    // A bug may leave it at a position that was released before.
    if (server.copy.has_value()) release(s, server.copy->released());
  }

  void deliver(const Message& m) {
    Server& server = servers_[m.to];
    ReplicaEffects effects;
    if (m.image) {
      const bool further = server.copy.has_value() && server.copy->joins() &&
                           server.copy->map().epoch == m.epoch && server.copy->last() < m.position;
      if (m.epoch > server.newest || further) {
        server.newest = m.epoch;
        server.copy = ReplicaProtocol::backup(place(m.to), m.map, m.position, bug_);
        server.log = m.log;
        server.pending.clear();
      }
      if (!server.copy.has_value() || server.copy->role() != Role::kBackup) return;
      if (server.copy->map().epoch != m.epoch) return;
      return put({m.to, m.from, m.epoch, false, 0, {}, server.copy->last()});
    }
    if (!server.copy.has_value()) return;
    if (m.first == ~uint64_t{0}) {
      server.copy->read(m.map, &effects);
      return perform(m.to, effects);
    }
    if (m.first == 0) {
      if (server.copy->map().backup == place(m.from)) {
        server.copy->confirm(m.epoch, m.position, &effects);
      } else if (server.copy->next() == place(m.from) && server.copy->map().epoch == m.epoch) {
        server.next_confirmed = std::max(server.next_confirmed, m.position);
        server.copy->confirm_next(m.epoch, m.position, &effects);
      }
      return perform(m.to, effects);
    }
    server.copy->adopt(m.map);
    const auto taken = server.copy->entries(m.epoch, m.first, m.log.size());
    if (taken.refused) {
      // The answer says what the refuser knows.
      if (!servers_[m.from].dead && servers_[m.from].copy.has_value()) {
        servers_[m.from].copy->read(server.copy->map(), &effects);
        perform(m.from, effects);
      }
      return;
    }
    for (uint64_t i = taken.skip; i < taken.skip + taken.apply; ++i) server.log.push_back(m.log[i]);
    put({m.to, m.from, m.epoch, false, 0, {}, server.copy->last()});
  }

  void perform(int s, const ReplicaEffects& effects) {
    Server& server = servers_[s];
    for (const ReplicaEffect& effect : effects) {
      if (const auto* write = std::get_if<WriteMap>(&effect)) {
        server.write = *write;
        server.answer.reset();
      } else if (std::holds_alternative<SendImage>(effect) ||
                 std::holds_alternative<SendImageToNext>(effect)) {
        const bool next = std::holds_alternative<SendImageToNext>(effect);
        const CopyPlace to = next ? server.copy->next() : server.copy->map().backup;
        Message m{s, index_of(to), server.copy->map().epoch, true};
        m.log = server.log;
        m.position = server.copy->last();
        m.map = server.copy->map();
        put(m);
      } else if (const auto* free = std::get_if<Release>(&effect)) {
        release(s, free->position);
      } else if (std::holds_alternative<NextIsBackup>(effect)) {
        ++moved_;
      } else if (std::holds_alternative<Serve>(effect)) {
        ++takeovers_;
        tell(s);
      } else {
        if (std::holds_alternative<Follow>(effect)) {
          ++moved_;
          tell(s);
        }
        server.pending.clear();
      }
    }
  }

  // The other copy of the map that this one knows may hear of it; or it reads it from the store.
  void tell(int s) {
    const RangeMap map = servers_[s].copy->map();
    for (int other = 0; other < kServers; ++other) {
      Server& there = servers_[other];
      if (other == s || there.dead || !there.copy.has_value()) continue;
      if (map.owner == place(other) || map.backup == place(other)) {
        Message m{s, other, map.epoch, false};
        m.first = ~uint64_t{0};
        m.map = map;
        put(m);
      }
    }
  }

  void release(int s, uint64_t upto) {
    Server& server = servers_[s];
    for (auto p = server.pending.begin(); p != server.pending.end();) {
      if (p->position > upto) {
        ++p;
        continue;
      }
      Op& op = ops_[static_cast<size_t>(p->op)];
      op.done = true;
      if (op.push != 0) seen_.insert(op.push);
      for (const int push : p->must) {
        if (std::count(p->saw.begin(), p->saw.end(), push) == 0) {
          wrong_ = absl::StrCat("PSR-11: a read that began after push ", push, " does not see it");
        }
      }
      for (const int push : p->saw) {
        if (push != 0) seen_.insert(push);
      }
      p = server.pending.erase(p);
    }
  }

  Limits left_;
  ReplicaBug bug_;
  RangeMap map_;
  Server servers_[kServers];
  std::vector<Op> ops_;
  std::vector<Message> wire_;
  std::set<int> seen_;
  std::string wrong_;
  int takeovers_ = 0;
  int moved_ = 0;
};

struct Explored {
  size_t worlds = 0;
  std::string wrong;
};

// Every world that can be reached, once.
Explored explore(const Limits& limits, ReplicaBug bug, size_t most) {
  Explored out;
  std::unordered_set<std::string> met;
  std::vector<World> open = {World(limits, bug)};
  while (!open.empty() && met.size() < most) {
    const World world = std::move(open.back());
    open.pop_back();
    for (const int action : world.actions()) {
      World next = world;
      next.step(action);
      out.wrong = next.check();
      if (!out.wrong.empty()) {
        out.worlds = met.size();
        return out;
      }
      if (met.insert(next.key()).second) open.push_back(std::move(next));
    }
  }
  out.worlds = met.size();
  return out;
}

struct Walked {
  int schedules = 0;
  int acknowledged = 0;
  int takeovers = 0;
  int moved = 0;
  std::string wrong;
};

constexpr Limits kSmall{
    .pushes = 1, .reads = 1, .sends = 1, .kills = 0, .suspicions = 1, .copies = 0, .offers = 1};
constexpr Limits kSmallMoves{.pushes = 2,
                             .reads = 0,
                             .sends = 1,
                             .kills = 0,
                             .suspicions = 0,
                             .copies = 0,
                             .offers = 1,
                             .moves = 1};
// Many of everything, or few pushes and many reads.
constexpr Limits kLarge{.pushes = 5,
                        .reads = 4,
                        .sends = 3,
                        .kills = 1,
                        .suspicions = 3,
                        .copies = 3,
                        .offers = 4,
                        .moves = 3};
constexpr Limits kReads{.pushes = 2,
                        .reads = 8,
                        .sends = 3,
                        .kills = 0,
                        .suspicions = 2,
                        .copies = 0,
                        .offers = 1,
                        .moves = 1};

// Many moves.
constexpr Limits kMoves{
    .pushes = 9, .reads = 0, .sends = 2, .kills = 0, .suspicions = 1, .offers = 1, .moves = 6};

Walked walk(ReplicaBug bug, int schedules) {
  Walked out;
  for (; out.schedules < schedules && out.wrong.empty(); ++out.schedules) {
    std::mt19937_64 random(static_cast<uint64_t>(out.schedules) + 1);
    const Limits* const limits[] = {&kLarge, &kReads, &kLarge, &kMoves};
    World world(*limits[out.schedules % 4], bug);
    for (int i = 0; i < 200 && out.wrong.empty(); ++i) {
      const std::vector<int> actions = world.actions();
      if (actions.empty()) break;
      int action = actions[random() % actions.size()];
      // What ends a copy comes seldom, so that there is something to end.
      if (World::ends(action) && random() % 8 != 0) action = actions[random() % actions.size()];
      world.step(action);
      out.wrong = world.check();
    }
    out.acknowledged += world.acknowledged();
    out.takeovers += world.takeovers();
    out.moved += world.moved();
  }
  return out;
}

TEST(PsReplica, PSR_10_to_13_Small_worlds_in_every_order) {
  const Explored all = explore(kSmall, ReplicaBug::kNone, 60'000);
  EXPECT_LT(all.worlds, 60'000U) << "not all of them";
  EXPECT_EQ(all.wrong, "");
  std::printf("%zu worlds\n", all.worlds);
}

// The same, with moves instead of wrong suspicions.
TEST(PsReplica, PSR_10_to_13_Small_worlds_with_a_move_in_every_order) {
  Limits limits = kSmallMoves;
  limits.pushes = weft::testing::fewer(2, 1);
  const Explored all = explore(limits, ReplicaBug::kNone, 400'000);
  EXPECT_LT(all.worlds, 400'000U) << "not all of them";
  EXPECT_EQ(all.wrong, "");
  std::printf("%zu worlds\n", all.worlds);
}

TEST(PsReplica, PSR_10_to_14_Random_schedules) {
  const int schedules = weft::testing::environment_number("WEFT_PS_REPLICA_SCHEDULES",
                                                          weft::testing::fewer(100'000, 500));
  const Walked walked = walk(ReplicaBug::kNone, schedules);
  EXPECT_EQ(walked.wrong, "") << "schedule " << walked.schedules;
  EXPECT_GT(walked.acknowledged, 3 * schedules);
  EXPECT_GT(walked.takeovers, schedules / 20);
  EXPECT_GT(walked.moved, schedules / 20);
  std::printf("%d schedules, %d operations ended, %d takeovers, %d moves\n", walked.schedules,
              walked.acknowledged, walked.takeovers, walked.moved);
}

TEST(PsReplica, PlantedBugsAreFound) {
  for (int bug = 1; bug <= kReplicaBugs; bug += weft::testing::fewer(1, 4)) {
    const Walked walked = walk(static_cast<ReplicaBug>(bug), 5'000);
    std::printf("bug %2d: %s after %d schedules\n", bug,
                walked.wrong.empty() ? "not found" : walked.wrong.c_str(), walked.schedules);
    if (!walked.wrong.empty()) continue;
    const bool of_moves = bug >= static_cast<int>(ReplicaBug::kNextNotWaitedFor);
    const Explored all =
        explore(of_moves ? kSmallMoves : kSmall, static_cast<ReplicaBug>(bug), 400'000);
    std::printf("bug %2d: %s after %zu worlds\n", bug, all.wrong.c_str(), all.worlds);
    EXPECT_NE(all.wrong, "") << "bug " << bug;
  }
}

}  // namespace
}  // namespace weft::ps::internal
