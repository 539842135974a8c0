#ifndef WEFT_PS_SNAPSHOT_H_
#define WEFT_PS_SNAPSHOT_H_

// Snapshots of tables, which a ps::Client writes and restores while others train. Value types.
//
//   weft::ps::SnapshotInfo kept = client.snapshot("/data/run7");
//   ...
//   weft::ps::SnapshotInfo back = client.restore("/data/run7");   // at any number of servers
//   for (const auto& table : back.tables)
//     for (const auto& c : table.clients) read_on_from(c.worker, c.position);
//
// A snapshot is a cut over all servers: of each client it has every push up to one number, and none after
// it, with the rule's state, pushes that wait for their step, and clocks. Each server writes a file of its
// own, in the format safetensors, then the client writes FOLDER/snapshot, which names them with their hashes;
// the snapshot before is kept as FOLDER/snapshot.previous. Servers and client see the same folder, which
// exists. One client at a time writes to it: files named as those of snapshots that belong to neither of
// the two are removed by the next.
//
// export_snapshot() makes one file of tables for other programs, whatever the number of servers was:
//
//   weft::ps::export_snapshot(worker.runtime().files(), "/data/run7", "/data/words.safetensors");
//
//   words = safetensors.torch.load_file("/data/words.safetensors")     # in Python
//   words["words/keys"], words["words/values"]                         # a row for each key

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/time.h"
#include "weft/ps/table.h"

namespace weft {
class Files;
}

namespace weft::ps {

struct SnapshotOptions {  // of snapshot()
  // These; none: all that the servers have.
  std::vector<std::string> tables{};
  // For so long at most pushes are held and no client enters; a cut that takes longer is given up. It takes
  // some round trips, and not the writing. Default: 2 s.
  Timeout pause{};
  // Until all is written. Default: 10 min.
  Timeout deadline{};
};

struct RestoreOptions {  // of restore()
  // These; none: all that the snapshot has.
  std::vector<std::string> tables{};
  // Until all is read. Default: 10 min.
  Timeout deadline{};
};

struct ExportOptions {  // of export_snapshot()
  // These; none: all that the snapshot has.
  std::vector<std::string> tables{};
  // Also the rule's state.
  bool state = false;
};

struct SnapshotClient {  // a client, as a snapshot has it
  std::string worker{};
  uint64_t pushes = 0;  // of this table: all up to this number are in, and none after it
  uint64_t clock = 0;
  std::string position{};  // PushOptions::position of the last of them
};

struct SnapshotTable {                 // a table of a snapshot
  std::string name{};                  // as it was opened
  TableDefinition definition{};        // as it was opened
  std::vector<std::string> servers{};  // when it was written
  std::vector<SnapshotClient> clients{};
};

struct SnapshotInfo {
  std::string path{};   // of the manifest
  uint64_t number = 0;  // counted in the folder
  std::vector<SnapshotTable> tables{};
  // snapshot(): for how long pushes were held.
  absl::Duration held{};
  // restore(), export_snapshot(): why a newer one was not used; "" when this is the newest.
  std::string refused{};
};

// Writes tables of the newest snapshot in `folder` that is whole to the file `path`, in the format
// safetensors, and replaces it in one step. A dense table is "TABLE/values" in its shape. A sparse one is
// "TABLE/keys" (int64, ascending) and "TABLE/values", a row for each key. With `state`: "TABLE/steps" and the
// rule's buffers ("TABLE/momentum_buffer", ...), of the values' shape or a row for each key. Pushes that wait
// for their step are not in it. It needs no server; a table at a time is in memory twice, and all that is
// written once. Any thread. Errors, after which nothing has changed: kind not_found, there is no
// snapshot, or no such table in it; invalid_argument, none is whole (why, for each file); that of the file
// system, naming the file.
WEFT_API SnapshotInfo export_snapshot(Files& files, std::string_view folder, std::string_view path,
                                      const ExportOptions& options = {});
WEFT_API StatusOr<SnapshotInfo> try_export_snapshot(Files& files, std::string_view folder,
                                                    std::string_view path,
                                                    const ExportOptions& options = {});

}  // namespace weft::ps

#endif  // WEFT_PS_SNAPSHOT_H_
