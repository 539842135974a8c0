#ifndef WEFT_TRANSPORT_STREAM_COPY_H_
#define WEFT_TRANSPORT_STREAM_COPY_H_

// Copies that bypass the caches, for bytes that another process reads later: a plain copy first
// reads the lines that it is about to overwrite. Any thread.

#include <cstddef>

#include "weft/common/api.h"

namespace weft::internal {

// From this size on streaming is faster: the buffers of a few messages under way together are then
// larger than what a core has of its caches (docs/arena.md).
inline constexpr size_t kStreamAbove = size_t{12} << 20;

// As memcpy, around the caches if the processor can. Complete when it returns, also for other threads
// and processes.
WEFT_API void copy_streamed(void* to, const void* from, size_t bytes);

// As memcpy, for a piece of a buffer of `whole` bytes: where that is kStreamAbove or more, around
// the caches. Complete when it returns, also for other threads and processes.
WEFT_API void copy_part(void* to, const void* from, size_t bytes, size_t whole);

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_STREAM_COPY_H_
