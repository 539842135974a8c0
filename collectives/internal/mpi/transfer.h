#ifndef WEFT_COLLECTIVES_INTERNAL_MPI_TRANSFER_H_
#define WEFT_COLLECTIVES_INTERNAL_MPI_TRANSFER_H_

// MpiEngine::Transfer: bytes to one rank, or from it, as messages of MPI: the number of bytes in
// front, and then one piece after the other.
//
// Threads: one.

#include <mpi.h>

#include <memory>

#include "weft/collectives/internal/mpi/engine.h"
#include "weft/common/error.h"

namespace weft::internal {

class MpiEngine::Transfer {
 public:
  // `data` stays valid until it is done; it is read or written while advance() runs, not by MPI.
  Transfer(int peer, bool sends, char* data, uint64_t bytes);

  // True: all has gone, or come. Begins the next piece when the one before has ended.
  StatusOr<bool> advance(MPI_Comm comm);
  // Ends, done or not. True: MPI still works on a piece, which `life` has from now on (MPI-2).
  bool give_up(MpiLife& life);

 private:
  // Begins a piece: what is in front of the first one is part of it.
  Status begin(MPI_Comm comm);
  // After a piece has come. Error, kind invalid_argument: of another length than expected.
  Status take(uint64_t came);
  uint64_t front() const;

  const int peer_;
  const bool sends_;
  char* const data_;
  const uint64_t bytes_;
  const uint64_t room_bytes_;
  std::unique_ptr<char[]> room_;
  MPI_Request request_ = MPI_REQUEST_NULL;
  bool begun_ = false;
  bool under_way_ = false;
  uint64_t moved_ = 0;  // of the bytes, without the piece under way
  uint64_t piece_ = 0;  // bytes of that
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_MPI_TRANSFER_H_
