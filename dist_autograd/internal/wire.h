#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_WIRE_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_WIRE_H_

// The records of proto/dist_autograd.proto as bytes. Decoders check: no input aborts or throws.
// Free functions; any thread.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/dist_autograd/internal/pass.h"

namespace weft::internal {

struct AutogradData {
  AutogradContextId context;
  uint64_t message = 0;
};
struct DiscoverData {
  PassId pass;
  absl::Duration remaining;
  bool retain = false;
  Messages messages{};
  uint64_t ended_below = 0;
  std::vector<uint64_t> aborted{};
};
struct GradientData {
  PassId pass;
  uint64_t message = 0;
  absl::Duration remaining;
};
struct NoticeData {
  PassId pass;
  Status status{};  // of an abort
};
struct ReleaseData {
  AutogradContextId context;
  uint64_t released_below = 0;
};

struct NormRequestData {
  AutogradContextId context;
  double norm_type = 2;
  uint64_t ended_below = 0;
  std::vector<uint64_t> aborted{};
};
struct NormData {
  double sum = 0;
  std::vector<WorkerKey> known{};
};
struct ScaleData {
  AutogradContextId context;
  double factor = 1;
};

WEFT_API std::string encode(const AutogradData& data);
WEFT_API std::string encode(const DiscoverData& data);
WEFT_API std::string encode(const Participants& participants);
WEFT_API std::string encode(const GradientData& data);
WEFT_API std::string encode(const NoticeData& data);
WEFT_API std::string encode(const ReleaseData& data);
WEFT_API std::string encode(const NormRequestData& data);
WEFT_API std::string encode(const NormData& data);
WEFT_API std::string encode(const ScaleData& data);

WEFT_API StatusOr<AutogradData> decode_autograd(std::string_view bytes);
WEFT_API StatusOr<DiscoverData> decode_discover(std::string_view bytes);
WEFT_API StatusOr<Participants> decode_participants(std::string_view bytes);
WEFT_API StatusOr<GradientData> decode_gradient(std::string_view bytes);
WEFT_API StatusOr<NoticeData> decode_notice(std::string_view bytes);
WEFT_API StatusOr<ReleaseData> decode_release(std::string_view bytes);
WEFT_API StatusOr<NormRequestData> decode_norm_request(std::string_view bytes);
WEFT_API StatusOr<NormData> decode_norm(std::string_view bytes);
WEFT_API StatusOr<ScaleData> decode_scale(std::string_view bytes);

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_WIRE_H_
