// The receiving half of message.h.

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/incoming.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/transport/protocol_error.h"
#include "weft/transport/stream_copy.h"

namespace weft::internal {
namespace {

constexpr int kMostInFrame = 1 << 14;  // tensors, as a descriptor has at least four bytes

// Messages have few transfers, and the order must not depend on addresses.
template <class T>
void add_once(std::vector<std::shared_ptr<T>>* list, const std::shared_ptr<T>& item) {
  if (std::find(list->begin(), list->end(), item) == list->end()) list->push_back(item);
}

}  // namespace

Status Assembler::validate(const v1::Layout& layout, uint64_t payload_bytes, uint64_t* charge,
                           Metas* metas) {
  if (layout.segments_size() == 0) return protocol_error("a message without segments");
  std::string_view in(layout.tensor_metas());
  struct Expected {
    uint64_t bytes;
    bool stays;  // where it is, if that is an arena
  };
  absl::InlinedVector<Expected, 4> expected;
  while (!in.empty()) {
    TensorMeta meta;
    WEFT_RETURN_IF_ERROR(take_meta(&in, &meta));
    const size_t before = expected.size();
    for (const BufferSpec& spec : buffer_specs(meta)) {
      expected.push_back({spec.nbytes, may_stay_shared(meta, expected.size() - before)});
    }
    metas->push_back(std::move(meta));
    // No more than were announced, each takes a hundred times its bytes. As many as fit into a frame
    // are counted, for the words.
    if (expected.size() >= static_cast<size_t>(std::max(layout.segments_size(), kMostInFrame))) {
      break;
    }
  }
  if (expected.size() + 1 != static_cast<size_t>(layout.segments_size())) {
    return protocol_error(absl::StrCat("a message with ", layout.segments_size(),
                                       " segments whose tensors need ", expected.size() + 1));
  }
  uint64_t inlined = 0;
  uint64_t total = 0;
  bool comes_later = false;
  *charge = 0;
  for (int i = 0; i < layout.segments_size(); ++i) {
    const v1::Segment& s = layout.segments(i);
    if (i > 0 && s.length() != expected[static_cast<size_t>(i) - 1].bytes) {
      return protocol_error(absl::StrCat("segment ", i, " has ", s.length(), " bytes, its tensor ",
                                         expected[static_cast<size_t>(i) - 1].bytes));
    }
    if (s.length() > limits_.max_message_bytes - total) {
      return make_error(ErrorKind::kResource,
                        absl::StrCat("a message of more than ", limits_.max_message_bytes,
                                     " bytes (WEFT_MAX_MESSAGE_BYTES)"));
    }
    total += s.length();
    if (s.has_arena_offset()) {
      if (i == 0 || s.transfer_id() != 0 || s.length() == 0) {
        return protocol_error(absl::StrCat("segment ", i, " of ", s.length(),
                                           " bytes and transfer ", s.transfer_id(),
                                           " cannot lie in an arena"));
      }
      if (expected[static_cast<size_t>(i) - 1].stays) continue;
      comes_later = true;
    }
    *charge += s.length();
    if (s.has_arena_offset()) continue;
    if (s.transfer_id() == 0) inlined += s.length();
    if (s.transfer_id() != 0) comes_later = true;
    if (s.transfer_id() != 0 && s.length() == 0) return protocol_error("a transfer of no bytes");
  }
  // A small message is already here.
  if (!comes_later) *charge = 0;
  if (inlined != payload_bytes) {
    return protocol_error(
        absl::StrCat("a frame with ", payload_bytes, " bytes of payload that announces ", inlined));
  }
  return absl::OkStatus();
}

// Memory for every tensor: the sender's where it lies there and may stay, else our own.
Status Assembler::fill_buffers(const v1::Layout& layout, Places places, Incoming* message) {
  size_t segment = 1;
  for (const TensorMeta& meta : message->metas) {
    Buffers buffers;
    const BufferSpecs specs = buffer_specs(meta);
    for (size_t i = 0; i < specs.size(); ++i, ++segment) {
      Borrowed place;
      if (!places.empty()) place = std::move(places[segment]);
      if (place.data != nullptr) {
        const size_t align = c10::elementSize(specs[i].dtype);
        if (reinterpret_cast<uintptr_t>(place.data) % align != 0) {
          return protocol_error(
              absl::StrCat("segment ", segment, " at ",
                           layout.segments(static_cast<int>(segment)).arena_offset(),
                           " of an arena, whose elements have ", align, " bytes"));
        }
        if (may_stay_shared(meta, i)) {
          buffers.push_back(buffer_around(specs[i], place.data, std::move(place.owner)));
          continue;
        }
      }
      WEFT_ASSIGN_OR_RETURN(at::Tensor own, allocate_buffer(specs[i], memory_.get()));
      if (place.data != nullptr) {
        std::memcpy(own.mutable_data_ptr(), place.data, specs[i].nbytes);
      }
      buffers.push_back(std::move(own));
    }
    message->buffers.push_back(std::move(buffers));
  }
  return absl::OkStatus();
}

StatusOr<Assembler::Places> Assembler::borrow_places(const v1::Layout& layout,
                                                     Connection* connection) {
  Places places;
  for (int i = 0; i < layout.segments_size(); ++i) {
    const v1::Segment& s = layout.segments(i);
    if (!s.has_arena_offset()) continue;
    places.resize(static_cast<size_t>(layout.segments_size()));
    WEFT_ASSIGN_OR_RETURN(places[static_cast<size_t>(i)],
                          connection->borrow({s.arena_offset(), s.arena_lease()}, s.length()));
  }
  return places;
}

Status Assembler::begin(const v1::Layout& layout, const FrameView& frame, Connection* connection,
                        Delivered delivered, const Purpose& purpose) {
  if (is_wide(layout)) return protocol_error("a wide message where none may be");
  uint64_t charge = 0;
  auto message = std::make_shared<Incoming>();
  Status valid = validate(layout, frame.payload_bytes, &charge, &message->metas);
  const bool chunked = std::any_of(layout.segments().begin(), layout.segments().end(),
                                   [](const v1::Segment& s) { return s.transfer_id() != 0; });
  if (!valid.ok() && error_kind(valid) != ErrorKind::kResource) return valid;
  // What is refused below is given back by this going out of scope.
  WEFT_ASSIGN_OR_RETURN(Places places, borrow_places(layout, connection));
  if (chunked) {
    // Refused messages leave entries, too, and no budget counts those.
    MutexLock lock(&mutex_);
    if (transfers_.size() + static_cast<size_t>(layout.segments_size()) > kMaxOpenTransfers) {
      return protocol_error(absl::StrCat("more than ", kMaxOpenTransfers, " transfers at once"));
    }
  }
  // The bytes are charged before anything is allocated for them.
  if (valid.ok() && charge > 0) {
    valid = budget_->charge(charge);
    if (valid.ok()) message->charged = charge;
    if (!valid.ok() && budget_->may_fit(charge)) valid = no_room_now(valid);
  }
  if (valid.ok()) {
    message->payload.body.resize(layout.segments(0).length());
    valid = fill_buffers(layout, std::move(places), message.get());
    if (!valid.ok() && message->charged > 0) {
      budget_->release(message->charged);
      message->charged = 0;
    }
    if (error_kind(valid) == ErrorKind::kProtocol) return valid;
  }
  message->delivered = std::move(delivered);
  message->purpose = purpose;
  if (!valid.ok()) {
    // Refused, not a violation: what came of it before and what still comes is discarded.
    Status parked;
    {
      MutexLock lock(&mutex_);
      for (const v1::Segment& s : layout.segments()) {
        if (s.transfer_id() == 0) continue;
        max_announced_ = std::max(max_announced_, s.transfer_id());
        const bool fresh =
            transfers_.emplace(s.transfer_id(), Transfer{nullptr, nullptr, s.length()}).second;
        // A transfer that is under way must not be replaced: its message holds bytes.
        if (!fresh)
          return protocol_error(absl::StrCat("transfer ", s.transfer_id(), " announced twice"));
      }
      parked = take_parked_locked(layout, nullptr);
    }
    message->delivered(valid);
    return parked;
  }

  absl::InlinedVector<char*, 5> targets = {message->payload.body.data()};
  for (auto& buffers : message->buffers) {
    for (at::Tensor& b : buffers) targets.push_back(static_cast<char*>(b.mutable_data_ptr()));
  }
  PayloadReader reader(frame);
  for (int i = 0; i < layout.segments_size(); ++i) {
    const v1::Segment& s = layout.segments(i);
    if (s.transfer_id() == 0 && s.length() > 0 && !s.has_arena_offset()) {
      reader.read(targets[static_cast<size_t>(i)], s.length(), s.length());
    }
  }
  if (!chunked) {
    finish(message);
    return absl::OkStatus();
  }

  std::shared_ptr<Incoming> complete;
  Status parked;
  {
    MutexLock lock(&mutex_);
    for (int i = 0; i < layout.segments_size(); ++i) {
      const v1::Segment& s = layout.segments(i);
      if (s.transfer_id() == 0) continue;
      const auto [it, fresh] = transfers_.emplace(
          s.transfer_id(), Transfer{message, targets[static_cast<size_t>(i)], s.length()});
      if (!fresh) {
        // abandon() gives back what the messages in the table have taken, and this one is not
        // there.
        if (message->open_transfers == 0) budget_->release(message->charged);
        return protocol_error(absl::StrCat("transfer ", s.transfer_id(), " announced twice"));
      }
      ++message->open_transfers;
      max_announced_ = std::max(max_announced_, s.transfer_id());
    }
    parked = take_parked_locked(layout, &complete);
  }
  // Also before a violation: a complete message has left the table, so only this finishes it.
  if (complete != nullptr) finish(complete);
  return parked;
}

Status Assembler::take_parked_locked(const v1::Layout& layout,
                                     std::shared_ptr<Incoming>* complete) {
  Status first;
  for (const v1::Segment& s : layout.segments()) {
    const auto at = parked_.find(s.transfer_id());
    if (s.transfer_id() == 0 || at == parked_.end()) continue;
    for (const Parked& chunk : at->second) {
      parked_bytes_ -= chunk.bytes.size() + kParkedBytes;
      if (first.ok())
        first = take_locked(s.transfer_id(), chunk.offset, nullptr, chunk.bytes, complete);
    }
    parked_.erase(at);
  }
  return first;
}

Status Assembler::take_locked(uint64_t id, uint64_t offset, const FrameView* frame,
                              std::string_view bytes, std::shared_ptr<Incoming>* complete) {
  const auto it = transfers_.find(id);
  // The peer sent more than it announced; before the announcement that cannot be detected.
  if (it == transfers_.end()) {
    return protocol_error(absl::StrCat("chunk of transfer ", id, ", which is over"));
  }
  Transfer& t = it->second;
  const uint64_t n = frame != nullptr ? frame->payload_bytes : bytes.size();
  // In order, without gaps, within what was announced: by subtraction, so that nothing overflows.
  // And never beside a transport that reads into the same place.
  if (offset != t.received || n == 0 || n > t.length - t.received || t.filling > 0) {
    return protocol_error(absl::StrCat("chunk of transfer ", id, " at ", offset, "+", n,
                                       ", expected ", t.received + t.filling, " of ", t.length));
  }
  if (t.message != nullptr) {
    if (frame != nullptr) {
      PayloadReader(*frame).read(t.target + offset, n, t.length);
    } else {
      std::memcpy(t.target + offset, bytes.data(), n);
    }
  }
  took_locked(id, n, complete);
  return absl::OkStatus();
}

void Assembler::took_locked(uint64_t id, uint64_t bytes, std::shared_ptr<Incoming>* complete) {
  auto it = transfers_.find(id);
  Transfer& t = it->second;
  t.received += bytes;
  if (t.received < t.length) return;
  if (t.message != nullptr && --t.message->open_transfers == 0) *complete = std::move(t.message);
  transfers_.erase(it);
}

ChunkTarget Assembler::chunk_target(std::string_view header, size_t bytes) {
  uint64_t id = 0;
  uint64_t offset = 0;
  if (!decode_chunk_header(header, &id, &offset).ok()) return {};
  MutexLock lock(&mutex_);
  const auto it = transfers_.find(id);
  if (it == transfers_.end()) return {};
  Transfer& t = it->second;
  if (t.message == nullptr || t.filling > 0 || t.busy || offset != t.received || bytes == 0 ||
      bytes > t.length - t.received) {
    return {};
  }
  char* const target = t.wide ? t.message->wide->target(offset, bytes) : t.target + offset;
  if (target == nullptr) return {};
  t.filling = bytes;
  // The memory stays even when the message is dropped meanwhile.
  return {target, t.message};
}

Status Assembler::chunk_filled(std::string_view header, size_t bytes) {
  uint64_t id = 0;
  uint64_t offset = 0;
  WEFT_RETURN_IF_ERROR(decode_chunk_header(header, &id, &offset));
  std::shared_ptr<Incoming> complete;
  bool wide = false;
  {
    MutexLock lock(&mutex_);
    const auto it = transfers_.find(id);
    // abandon() was here.
    if (it == transfers_.end()) return absl::OkStatus();
    if (it->second.filling != bytes || it->second.received != offset) {
      return protocol_error(absl::StrCat("chunk of transfer ", id, " at ", offset, "+", bytes,
                                         " is there without having been begun"));
    }
    it->second.filling = 0;
    wide = it->second.wide;
    if (!wide) took_locked(id, bytes, &complete);  // which may end the transfer
  }
  if (wide) return take_wide(id, offset, bytes, nullptr);
  if (complete != nullptr) finish(complete);
  return absl::OkStatus();
}

Status Assembler::on_chunk(const FrameView& frame) {
  uint64_t id = 0;
  uint64_t offset = 0;
  WEFT_RETURN_IF_ERROR(decode_chunk_header(frame.header, &id, &offset));
  std::shared_ptr<Incoming> complete;
  bool wide = false;
  {
    MutexLock lock(&mutex_);
    const auto announced = transfers_.find(id);
    if (announced == transfers_.end()) {
      if (id <= max_announced_) {
        return protocol_error(
            absl::StrCat("chunk of transfer ", id, ", which is over or was never announced"));
      }
      if (frame.payload_bytes == 0) return protocol_error("a chunk of no bytes");
      // Its header may still come by another lane; it is kept within a bound until then.
      if (frame.payload_bytes + kParkedBytes > limits_.max_parked_bytes - parked_bytes_) {
        return protocol_error(absl::StrCat("more than ", limits_.max_parked_bytes,
                                           " bytes of chunks without a header"));
      }
      std::string bytes;
      for (std::string_view piece : frame.payload) bytes.append(piece);
      parked_bytes_ += bytes.size() + kParkedBytes;
      parked_[id].push_back(Parked{std::move(bytes), offset});
      return absl::OkStatus();
    }
    wide = announced->second.wide;
    if (!wide) WEFT_RETURN_IF_ERROR(take_locked(id, offset, &frame, {}, &complete));
  }
  if (wide) return take_wide(id, offset, frame.payload_bytes, &frame);
  if (complete != nullptr) finish(complete);
  return absl::OkStatus();
}

namespace {

struct HeldCharge {
  HeldCharge(std::shared_ptr<ByteBudget> from, uint64_t n) : budget(std::move(from)), bytes(n) {}
  ~HeldCharge() { budget->release(bytes); }
  const std::shared_ptr<ByteBudget> budget;
  const uint64_t bytes;
};

}  // namespace

void Assembler::finish(const std::shared_ptr<Incoming>& message) {
  if (message->charged > 0 && shared_budget_ != nullptr) {
    message->payload.charge = std::make_shared<HeldCharge>(shared_budget_, message->charged);
  } else if (message->charged > 0) {
    budget_->release(message->charged);
  }
  message->payload.tensors.reserve(message->metas.size());
  for (size_t i = 0; i < message->metas.size(); ++i) {
    StatusOr<at::Tensor> tensor = join_from_wire(message->metas[i], std::move(message->buffers[i]));
    if (!tensor.ok()) {
      message->delivered(tensor.status());
      return;
    }
    // Interceptors would claim tensors here, before the flag un-leafs nothing that is claimed.
    restore_requires_grad(message->metas[i], &*tensor);
    if (message->metas[i].device != kCpuCode) {
      if (message->payload.devices == nullptr) {
        message->payload.devices = std::make_shared<PayloadDevices>();
        message->payload.devices->targets.resize(message->metas.size(), kCpuCode);
      }
      message->payload.devices->targets[i] = message->metas[i].device;
    }
    message->payload.tensors.push_back(*std::move(tensor));
  }
  message->delivered(std::move(message->payload));
}

std::set<Assembler::Purpose> Assembler::incomplete() {
  std::set<Purpose> out;
  MutexLock lock(&mutex_);
  for (const auto& [id, t] : transfers_) {
    if (t.message != nullptr) out.insert(t.message->purpose);
  }
  return out;
}

void Assembler::give_up(const std::map<Purpose, Status>& over) {
  std::vector<std::shared_ptr<Incoming>> dropped;
  {
    MutexLock lock(&mutex_);
    for (auto& [id, t] : transfers_) {
      // One that is busy is given up the next time.
      if (t.message == nullptr || t.busy || over.count(t.message->purpose) == 0) continue;
      add_once(&dropped, t.message);
      t.message = nullptr;  // from here on draining
    }
  }
  for (const auto& message : dropped) {
    budget_->release(message->charged);
    message->delivered(over.at(message->purpose));
  }
}

void Assembler::abandon() {
  std::vector<std::shared_ptr<Incoming>> open;
  {
    MutexLock lock(&mutex_);
    for (auto& [id, t] : transfers_) {
      if (t.message != nullptr && !t.busy) add_once(&open, t.message);
    }
    transfers_.clear();
    parked_.clear();
    parked_bytes_ = 0;
  }
  for (const auto& message : open) budget_->release(message->charged);
}

size_t Assembler::incomplete_for_test() {
  MutexLock lock(&mutex_);
  return transfers_.size() + parked_.size();
}

}  // namespace weft::internal
