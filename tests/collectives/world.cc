#include "weft/tests/collectives/world.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "weft/tests/testing/tls_files.h"

namespace weft::testing {

std::shared_ptr<Runtime> borrowed(Runtime* runtime) {
  return std::shared_ptr<Runtime>(std::shared_ptr<Runtime>(), runtime);
}

namespace {

struct Seat {
  MpiSeat seat;
  bool is_taken = false;
  int worlds = 0;  // of kMpi so far, the same at all processes
};
Seat& own_seat() {
  static Seat seat;
  return seat;
}

}  // namespace

void set_mpi_seat(const MpiSeat& seat) {
  own_seat().seat = seat;
  own_seat().is_taken = true;
}
const MpiSeat& mpi_seat() { return own_seat().seat; }

std::vector<Setting> all_settings() {
  if (own_seat().is_taken) return {Backend::kMpi};
  return {Backend::kInproc, Backend::kShm, Backend::kTcp, Setting::tls(), Setting::hosts()};
}

Setting Setting::tls() {
  Setting out = Backend::kTcp;
  out.has_tls = true;
  return out;
}

Setting Setting::hosts() {
  Setting out = Backend::kAuto;
  out.has_hosts = true;
  return out;
}

World::World(const Setting& setting_in, int size_in, std::shared_ptr<Runtime> runtime_in)
    : setting(setting_in),
      size(size_in),
      runtime(runtime_in != nullptr ? std::move(runtime_in) : make_system_runtime()),
      store(std::make_shared<HashStore>(runtime)),
      fabric(setting.backend == Backend::kInproc ? std::make_shared<InprocFabric>(runtime)
                                                 : nullptr),
      tls_files(setting.has_tls ? std::make_shared<TlsFiles>() : nullptr) {
  for (int rank = 0; rank < size && tls_files != nullptr; ++rank) {
    credentials.push_back(tls_files->make("w" + std::to_string(rank), {.rank = rank}));
  }
  if (setting.backend == Backend::kMpi) {
    rendezvous =
        "file://" + mpi_seat().folder + "/" + std::to_string(++own_seat().worlds) + "?run_id=test";
  }
}

ProcessGroupOptions World::options(int rank) const {
  ProcessGroupOptions out;
  out.backend = setting.backend;
  if (tls_files != nullptr) out.credentials = credentials[static_cast<size_t>(rank)];
  if (setting.has_hosts) out.host = rank % 2 == 0 ? "even" : "odd";
  if (rendezvous.empty()) {
    out.store = store->new_client();
  } else {
    out.rendezvous = rendezvous;
    out.host_library = mpi_seat().library;
  }
  out.rank = rank;
  out.size = size;
  out.timeout = absl::Seconds(60);
  out.init_timeout = absl::Seconds(60);
  out.runtime = runtime;
  out.fabric = fabric;
  out.environment = Environment();
  return out;
}

void World::run_ranks(const std::function<void(int rank)>& body) const {
  if (setting.backend == Backend::kMpi) {
    ASSERT_LE(size, mpi_seat().size);
    if (mpi_seat().rank < size) body(mpi_seat().rank);
    return;
  }
  std::vector<std::unique_ptr<Thread>> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.push_back(runtime->spawn("rank" + std::to_string(rank), [&body, rank] { body(rank); }));
  }
  for (auto& thread : threads) thread->join();
}

void World::run(const std::function<void(ProcessGroupOptions&)>& change,
                const std::function<void(ProcessGroup&)>& body) const {
  run_ranks([&](int rank) {
    ProcessGroupOptions o = options(rank);
    change(o);
    StatusOr<ProcessGroup> group = try_init_process_group(o);
    ASSERT_TRUE(group.ok()) << group.status();
    try {
      body(*group);
    } catch (const std::exception& e) {
      ADD_FAILURE() << "rank " << rank << ": " << e.what();
      group->abort("the test has failed here");
    }
  });
}

void World::run(const std::function<void(ProcessGroup&)>& body) const {
  run([](ProcessGroupOptions&) {}, body);
}

std::string setting_text(const Setting& setting) {
  if (setting.has_tls) return "tls";
  if (setting.has_hosts) return "hosts";
  switch (setting.backend) {
    case Backend::kInproc: return "inproc";
    case Backend::kShm: return "shm";
    case Backend::kTcp: return "tcp";
    case Backend::kMpi: return "mpi";
    default: return "auto";
  }
}

}  // namespace weft::testing
