#include "weft/tests/sim/ps_world.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/ps/client.h"
#include "weft/ps/internal/service.h"
#include "weft/store/hash_store.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {

using namespace std::chrono_literals;  // NOLINT

void PsWorld::fail(const std::string& what) {
  if (failed()) return;
  out_.status =
      make_error(ErrorKind::kInternal,
                 absl::StrCat(what, " (", kNames[static_cast<size_t>(trouble_)], ", ", servers_,
                              " servers, ", clients_, " clients, ", described(), ")"));
}

std::vector<std::string> PsWorld::server_names() const {
  std::vector<std::string> names;
  for (int s = 0; s < servers_; ++s) names.push_back(server_name(s));
  return names;
}

void PsWorld::start(const std::shared_ptr<Runtime>& runtime) {
  disk_ = std::make_shared<SlowDisk>(runtime);
  join(runtime);
  if (failed()) return;
  for (int s = 0; s < servers_ + spare_; ++s) {
    serving_.push_back(std::make_unique<ps::Server>(server_worker(s)));
  }
}

void PsWorld::live_through() {
  {
    std::vector<std::unique_ptr<Thread>> threads;
    for (int c = 0; c < clients_; ++c) {
      threads.push_back(sim_->spawn("client", [this, c] { live(c); }));
    }
    if (trouble_ >= Trouble::kServer) {
      threads.push_back(sim_->spawn("trouble", [this] { trouble_servers(); }));
    }
    if (moves()) threads.push_back(sim_->spawn("moves", [this] { move_parts(); }));
    spawn_more(&threads);
    if (trouble_ == Trouble::kDisk) {
      threads.push_back(sim_->spawn("disk", [this] { trouble_disk(4); }));
    }
  }
  plan_->clear();
}

void PsWorld::join(const std::shared_ptr<Runtime>& runtime) {
  const auto network = std::make_shared<InprocNetwork>();
  const auto store = std::make_shared<HashStore>(runtime);
  const int size = servers_ + clients_ + spare_;
  workers_.resize(static_cast<size_t>(size));
  std::vector<std::unique_ptr<Thread>> threads;
  for (int i = 0; i < size; ++i) {
    threads.push_back(runtime->spawn("join", [&, i] {
      JoinOptions o;
      o.name = i < servers_ ? absl::StrCat("ps", i) : absl::StrCat("c", i - servers_);
      if (i == servers_ + clients_) o.name = server_name(servers_);
      o.rank = i;
      o.world_size = size;
      o.store = store->new_client();
      o.transport = faulty_transport(inproc_transport(network), plan_);
      o.services = {ps_service()};
      o.worker_threads = 2;
      o.shutdown_timeout = 300s;
      o.runtime = trouble_ == Trouble::kDisk ? disk_ : runtime;
      o.log_level = Severity::kOff;
      o.environment = Environment{};
      StatusOr<Worker> w = Worker::try_join(std::move(o));
      if (!w.ok()) {
        fail(absl::StrCat("join: ", w.status().message()));
      } else {
        worker(i) = *std::move(w);
      }
    }));
  }
}

// Some time after the table is there: a server dies, or nothing passes between it and others.
void PsWorld::trouble_servers() {
  while (!opened_ && out_.status.ok()) sim_->sleep(absl::Milliseconds(5));
  sim_->sleep(absl::Milliseconds(below(200)));
  if (trouble_ == Trouble::kJoin || trouble_ == Trouble::kMovesAndLoss) return;  // move_parts()
  victim_ = below(servers_ + spare_);
  if (one_dies()) {
    (void)server_worker(victim_).shutdown({.graceful = false});
    return;
  }
  if (trouble_ == Trouble::kDrain) {
    const Status drained = serving_[static_cast<size_t>(victim_)]->try_drain(60s);
    if (!drained.ok()) fail(absl::StrCat("drain: ", drained.message()));
    return;
  }
  const std::string name = absl::StrCat("ps", victim_);
  for (int other = 0; other < servers_ + clients_; ++other) {
    if (other == victim_ || (trouble_ == Trouble::kServersCut && other >= servers_)) continue;
    const std::string theirs =
        other < servers_ ? absl::StrCat("ps", other) : absl::StrCat("c", other - servers_);
    for (const FrameKind kind : {FrameKind::kRequest, FrameKind::kResponse}) {
      plan_->add({.fault = Fault::kDrop, .kind = kind, .from = name, .to = theirs});
      plan_->add({.fault = Fault::kDrop, .kind = kind, .from = theirs, .to = name});
    }
  }
  sim_->sleep(absl::Milliseconds(100 + below(12000)));
  plan_->clear();
}

