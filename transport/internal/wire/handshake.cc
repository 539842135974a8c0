#include "weft/transport/internal/wire/handshake.h"

#include <algorithm>
#include <utility>

#include "weft/common/internal/text.h"
#include "weft/common/internal/utf8.h"
#include "weft/proto/transport.pb.h"
#include "weft/transport/protocol_error.h"

namespace weft::internal {
namespace {

constexpr uint32_t kByteOrder = 0x01020304;
// A message of a refusal must fit into a header with room to spare.
constexpr size_t kMaxRefusalBytes = 16u << 10;

void to_proto(const Hello& hello, int lane, v1::Hello* out) {
  out->set_version_min(hello.version_min);
  out->set_version_max(hello.version_max);
  out->set_byte_order(kByteOrder);
  out->set_job_id(hello.job_id);
  out->set_name(hello.name);
  out->set_id(hello.id);
  out->set_incarnation(hello.incarnation);
  out->set_to_id(hello.to_id);
  out->set_to_incarnation(hello.to_incarnation);
  out->set_max_frame_bytes(hello.max_frame_bytes);
  out->set_connection_id(hello.connection_id);
  out->set_lanes(hello.lanes);
  out->set_lane(static_cast<uint32_t>(lane));
  out->set_ticket(hello.ticket);
  out->set_observer(hello.observer);
  out->set_late_lanes(hello.late_lanes);
}

StatusOr<Hello> from_proto(const v1::Hello& in, int lane) {
  if (in.byte_order() != kByteOrder) {
    return protocol_error(absl::StrCat("a hello of byte order 0x", absl::Hex(in.byte_order())));
  }
  if (in.version_min() == 0 || in.version_min() > in.version_max()) {
    return protocol_error(
        absl::StrCat("a hello with versions ", in.version_min(), " to ", in.version_max()));
  }
  if (in.name().empty() || in.name().size() > kMaxNameBytes) {
    return protocol_error(absl::StrCat("a hello with a name of ", in.name().size(), " bytes, 1 to ",
                                       kMaxNameBytes, " are allowed"));
  }
  // The name appears in logs and errors of other workers.
  if (!is_line_of_text(in.name())) {
    return protocol_error(absl::StrCat("a hello with a name of ", in.name().size(),
                                       " bytes that are no line of UTF-8 text"));
  }
  if (in.job_id().size() > kMaxJobIdBytes) {
    return protocol_error(absl::StrCat("a hello with a job id of ", in.job_id().size(),
                                       " bytes, the limit is ", kMaxJobIdBytes));
  }
  const uint64_t lanes = uint64_t{in.lanes()} + in.late_lanes();
  if (in.lanes() == 0 || lanes > kMaxLanes) {
    return protocol_error(
        absl::StrCat("a hello with ", lanes, " lanes, 1 to ", kMaxLanes, " are allowed"));
  }
  if (in.lane() != static_cast<uint32_t>(lane) || in.lane() >= lanes) {
    return protocol_error(
        absl::StrCat("a hello for lane ", in.lane(), " of ", lanes, " arrived on lane ", lane));
  }
  if (in.max_frame_bytes() < kMinMaxFrameBytes) {
    return protocol_error(absl::StrCat("a hello that accepts frames of ", in.max_frame_bytes(),
                                       " bytes, the least is ", kMinMaxFrameBytes));
  }
  if (in.ticket().size() > kMaxTicketBytes) {
    return protocol_error(absl::StrCat("a hello with a ticket of ", in.ticket().size(),
                                       " bytes, the limit is ", kMaxTicketBytes));
  }
  Hello out;
  out.version_min = in.version_min();
  out.version_max = in.version_max();
  out.job_id = in.job_id();
  out.name = in.name();
  out.id = in.id();
  out.incarnation = in.incarnation();
  out.to_id = in.to_id();
  out.to_incarnation = in.to_incarnation();
  out.max_frame_bytes = in.max_frame_bytes();
  out.connection_id = in.connection_id();
  out.lanes = in.lanes();
  out.ticket = in.ticket();
  out.observer = in.observer();
  out.late_lanes = in.late_lanes();
  return out;
}

Status check_answer(const Hello& theirs, const Hello& sent) {
  if (theirs.connection_id != sent.connection_id || theirs.lanes != sent.lanes ||
      theirs.late_lanes > sent.late_lanes) {
    return protocol_error("the answer to the hello belongs to another connection");
  }
  const bool any_job = sent.observer && sent.job_id.empty();
  if (!any_job && theirs.job_id != sent.job_id) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("'", theirs.name, "' belongs to another job"));
  }
  if ((sent.to_id != 0 && theirs.id != sent.to_id) ||
      (sent.to_incarnation != 0 && theirs.incarnation != sent.to_incarnation)) {
    return make_error(ErrorKind::kPeerLost,
                      absl::StrCat("'", theirs.name, "' (id ", theirs.id, ", incarnation ",
                                   absl::Hex(theirs.incarnation), ") answers, wanted was id ",
                                   sent.to_id, ", incarnation ", absl::Hex(sent.to_incarnation)));
  }
  if (!sent.to_name.empty() && theirs.name != sent.to_name) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("'", theirs.name, "' answers, wanted was '", sent.to_name, "'"));
  }
  return common_version(theirs, sent).status();
}

}  // namespace

