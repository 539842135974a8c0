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
// exists. One client at a time writes to it.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/time.h"
#include "weft/ps/table.h"

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
  // restore(): why a newer one was not used; "" when this is the newest.
  std::string refused{};
};

}  // namespace weft::ps

#endif  // WEFT_PS_SNAPSHOT_H_
