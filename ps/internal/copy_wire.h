#ifndef WEFT_PS_INTERNAL_COPY_WIRE_H_
#define WEFT_PS_INTERNAL_COPY_WIRE_H_

// What servers say to each other about copies, in memory, and the bytes of proto/ps.proto. Decoding is
// strict, as in wire.h. Pure functions; any thread.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/ps/internal/part_protocol.h"
#include "weft/ps/internal/replica_protocol.h"
#include "weft/ps/internal/wire.h"

namespace weft::v1 {
class PsAnswer;
class PsDefinition;
class PsMap;
class PsRequest;
class PsStatus;
class PsWorker;
}  // namespace weft::v1

namespace weft::ps::internal {

inline constexpr std::string_view kFindMethod = "@ps.find";
inline constexpr std::string_view kFindSignature = "(bytes)->bytes";
inline constexpr std::string_view kCopyMethod = "@ps.copy";
inline constexpr std::string_view kCopySignature = "(tuple<bytes,list<tensor>>)->bytes";

struct FindRequest {
  std::string name{};
  uint32_t index = 0;
  bool suspect = false;
};
struct FindAnswer {
  uint64_t part = 0;
  RangeMap map{};
  bool copy = false;
};

// A position of the log: a request without its pull, a worker that is gone, or neither.
struct LogEntry {
  WorkerKey caller{};
  std::optional<Request> request{};
  Status accepted{};  // of a push that is judged the first time
  std::optional<WorkerKey> gone{};
  std::vector<at::Tensor> tensors{};  // of a push that was accepted
  std::vector<uint64_t> evicted{};    // before the push
  int64_t bytes() const;
};
struct PartImage {
  TableDefinition definition{};
  std::vector<std::string> servers{};
  ProtocolImage protocol{};
  struct HeldPush {
    PushKind kind = PushKind::kGradient;
    std::optional<double> rate{};
    uint32_t tensors = 0;
  };
  std::vector<HeldPush> pushes{};  // as protocol.held
};
// Its tensors travel beside it, as those of its entries do.
enum class CopyWish : uint8_t { kNone = 0, kTakeOver = 1, kLetGo = 2 };
struct CopyRequest {
  std::string name{};
  uint32_t index = 0;
  RangeMap map{};
  uint64_t position = 0;
  std::optional<PartImage> image{};
  std::vector<LogEntry> entries{};
  CopyWish wish = CopyWish::kNone;
  CopyPlace next{};  // with an image or entries: not the map's backup, but the one that is to be it
};
struct CopyAnswer {
  bool refused = false;
  RangeMap map{};
  uint64_t position = 0;
  bool owns = false;
};

WEFT_API std::string encode(const FindRequest& request);
WEFT_API std::string encode(const FindAnswer& answer);
WEFT_API std::string encode(const CopyRequest& request);
WEFT_API std::string encode(const CopyAnswer& answer);
WEFT_API std::string encode(const PartImage& image);
WEFT_API std::string encode(const RangeMap& map);
WEFT_API StatusOr<FindRequest> decode_find(std::string_view bytes);
WEFT_API StatusOr<FindAnswer> decode_found(std::string_view bytes);
// `tensors` are dealt to the entries; those of an image stay.
WEFT_API StatusOr<CopyRequest> decode_copy(std::string_view bytes,
                                           std::vector<at::Tensor>* tensors);
WEFT_API StatusOr<CopyAnswer> decode_copied(std::string_view bytes);
WEFT_API StatusOr<RangeMap> decode_map(std::string_view bytes);
WEFT_API StatusOr<PartImage> decode_image(std::string_view bytes);

// Shared by the sources that read and write messages.
void put(const TableDefinition& d, v1::PsDefinition* out);
void put(const RangeMap& map, v1::PsMap* out);
void put(const Request& request, v1::PsRequest* out);
void put(const Answer& answer, v1::PsAnswer* out);
void put(const Status& status, v1::PsStatus* out);
void put(const WorkerKey& key, v1::PsWorker* out);
StatusOr<TableDefinition> get(const v1::PsDefinition& in);
StatusOr<RangeMap> get(const v1::PsMap& in);
StatusOr<Request> get(const v1::PsRequest& in);
StatusOr<Answer> get(const v1::PsAnswer& in);
Status get(const v1::PsStatus& in);
WorkerKey get(const v1::PsWorker& in);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_COPY_WIRE_H_
