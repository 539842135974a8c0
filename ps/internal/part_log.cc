// A Part that is the owner of two copies: its log and images, and how they come to the backup.

#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "weft/ps/internal/part.h"
#include "weft/ps/internal/rest.h"

namespace weft::ps::internal {
namespace {

constexpr int64_t kBatchBytes = int64_t{8} << 20;
constexpr size_t kBatchEntries = 4096;
constexpr absl::Duration kAttempt = absl::Seconds(2);
// A backup that does not answer for so long is given up.
constexpr absl::Duration kPatience = absl::Seconds(4);
constexpr absl::Duration kAgain = absl::Milliseconds(50);
constexpr int64_t kSlowestBytes = 20 << 20;  // in a second

// The peer is not there, or says that it will not be a backup: to ask again is no use.
bool is_final(const Status& why) {
  switch (error_kind(why)) {
    case ErrorKind::kDeadline:
    case ErrorKind::kCancelled:
    case ErrorKind::kNotDelivered:
    case ErrorKind::kMaybeExecuted:
    case ErrorKind::kUnavailable: return false;
    default: return true;
  }
}

// It says that it takes up no copy. One that does not serve yet is kUnavailable.
bool drains(const Status& why) {
  return error_kind(why) == ErrorKind::kState && why.code() != absl::StatusCode::kUnavailable;
}

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& t : tensors) sum += t.defined() ? static_cast<int64_t>(t.nbytes()) : 0;
  return sum;
}

}  // namespace

void Part::append(LogEntry entry) {
  ReplicaEffects effects;
  const uint64_t position = replica_->append(false, &effects);
  const RangeMap map = replica_->map();
  const auto too_far_behind = [&](const CopyPlace& place) {
    end_move(place,
             make_error(ErrorKind::kResource,
                        absl::StrCat("it cannot follow, and log_bytes is ", limits_->log_bytes)));
  };
  if (replica_->streams_to_next()) {
    next_stream_->put(position, entry);
    if (next_stream_->bytes > limits_->log_bytes) {
      too_far_behind(replica_->next());
      replica_->lost_next(map.epoch, &effects);
    }
  }
  if (replica_->streams()) {
    stream_->put(position, std::move(entry));
    if (!map.ready && stream_->bytes > limits_->log_bytes) {
      too_far_behind(map.backup);
      replica_->lost_backup(map.epoch, &effects);
    }
  }
  perform(effects);
}

// The state is frozen in this turn, and copied by and by beside those that follow: pushes do not wait for it.
void Part::take_image(bool for_next) {
  auto making = std::make_shared<Making>();
  making->request = {identity_.table, identity_.index, replica_->map(), replica_->last()};
  if (for_next) making->request.next = replica_->next();
  PartImage image{identity_.definition, identity_.servers, protocol_.image(), {}};
  for (const ProtocolImage::Held& held : image.protocol.held) {
    const Push& push = pushes_.at(held.token);
    const std::vector<at::Tensor> of_push = data_->pack(push);
    image.pushes.push_back({push.kind, push.rate, static_cast<uint32_t>(of_push.size())});
    making->held.insert(making->held.end(), of_push.begin(), of_push.end());
  }
  making->request.image = std::move(image);
  making->data = data_->freeze();
  making->host = host_;
  auto& stream = for_next ? next_stream_ : stream_;
  stream = std::make_shared<Stream>();
  stream->sending = true;  // until it is made
  metrics_.images->add();
  if (const auto host = host_.lock()) {
    host->later(runtime_->now(), [weak = weak_from_this(), at = stream, making] {
      if (const auto self = weak.lock()) self->copy_piece(at, making);
    });
  }
}

// Not in a turn.
void Part::copy_piece(const StreamRef& stream, const std::shared_ptr<Making>& making) {
  const absl::Time began = runtime_->now();
  Status made;
  bool more = false;
  try {
    const at::AutoGradMode no_grad(false);
    more = making->data->copy_image(&making->tensors, &making->done);
  } catch (...) {  // of LibTorch, for want of memory
    made = status_from_current_exception();
  }
  const auto host = making->host.lock();
  if (more && host != nullptr) {
    const absl::Time now = runtime_->now();
    const absl::Duration rest = rest_after(now - began, &making->rested);
    return host->later(now + rest, [weak = weak_from_this(), stream, making] {
      if (const auto self = weak.lock()) self->copy_piece(stream, making);
    });
  }
  take_turn([this, stream, making, made] {
    image_made(stream, making.get(), made);
    publish();
  });
}

