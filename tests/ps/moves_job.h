#ifndef WEFT_TESTS_PS_MOVES_JOB_H_
#define WEFT_TESTS_PS_MOVES_JOB_H_

// What the tests of parts that move share.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch/types.h"
#include "weft/tests/ps/fixture.h"

namespace weft::testing {

// Servers ps0 to ps3, of which the tables' lists have the first three.
struct MovesJob : PsJob {
  MovesJob(int clients, const std::shared_ptr<SimRuntime>& sim,
           std::function<void(int index, JoinOptions*)> adjust = {})
      : PsJob(4, clients, Net::kInproc, sim, std::move(adjust)) {
    listed.assign(server_names.begin(), server_names.begin() + 3);
    for (int i = 0; i < clients; ++i)
      near.emplace_back(worker(i), ps::ClientOptions{.servers = listed});
  }
  // The servers that say that they own the part.
  std::vector<std::string> owners(const std::string& table, uint32_t part) {
    return with_role(table, part, ps::internal::ReplicaProtocol::Role::kOwner);
  }
  std::vector<std::string> with_role(const std::string& table, uint32_t part,
                                     ps::internal::ReplicaProtocol::Role role) {
    std::vector<std::string> out;
    for (size_t s = 0; s < servers.size(); ++s) {
      const auto parts = ps::internal::PsService::of(server(static_cast<int>(s)))->parts_by_name();
      const auto at = parts.find({table, part});
      if (at != parts.end() && at->second->report().role == role) out.push_back(server_names[s]);
    }
    return out;
  }
  // Over all copies that know of the latest epoch.
  std::vector<ps::internal::RangeMap> maps(const std::string& table, uint32_t parts) {
    std::vector<ps::internal::RangeMap> out(parts);
    for (size_t s = 0; s < servers.size(); ++s) {
      const auto all = ps::internal::PsService::of(server(static_cast<int>(s)))->parts_by_name();
      for (const auto& [name, part] : all) {
        const auto map = part->report().map;
        ps::internal::RangeMap& known = out[name.second];
        // A backup does not hear that it is ready: the owner knows it.
        const bool later = map.epoch > known.epoch || (map.epoch == known.epoch && map.ready);
        if (name.first == table && later) known = map;
      }
    }
    return out;
  }
  std::vector<std::string> listed;
  std::vector<ps::Client> near;  // know no more than the list
};

inline ps::TableDefinition counters(int64_t elements = 6) {
  auto out = ps::dense({elements}, ps::rule<optim::SGD>({.lr = 1}));
  out.copies = 2;
  return out;
}

// Pushes ones until `stop`, and gives how many were acknowledged. Seldom after a second, since a death is only
// noticed after a lease.
inline int64_t count_up(SimRuntime& sim, const ps::Table& t, const bool& stop) {
  int64_t acknowledged = 0;
  while (!stop) {
    t.push(-torch::ones({6})).wait();
    sim.sleep(absl::Milliseconds(++acknowledged < 300 ? 3 : 100));
  }
  return acknowledged;
}

// Two clients count up in "w", of which the first has this handle, while `what` happens: pushes that were acknowledged.
inline int64_t count_by_two(SimRuntime& sim, MovesJob& job, const ps::Table& first,
                            const std::function<void()>& what) {
  bool stop = false;
  int64_t pushed[2] = {0, 0};
  side_by_side(sim, {[&] { pushed[0] = count_up(sim, first, stop); },
                     [&] {
                       const ps::Table t = job.near[1].open_table("w", first.definition());
                       pushed[1] = count_up(sim, t, stop);
                     },
                     [&] {
                       sim.sleep(absl::Milliseconds(100));
                       what();
                       stop = true;
                     }});
  EXPECT_GT(pushed[0], 10);
  return pushed[0] + pushed[1];
}

struct MovedAndPushed {
  Status moved;
  int64_t pushed = 0;  // and acknowledged
};
// Part 0 of "w" moves to ps3 while a client counts up, until `trouble` has happened.
inline MovedAndPushed move_while_counting(SimRuntime& sim, MovesJob& job, const ps::Table& t,
                                          std::chrono::seconds time,
                                          const std::function<void()>& trouble) {
  MovedAndPushed out;
  bool stop = false;
  side_by_side(sim, {[&] { out.pushed = count_up(sim, t, stop); },
                     [&] { out.moved = job.near[1].try_move_part("w", 0, "ps3", time); },
                     [&] {
                       trouble();
                       stop = true;
                     }});
  return out;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_PS_MOVES_JOB_H_
