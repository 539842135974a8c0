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
// FILE-2  a file shorter than `committed` was truncated by another program: an error.
// FILE-3  an old log is replaced by a shorter one under a new generation; a writer killed then
//         leaves a mixture, which the checksums tell from both: an error, not wrong data.
// FILE-4  who only reads excludes no other reader, and holds a lock for no longer than it takes to
//         read the bytes. An operation that is certain to write does not read first.
// FILE-5  a client that has read the file reads on from where it stopped, while file (inode) and
//         generation are the same: a write does not make all others read everything again.
// FILE-6  to read on takes no lock, so readers never keep a writer waiting, however many look at
//         once, and a stopped one stops no other. By FILE-1 a record is whole or not there yet, and
//         the checksums, which know the generation, tell what a change under way has left half
//         done: that is read again under the lock, shared.
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
  uint64_t committed = 0;  // as the header has it
  size_t header = 0;       // bytes of the header
  size_t end = 0;          // behind the last complete record
  size_t size = 0;         // of the whole file
};

// More bytes than any header has.
inline constexpr size_t kMaxStoreHeader = 64 + (kMaxRetiredRuns + 1) * (4 + kMaxRunId);

// Kind protocol when `content` is no such file. Allocates no more than a few times its size.
WEFT_API StatusOr<StoreFile> parse_store_file(std::string_view content);

// The same in two steps, for a client that has read the file before: by FILE-1, within one
// generation only what comes after `end` is new. The first function takes the beginning of a file
// of `size` bytes and sets everything but the table; `end` is then just after the header. The
// second takes the file's content from `end` to its last byte.
WEFT_API Status parse_store_header(std::string_view begin, size_t size, StoreFile* file);
WEFT_API Status parse_store_records(std::string_view rest, StoreFile* file);

// A whole file: header and one record per entry of file.table.
WEFT_API std::string begin_store_file(const StoreFile& file);

// What is written to add a record that says what the table now holds at `key`: a header in the
// place of the one that is there, then `tail` at file.end, which covers all that comes behind it.
struct StoreAppend {
  std::string header;
  std::string tail;
};
WEFT_API StoreAppend make_store_append(const StoreFile& file, std::string_view key);
// Changes `content`, which parsed as `file`, as a writer of these two would.
WEFT_API void append_store_record(const StoreFile& file, std::string_view key,
                                  std::string* content);

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_FILE_FORMAT_H_
