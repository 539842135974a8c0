#ifndef WEFT_TRANSPORT_INTERNAL_MEMORY_LIMIT_H_
#define WEFT_TRANSPORT_INTERNAL_MEMORY_LIMIT_H_

// How much memory this process may use. Any thread.

#include <cstdint>

#include "weft/common/api.h"
#include "weft/common/files.h"

namespace weft::internal {

// `physical`, or less: the smallest limit of the memory control groups that the process is in
// (version 1 or 2, below /sys/fs/cgroup), their parents included.
WEFT_API uint64_t memory_limit(Files& files, uint64_t physical);

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_MEMORY_LIMIT_H_
