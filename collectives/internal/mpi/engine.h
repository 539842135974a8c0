#ifndef WEFT_COLLECTIVES_INTERNAL_MPI_ENGINE_H_
#define WEFT_COLLECTIVES_INTERNAL_MPI_ENGINE_H_

// MpiEngine: operations by MPI on a communicator of the group's own.
//
// Elements travel in pieces through memory of the engine (MPI-2), so that an operation can be given
// up: MPI cannot cancel a collective operation, and writes until it ends. While MPI works, the
// thread of the operation asks it for progress, and now and then the link whether another rank has
// failed or left.
//
// gather, scatter and all_to_all are messages between pairs of ranks, since no rank knows the sizes
// of all. The first piece of each begins with the number of its bytes, so that a difference is an
// error at once.

#include <mpi.h>

#include <memory>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "weft/collectives/internal/host_library.h"
#include "weft/collectives/internal/mpi/life.h"

namespace weft::internal {

class MpiEngine final : public Engine {
 public:
  // REQUIRES: life->enter() has succeeded.
  MpiEngine(std::shared_ptr<MpiLife> life, HostConnection connection);
  ~MpiEngine() override;

  // `ranks`: the members' in MPI_COMM_WORLD. Once, by all members.
  Status connect(const std::vector<int>& ranks);

  Status barrier(const Turn& turn) override;
  Status all_reduce(const Turn& turn, ElementType type, ReduceOp op, Algorithm algorithm,
                    char* data, uint64_t elements) override;
  Status broadcast(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                   uint64_t elements, int root) override;
  Status reduce(const Turn& turn, ElementType type, ReduceOp op, char* data, uint64_t elements,
                int root) override;
  Status all_gather(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                    const Blocks& blocks) override;
  Status gather(const Turn& turn, ElementType type, Algorithm algorithm, const char* input,
                uint64_t elements, char* output, const Blocks& blocks, int root) override;
  Status scatter(const Turn& turn, ElementType type, Algorithm algorithm, const char* input,
                 const Blocks& blocks, char* output, uint64_t elements, int root) override;
  Status reduce_scatter(const Turn& turn, ElementType type, ReduceOp op, Algorithm algorithm,
                        const char* input, const Blocks& blocks, char* output) override;
  Status all_to_all(const Turn& turn, ElementType type, Algorithm algorithm, const char* input,
                    const Blocks& input_blocks, char* output, const Blocks& output_blocks) override;

 private:
  // What goes to one rank, or comes from it, in pieces.
  class Transfer;
  using Transfers = std::vector<std::unique_ptr<Transfer>>;

  // Notes that MPI performs the operation, and compares it where the group does.
  Status begins(const Turn& turn, OpKind op, ElementType type, uint64_t elements,
                ReduceOp::Kind reduction = ReduceOp::kSum, int root = -1);
  // Until the request has ended. `call`: what began it, and its result.
  Status await(const Turn& turn, std::string_view call, int begun, MPI_Request* request);
  // Until `ended` says so; MPI works on while it is asked.
  Status until(const Turn& turn, std::string_view call, absl::FunctionRef<StatusOr<bool>()> ended);
  Status exchange(const Turn& turn, std::string_view call, Transfers transfers);
  void add(Transfers* all, int peer, bool sends, char* data, uint64_t bytes) const;
  // At least so many bytes, for MPI.
  char* room(uint64_t bytes);
  // Calls `piece(begin, count)` for elements one piece after the other, at least once.
  Status in_pieces(uint64_t elements, uint64_t most,
                   absl::FunctionRef<Status(uint64_t begin, uint64_t count)> piece) const;

  const std::shared_ptr<MpiLife> life_;
  const std::shared_ptr<Runtime> runtime_;
  const std::unique_ptr<Parker> parker_;
  const bool compares_;
  const absl::Time connect_by_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  bool keeps_comm_ = false;  // MPI still works on an operation that was given up
  std::unique_ptr<char[]> room_;
  uint64_t room_bytes_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_MPI_ENGINE_H_
