#ifndef WEFT_COLLECTIVES_INTERNAL_MIXED_STREAMS_H_
#define WEFT_COLLECTIVES_INTERNAL_MIXED_STREAMS_H_

// Streams of a group over several hosts: shared memory to the peers on the own host, sockets to the
// others. A thread that waits spins and sleeps as one of shared memory does; it sleeps on the
// sockets as well.
//
// Threads: see stream_link.h.

#include <memory>
#include <vector>

#include "weft/collectives/internal/shm_streams.h"
#include "weft/collectives/internal/stream_link.h"

namespace weft::internal {

// `on_host`: by rank, whether shared memory reaches that peer. REQUIRES: each of the two has what
// its peers need.
std::unique_ptr<Streams> make_mixed_streams(std::unique_ptr<ShmStreams> inside,
                                            std::unique_ptr<Streams> outside,
                                            std::vector<bool> on_host);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_MIXED_STREAMS_H_
