#include "weft/rpc/internal/agent/header.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace weft::internal {
namespace {

Status parse(const FrameView& frame, google::protobuf::MessageLite* header) {
  if (header->ParseFromArray(frame.header.data(), static_cast<int>(frame.header.size()))) {
    return absl::OkStatus();
  }
  return make_error(
      ErrorKind::kProtocol,
      absl::StrCat("a frame of kind ", std::string(frame_kind_name(frame.kind)),
                   " whose header of ", frame.header.size(), " bytes cannot be parsed"));
}

Status check_metadata(FrameKind kind, int entries) {
  if (entries <= kMaxMetadataEntries) return absl::OkStatus();
  return make_error(
      ErrorKind::kProtocol,
      absl::StrCat("a message of kind ", std::string(frame_kind_name(kind)), " with ", entries,
                   " entries of metadata, at most ", kMaxMetadataEntries, " are allowed"));
}

template <class Header>
Status parse_with_metadata(const FrameView& frame, Header* header) {
  WEFT_RETURN_IF_ERROR(parse(frame, header));
  return check_metadata(frame.kind, header->metadata_size());
}

uint32_t attempt_of(const v1::CallHeader& header) { return header.attempt(); }
uint32_t attempt_of(const v1::ResponseHeader&) { return 0; }

template <class Header>
Status parse_whole(FrameKind kind, std::string_view bytes, const Header& brief, Header* header) {
  if (!header->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("a wide message of kind ", std::string(frame_kind_name(kind)),
                                   " whose header of ", bytes.size(), " bytes cannot be parsed"));
  }
  if (header->call_id() != brief.call_id() || attempt_of(*header) != attempt_of(brief)) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("a wide message whose header is of call ", header->call_id(),
                                   ", attempt ", attempt_of(*header), ", and its frame of call ",
                                   brief.call_id(), ", attempt ", attempt_of(brief)));
  }
  return check_metadata(kind, header->metadata_size());
}

}  // namespace

Status parse_header(const FrameView& frame, v1::CallHeader* header) {
  return parse_with_metadata(frame, header);
}
Status parse_header(const FrameView& frame, v1::ResponseHeader* header) {
  return parse_with_metadata(frame, header);
}
Status parse_header(const FrameView& frame, v1::ErrorHeader* header) {
  return parse(frame, header);
}
Status parse_header(const FrameView& frame, v1::CancelHeader* header) {
  return parse(frame, header);
}
Status parse_header(const FrameView& frame, v1::GoodbyeHeader* header) {
  return parse(frame, header);
}
Status parse_header(const FrameView& frame, v1::HeartbeatHeader* header) {
  return parse(frame, header);
}

Status parse_wide(std::string_view bytes, const v1::CallHeader& brief, v1::CallHeader* header) {
  return parse_whole(FrameKind::kRequest, bytes, brief, header);
}
Status parse_wide(std::string_view bytes, const v1::ResponseHeader& brief,
                  v1::ResponseHeader* header) {
  return parse_whole(FrameKind::kResponse, bytes, brief, header);
}

}  // namespace weft::internal
