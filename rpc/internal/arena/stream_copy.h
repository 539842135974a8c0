#ifndef WEFT_RPC_INTERNAL_ARENA_STREAM_COPY_H_
#define WEFT_RPC_INTERNAL_ARENA_STREAM_COPY_H_

// Copies that leave the caches alone, for bytes that somebody else reads later: a plain copy first
// reads the lines that it is about to overwrite. Any thread.

#include <cstddef>

#include "weft/common/api.h"

namespace weft::internal {

// From this size on streaming is faster: the blocks of a few messages under way together are then
// larger than what a core has of its caches (docs/arena.md).
inline constexpr size_t kStreamAbove = size_t{12} << 20;

// As memcpy; with kStreamAbove bytes and more, around the caches where the processor can. Complete
// when it returns, also for other threads and processes.
WEFT_API void copy_past_caches(void* to, const void* from, size_t bytes,
                               size_t stream_above = kStreamAbove);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_ARENA_STREAM_COPY_H_
