#ifndef WEFT_COLLECTIVES_INTERNAL_MPI_TYPES_H_
#define WEFT_COLLECTIVES_INTERNAL_MPI_TYPES_H_

// MpiTypes: our elements and reductions as MPI's. Each type is a run of bytes to MPI, each
// reduction a function of ours, so that all have the meaning of ReduceOp's table: integers wrap,
// NaN is kept by minimum and maximum, half types are added up in fp32. MPI gives such a function
// the type and nothing else, so the number of our type is the name of MPI's.
//
// Threads: made and freed by one; the others from anywhere.

#include <mpi.h>

#include <array>

#include "weft/collectives/internal/element.h"
#include "weft/collectives/reduce_op.h"
#include "weft/common/error.h"

namespace weft::internal {

// OK for MPI_SUCCESS. Kinds: invalid_argument for a message that is longer than its place.
Status mpi_status(int code, std::string_view call);

class MpiTypes {
 public:
  Status make();
  void free();

  MPI_Datatype of(ElementType type) const { return types_[static_cast<size_t>(type)]; }
  // A mean and a sum of products are sums: their factors are applied outside.
  MPI_Op of(ReduceOp::Kind kind) const { return ops_[static_cast<size_t>(kind)]; }

 private:
  static constexpr size_t kReductions = ReduceOp::kBxor + 1;

  std::array<MPI_Datatype, kElementTypes> types_ = nulls<kElementTypes>(MPI_DATATYPE_NULL);
  std::array<MPI_Op, kReductions> ops_ = nulls<kReductions>(MPI_OP_NULL);

  template <size_t kCount, class Handle>
  static std::array<Handle, kCount> nulls(Handle null) {
    std::array<Handle, kCount> out;
    out.fill(null);
    return out;
  }
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_MPI_TYPES_H_
