#ifndef WEFT_COLLECTIVES_INTERNAL_NCCL_API_H_
#define WEFT_COLLECTIVES_INTERNAL_NCCL_API_H_

// NcclApi: the functions of a libnccl that was opened at run time, each looked up by itself. Any
// thread.

#include <nccl.h>

#include <memory>
#include <string>

#include "weft/common/error.h"

namespace weft::internal {

struct NcclApi {
  // Error, kind unavailable: there is no such file, it is too old, or lacks a function, which is
  // named. A libnccl of that name that is in the process already is the one that is taken.
  static StatusOr<std::shared_ptr<const NcclApi>> open(const std::string& file);

  // "NCCL 2.28.9".
  std::string text() const;
  // The error of a call that did not succeed; `comm` may be null.
  Status error(ncclResult_t result, ncclComm_t comm) const;

  int version = 0;
  decltype(&::ncclGetVersion) get_version = nullptr;
  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclGetErrorString) get_error_string = nullptr;
  decltype(&::ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&::ncclCommFinalize) comm_finalize = nullptr;
  decltype(&::ncclCommDestroy) comm_destroy = nullptr;
  decltype(&::ncclCommAbort) comm_abort = nullptr;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclAllReduce) all_reduce = nullptr;
  decltype(&::ncclBroadcast) broadcast = nullptr;
  decltype(&::ncclReduce) reduce = nullptr;
  decltype(&::ncclAllGather) all_gather = nullptr;
  decltype(&::ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) recv = nullptr;
  decltype(&::ncclRedOpCreatePreMulSum) red_op_create_premul_sum = nullptr;
  decltype(&::ncclRedOpDestroy) red_op_destroy = nullptr;
  // Null where the library does not have them.
  decltype(&::ncclGetLastError) get_last_error = nullptr;
  decltype(&::ncclCommSplit) comm_split = nullptr;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_NCCL_API_H_
