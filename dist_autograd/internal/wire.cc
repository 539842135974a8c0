#include "weft/dist_autograd/internal/wire.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "weft/proto/dist_autograd.pb.h"

namespace weft::internal {
namespace {

// Maximum length of an error's text, which travels on to all workers, and of text for people.
constexpr size_t kMaxText = 16 << 10;

Status violation(std::string_view what) {
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("a message of distributed autograd: ", std::string(what)));
}

template <class Record>
StatusOr<Record> parse(std::string_view bytes) {
  Record record;
  if (record.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return record;
  return violation(absl::StrCat(bytes.size(), " bytes that cannot be parsed"));
}

void put(const WorkerKey& key, v1::WorkerKeyRecord* out) {
  out->set_id(key.id.value());
  out->set_incarnation(key.incarnation.value());
}
WorkerKey get(const v1::WorkerKeyRecord& in) {
  return WorkerKey{WorkerId(in.id()), Incarnation(in.incarnation())};
}
void put(const AutogradContextId& id, v1::CreatedIdRecord* out) {
  put(id.creator, out->mutable_creator());
  out->set_counter(id.counter);
}
StatusOr<AutogradContextId> get(const v1::CreatedIdRecord& in) {
  if (in.counter() == 0) return violation("without a context");
  return AutogradContextId{get(in.creator()), in.counter()};
}
void put(const PassId& id, v1::BackwardPassRecord* out) {
  put(id.context, out->mutable_context());
  put(id.root, out->mutable_root());
  out->set_counter(id.counter);
}
StatusOr<PassId> get(const v1::BackwardPassRecord& in) {
  WEFT_ASSIGN_OR_RETURN(const AutogradContextId context, get(in.context()));
  if (in.counter() == 0) return violation("without a pass");
  return PassId{context, get(in.root()), in.counter()};
}
void put(const Advanced& data, v1::BackwardAdvanced* out) {
  for (const auto& [worker, is_final] : data.participants) {
    v1::BackwardParticipant* one = out->add_participants();
    put(worker, one->mutable_worker());
    one->set_final(is_final);
  }
  out->set_done(data.done);
  out->set_carried(data.carried);
  out->set_outcome(data.outcome);
}
Advanced get(const v1::BackwardAdvanced& in) {
  Advanced data;
  for (const v1::BackwardParticipant& one : in.participants()) {
    data.participants[get(one.worker())] |= one.final();
  }
  data.done = in.done();
  data.carried = in.carried();
  data.outcome = in.outcome();
  return data;
}
int64_t put(absl::Duration remaining) {
  return std::max<int64_t>(0, absl::ToInt64Microseconds(remaining));
}
absl::Duration get_remaining(int64_t us) {
  return us <= 0                                     ? absl::ZeroDuration()
         : us == std::numeric_limits<int64_t>::max() ? absl::InfiniteDuration()
                                                     : absl::Microseconds(us);
}

}  // namespace

std::string encode(const AutogradData& data) {
  v1::AutogradRecord record;
  put(data.context, record.mutable_context());
  record.set_message(data.message);
  record.mutable_released()->Add(data.released.begin(), data.released.end());
  record.set_released_below(data.released_below);
  record.mutable_alive()->Add(data.alive.begin(), data.alive.end());
  record.mutable_devices()->Add(data.devices.begin(), data.devices.end());
  record.mutable_within()->Add(data.within.begin(), data.within.end());
  record.set_call(data.call);
  return record.SerializeAsString();
}

StatusOr<AutogradData> decode_autograd(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const auto record, parse<v1::AutogradRecord>(bytes));
  WEFT_ASSIGN_OR_RETURN(const AutogradContextId context, get(record.context()));
  for (const DeviceCode code : record.devices()) {
    if (!device_of_code(code).has_value()) return violation(device_text(code));
  }
  if (static_cast<size_t>(record.within_size()) > kOrderedDepth) {
    return violation(absl::StrCat("a call within ", record.within_size(), " others; ",
                                  kOrderedDepth, " are told apart"));
  }
  return AutogradData{context,
                      record.message(),
                      {record.released().begin(), record.released().end()},
                      record.released_below(),
                      {record.alive().begin(), record.alive().end()},
                      {record.devices().begin(), record.devices().end()},
                      {record.within().begin(), record.within().end()},
                      record.call()};
}

std::string encode(const AdvanceData& data) {
  v1::BackwardAdvance record;
  const Advance& advance = data.advance;
  put(data.pass, record.mutable_pass());
  record.set_remaining_us(put(data.remaining));
  record.set_retain_graph(advance.retain);
  for (const auto& [message, outputs] : advance.named) {
    v1::LiveMessage* live = record.add_messages();
    live->set_message(message);
    live->mutable_outputs()->Add(outputs.begin(), outputs.end());
  }
  record.set_ended_below(data.ended_below);
  record.mutable_aborted()->Add(data.aborted.begin(), data.aborted.end());
  for (size_t i = 0; i < advance.gradients.size(); ++i) {
    v1::GradientRecord* one = record.add_gradients();
    one->set_message(advance.gradients[i].message);
    one->set_tensors(data.tensors[i]);
  }
  record.set_done(advance.done);
  if (advance.answer.has_value()) put(*advance.answer, record.mutable_answer());
  record.set_fast(advance.fast);
  record.set_effect(advance.effect);
  record.set_outcome(advance.outcome);
  return record.SerializeAsString();
}

