#include "weft/ps/internal/wire.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "weft/proto/ps.pb.h"
#include "weft/ps/internal/copy_wire.h"
#include "weft/ps/internal/definition.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/value.h"

namespace weft::ps::internal {
namespace {

constexpr int kMostServers = 4096;

Status violation(std::string_view what) {
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("message of a parameter server: ", std::string(what)));
}

template <class Record>
Status parse(std::string_view bytes, Record* record) {
  if (record->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return absl::OkStatus();
  return violation(absl::StrCat(bytes.size(), " bytes that cannot be parsed"));
}

}  // namespace

void put(const TableDefinition& d, v1::PsDefinition* out) {
  out->set_kind(static_cast<uint32_t>(d.kind));
  for (const int64_t n : d.shape) out->add_shape(n);
  out->set_dtype(d.dtype == c10::ScalarType::Double ? 2 : 1);
  out->set_rule(d.rule.name);
  for (const double option : d.rule.options) out->add_options(option);
  out->set_init(static_cast<uint32_t>(d.init.kind));
  out->set_init_low(d.init.low);
  out->set_init_high(d.init.high);
  out->set_init_seed(d.init.seed);
  out->set_mode(static_cast<uint32_t>(d.consistency.mode));
  out->set_bound(d.consistency.bound);
  out->set_clients(d.consistency.clients);
  out->set_max_bytes(d.max_bytes);
  if (d.part_bytes != TableDefinition{}.part_bytes) out->set_part_bytes(d.part_bytes);
  if (d.copies > 1) out->set_copies(d.copies);
  if (d.movable) out->set_movable(true);
  if (d.eviction != Eviction::kNone) out->set_eviction(static_cast<uint32_t>(d.eviction));
  if (d.ttl != absl::ZeroDuration()) {
    out->set_ttl_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(d.ttl)));
  }
  if (d.admit_after > 1) out->set_admit_after(d.admit_after);
}

StatusOr<TableDefinition> get(const v1::PsDefinition& in) {
  TableDefinition d;
  if (in.kind() < 1 || in.kind() > 2) return violation(absl::StrCat("kind of table ", in.kind()));
  if (in.dtype() < 1 || in.dtype() > 2) return violation(absl::StrCat("dtype ", in.dtype()));
  if (in.init() < 1 || in.init() > 3) return violation(absl::StrCat("init ", in.init()));
  if (in.mode() < 1 || in.mode() > 4) return violation(absl::StrCat("consistency ", in.mode()));
  d.kind = static_cast<TableKind>(in.kind());
  d.shape.assign(in.shape().begin(), in.shape().end());
  d.dtype = in.dtype() == 2 ? c10::ScalarType::Double : c10::ScalarType::Float;
  d.rule.name = in.rule();
  d.rule.options.assign(in.options().begin(), in.options().end());
  for (const double option : in.options()) {
    if (!std::isfinite(option)) return violation(absl::StrCat("an option of the rule is ", option));
  }
  d.init = Init{static_cast<Init::Kind>(in.init()), in.init_low(), in.init_high(), in.init_seed()};
  d.consistency = Consistency{static_cast<Mode>(in.mode()), in.bound(), in.clients()};
  d.max_bytes = in.max_bytes();
  if (in.part_bytes() != 0) d.part_bytes = in.part_bytes();
  d.copies = std::max<uint32_t>(1, in.copies());
  d.movable = in.movable();
  if (in.eviction() > 1) return violation(absl::StrCat("eviction ", in.eviction()));
  d.eviction = static_cast<Eviction>(in.eviction());
  if (in.ttl_ms() > INT64_MAX) return violation(absl::StrCat("ttl of ", in.ttl_ms(), " ms"));
  d.ttl = absl::Milliseconds(static_cast<int64_t>(in.ttl_ms()));
  d.admit_after = std::max<uint32_t>(1, in.admit_after());
  if (const Status s = check_definition(d); !s.ok()) return violation(std::string(s.message()));
  return d;
}

namespace {

template <class Names>
StatusOr<std::vector<std::string>> get_servers(const Names& names) {
  if (names.size() > kMostServers) return violation(absl::StrCat(names.size(), " servers"));
  return std::vector<std::string>(names.begin(), names.end());
}

}  // namespace

std::string encode(const OpenRequest& request) {
  v1::PsOpen out;
  out.set_name(request.name);
  if (request.definition.has_value()) put(*request.definition, out.mutable_definition());
  for (const std::string& server : request.servers) out.add_servers(server);
  out.set_index(request.index);
  return out.SerializeAsString();
}

StatusOr<OpenRequest> decode_open(std::string_view bytes) {
  v1::PsOpen in;
  WEFT_RETURN_IF_ERROR(parse(bytes, &in));
  OpenRequest out;
  out.name = in.name();
  if (const Status s = check_name(out.name); !s.ok()) return violation(std::string(s.message()));
  if (!in.has_definition()) return out;
  WEFT_ASSIGN_OR_RETURN(out.definition, get(in.definition()));
  WEFT_ASSIGN_OR_RETURN(out.servers, get_servers(in.servers()));
  out.index = in.index();
  if (out.servers.empty()) return violation("a table without servers");
  const size_t parts = part_count(*out.definition, out.servers.size());
  if (out.index >= parts) return violation(absl::StrCat("part ", out.index, " of ", parts));
  return out;
}

std::string encode(const OpenAnswer& answer) {
  v1::PsOpened out;
  out.set_part(answer.part);
  put(answer.definition, out.mutable_definition());
  for (const std::string& server : answer.servers) out.add_servers(server);
  if (answer.map.epoch != 0) put(answer.map, out.mutable_map());
  return out.SerializeAsString();
}

