#ifndef WEFT_TESTS_SIM_PS_WORLD_H_
#define WEFT_TESTS_SIM_PS_WORLD_H_

// PsWorld: workers with a table "t" under the seeded scheduler, one to four of them servers, one to three
// clients, and what befalls them: messages that are late, lost or twice, a server that dies, is cut off, joins or
// drains, parts that move. What clients do, and what their history says, is a test's (ps_sim_test.cc,
// ps_eviction_sim_test.cc). Its threads are the scheduler's: one runs at a time.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/sim.h"
#include "weft/ps/server.h"
#include "weft/ps/table.h"
#include "weft/rpc/worker.h"
#include "weft/tests/sim/ps_schedule.h"
#include "weft/tests/testing/slow_disk.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {

class PsWorld {
 public:
  virtual ~PsWorld() = default;
  Outcome take() { return std::move(out_); }

 protected:
  static constexpr absl::Duration kDeadline = absl::Seconds(60);  // of a client's call

  PsWorld(uint64_t seed, SimRuntime* sim, Trouble trouble, uint32_t copies, bool movable = false)
      : sim_(sim),
        plan_(std::make_shared<FaultPlan>(seed)),
        trouble_(trouble),
        copies_(copies),
        movable_(movable),
        servers_(copies == 1 && !movable ? 1 + below(4) : 2 + below(3)),
        spare_(moves() ? 1 : 0),
        clients_(1 + below(3)) {}

  virtual ps::TableDefinition definition() const = 0;
  // What a client does, on a thread of its own.
  virtual void live(int client) = 0;
  // Threads besides those of clients and troubles.
  virtual void spawn_more(std::vector<std::unique_ptr<Thread>>* threads) { (void)threads; }
  // What a failure says of the schedule besides.
  virtual std::string described() const = 0;

  int below(int n) { return static_cast<int>(sim_->random().below(static_cast<uint64_t>(n))); }
  Worker& worker(int i) { return workers_[static_cast<size_t>(i)]; }
  Worker& client_worker(int c) { return worker(servers_ + c); }
  // The servers, and the spare one behind them, which is in no list.
  Worker& server_worker(int s) { return worker(s < servers_ ? s : servers_ + clients_); }
  std::string server_name(int s) const { return s < servers_ ? absl::StrCat("ps", s) : "spare"; }
  std::vector<std::string> server_names() const;
  bool moves() const { return trouble_ >= Trouble::kJoin; }
  bool one_dies() const {
    return trouble_ == Trouble::kServer || trouble_ == Trouble::kMovesAndDeath;
  }
  bool one_drains() const { return trouble_ == Trouble::kDrain || trouble_ == Trouble::kJoin; }
  // The first of several is kept.
  void fail(const std::string& what);
  bool failed() const { return !out_.status.ok(); }

  // Workers that serve; out_.status says whether they are there.
  void start(const std::shared_ptr<Runtime>& runtime);
  // Clients, and what befalls them and the servers from when `opened_` is set, until all that has ended.
  void live_through();
  // So many times, with pauses, the disk does nothing for some seconds. It answers late all the time.
  void trouble_disk(int times);
  // To messages, once the table is there.
  void add_faults();
  // Each part has one owner and, with two copies and while two servers live, one backup, which is equal bit by bit.
  void check_copies();
  // All shut down, gracefully where no worker has died; the end.
  void leave();

  SimRuntime* const sim_;
  const std::shared_ptr<FaultPlan> plan_;
  const Trouble trouble_;
  const uint32_t copies_;
  const bool movable_;
  const int servers_;
  const int spare_;
  const int clients_;
  std::shared_ptr<SlowDisk> disk_;
  bool opened_ = false;
  std::vector<Worker> workers_;
  std::vector<std::unique_ptr<ps::Server>> serving_;
  Outcome out_;

 private:
  void join(const std::shared_ptr<Runtime>& runtime);
  void trouble_servers();
  void move_parts();

  int victim_ = 0;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_SIM_PS_WORLD_H_