StatusOr<AdvanceData> decode_advance(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const auto record, parse<v1::BackwardAdvance>(bytes));
  AdvanceData data;
  Advance& advance = data.advance;
  WEFT_ASSIGN_OR_RETURN(data.pass, get(record.pass()));
  data.remaining = get_remaining(record.remaining_us());
  advance.retain = record.retain_graph();
  for (const v1::LiveMessage& live : record.messages()) {
    auto& outputs = advance.named[live.message()];
    if (!outputs.empty()) return violation(absl::StrCat("message ", live.message(), " twice"));
    if (live.outputs().empty()) return violation("a message that is named without outputs");
    outputs.assign(live.outputs().begin(), live.outputs().end());
  }
  data.ended_below = record.ended_below();
  data.aborted.assign(record.aborted().begin(), record.aborted().end());
  for (const v1::GradientRecord& one : record.gradients()) {
    advance.gradients.push_back(MessageGradients{one.message(), {}});
    data.tensors.push_back(one.tensors());
  }
  advance.done = record.done();
  if (record.has_answer()) advance.answer = get(record.answer());
  advance.fast = record.fast();
  advance.effect = record.effect();
  advance.outcome = record.outcome();
  return data;
}

std::string encode(const Advanced& data) {
  v1::BackwardAdvanced record;
  put(data, &record);
  return record.SerializeAsString();
}

StatusOr<Advanced> decode_advanced(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const auto record, parse<v1::BackwardAdvanced>(bytes));
  return get(record);
}

std::string encode(const NoticeData& data) {
  v1::BackwardNotice record;
  put(data.pass, record.mutable_pass());
  if (!data.status.ok()) {
    const ErrorDetails details = error_details(data.status);
    record.set_code(static_cast<uint32_t>(data.status.code()));
    record.set_kind(static_cast<uint32_t>(details.kind));
    record.set_message(std::string(data.status.message().substr(0, kMaxText)));
    record.set_origin(details.origin);
  }
  record.set_outcome(data.outcome);
  record.set_events(data.progress.events);
  record.set_waits_for(data.progress.waits_for.substr(0, kMaxText));
  return record.SerializeAsString();
}

StatusOr<NoticeData> decode_notice(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const auto record, parse<v1::BackwardNotice>(bytes));
  WEFT_ASSIGN_OR_RETURN(const PassId pass, get(record.pass()));
  NoticeData data{pass,
                  absl::OkStatus(),
                  record.outcome(),
                  {record.events(), record.waits_for().substr(0, kMaxText)}};
  if (record.code() == 0) return data;
  const bool known_code =
      record.code() <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
  const bool known_kind = record.kind() <= static_cast<uint32_t>(ErrorKind::kPermission);
  ErrorDetails details;
  details.kind = known_kind ? static_cast<ErrorKind>(record.kind()) : ErrorKind::kInternal;
  details.origin = record.origin();
  data.status = with_details(
      Status(known_code ? static_cast<absl::StatusCode>(record.code()) : absl::StatusCode::kUnknown,
             record.message()),
      details);
  return data;
}

std::string encode(const ReleaseData& data) {
  v1::AutogradRelease record;
  put(data.context, record.mutable_context());
  record.set_released_below(data.released_below);
  record.set_others(data.others);
  record.mutable_alive()->Add(data.alive.begin(), data.alive.end());
  return record.SerializeAsString();
}

StatusOr<ReleaseData> decode_release(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const auto record, parse<v1::AutogradRelease>(bytes));
  WEFT_ASSIGN_OR_RETURN(const AutogradContextId context, get(record.context()));
  return ReleaseData{context,
                     record.released_below(),
                     record.others(),
                     {record.alive().begin(), record.alive().end()}};
}

std::string encode(const NormRequestData& data) {
  v1::AutogradNormRequest record;
  put(data.context, record.mutable_context());
  record.set_norm_type(data.norm_type);
  record.set_ended_below(data.ended_below);
  for (const uint64_t counter : data.aborted) record.add_aborted(counter);
  return record.SerializeAsString();
}

StatusOr<NormRequestData> decode_norm_request(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const auto record, parse<v1::AutogradNormRequest>(bytes));
  WEFT_ASSIGN_OR_RETURN(const AutogradContextId context, get(record.context()));
  if (!(record.norm_type() > 0)) return violation("a norm of no positive order");
  return NormRequestData{context,
                         record.norm_type(),
                         record.ended_below(),
                         {record.aborted().begin(), record.aborted().end()}};
}

std::string encode(const NormData& data) {
  v1::AutogradNorm record;
  record.set_sum(data.sum);
  for (const WorkerKey& worker : data.known) put(worker, record.add_known());
  return record.SerializeAsString();
}

StatusOr<NormData> decode_norm(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const auto record, parse<v1::AutogradNorm>(bytes));
  NormData data{record.sum(), {}};
  for (const auto& worker : record.known()) data.known.push_back(get(worker));
  return data;
}

std::string encode(const ScaleData& data) {
  v1::AutogradScale record;
  put(data.context, record.mutable_context());
  record.set_factor(data.factor);
  return record.SerializeAsString();
}

StatusOr<ScaleData> decode_scale(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const auto record, parse<v1::AutogradScale>(bytes));
  WEFT_ASSIGN_OR_RETURN(const AutogradContextId context, get(record.context()));
  return ScaleData{context, record.factor()};
}

}  // namespace weft::internal
