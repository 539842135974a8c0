// A Part that is one of two copies: what a ReplicaProtocol says is done, which of them owns, and the
// backup, which follows the log.

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/ps/internal/part.h"
#include "weft/ps/placement.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kProbe = absl::Seconds(1);
// Who hears nothing of the other copy for so long asks the store whether the map is still the same.
constexpr absl::Duration kSilence = absl::Seconds(10);
constexpr uint64_t kOffersToUnwilling = 16;

}  // namespace

void Part::own(const RangeMap& map, std::weak_ptr<CopyHost> host) {
  take_turn([this, map, host = std::move(host)] {
    replica_ = ReplicaProtocol::owner(identity_.self, map);
    host_ = host;
    formed_ = !wants_backup();
    publish();
  });
}

Status Part::follow(const CopyRequest& image, std::vector<at::Tensor> tensors,
                    std::weak_ptr<CopyHost> host, const std::function<void()>& between) {
  // LibTorch may throw, for want of memory.
  Status result =
      make_error(ErrorKind::kResource, absl::StrCat(label(), ": the image could not be taken up"));
  take_turn([&, this] {
    result = take_up(*image.image, std::move(tensors), between);
    if (!result.ok()) return fail_all(result);
    replica_ = ReplicaProtocol::backup(identity_.self, image.map, image.position);
    host_ = host;
    heard_ = runtime_->now();
    publish();
  });
  return result;
}

Reply Part::moved() const {
  Answer answer;
  answer.moved = true;
  answer.map = replica_->map();
  return Reply{answer, {}};
}

void Part::perform(const ReplicaEffects& effects) {
  const auto host = host_.lock();
  for (const ReplicaEffect& effect : effects) {
    if (const auto* write = std::get_if<WriteMap>(&effect)) {
      if (host != nullptr) host->write_map(shared_from_this(), *write);
    } else if (std::holds_alternative<SendImage>(effect)) {
      take_image(false);
    } else if (std::holds_alternative<SendImageToNext>(effect)) {
      take_image(true);
    } else if (std::holds_alternative<NextIsBackup>(effect)) {
      stream_ = std::exchange(next_stream_, std::make_shared<Stream>());
    } else if (std::holds_alternative<Serve>(effect)) {
      serve();
    } else if (std::holds_alternative<Follow>(effect)) {
      follow_successor();
    } else if (!std::holds_alternative<Release>(effect)) {
      retire();
    }
  }
  if (!replica_->streams()) stream_ = std::make_shared<Stream>();
  if (!replica_->streams_to_next()) next_stream_ = std::make_shared<Stream>();
  formed_ |= replica_->map().ready;
}

// ---- who owns ----------------------------------------------------------------------------------

void Part::serve() {
  formed_ = true;
  metrics_.takeovers->add();
  data_->follow(false);
  runtime_->trace("ps.serve", identity_.id, replica_->last());
  const auto host = host_.lock();
  if (host == nullptr) return;
  for (const WorkerKey& worker : host->gone_workers()) {
    PartEffects effects;
    protocol_.worker_gone(worker, &effects);
    perform(std::move(effects));
    append({.gone = worker});
  }
}

// Nothing that was not released leaves: its client asks the new owner.
void Part::let_go() {
  for (auto& [reply, what] : std::exchange(answers_, {})) reply(moved());
  for (Gated& gated : std::exchange(gated_, {})) gated.reply(moved());
  stream_ = std::make_shared<Stream>();
  next_stream_ = std::make_shared<Stream>();
}

void Part::retire() {
  runtime_->trace("ps.retire", identity_.id, replica_->map().epoch);
  fail_all(make_error(ErrorKind::kState,
                      absl::StrCat("the part has moved: ", to_string(replica_->map()))));
}

void Part::map_written(const RangeMap& now) {
  take_turn([this, now] {
    ReplicaEffects effects;
    replica_->wrote(now, &effects);
    perform(effects);
    publish();
  });
}

void Part::map_read(const RangeMap& then) {
  take_turn([this, then] {
    heard_ = runtime_->now();
    ReplicaEffects effects;
    replica_->read(then, &effects);
    if (std::exchange(doubts_owner_, false)) replica_->suspect_owner(&effects);
    perform(effects);
    publish();
  });
}

// One that joins may be the backup by now, and then it takes over.
void Part::look_at_map() {
  doubts_owner_ = true;
  if (const auto host = host_.lock()) host->read_map(shared_from_this());
}

void Part::server_gone(const CopyPlace& server) {
  take_turn([this, server] {
    if (!replica_.has_value() || !closed_.ok()) return;
    ReplicaEffects effects;
    end_move(server, make_error(ErrorKind::kPeerLost, "it is not there any more"));
    if (owns() && replica_->next() == server) {
      replica_->lost_next(replica_->map().epoch, &effects);
    } else if (owns() && replica_->map().backup == server) {
      replica_->lost_backup(replica_->map().epoch, &effects);
    } else if (!owns() && replica_->map().owner == server) {
      if (replica_->joins()) {
        look_at_map();
      } else {
        replica_->suspect_owner(&effects);
      }
    }
    perform(effects);
    publish();
  });
}

void Part::suspected() {
  take_turn([this] {
    const auto host = host_.lock();
    if (!replica_.has_value() || owns() || !closed_.ok() || asking_owner_ || host == nullptr)
      return;
    asking_owner_ = true;
    const CopyRequest question{identity_.table, identity_.index, replica_->map()};
    host->send_copy(replica_->map().owner, question, {}, kProbe,
                    [weak = weak_from_this()](StatusOr<CopyAnswer> answer) {
                      const auto self = weak.lock();
                      if (self == nullptr) return;
                      self->take_turn([part = self.get(), answer] {
                        part->asking_owner_ = false;
                        if (part->owns() || !part->closed_.ok()) return;
                        if (answer.ok() && answer->owns) return;  // it is there
                        ReplicaEffects effects;
                        if (answer.ok() && answer->map.epoch > part->replica_->map().epoch) {
                          part->replica_->read(answer->map, &effects);
                        } else if (part->replica_->joins()) {
                          part->look_at_map();
                        } else {
                          part->replica_->suspect_owner(&effects);
                        }
                        part->perform(effects);
                        part->publish();
                      });
                    });
  });
}

