#include "weft/ps/internal/copy_wire.h"

#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/proto/ps.pb.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/placement.h"

namespace weft::ps::internal {

void put(const WorkerKey& key, v1::PsWorker* out) {
  out->set_id(key.id.value());
  out->set_incarnation(key.incarnation.value());
}
WorkerKey get(const v1::PsWorker& in) {
  return WorkerKey{WorkerId(in.id()), Incarnation(in.incarnation())};
}

namespace {

Status wrong_copy(std::string_view what) {
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("message about a copy: ", std::string(what)));
}
template <class Record>
Status parse_copy(std::string_view bytes, Record* record) {
  if (record->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return absl::OkStatus();
  return wrong_copy(absl::StrCat(bytes.size(), " bytes that cannot be parsed"));
}

void put_place(const CopyPlace& place, v1::PsPlace* out) {
  out->set_name(place.name);
  out->set_incarnation(place.incarnation);
}

Status check_index(const std::string& name, uint32_t index) {
  if (const Status s = check_name(name); !s.ok()) return wrong_copy(std::string(s.message()));
  if (index >= kMostParts) return wrong_copy(absl::StrCat("part ", index));
  return absl::OkStatus();
}

void put_client(const ClientKey& key, v1::PsImage::Client* out) {
  put(key.worker, out->mutable_worker());
  out->set_number(key.number);
}

void put_image(const PartImage& image, v1::PsImage* out) {
  put(image.definition, out->mutable_definition());
  for (const std::string& server : image.servers) out->add_servers(server);
  const ProtocolImage& p = image.protocol;
  for (const ProtocolImage::Client& client : p.clients) {
    v1::PsImage::Client* one = out->add_clients();
    put_client(client.key, one);
    one->set_clock(client.clock);
    one->set_floor(client.floor);
    for (const ProtocolImage::Outcome& outcome : client.outcomes) {
      v1::PsImage::Outcome* said = one->add_outcomes();
      said->set_number(outcome.number);
      if (!outcome.told.ok()) put(outcome.told, said->mutable_told());
      said->set_dropped(outcome.dropped);
    }
  }
  for (const ClientKey& key : p.left) put_client(key, out->add_left());
  for (const WorkerKey& key : p.gone) put(key, out->add_gone());
  out->set_entered(p.entered);
  out->set_started(p.started);
  out->set_version(p.version);
  out->set_step(p.step);
  for (size_t i = 0; i < p.held.size(); ++i) {
    v1::PsImage::Held* held = out->add_held();
    put(p.held[i].client.worker, held->mutable_worker());
    held->set_client(p.held[i].client.number);
    held->set_number(p.held[i].number);
    held->set_step(p.held[i].step);
    if (i >= image.pushes.size()) continue;
    held->set_kind(static_cast<uint32_t>(image.pushes[i].kind));
    if (image.pushes[i].rate.has_value()) held->set_rate(*image.pushes[i].rate);
    held->set_tensors(image.pushes[i].tensors);
  }
}

// An image lists everything in ascending order, each once, so loading it gives back the same image.
template <class List, class Less>
Status check_order(const List& list, const Less& less, std::string_view what) {
  const bool rises =
      std::adjacent_find(list.begin(), list.end(),
                         [&](const auto& a, const auto& b) { return !less(a, b); }) == list.end();
  return rises ? absl::OkStatus() : wrong_copy(absl::StrCat(std::string(what), " out of order"));
}

StatusOr<ProtocolImage::Client> get_client(const v1::PsImage::Client& in) {
  ProtocolImage::Client out{
      {get(in.worker()), in.number()}, in.clock(), std::max<uint64_t>(1, in.floor()), {}};
  out.outcomes.reserve(static_cast<size_t>(in.outcomes_size()));
  uint64_t below = out.floor - 1;
  for (const v1::PsImage::Outcome& outcome : in.outcomes()) {
    if (outcome.number() <= below) return wrong_copy("outcomes out of order");
    below = outcome.number();
    out.outcomes.push_back({outcome.number(), get(outcome.told()), outcome.dropped()});
  }
  return out;
}

StatusOr<PartImage> get_image(const v1::PsImage& in) {
  PartImage out;
  WEFT_ASSIGN_OR_RETURN(out.definition, get(in.definition()));
  out.servers.assign(in.servers().begin(), in.servers().end());
  ProtocolImage& p = out.protocol;
  p.clients.reserve(static_cast<size_t>(in.clients_size()));
  p.left.reserve(static_cast<size_t>(in.left_size()));
  p.gone.reserve(static_cast<size_t>(in.gone_size()));
  p.held.reserve(static_cast<size_t>(in.held_size()));
  out.pushes.reserve(static_cast<size_t>(in.held_size()));
  for (const v1::PsImage::Client& client : in.clients()) {
    WEFT_ASSIGN_OR_RETURN(ProtocolImage::Client one, get_client(client));
    p.clients.push_back(std::move(one));
  }
  for (const v1::PsImage::Client& c : in.left()) p.left.push_back({get(c.worker()), c.number()});
  for (const v1::PsWorker& worker : in.gone()) p.gone.push_back(get(worker));
  p.entered = in.entered();
  p.started = in.started();
  p.version = in.version();
  p.step = in.step();
  uint64_t token = 0;
  for (const v1::PsImage::Held& held : in.held()) {
    if (held.kind() < 1 || held.kind() > 2) return wrong_copy("kind of a held push");
    if (held.tensors() > 2) return wrong_copy("tensors of a held push");
    p.held.push_back({{get(held.worker()), held.client()}, held.number(), held.step(), ++token});
    PartImage::HeldPush push{static_cast<PushKind>(held.kind()), {}, held.tensors()};
    if (held.has_rate()) push.rate = held.rate();
    out.pushes.push_back(push);
  }
  const auto by_key = [](const auto& a, const auto& b) { return a.key < b.key; };
  const auto by_step = [](const ProtocolImage::Held& a, const ProtocolImage::Held& b) {
    return std::tie(a.step, a.client, a.number) < std::tie(b.step, b.client, b.number);
  };
  WEFT_RETURN_IF_ERROR(check_order(p.clients, by_key, "clients"));
  WEFT_RETURN_IF_ERROR(check_order(p.left, std::less<>(), "clients that left"));
  WEFT_RETURN_IF_ERROR(check_order(p.gone, std::less<>(), "workers that are gone"));
  WEFT_RETURN_IF_ERROR(check_order(p.held, by_step, "held pushes"));
  return out;
}

}  // namespace

void put(const Status& status, v1::PsStatus* out) {
  out->set_code(static_cast<uint32_t>(status.code()));
  out->set_kind(static_cast<uint32_t>(error_kind(status)));
  out->set_text(std::string(status.message()));
}
Status get(const v1::PsStatus& in) {
  if (in.code() == 0) return absl::OkStatus();
  const uint32_t kind =
      std::min<uint32_t>(in.kind(), static_cast<uint32_t>(ErrorKind::kPermission));
  return make_error(static_cast<absl::StatusCode>(std::min<uint32_t>(in.code(), 16)),
                    static_cast<ErrorKind>(kind), in.text());
}

int64_t LogEntry::bytes() const {
  int64_t sum = 128 + static_cast<int64_t>(evicted.size() * sizeof(uint64_t));
  for (const at::Tensor& tensor : tensors) sum += static_cast<int64_t>(tensor.nbytes());
  return sum;
}

void put(const RangeMap& map, v1::PsMap* out) {
  out->set_epoch(map.epoch);
  put_place(map.owner, out->mutable_owner());
  if (!map.backup.empty()) put_place(map.backup, out->mutable_backup());
  out->set_ready(map.ready);
}
StatusOr<RangeMap> get(const v1::PsMap& in) {
  RangeMap out;
  out.epoch = in.epoch();
  out.owner = {in.owner().name(), in.owner().incarnation()};
  if (in.has_backup()) out.backup = {in.backup().name(), in.backup().incarnation()};
  out.ready = in.ready();
  if (out.epoch == 0 || out.owner.empty() || (out.ready && out.backup.empty())) {
    return wrong_copy("a map without epoch, owner or backup");
  }
  return out;
}

std::string encode(const RangeMap& map) {
  if (map.epoch == 0) return "";
  v1::PsMap out;
  put(map, &out);
  return out.SerializeAsString();
}
StatusOr<RangeMap> decode_map(std::string_view bytes) {
  v1::PsMap in;
  WEFT_RETURN_IF_ERROR(parse_copy(bytes, &in));
  return get(in);
}

std::string encode(const FindRequest& request) {
  v1::PsFind out;
  out.set_name(request.name);
  out.set_index(request.index);
  out.set_suspect(request.suspect);
  return out.SerializeAsString();
}
StatusOr<FindRequest> decode_find(std::string_view bytes) {
  v1::PsFind in;
  WEFT_RETURN_IF_ERROR(parse_copy(bytes, &in));
  WEFT_RETURN_IF_ERROR(check_index(in.name(), in.index()));
  return FindRequest{in.name(), in.index(), in.suspect()};
}
std::string encode(const FindAnswer& answer) {
  v1::PsFound out;
  out.set_part(answer.part);
  if (answer.map.epoch != 0) put(answer.map, out.mutable_map());
  out.set_copy(answer.copy);
  return out.SerializeAsString();
}
StatusOr<FindAnswer> decode_found(std::string_view bytes) {
  v1::PsFound in;
  WEFT_RETURN_IF_ERROR(parse_copy(bytes, &in));
  FindAnswer out{in.part(), {}, in.copy()};
  if (in.has_map()) {
    WEFT_ASSIGN_OR_RETURN(out.map, get(in.map()));
  }
  return out;
}

std::string encode(const PartImage& image) {
  v1::PsImage out;
  put_image(image, &out);
  return out.SerializeAsString();
}

StatusOr<PartImage> decode_image(std::string_view bytes) {
  v1::PsImage in;
  WEFT_RETURN_IF_ERROR(parse_copy(bytes, &in));
  return get_image(in);
}

std::string encode(const CopyRequest& request) {
  v1::PsCopy out;
  out.set_name(request.name);
  out.set_index(request.index);
  put(request.map, out.mutable_map());
  out.set_position(request.position);
  if (request.wish != CopyWish::kNone) out.set_wish(static_cast<uint32_t>(request.wish));
  if (!request.next.empty()) put_place(request.next, out.mutable_next());
  if (request.image.has_value()) put_image(*request.image, out.mutable_image());
  for (const LogEntry& entry : request.entries) {
    v1::PsEntry* one = out.add_entries();
    if (entry.gone.has_value()) put(*entry.gone, one->mutable_gone());
    if (entry.request.has_value()) {
      put(entry.caller, one->mutable_caller());
      put(*entry.request, one->mutable_request());
      if (!entry.accepted.ok()) put(entry.accepted, one->mutable_refused());
    }
    one->set_tensors(static_cast<uint32_t>(entry.tensors.size()));
    one->mutable_evicted()->Add(entry.evicted.begin(), entry.evicted.end());
  }
  return out.SerializeAsString();
}

StatusOr<CopyRequest> decode_copy(std::string_view bytes, std::vector<at::Tensor>* tensors) {
  v1::PsCopy in;
  WEFT_RETURN_IF_ERROR(parse_copy(bytes, &in));
  WEFT_RETURN_IF_ERROR(check_index(in.name(), in.index()));
  CopyRequest out{in.name(), in.index()};
  WEFT_ASSIGN_OR_RETURN(out.map, get(in.map()));
  out.position = in.position();
  if (in.has_image() && in.entries_size() > 0) return wrong_copy("an image with entries");
  if (in.wish() > 2) return wrong_copy(absl::StrCat("wish ", in.wish()));
  if (in.wish() != 0 && (in.has_image() || in.entries_size() > 0)) {
    return wrong_copy("a wish with an image or entries");
  }
  out.wish = static_cast<CopyWish>(in.wish());
  if (in.has_next()) {
    out.next = {in.next().name(), in.next().incarnation()};
    if (out.next.empty()) return wrong_copy("a copy that is to be the backup, without a name");
  }
  if (in.has_image()) {
    WEFT_ASSIGN_OR_RETURN(out.image, get_image(in.image()));
    const size_t servers = out.image->servers.size();
    const size_t parts = servers == 0 ? 0 : part_count(out.image->definition, servers);
    if (out.index >= parts) return wrong_copy(absl::StrCat("part ", out.index, " of ", parts));
    return out;
  }
  if (in.entries_size() > 0 && in.position() == 0) return wrong_copy("entries without position");
  size_t used = 0;
  out.entries.reserve(static_cast<size_t>(in.entries_size()));
  for (const v1::PsEntry& one : in.entries()) {
    LogEntry entry;
    if (one.has_gone()) entry.gone = get(one.gone());
    if (one.has_request()) {
      entry.caller = get(one.caller());
      WEFT_ASSIGN_OR_RETURN(entry.request, get(one.request()));
      if (one.has_refused()) entry.accepted = get(one.refused());
    }
    if (one.evicted_size() > 0 && !(one.has_request() && one.request().has_push())) {
      return wrong_copy("rows that go without a push");
    }
    entry.evicted.assign(one.evicted().begin(), one.evicted().end());
    if (one.tensors() > tensors->size() - used) {
      return wrong_copy(
          absl::StrCat("entries with more tensors than the ", tensors->size(), " that came"));
    }
    for (uint32_t i = 0; i < one.tensors(); ++i) entry.tensors.push_back((*tensors)[used++]);
    out.entries.push_back(std::move(entry));
  }
  if (used != tensors->size()) return wrong_copy("tensors that belong to no entry");
  tensors->clear();
  return out;
}

std::string encode(const CopyAnswer& answer) {
  v1::PsCopied out;
  out.set_refused(answer.refused);
  if (answer.map.epoch != 0) put(answer.map, out.mutable_map());
  out.set_position(answer.position);
  out.set_owns(answer.owns);
  return out.SerializeAsString();
}
StatusOr<CopyAnswer> decode_copied(std::string_view bytes) {
  v1::PsCopied in;
  WEFT_RETURN_IF_ERROR(parse_copy(bytes, &in));
  CopyAnswer out{in.refused(), {}, in.position(), in.owns()};
  if (in.has_map()) {
    WEFT_ASSIGN_OR_RETURN(out.map, get(in.map()));
  }
  return out;
}

}  // namespace weft::ps::internal
