#ifndef WEFT_PS_INTERNAL_CUT_H_
#define WEFT_PS_INTERNAL_CUT_H_

// A cut through all parts of tables: of each client every push up to one number, and none after it. The
// parties are the cutter, the parts, and the clients (proto/ps_snapshot.proto). Value types.
//
//   CUT-1  from when a cut is open at a part until it is taken there, no client enters the part.
//   CUT-2  a client that is held begins no push and ends no step; it says so of the whole time from the
//          hold to the release, or there is no cut.
//   CUT-3  a part is taken when it has all that held clients had begun and not seen answered, and before any
//          of them is released.
//   CUT-4  what a part has taken does not change any more, and its clients wait for no file.
//   CUT-5  a snapshot is there when its manifest is, which is written after all its files.
//
// So a part has, when it is taken, each push that its clients had begun before the hold and that was acknowledged, now or
// later, and no other: those of clients that entered later come after it, at every part. A push that has
// failed may be in some parts, as ever.

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/worker_key.h"
#include "weft/ps/internal/copy_wire.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/part_protocol.h"

namespace weft::ps::internal {

inline constexpr std::string_view kCutMethod = "@ps.cut";
inline constexpr std::string_view kHoldMethod = "@ps.hold";
inline constexpr std::string_view kRestoreMethod = "@ps.restore";
inline constexpr std::string_view kCutSignature = "(bytes)->bytes";  // of all three

// Used once.
struct CutName {
  WorkerKey by{};  // the cutter
  uint64_t number = 0;
  friend auto operator<=>(const CutName&, const CutName&) = default;
};

// What a part has to have before it is taken: a push, or the end of the steps below a clock; 0: neither.
struct CutNeed {
  ClientKey client{};
  uint64_t push = 0;
  uint64_t clock = 0;
};

// A part as it was taken.
struct PartCut {
  PartImage image{};
  std::vector<at::Tensor> held{};  // of its held pushes
  std::shared_ptr<const FrozenData> data{};
};

// What a table was restored from: for clients of its parts before.
struct RestoredTable {
  std::string snapshot{};  // path of the manifest
  std::string table{};
  std::map<ClientKey, uint64_t> pushes{};  // of those that were there: all up to this one are in
};
// Kind state: up to which of its pushes the table has them.
Status restored_since(const RestoredTable& table, const ClientKey& client);

// A client while it is held.
struct HeldClient {
  // Begun, and not answered by this part.
  struct Open {
    uint32_t part = 0;
    uint64_t push = 0;
    uint64_t clock = 0;
  };
  uint64_t number = 0;
  uint64_t pushes = 0;  // number of the last that has begun
  uint64_t clock = 0;
  std::string position{};
  std::vector<Open> open{};
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_CUT_H_
