#ifndef WEFT_COLLECTIVES_INTERNAL_SHM_STREAMS_H_
#define WEFT_COLLECTIVES_INTERNAL_SHM_STREAMS_H_

// Streams through rings in the members' files, and the naps of the threads that wait.
//
// A thread that waits looks for a while, then gives its core to others between looks, as long as it
// gets it back soon, then says in its own page that it sleeps, looks once more, and sleeps on the private sockets. A thread that
// writes what a peer may wait for looks at that peer's page afterwards, and rings by the socket
// when it sleeps. Both sides write first and look then, in one order for all threads, so that one
// of them sees the other.

#include <sched.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "weft/collectives/internal/shm_mesh.h"
#include "weft/collectives/internal/stream_link.h"
#include "weft/common/runtime.h"
#include "weft/transport/shared_writes.h"

namespace weft::internal {

class ShmStreams : public Streams {
 public:
  ShmStreams(const Membership& member, ShmMesh mesh, std::shared_ptr<Runtime> runtime);

  Moved read(int peer, int lane, char* to, size_t bytes, size_t* got) override;
  Moved write(int peer, int lane, const iovec* parts, size_t count, size_t* sent) override;
  int control(int peer) const override { return sockets_[static_cast<size_t>(peer)].get(); }
  int looks() const override { return kLooks; }
  int yields() const override { return kSpins; }
  void relax(int look) override;
  bool goodbye_comes_last(int peer) const override {
    (void)peer;
    return true;
  }
  void begin_sleep() override;
  void end_sleep() override;
  void poll_for(int peer, int lane, size_t to_read, bool to_write,
                std::vector<pollfd>* fds) override {
    (void)peer, (void)lane, (void)to_read, (void)to_write, (void)fds;
  }

  // After something was written that the peer may wait for.
  void ring(int peer);
  const ShmFiles& files() const { return *files_; }

 private:
  static constexpr int kLooks = 2000;
  static constexpr int kSpins = 200;

  ShmFile& of(int rank) const { return *files_->by_rank[static_cast<size_t>(rank)]; }

  const Membership member_;
  const std::shared_ptr<ShmFiles> files_;
  const std::vector<UniqueFd> sockets_;
  const std::shared_ptr<Runtime> runtime_;
  SharedWrites writes_;
  std::vector<uint32_t> rung_;  // which nap of each peer this one has ended
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_SHM_STREAMS_H_
