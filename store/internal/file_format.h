#ifndef WEFT_STORE_INTERNAL_FILE_FORMAT_H_
#define WEFT_STORE_INTERNAL_FILE_FORMAT_H_

// What a FileStore's file holds: a header and a log of changes. All integers are little-endian.
//
//   header   "WEFTSTOR"                      8 bytes
//            version = 1                     u32
//            length of what follows          u32
//            generation                      u64   drawn at random when the log is begun anew
//            committed                       u64   bytes of the file that were complete before the
//                                                  last change was written
//            run id                          u32 length, bytes
//            retired run ids                 u32 count (at most 8), each u32 length, bytes
//            checksum of the above           u64
//   record   length of payload               u32
//            checksum of generation, payload u64
//            payload: u8 kind (1 set, 2 delete, 3 padding), u32 length of key, key, value
//
// FILE-1  a writer only ever adds records behind what is there, and the bytes before them stay the
//         same, `committed` apart; so a writer that is killed leaves a file whose last record may
//         be cut. It was never acknowledged, and the next writer overwrites it.
// FILE-2  a file shorter than `committed` was truncated by someone else: an error.
// FILE-3  an old log is replaced by a shorter one under a new generation; a writer killed then
//         leaves a mixture, which the checksums tell from both: an error, not wrong data.
// FILE-4  who changes nothing takes the lock beside others who do not, and for as long as it takes
//         to read the bytes: many workers that wait for one another would be in each other's way.
//         Who is sure to change something does not look first.
// Pure functions; any thread.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/store/internal/table.h"

namespace weft::internal {

inline constexpr size_t kMaxRunId = 256;
inline constexpr size_t kMaxRetiredRuns = 8;

struct StoreFile {
  uint64_t generation = 0;
  std::string run_id;
  std::vector<std::string> retired;
  StoreTable table;
  size_t end = 0;   // behind the last complete record
  size_t size = 0;  // of the whole file
};

// Kind protocol when `content` is no such file. Allocates no more than a few times its size.
WEFT_API StatusOr<StoreFile> parse_store_file(std::string_view content);

// A whole file: header and one record per entry of file.table.
WEFT_API std::string begin_store_file(const StoreFile& file);

// Changes `content`, which parsed as `file`: adds a record that says what the table now holds at
// `key`.
WEFT_API void append_store_record(const StoreFile& file, std::string_view key,
                                  std::string* content);

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_FILE_FORMAT_H_
