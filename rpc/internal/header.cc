#include "weft/rpc/internal/header.h"

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

template <class Header>
Status parse_with_metadata(const FrameView& frame, Header* header) {
  WEFT_RETURN_IF_ERROR(parse(frame, header));
  if (header->metadata_size() == 0) return absl::OkStatus();
  size_t bytes = 0;
  for (const v1::MetadataEntry& entry : header->metadata()) {
    bytes += entry.key().size() + entry.value().size();
  }
  if (header->metadata_size() <= kMaxMetadataEntries && bytes <= kMaxMetadataBytes) {
    return absl::OkStatus();
  }
  return make_error(
      ErrorKind::kProtocol,
      absl::StrCat("a frame of kind ", std::string(frame_kind_name(frame.kind)), " with ",
                   header->metadata_size(), " entries of metadata of ", bytes, " bytes, at most ",
                   kMaxMetadataEntries, " of ", kMaxMetadataBytes, " are allowed"));
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

}  // namespace weft::internal
