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
  std::vector<uint64_t> released{};   // of the sender's contexts
  uint64_t released_below = 0;        // and all of these...
  std::vector<uint64_t> alive{};      // ...but for these
  std::vector<DeviceCode> devices{};  // of the message's tensors that require grad
  // In a request: the call that its sender serves, and its own number when `message` is 0.
  CallOrder within{};
  uint64_t call = 0;
};
struct AdvanceData {
  PassId pass;
  absl::Duration remaining;
  Advance advance{};                // its gradients go beside it: here they have no tensors...
  std::vector<uint32_t> tensors{};  // ...but each so many
  uint64_t ended_below = 0;
  std::vector<uint64_t> aborted{};
};
struct NoticeData {
  PassId pass;
  Status status{};        // of an abort
  std::string outcome{};  // of a done
  PassProgress progress{};
};
struct ReleaseData {
  AutogradContextId context;
  uint64_t released_below = 0;    // and all of its creator below that...
  bool others = false;            // (it says no more of its own, and those up to it...)
  std::vector<uint64_t> alive{};  // ...but for these
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
WEFT_API std::string encode(const AdvanceData& data);
WEFT_API std::string encode(const Advanced& data);
WEFT_API std::string encode(const NoticeData& data);
WEFT_API std::string encode(const ReleaseData& data);
WEFT_API std::string encode(const NormRequestData& data);
WEFT_API std::string encode(const NormData& data);
WEFT_API std::string encode(const ScaleData& data);

WEFT_API StatusOr<AutogradData> decode_autograd(std::string_view bytes);
WEFT_API StatusOr<AdvanceData> decode_advance(std::string_view bytes);
WEFT_API StatusOr<Advanced> decode_advanced(std::string_view bytes);
WEFT_API StatusOr<NoticeData> decode_notice(std::string_view bytes);
WEFT_API StatusOr<ReleaseData> decode_release(std::string_view bytes);
WEFT_API StatusOr<NormRequestData> decode_norm_request(std::string_view bytes);
WEFT_API StatusOr<NormData> decode_norm(std::string_view bytes);
WEFT_API StatusOr<ScaleData> decode_scale(std::string_view bytes);

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_WIRE_H_
