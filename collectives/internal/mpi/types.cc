#include "weft/collectives/internal/mpi/types.h"

#include <cstdlib>
#include <string>

#include "weft/collectives/internal/reduce.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

constexpr char kElementPrefix[] = "weft element ";

ElementType element_of(MPI_Datatype type) {
  char name[MPI_MAX_OBJECT_NAME] = {};
  int length = 0;
  MPI_Type_get_name(type, name, &length);
  return static_cast<ElementType>(std::atoi(name + sizeof kElementPrefix - 1));
}

template <ReduceOp::Kind kKind>
void reduce_elements(void* in, void* in_and_out, int* count, MPI_Datatype* type) {
  const void* const inputs[] = {in, in_and_out};
  reduce_many(element_of(*type), kKind, in_and_out, inputs, 2, static_cast<uint64_t>(*count), 0);
}

}  // namespace

Status mpi_status(int code, std::string_view call) {
  if (code == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  int kind = MPI_ERR_OTHER;
  MPI_Error_string(code, text, &length);
  MPI_Error_class(code, &kind);
  return make_error(kind == MPI_ERR_TRUNCATE ? ErrorKind::kInvalidArgument : ErrorKind::kInternal,
                    cat(call, ": ", text));
}

Status MpiTypes::make() {
  for (uint8_t i = 1; i < kElementTypes; ++i) {
    MPI_Datatype& type = types_[i];
    const auto bytes = static_cast<int>(element_size(static_cast<ElementType>(i)));
    WEFT_RETURN_IF_ERROR(
        mpi_status(MPI_Type_contiguous(bytes, MPI_BYTE, &type), "MPI_Type_contiguous"));
    WEFT_RETURN_IF_ERROR(mpi_status(MPI_Type_commit(&type), "MPI_Type_commit"));
    const std::string name = cat(kElementPrefix, static_cast<int>(i));
    WEFT_RETURN_IF_ERROR(mpi_status(MPI_Type_set_name(type, name.c_str()), "MPI_Type_set_name"));
  }
  struct Reduction {
    ReduceOp::Kind kind;
    MPI_User_function* function;
  };
  const Reduction all[] = {
      {ReduceOp::kSum, &reduce_elements<ReduceOp::kSum>},
      {ReduceOp::kProd, &reduce_elements<ReduceOp::kProd>},
      {ReduceOp::kMin, &reduce_elements<ReduceOp::kMin>},
      {ReduceOp::kMax, &reduce_elements<ReduceOp::kMax>},
      {ReduceOp::kAvg, &reduce_elements<ReduceOp::kAvg>},
      {ReduceOp::kPremulSum, &reduce_elements<ReduceOp::kPremulSum>},
      {ReduceOp::kBand, &reduce_elements<ReduceOp::kBand>},
      {ReduceOp::kBor, &reduce_elements<ReduceOp::kBor>},
      {ReduceOp::kBxor, &reduce_elements<ReduceOp::kBxor>},
  };
  for (const Reduction& one : all) {
    WEFT_RETURN_IF_ERROR(
        mpi_status(MPI_Op_create(one.function, /*commute=*/1, &ops_[one.kind]), "MPI_Op_create"));
  }
  return absl::OkStatus();
}

void MpiTypes::free() {
  for (MPI_Datatype& type : types_) {
    if (type != MPI_DATATYPE_NULL) MPI_Type_free(&type);
  }
  for (MPI_Op& op : ops_) {
    if (op != MPI_OP_NULL) MPI_Op_free(&op);
  }
}

}  // namespace weft::internal
