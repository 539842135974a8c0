#include "weft/collectives/internal/mixed_streams.h"

#include <utility>

namespace weft::internal {
namespace {

class MixedStreams : public Streams {
 public:
  MixedStreams(std::unique_ptr<ShmStreams> inside, std::unique_ptr<Streams> outside,
               std::vector<bool> on_host)
      : inside_(std::move(inside)), outside_(std::move(outside)), on_host_(std::move(on_host)) {}

  Moved read(int peer, int lane, char* to, size_t bytes, size_t* got) override {
    return to_peer(peer).read(peer, lane, to, bytes, got);
  }
  Moved write(int peer, int lane, const iovec* parts, size_t count, size_t* sent) override {
    return to_peer(peer).write(peer, lane, parts, count, sent);
  }
  int control(int peer) const override { return to_peer(peer).control(peer); }
  ssize_t hear(int peer, char* to, size_t bytes) override {
    return to_peer(peer).hear(peer, to, bytes);
  }
  void say(int peer, std::string_view message) override { to_peer(peer).say(peer, message); }
  bool flush() override { return outside_->flush(); }

  int looks() const override { return inside_->looks(); }
  int yields() const override { return inside_->yields(); }
  void relax(int look) override { inside_->relax(look); }
  void begin_sleep() override { inside_->begin_sleep(); }
  void end_sleep() override { inside_->end_sleep(); }
  bool goodbye_comes_last(int peer) const override {
    return to_peer(peer).goodbye_comes_last(peer);
  }
  bool drained() override { return outside_->drained(); }
  void poll_for(int peer, int lane, size_t to_read, bool to_write,
                std::vector<pollfd>* fds) override {
    to_peer(peer).poll_for(peer, lane, to_read, to_write, fds);
  }

 private:
  Streams& to_peer(int peer) const {
    return on_host_[static_cast<size_t>(peer)] ? static_cast<Streams&>(*inside_) : *outside_;
  }

  const std::unique_ptr<ShmStreams> inside_;
  const std::unique_ptr<Streams> outside_;
  const std::vector<bool> on_host_;
};

}  // namespace

std::unique_ptr<Streams> make_mixed_streams(std::unique_ptr<ShmStreams> inside,
                                            std::unique_ptr<Streams> outside,
                                            std::vector<bool> on_host) {
  return std::make_unique<MixedStreams>(std::move(inside), std::move(outside), std::move(on_host));
}

}  // namespace weft::internal