std::string encode_hello(const Hello& hello, int lane, std::string_view token) {
  v1::Hello message;
  to_proto(hello, lane, &message);
  if (!token.empty()) message.set_token(std::string(token));
  return message.SerializeAsString();
}

StatusOr<Hello> decode_hello(std::string_view header, int lane, std::string* token) {
  v1::Hello message;
  if (!message.ParseFromArray(header.data(), static_cast<int>(header.size()))) {
    return protocol_error(absl::StrCat("a hello of ", header.size(), " bytes that cannot be read"));
  }
  if (message.token().size() > kMaxHelloTokenBytes) {
    return protocol_error(absl::StrCat("a hello with a token of ", message.token().size(),
                                       " bytes, the limit is ", kMaxHelloTokenBytes));
  }
  if (token != nullptr) *token = std::move(*message.mutable_token());
  return from_proto(message, lane);
}

std::string encode_ack(const Hello& ours, int lane) {
  v1::HelloAck message;
  to_proto(ours, lane, message.mutable_hello());
  return message.SerializeAsString();
}

std::string encode_refusal(const Status& why) {
  v1::HelloAck message;
  v1::Refusal* refusal = message.mutable_refusal();
  const ErrorDetails details = error_details(why);
  refusal->set_code(static_cast<uint32_t>(why.code()));
  refusal->set_kind(static_cast<uint32_t>(details.kind));
  refusal->set_message(std::string(why.message().substr(0, kMaxRefusalBytes)));
  refusal->set_origin(details.origin.substr(0, kMaxNameBytes));
  return message.SerializeAsString();
}

StatusOr<Hello> decode_ack(std::string_view header, const Hello& sent, int lane) {
  v1::HelloAck message;
  if (!message.ParseFromArray(header.data(), static_cast<int>(header.size())) ||
      message.outcome_case() == v1::HelloAck::OUTCOME_NOT_SET) {
    return protocol_error(
        absl::StrCat("an answer to the hello of ", header.size(), " bytes that cannot be read"));
  }
  if (message.has_refusal()) {
    const v1::Refusal& refusal = message.refusal();
    const bool known_code = refusal.code() >= 1 && refusal.code() <= 16;
    const bool known_kind =
        refusal.kind() >= 1 && refusal.kind() <= static_cast<uint32_t>(ErrorKind::kPermission);
    ErrorDetails details;
    details.kind = known_kind ? static_cast<ErrorKind>(refusal.kind()) : ErrorKind::kProtocol;
    details.origin = refusal.origin();
    const absl::Status status(
        known_code ? static_cast<absl::StatusCode>(refusal.code()) : absl::StatusCode::kUnknown,
        refusal.message());
    return with_details(status, details);
  }
  WEFT_ASSIGN_OR_RETURN(Hello theirs, from_proto(message.hello(), lane));
  WEFT_RETURN_IF_ERROR(check_answer(theirs, sent));
  return theirs;
}

StatusOr<uint32_t> common_version(const Hello& theirs, const Hello& ours) {
  const uint32_t version = std::min(theirs.version_max, ours.version_max);
  if (version < theirs.version_min || version < ours.version_min) {
    return make_error(
        ErrorKind::kUnimplemented,
        absl::StrCat("'", theirs.name, "' speaks protocol versions ", theirs.version_min, " to ",
                     theirs.version_max, ", '", ours.name, "' speaks ", ours.version_min, " to ",
                     ours.version_max, ": they have none in common"));
  }
  return version;
}

StatusOr<Hello> complete_hello(const Hello& hello, size_t max_frame_bytes, Random& random) {
  Hello out = hello;
  while (out.connection_id == 0) out.connection_id = random.next();
  if (out.max_frame_bytes == 0) out.max_frame_bytes = static_cast<uint32_t>(max_frame_bytes);
  if (out.lanes == 0) out.lanes = 2;
  // What the other side would call a protocol error is an argument error here.
  const StatusOr<Hello> check = decode_hello(encode_hello(out, 0), 0);
  if (!check.ok())
    return make_error(ErrorKind::kInvalidArgument, std_view(check.status().message()));
  return out;
}

StatusOr<Hello> answer_hello(Acceptor& acceptor, const Hello& theirs, size_t max_frame_bytes) {
  WEFT_ASSIGN_OR_RETURN(Hello ours, acceptor.check_hello(theirs));
  WEFT_RETURN_IF_ERROR(common_version(theirs, ours).status());
  if (ours.max_frame_bytes == 0) ours.max_frame_bytes = static_cast<uint32_t>(max_frame_bytes);
  ours.to_id = theirs.to_id;
  ours.to_incarnation = theirs.to_incarnation;
  ours.connection_id = theirs.connection_id;
  ours.lanes = theirs.lanes;
  ours.late_lanes = theirs.late_lanes;
  ours.ticket.clear();
  return ours;
}

std::string describe_peer(const Hello& hello, std::string_view address) {
  return absl::StrCat(hello.name, " (", view(address), ")");
}

}  // namespace weft::internal