void Part::image_made(const StreamRef& stream, Making* making, const Status& made) {
  making->data.reset();
  if (!made.ok()) return sent(stream, making->request.map.epoch, true, made);
  stream->sending = false;
  std::vector<at::Tensor> tensors = std::move(making->held);
  for (at::Tensor& t : making->tensors) tensors.push_back(std::move(t));
  stream->image.emplace(std::move(making->request), std::move(tensors));
}

void Part::pump() {
  if (replica_->streams()) pump(stream_, replica_->map().backup);
  if (replica_->streams_to_next()) pump(next_stream_, replica_->next());
}

void Part::pump(const StreamRef& stream, const CopyPlace& to) {
  const auto host = host_.lock();
  if (stream->sending || host == nullptr) return;
  CopyRequest request;
  std::vector<at::Tensor> tensors;
  const bool image = stream->image.has_value();
  if (image) {
    request = stream->image->first;
    tensors = stream->image->second;
  } else if (!stream->log.empty()) {
    request = CopyRequest{identity_.table, identity_.index, replica_->map(), stream->first};
    if (stream == next_stream_) request.next = to;
    int64_t bytes = 0;
    for (const LogEntry& entry : stream->log) {
      if (request.entries.size() == kBatchEntries) break;
      if (!request.entries.empty() && bytes + entry.bytes() > kBatchBytes) break;
      bytes += entry.bytes();
      request.entries.push_back(entry);
      tensors.insert(tensors.end(), entry.tensors.begin(), entry.tensors.end());
    }
  } else {
    return;
  }
  stream->sending = true;
  const int64_t bytes = bytes_of(tensors);
  const absl::Duration deadline = kAttempt + absl::Seconds(bytes / kSlowestBytes);
  const uint64_t epoch = replica_->map().epoch;
  auto done = [weak = weak_from_this(), stream, epoch, image](const StatusOr<CopyAnswer>& answer) {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->take_turn([part = self.get(), stream, epoch, image, answer] {
      part->sent(stream, epoch, image, answer);
      part->publish();
    });
  };
  if (!image) return host->send_copy(to, std::move(request), std::move(tensors), deadline, done);
  // A message takes as long to pack as its bytes to copy: pushes do not wait for that.
  host->later(runtime_->now(), [at = std::weak_ptr<CopyHost>(host), to, deadline, done,
                                request = std::move(request), tensors = std::move(tensors)] {
    if (const auto still = at.lock()) still->send_copy(to, request, tensors, deadline, done);
  });
}

void Part::sent(const StreamRef& stream, uint64_t epoch, bool image,
                const StatusOr<CopyAnswer>& answer) {
  stream->sending = false;
  if (!owns() || !closed_.ok()) return;
  ReplicaEffects effects;
  if (answer.ok() && answer->refused && answer->map.epoch > replica_->map().epoch) {
    replica_->read(answer->map, &effects);
    return perform(effects);
  }
  const bool next = stream == next_stream_;
  if (epoch != replica_->map().epoch) return;
  if (next ? !replica_->streams_to_next() : stream != stream_ || !replica_->streams()) return;
  if (answer.ok() && !answer->refused) {
    heard_ = runtime_->now();
    stream->confirmed(image, answer->position);
    if (next) {
      replica_->confirm_next(epoch, answer->position, &effects);
    } else {
      replica_->confirm(epoch, answer->position, &effects);
    }
    return perform(effects);
  }
  const absl::Time now = runtime_->now();
  if (!stream->failing_since.has_value()) stream->failing_since = now;
  const bool final = !answer.ok() && is_final(answer.status());
  const CopyPlace place = next ? replica_->next() : replica_->map().backup;
  if (final && drains(answer.status())) unwilling_ = place;
  if (final || now - *stream->failing_since > kPatience) {
    end_move(place,
             answer.ok() ? make_error(ErrorKind::kState, "it refuses the log") : answer.status());
    if (next) {
      replica_->lost_next(epoch, &effects);
    } else {
      replica_->lost_backup(epoch, &effects);
    }
    return perform(effects);
  }
  const auto host = host_.lock();
  if (host == nullptr) return;
  stream->sending = true;  // until then
  host->later(now + kAgain, [weak = weak_from_this(), stream] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->take_turn([part = self.get(), stream] {
      stream->sending = false;
      part->publish();
    });
  });
}

void Part::Stream::put(uint64_t position, LogEntry entry) {
  if (log.empty()) first = position;
  bytes += entry.bytes();
  log.push_back(std::move(entry));
}

void Part::Stream::confirmed(bool of_image, uint64_t position) {
  failing_since.reset();
  if (of_image) image.reset();
  while (!log.empty() && first <= position) {
    bytes -= log.front().bytes();
    log.pop_front();
    ++first;
  }
}

}  // namespace weft::ps::internal
