#ifndef WEFT_STORE_FILE_STORE_H_
#define WEFT_STORE_FILE_STORE_H_

// FileStore: a store in one file that the processes of one host share. For a handful of processes
// that have no port to meet at; TcpStore is faster and knows who is there.
//
//   auto store = weft::FileStore::open("/tmp/job.store", {.run_id = "7f3a"}, runtime);
//
// Which run a file belongs to is written in it, so that the file of a run that crashed cannot
// poison the next one:
//   - a missing or empty file, or one of another run, is begun anew for our run;
//   - a run that was replaced has retired: opening the file for it again, and every operation of
//     those who still have it open, is an error of kind state that names both runs;
//   - a file that is no store, or is damaged, is an error of kind protocol and stays as it is.
// So two runs that are alive must not share a path; the older one is told.
//
// Every operation locks the file, reads it and appends to it. A process that is killed meanwhile
// leaves an operation out or done, never half. While one is stopped meanwhile, the operations of
// the others fail at their deadlines, kind unavailable. Waiting polls, from every 1 ms to every
// 50 ms. Network file systems do not lock reliably: keep the file on a local disk.
// Threads: any.

#include <memory>
#include <string>
#include <string_view>

#include "weft/common/api.h"
#include "weft/store/delegating_store.h"

namespace weft {

struct FileStoreOptions {  // how a FileStore is opened
  // 1 to 256 bytes, the same in all processes of a run and in no other run.
  std::string run_id = {};
  Timeout timeout = {};  // default for operations that give none: 60 s when unset
};

class WEFT_API FileStore : public DelegatingStore, public ForkableStore {
 public:
  // Fails with invalid_argument (no run id), state (the run has retired), protocol (not a store),
  // or what the file system says.
  static StatusOr<std::shared_ptr<FileStore>> open(std::string_view path,
                                                   const FileStoreOptions& options,
                                                   std::shared_ptr<Runtime> runtime);
  std::shared_ptr<Store> new_client() override;

 private:
  explicit FileStore(std::shared_ptr<Store> inner) : DelegatingStore(std::move(inner)) {}
};

}  // namespace weft

#endif  // WEFT_STORE_FILE_STORE_H_
