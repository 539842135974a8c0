#ifndef WEFT_COLLECTIVES_MPI_H_
#define WEFT_COLLECTIVES_MPI_H_

// Mpi: MPI's one life in a process, and with it process groups whose operations MPI performs.
// Library weft::mpi, which nothing else links.
//
//   int main(int argc, char** argv) {
//     weft::Mpi mpi(&argc, &argv);
//     auto group = weft::init_process_group(
//         {.backend = weft::Backend::kMpi, .host_library = mpi.library()});
//     group.all_reduce(tensor);
//   }
//
// The backend has the reductions of ReduceOp's table, half types rounded once per step, and tensors
// of any size: what is larger than MPI's counts goes in pieces. Deadlines, failures of a rank, a
// rank that leaves and abort() end an operation as on the other backends. Not promised: that all
// ranks get the same bits, which is MPI's affair. An operation for which an algorithm is named runs
// by that algorithm over the group's own connections; so do send(), recv() and monitored_barrier().
// Ranks compare what they are about to do only with compare_operations. A process that dies ends,
// under Open MPI's mpirun, all of the job.
//
// Threads: made and finalized by one thread, usually main's; the groups as on other backends. MPI
// has to be initialized for several threads (MPI_THREAD_MULTIPLE), and is, unless the program has
// done it itself.

#include <memory>
#include <string>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/log.h"

namespace weft {

namespace internal {
class HostLibrary;
class MpiLife;
}  // namespace internal

class WEFT_API Mpi {
 public:
  // Initializes MPI with main's arguments, both or none. All processes of the job do it. Error,
  // kind state: MPI was finalized before in this process; unavailable: this MPI serves one thread
  // only. An MPI that the program has initialized itself is used, and not finalized.
  static StatusOr<std::unique_ptr<Mpi>> try_init(int* argc = nullptr, char*** argv = nullptr,
                                                 const Logger& log = Logger({.name = "mpi"}));
  // Throws these errors.
  explicit Mpi(int* argc = nullptr, char*** argv = nullptr,
               const Logger& log = Logger({.name = "mpi"}));
  // Finalizes MPI; an error goes to the log, by default to stderr.
  ~Mpi();
  Mpi(const Mpi&) = delete;
  Mpi& operator=(const Mpi&) = delete;

  // For ProcessGroupOptions::host_library.
  std::shared_ptr<internal::HostLibrary> library() const;
  // In MPI_COMM_WORLD.
  int rank() const;
  int size() const;
  // "Open MPI v4.1.4".
  const std::string& version() const;

  // Finalizes MPI, which waits for the other processes. Error, kind state, and MPI is not
  // finalized: groups by it still live, or an operation was given up that MPI has not ended. (With
  // Open MPI, which ends all the same, the latter is none.)
  Status try_finalize();
  void finalize() { throw_if_error(try_finalize()); }

 private:
  explicit Mpi(std::shared_ptr<internal::MpiLife> life, const Logger& log);

  const std::shared_ptr<internal::MpiLife> life_;
  const Logger log_;
};

}  // namespace weft

#endif  // WEFT_COLLECTIVES_MPI_H_