void PsWorld::trouble_disk(int times) {
  disk_->be_late(absl::Milliseconds(1 + below(200)));
  while (!opened_ && out_.status.ok()) sim_->sleep(absl::Milliseconds(5));
  for (int i = 0; i < times; ++i) {
    sim_->sleep(absl::Milliseconds(below(1000)));
    const absl::Duration still = absl::Milliseconds(below(20'000));
    disk_->stand_still_until(sim_->now() + still);
    sim_->sleep(still);
  }
}

// A server joins, parts go here and there, and then one drains, while clients go on and nothing else happens, or a
// server dies, or messages are lost.
void PsWorld::move_parts() {
  while (!opened_ && out_.status.ok()) sim_->sleep(absl::Milliseconds(5));
  sim_->sleep(absl::Milliseconds(below(100)));
  // `at`: the server that acts. Of one that dies meanwhile the own calls fail, too.
  const auto check = [this](const std::string& what, int at, const Status& status) {
    const ErrorKind kind = error_kind(status);
    const bool lost = kind == ErrorKind::kPeerLost || kind == ErrorKind::kNotFound;
    if (status.ok()) {
      ++out_.parts_moved;
    } else if (!one_dies() || !(lost || at == victim_)) {
      fail(absl::StrCat(what, ": ", status.message()));
    }
  };
  check("join", servers_, serving_.back()->try_join(server_names(), 60s).status());
  const ps::Client client(client_worker(0), {.servers = server_names()});
  const int parts =
      static_cast<int>(ps::internal::part_count(definition(), static_cast<size_t>(servers_)));
  for (int i = 0; i < 3 && out_.status.ok(); ++i) {
    const int to = below(servers_ + 1);
    check("move", to,
          client.try_move_part("t", static_cast<size_t>(below(parts)), server_name(to), 60s));
  }
  if (trouble_ != Trouble::kJoin || !out_.status.ok()) return;
  victim_ = below(servers_ + spare_);
  check("drain", victim_, serving_[static_cast<size_t>(victim_)]->try_drain(60s));
}

void PsWorld::add_faults() {
  const absl::Duration late = absl::Milliseconds(1 + below(40));
  switch (trouble_) {
    case Trouble::kNone:
    case Trouble::kDeath:
    case Trouble::kDisk:
    case Trouble::kServer:
    case Trouble::kCut:
    case Trouble::kServersCut:
    case Trouble::kDrain:
    case Trouble::kJoin:
    case Trouble::kMovesAndDeath: break;
    case Trouble::kOrder:
      plan_->add({.fault = Fault::kDelay, .probability = 0.2, .delay = late});
      plan_->add({.fault = Fault::kReorder, .probability = 0.2, .delay = late});
      plan_->add({.fault = Fault::kDuplicate, .probability = 0.15});
      break;
    case Trouble::kLoss:
    case Trouble::kMovesAndLoss:
      plan_->add(
          {.fault = Fault::kDrop, .kind = FrameKind::kRequest, .times = 4, .probability = 0.1});
      plan_->add(
          {.fault = Fault::kDrop, .kind = FrameKind::kResponse, .times = 4, .probability = 0.1});
      plan_->add({.fault = Fault::kDelay, .probability = 0.1, .delay = late});
      break;
    case Trouble::kConnections:
      plan_->add({.fault = Fault::kFailAfter,
                  .kind = FrameKind::kRequest,
                  .times = 2,
                  .probability = 0.1});
      plan_->add(
          {.fault = Fault::kCut, .kind = FrameKind::kResponse, .times = 2, .probability = 0.1});
      plan_->add({.fault = Fault::kLoseUnsent,
                  .kind = FrameKind::kRequest,
                  .times = 1,
                  .probability = 0.1});
      break;
  }
}

void PsWorld::check_copies() {
  using Role = ps::internal::ReplicaProtocol::Role;
  const int living = servers_ + spare_ - (one_dies() || one_drains() ? 1 : 0);
  std::map<uint32_t, std::vector<std::pair<uint64_t, uint64_t>>> copies;
  std::map<uint32_t, int> owners;
  for (int s = 0; s < servers_ + spare_; ++s) {
    if (one_dies() && s == victim_) continue;
    const auto service = ps::internal::PsService::of(server_worker(s));
    for (const auto& [name, part] : service->parts_by_name()) {
      const auto report = part->report();
      if (report.role == Role::kGone) continue;
      if (one_drains() && s == victim_) {
        fail(absl::StrCat("part ", name.second, " is at ", server_name(s),
                          " still, which has drained"));
      }
      const bool owns = report.role == Role::kOwner;
      owners[name.second] += owns ? 1 : 0;
      if (owns && (report.clients != 0 || report.parked != 0)) {
        fail(absl::StrCat("PSR-8, PSR-9: ", report.clients, " clients and ", report.parked,
                          " pulls are left at ps", s, ", part ", name.second));
      }
      part->digest([&, index = name.second](uint64_t position, uint64_t hash) {
        copies[index].emplace_back(position, hash);
      });
    }
  }
  const auto parts = ps::internal::part_count(definition(), static_cast<size_t>(servers_));
  for (size_t part = 0; part < parts; ++part) {
    const auto& both = copies[static_cast<uint32_t>(part)];
    const int owning = owners[static_cast<uint32_t>(part)];
    if (owning != 1) fail(absl::StrCat("part ", part, " has ", owning, " owners"));
    if (both.size() != static_cast<size_t>(copies_ == 1 ? 1 : std::min(living, 2))) {
      fail(absl::StrCat("part ", part, " has ", both.size(), " copies"));
    } else if (both.size() == 2 && both[0] != both[1]) {
      fail(absl::StrCat("PSR-12: the copies of part ", part, " differ"));
    }
  }
}

void PsWorld::leave() {
  {
    std::vector<std::unique_ptr<Thread>> threads;
    for (Worker& one : workers_) {
      threads.push_back(sim_->spawn("leave", [this, &one] {
        const bool all = trouble_ != Trouble::kDeath && !one_dies() && !failed();
        const ShutdownResult r = one.shutdown({.graceful = all});
        if (!r.status.ok() && all) fail(absl::StrCat("shutdown: ", r.status.message()));
      }));
    }
  }
  serving_.clear();
  out_.hits = plan_->hits();
  out_.stood_still = disk_->stopped();
}

}  // namespace weft::testing