StatusOr<OpenAnswer> decode_opened(std::string_view bytes) {
  v1::PsOpened in;
  WEFT_RETURN_IF_ERROR(parse(bytes, &in));
  OpenAnswer out;
  out.part = in.part();
  WEFT_ASSIGN_OR_RETURN(out.definition, get(in.definition()));
  if (out.part == 0 && !in_map(out.definition)) return violation("a part without a number");
  if (in.has_map()) {
    WEFT_ASSIGN_OR_RETURN(out.map, get(in.map()));
  }
  WEFT_ASSIGN_OR_RETURN(out.servers, get_servers(in.servers()));
  if (out.servers.empty()) return violation("a table without servers");
  return out;
}

void put(const Request& request, v1::PsRequest* to) {
  v1::PsRequest& out = *to;
  out.set_part(request.part);
  out.set_client(request.client);
  if (request.enter.has_value()) out.set_enter(*request.enter);
  if (request.push.has_value()) {
    v1::PsPush* push = out.mutable_push();
    push->set_number(request.push->number);
    push->set_floor(request.push->floor);
    push->set_clock(request.push->clock);
    push->set_version(request.push->version);
    push->set_kind(static_cast<uint32_t>(request.push->kind));
    if (request.push->rate.has_value()) push->set_rate(*request.push->rate);
  }
  if (request.advance.has_value()) out.set_advance(*request.advance);
  if (request.pull.has_value()) {
    v1::PsPull* pull = out.mutable_pull();
    if (request.pull->clock.has_value()) pull->set_clock(*request.pull->clock);
    pull->set_at_least(request.pull->at_least);
  }
  out.set_leave(request.leave);
  if (request.epoch != 0) out.set_epoch(request.epoch);
}

std::string encode(const Request& request) {
  v1::PsRequest out;
  put(request, &out);
  return out.SerializeAsString();
}

StatusOr<Request> decode_request(std::string_view bytes) {
  v1::PsRequest in;
  WEFT_RETURN_IF_ERROR(parse(bytes, &in));
  return get(in);
}

StatusOr<Request> get(const v1::PsRequest& in) {
  Request out;
  out.part = in.part();
  out.client = in.client();
  out.epoch = in.epoch();
  if (out.part == 0 || out.client == 0) return violation("a request without part or client");
  if (in.has_enter()) out.enter = in.enter();
  if (in.has_push()) {
    const v1::PsPush& push = in.push();
    if (push.number() == 0 || push.floor() == 0 || push.floor() > push.number()) {
      return violation(absl::StrCat("push ", push.number(), " with floor ", push.floor()));
    }
    if (push.kind() < 1 || push.kind() > 2) {
      return violation(absl::StrCat("kind of push ", push.kind()));
    }
    PushHeader header{push.number(), push.floor(), push.clock(), push.version(),
                      static_cast<PushKind>(push.kind())};
    if (push.has_rate()) {
      if (!std::isfinite(push.rate()) || push.rate() < 0) return violation("rate of a push");
      header.rate = push.rate();
    }
    out.push = header;
  }
  if (in.has_advance()) out.advance = in.advance();
  if (in.has_pull()) {
    PullHeader pull;
    if (in.pull().has_clock()) pull.clock = in.pull().clock();
    pull.at_least = in.pull().at_least();
    out.pull = pull;
  }
  out.leave = in.leave();
  return out;
}

std::string encode(const Answer& answer) {
  v1::PsAnswer out;
  put(answer, &out);
  return out.SerializeAsString();
}

void put(const Answer& answer, v1::PsAnswer* to) {
  v1::PsAnswer& out = *to;
  out.set_version(answer.version);
  out.set_clock(answer.clock);
  out.set_dropped(answer.dropped);
  out.set_behind(answer.behind);
  out.set_lag(answer.lag);
  if (answer.map.epoch != 0) put(answer.map, out.mutable_map());
  if (answer.moved) out.set_moved(true);
}

StatusOr<Answer> decode_answer(std::string_view bytes) {
  v1::PsAnswer in;
  WEFT_RETURN_IF_ERROR(parse(bytes, &in));
  return get(in);
}

StatusOr<Answer> get(const v1::PsAnswer& in) {
  Answer out{in.version(), in.clock(), in.dropped(), in.behind(), in.lag()};
  out.moved = in.moved();
  if (in.has_map()) {
    WEFT_ASSIGN_OR_RETURN(out.map, get(in.map()));
  }
  return out;
}

namespace {
using Tensors = std::vector<at::Tensor>;

}  // namespace

StatusOr<Parcel> unpack(Payload payload) {
  Decoder in(std::move(payload));
  StatusOr<std::tuple<std::vector<std::byte>, Tensors>> taken =
      in.take<std::tuple<std::vector<std::byte>, Tensors>>();
  WEFT_RETURN_IF_ERROR(taken.status());
  WEFT_RETURN_IF_ERROR(in.finish());
  auto& [bytes, tensors] = *taken;
  Parcel out;
  out.bytes.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  out.tensors = std::move(tensors);
  return out;
}

StatusOr<Payload> pack(Parcel parcel) {
  Payload payload;
  Encoder out(&payload);
  out.begin_tuple(2);
  out.put_bytes(parcel.bytes);
  out.put(parcel.tensors);
  out.end();
  WEFT_RETURN_IF_ERROR(out.status());
  return payload;
}

Payload pack_bytes(const std::string& bytes) {
  Payload payload;
  Encoder(&payload).put_bytes(bytes);
  return payload;
}
StatusOr<std::string> unpack_bytes(Payload payload) {
  Decoder in(std::move(payload));
  return in.take_bytes();
}

}  // namespace weft::ps::internal
