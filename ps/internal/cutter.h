#ifndef WEFT_PS_INTERNAL_CUTTER_H_
#define WEFT_PS_INTERNAL_CUTTER_H_

// What a client does to write a snapshot and to restore one. Any thread that may wait.

#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/ps/internal/service.h"
#include "weft/ps/snapshot.h"

namespace weft::ps::internal {

// Names in the folder: the newest, the one before it, and one that is being put in place.
inline constexpr std::string_view kNewest = "snapshot";
inline constexpr std::string_view kPrevious = "snapshot.previous";
inline constexpr std::string_view kNext = "snapshot.next";

StatusOr<SnapshotInfo> take_snapshot(PsService& service, const std::vector<std::string>& servers,
                                     std::string_view folder, const SnapshotOptions& options);
StatusOr<SnapshotInfo> restore_snapshot(PsService& service, const std::vector<std::string>& servers,
                                        std::string_view folder, const RestoreOptions& options);

// For users. Kind protocol: its definitions are nonsense.
StatusOr<SnapshotInfo> info_of(const std::string& path, const v1::PsSnapshot& manifest);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_CUTTER_H_
