#ifndef WEFT_TESTS_COLLECTIVES_WORLD_H_
#define WEFT_TESTS_COLLECTIVES_WORLD_H_

// Ranks of a process group as threads of a test.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "weft/collectives/process_group.h"
#include "weft/common/runtime.h"
#include "weft/store/hash_store.h"
#include "weft/tests/testing/checks.h"

namespace weft::testing {

// How the ranks of a world reach each other.
struct Setting {
  Setting(Backend backend_in) : backend(backend_in) {}  // NOLINT(google-explicit-constructor)
  // tcp with a certificate for each rank.
  static Setting tls();
  // Ranks with even numbers say that they are on one host, the others on another one.
  static Setting hosts();

  Backend backend;
  bool has_tls = false;
  bool has_hosts = false;
};

// Where this process is among those of an mpirun, each of which runs all tests: the ranks of a world
// of kMpi are processes, those of others are threads of each.
struct MpiSeat {
  std::shared_ptr<internal::HostLibrary> library{};
  int rank = 0;
  int size = 1;
  std::string folder{};  // that all share
};
// Called by the program before its tests: all_settings() is then that of MPI.
void set_mpi_seat(const MpiSeat& seat);
const MpiSeat& mpi_seat();

class TlsFiles;

// What the ranks of one world share.
struct World {
  explicit World(const Setting& setting, int size, std::shared_ptr<Runtime> runtime = nullptr);

  ProcessGroupOptions options(int rank) const;
  // Runs `body` on every rank at once, each on a thread of its own with a group of its own.
  void run(const std::function<void(ProcessGroup&)>& body) const;
  void run(const std::function<void(ProcessGroupOptions&)>& change,
           const std::function<void(ProcessGroup&)>& body) const;
  // Without groups.
  void run_ranks(const std::function<void(int rank)>& body) const;

  const Setting setting;
  const int size;
  const std::shared_ptr<Runtime> runtime;
  const std::shared_ptr<HashStore> store;
  const std::shared_ptr<InprocFabric> fabric;
  const std::shared_ptr<TlsFiles> tls_files;
  std::vector<Credentials> credentials;  // by rank, with TLS
  std::string rendezvous;                // of a world of kMpi
};

// "inproc", "shm", "tcp", "tls" or "hosts": for names of tests.
std::string setting_text(const Setting& setting);
std::vector<Setting> all_settings();
// Does not own it.
std::shared_ptr<Runtime> borrowed(Runtime* runtime);

}  // namespace weft::testing

#endif  // WEFT_TESTS_COLLECTIVES_WORLD_H_
