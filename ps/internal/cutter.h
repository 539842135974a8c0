#ifndef WEFT_PS_INTERNAL_CUTTER_H_
#define WEFT_PS_INTERNAL_CUTTER_H_

// What a client does to write a snapshot, to restore one and to export one. Any thread that may wait.

#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/proto/ps_snapshot.pb.h"
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

// The newest snapshot in a folder that is whole.
struct FoundSnapshot {
  std::string path{};  // of the manifest
  v1::PsSnapshot manifest{};
  uint64_t hash = 0;
  std::string refused{};  // why newer ones are not used
};
// Checks all of its files. Kind not_found: there is none; invalid_argument: none is whole.
StatusOr<FoundSnapshot> find_snapshot(Files& files, const std::string& folder);
// Kind not_found: it has not all of these tables.
Status check_tables(const v1::PsSnapshot& manifest, const std::vector<std::string>& wanted);

// For users. Kind protocol: its definitions are nonsense.
StatusOr<SnapshotInfo> info_of(const std::string& path, const v1::PsSnapshot& manifest);
// The same of these tables; none: all.
StatusOr<SnapshotInfo> info_of(const FoundSnapshot& found, const std::vector<std::string>& wanted);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_CUTTER_H_
