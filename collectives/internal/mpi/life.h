#ifndef WEFT_COLLECTIVES_INTERNAL_MPI_LIFE_H_
#define WEFT_COLLECTIVES_INTERNAL_MPI_LIFE_H_

// MpiLife: MPI between its beginning and its end in this process, shared by the groups that it
// serves.
//
// MPI-1  MPI ends once, after the last group; not while an operation is under way that a group has
//        given up, where MPI's end may wait for it.
// MPI-2  memory that MPI may still use stays: a group never gives MPI memory of its caller, and what
//        it gives up is kept here.

#include <mpi.h>

#include <memory>
#include <string>
#include <vector>

#include "weft/collectives/internal/host_library.h"
#include "weft/collectives/internal/mpi/types.h"
#include "weft/common/mutex.h"

namespace weft::internal {

class MpiLife : public HostLibrary, public std::enable_shared_from_this<MpiLife> {
 public:
  ~MpiLife() override;
  static StatusOr<std::shared_ptr<MpiLife>> begin(int* argc, char*** argv);

  std::string_view name() const override { return "mpi"; }
  StatusOr<HostOffer> offer() override;
  StatusOr<std::unique_ptr<Engine>> connect(HostConnection connection) override;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& version() const { return version_; }
  const MpiTypes& types() const { return types_; }

  // Around the life of a group's communicator: between both, MPI does not end.
  Status enter();
  void leave();
  // An operation that nothing waits for any more, and the memory that it uses.
  void keep(MPI_Request request, std::unique_ptr<char[]> memory);
  Status end();

 private:
  struct Kept {
    MPI_Request request = MPI_REQUEST_NULL;
    std::unique_ptr<char[]> memory;
  };

  MpiLife() = default;
  Status start(int* argc, char*** argv);
  Status agree_on_job();
  StatusOr<int> place_of(const std::string& place, int member) const;

  MpiTypes types_;
  std::string version_;
  bool owner_ = false;  // this object has initialized MPI
  int rank_ = 0;
  int size_ = 1;
  uint64_t job_ = 0;  // of the processes that were initialized together

  Mutex mutex_;
  int groups_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Kept> kept_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_MPI_LIFE_H_