void Part::tick() {
  take_turn([this] {
    const auto host = host_.lock();
    if (!replica_.has_value() || !closed_.ok() || host == nullptr) return;
    if (owns() && !wants_backup() && !replica_->map().backup.empty()) drop_second_copy();
    // An owner may have a successor that it has not heard of, while nothing is asked of it.
    if (!replica_->map().backup.empty()) {
      const bool silence = runtime_->now() - heard_ > kSilence;
      if (silence || doubts_owner_) host->read_map(shared_from_this());
      if (silence && replica_->joins()) ask_whether_joins();
      return;
    }
    if (!owns() || replica_->writing() || !wants_backup()) return;
    const std::vector<CopyPlace> others = host->others(identity_);
    if (others.empty()) {
      // A table that is made after the death of the last other server: it waits for no backup.
      if (formed_ || !host->others_are_gone(identity_)) return;
      formed_ = true;
      return publish();
    }
    CopyPlace next = others[offers_++ % others.size()];
    if (next == unwilling_) next = others[offers_++ % others.size()];
    // The only one is asked again now and then: it may have given up to drain.
    if (next == unwilling_ && ++passed_over_ % kOffersToUnwilling != 0) return;
    ReplicaEffects effects;
    replica_->offer(next, &effects);
    perform(effects);
    publish();
  });
}

// ---- backup ------------------------------------------------------------------------------------

CopyAnswer Part::said(bool refused) const {
  return {refused, replica_->map(), replica_->last(), owns() && closed_.ok()};
}

void Part::copy(CopyRequest request, CopyReply reply) {
  take_turn([this, request = std::move(request), reply = std::move(reply)]() mutable {
    if (!replica_.has_value() || !closed_.ok()) {
      return reply({true, replica_.has_value() ? replica_->map() : RangeMap{}, 0, false});
    }
    heard_ = runtime_->now();
    ++heard_times_;
    if (request.image.has_value()) {  // it came before
      return reply(said(owns() || request.map.epoch != replica_->map().epoch));
    }
    replica_->adopt(request.map);
    if (request.wish != CopyWish::kNone) return reply(grant(request));
    if (request.entries.empty()) {
      if (!request.next.empty()) return reply(said(replica_->next() != request.next));
      if (request.map.epoch > replica_->map().epoch) later_map(request.map);
      return reply(said(false));
    }
    const auto taken =
        replica_->entries(request.map.epoch, request.position, request.entries.size());
    for (uint64_t i = taken.skip; !taken.refused && i < taken.skip + taken.apply; ++i) {
      replay(std::move(request.entries[i]));
    }
    publish();
    reply(said(taken.refused || !closed_.ok()));
  });
}

// It has been handed over to this copy; whatever else is said of maps, the store is asked.
void Part::later_map(const RangeMap& said) {
  const auto host = host_.lock();
  if (said.owner != identity_.self) {
    if (host != nullptr) host->read_map(shared_from_this());
    return;
  }
  ReplicaEffects effects;
  replica_->read(said, &effects);
  perform(effects);
  publish();
}

void Part::replay(LogEntry entry) {
  if (!closed_.ok()) return;
  PartEffects effects;
  if (entry.gone.has_value()) {
    protocol_.worker_gone(*entry.gone, &effects);
  } else if (entry.request.has_value()) {
    const ClientKey client{entry.caller, entry.request->client};
    const Request& request = *entry.request;
    Answer answer;
    Judged outcome{entry.accepted};
    if (request.push.has_value() && entry.accepted.ok() &&
        entry.tensors.size() != data_->push_tensors()) {
      return fail_all(make_error(ErrorKind::kProtocol, "a push of the log without its tensors"));
    }
    if (const Status gone = data_->evict(entry.evicted); !gone.ok()) {
      return fail_all(annotate(gone, "the log of the owner cannot be followed"));
    }
    // An error is the owner's, too, and was told to the client.
    const Status done = execute(client, request, std::move(entry.tensors), &entry.accepted, &answer,
                                &outcome, &effects);
    if (!done.ok() && outcome.accepted != entry.accepted) {
      return fail_all(annotate(done, "the log of the owner cannot be followed"));
    }
  }
  perform(std::move(effects));
}

void Part::digest(std::function<void(uint64_t position, uint64_t hash)> done) {
  take_turn([this, done = std::move(done)] {
    PartImage image{{}, {}, protocol_.image(), {}};
    uint64_t hash = 0;
    const auto add = [&hash](const at::Tensor& t) {
      if (!t.defined()) return;
      const at::Tensor flat = t.contiguous();
      hash = mix_bits(hash ^ hash_text(std::string(static_cast<const char*>(flat.const_data_ptr()),
                                                   static_cast<size_t>(flat.nbytes()))));
    };
    for (const ProtocolImage::Held& held : image.protocol.held) {
      for (const at::Tensor& t : data_->pack(pushes_.at(held.token))) add(t);
    }
    hash = mix_bits(hash ^ hash_text(encode(image)));
    for (const at::Tensor& t : image_of(*data_->freeze())) add(t);
    done(replica_.has_value() ? replica_->last() : 0, hash);
  });
}

}  // namespace weft::ps::internal
