#ifndef WEFT_PS_INTERNAL_SHARED_MEMORY_H_
#define WEFT_PS_INTERNAL_SHARED_MEMORY_H_

// Parameters in memory that several processes of a host write: how they come to lie there, and what a worker
// that has made such memory gives to those that ask for it.
//
//   SHARE-1  a parameter has its old memory until all that can fail has been done.
//   SHARE-2  the file goes only to a process of this user, which has listened at the name that its worker sent
//            by a call; it is taken only with the secret of that call.
//   SHARE-3  nothing is mapped before it is known to have the size that this side has computed.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/common/mutex.h"
#include "weft/ps/hogwild.h"
#include "weft/ps/internal/shared_wire.h"
#include "weft/transport/memory_file.h"

namespace weft::ps::internal {

// Kind invalid_argument: it is no dense leaf of Float or Double on the CPU, as Hogwild updates it in place. `what`
// names it, as "share_memory: parameter 'w'".
WEFT_API Status check_updated_in_place(std::string_view what, const at::Tensor& parameter);

// What one share_memory() has made. Immutable, but for what lies in the memory.
struct SharedRegion {
  std::string name{};
  std::string owner{};
  std::vector<SharedParameter> layout{};
  std::shared_ptr<weft::internal::MemoryFile> file{};
  std::vector<at::Tensor> parameters{};

  // In the memory: of all processes.
  std::atomic_ref<uint64_t> updates() const {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(file->data()));
  }
};

// What a worker shares, and which memory of the process is shared. Any thread.
class WEFT_API SharedMemories {
 public:
  // Kind state: one of this name is there.
  Status offer(const std::string& worker, const std::shared_ptr<SharedRegion>& region);
  void remember(const std::shared_ptr<weft::internal::MemoryFile>& file);
  bool has(const void* address) const;
  // How many regions and files it keeps in mind, of which some may be gone; for tests.
  size_t kept() const {
    MutexLock lock(&mutex_);
    return offered_.size() + files_.size();
  }
  // Kind not_found: nothing of this name. `worker`: this one.
  StatusOr<std::shared_ptr<SharedRegion>> find(const std::string& worker,
                                               const std::string& name) const;
  // Gives the file to the asker, and then says what is in it. `caller`: for messages.
  StatusOr<std::string> answer(const std::string& worker, const std::string& caller,
                               std::string_view request) const;

 private:
  void keep(const std::shared_ptr<weft::internal::MemoryFile>& file)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::map<std::string, std::weak_ptr<SharedRegion>> offered_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<weft::internal::MemoryFile>> files_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_SHARED_MEMORY_H_
