#include "weft/store/file_store.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "weft/common/condition.h"
#include "weft/common/files.h"
#include "weft/common/mutex.h"
#include "weft/store/internal/file_format.h"
#include "weft/store/internal/table_store.h"

namespace weft {
namespace internal {
namespace {

constexpr absl::Duration kFirstPoll = absl::Milliseconds(1);
constexpr absl::Duration kLastPoll = absl::Milliseconds(50);
// Between two looks that found nothing the file is read again only when its stamp has changed, but
// after this time in any case: stamps of a file on another machine may come from a cache.
constexpr absl::Duration kReread = absl::Seconds(1);
// An operation takes far below a millisecond.
constexpr absl::Duration kLongHeld = absl::Milliseconds(500);
// A log this long, and mostly of values that were overwritten, is begun anew.
constexpr size_t kLogBytes = 256 << 10;
// Every process holds all of it, so a large one is a mistake that is better told early.
constexpr size_t kMaxFileBytes = 256 << 20;

// What was read of the file so far (FILE-5).
class FileCache {
 public:
  // Makes file() what the file holds. REQUIRES: the file is locked.
  Status refresh(LockedFile* from) {
    const bool was_valid = std::exchange(valid_, false);
    WEFT_ASSIGN_OR_RETURN(const FileStamp stamp, from->stamp());
    if (was_valid && is_same(stamp)) {
      WEFT_ASSIGN_OR_RETURN(const bool read_on, this->read_on(from));
      if (read_on) {
        valid_ = true;
        return absl::OkStatus();
      }
    }
    WEFT_ASSIGN_OR_RETURN(const std::string content, from->read(0, UINT64_MAX));
    if (content.empty()) return make_error(ErrorKind::kState, "was removed or emptied");
    WEFT_ASSIGN_OR_RETURN(file_, parse_store_file(content));
    inode_ = stamp.inode;
    valid_ = true;
    return absl::OkStatus();
  }
  // The same of a file that others may be changing now (FILE-6). False: what is there can only be understood
  // under the lock.
  bool refresh_unlocked(LockedFile* from) {
    if (!valid_) return false;
    const StatusOr<FileStamp> stamp = from->stamp();
    if (!stamp.ok() || !is_same(*stamp)) return false;
    // Each record that was taken is whole, whatever comes after it.
    const StatusOr<bool> read_on = this->read_on(from);
    return read_on.ok() && *read_on;
  }
  // Writes what has become of the table: its last change, or all of it under a new generation (0:
  // none). REQUIRES: the lock is the one under which refresh() succeeded.
  Status write(LockedFile* to, uint64_t new_generation) {
    valid_ = false;
    if (new_generation != 0) {
      file_.generation = new_generation;
      const std::string content = begin_store_file(file_);
      WEFT_RETURN_IF_ERROR(to->write(0, content));
      WEFT_RETURN_IF_ERROR(to->truncate(content.size()));
      file_.committed = file_.end = file_.size = content.size();
    } else {
      const StoreAppend append = make_store_append(file_, file_.table.last_changed());
      WEFT_RETURN_IF_ERROR(to->write(0, append.header));
      WEFT_RETURN_IF_ERROR(to->write(file_.end, append.tail));
      file_.committed = file_.end;
      file_.end = file_.size = file_.end + append.tail.size();
    }
    valid_ = true;
    return absl::OkStatus();
  }
  // REQUIRES: refresh() succeeded.
  StoreFile& file() { return file_; }

 private:
  bool is_same(const FileStamp& stamp) const {
    return stamp.inode == inode_ && stamp.size >= file_.end;
  }
  // False: it is another file by now, or begun anew.
  StatusOr<bool> read_on(LockedFile* from) {
    StoreFile now;
    // What the header says is committed comes with what is read after it.
    WEFT_ASSIGN_OR_RETURN(const std::string header, from->read(0, file_.header));
    WEFT_ASSIGN_OR_RETURN(const std::string rest, from->read(file_.end, UINT64_MAX));
    const size_t size = file_.end + rest.size();
    if (!parse_store_header(header, size, &now).ok() || now.generation != file_.generation ||
        now.run_id != file_.run_id || now.retired != file_.retired) {
      return false;
    }
    file_.committed = now.committed;
    file_.size = size;
    WEFT_RETURN_IF_ERROR(parse_store_records(rest, &file_));
    return true;
  }

  bool valid_ = false;
  uint64_t inode_ = 0;
  StoreFile file_;
};

// What the clients of one FileStore share.
struct FileData {
  FileData(std::shared_ptr<Runtime> runtime_in, std::string path_in, std::string run_id_in)
      : runtime(std::move(runtime_in)),
        path(std::move(path_in)),
        run_id(std::move(run_id_in)),
        changed(runtime.get()) {}
  const std::shared_ptr<Runtime> runtime;
  const std::string path;
  const std::string run_id;
  Mutex mutex;
  Condition changed;  // by a client in this process; other processes' changes are seen by polling
  // Held while the file is: it is never waited for.
  Mutex cache_mutex;
  FileCache cache ABSL_GUARDED_BY(cache_mutex);
};

std::string quote(std::string_view s) {
  return absl::StrCat("'", absl::CHexEscape(absl::string_view(s.data(), s.size())), "'");
}

Status foreign(const std::string& path, const std::string& theirs, const std::string& ours) {
  return make_error(ErrorKind::kState,
                    absl::StrCat("file '", path, "' belongs to run ", quote(theirs),
                                 " now, this store was opened for run ", quote(ours)));
}

// A process that was stopped in the middle of an operation holds the lock until it goes on.
Status held_too_long() {
  return make_error(ErrorKind::kUnavailable,
                    "another process holds the lock of the file all this time; it may be stopped");
}

// Begins or joins; the first half of open(). False: the lock is held.
StatusOr<bool> try_claim(const FileData& data) {
  Status result;
  const auto locked = data.runtime->files().try_update_locked(data.path, [&](std::string* content) {
    StoreFile file;
    if (!content->empty()) {
      StatusOr<StoreFile> parsed = parse_store_file(*content);
      if (!parsed.ok()) {
        result = parsed.status();
        return false;
      }
      file = *std::move(parsed);
      if (file.run_id == data.run_id) return false;
      if (std::count(file.retired.begin(), file.retired.end(), data.run_id) > 0) {
        result = make_error(ErrorKind::kState,
                            absl::StrCat("run ", quote(data.run_id), " has retired: run ",
                                         quote(file.run_id), " has taken the file over"));
        return false;
      }
      file.retired.push_back(std::move(file.run_id));
      if (file.retired.size() > kMaxRetiredRuns) file.retired.erase(file.retired.begin());
    }
    file.table = StoreTable();
    file.run_id = data.run_id;
    file.generation = data.runtime->random().next();
    *content = begin_store_file(file);
    return true;
  });
  if (!result.ok()) return result;
  return locked;
}

Status claim(FileData* data, absl::Time deadline) {
  MutexLock lock(&data->mutex);
  while (true) {
    lock.unlock();
    const StatusOr<bool> claimed = try_claim(*data);
    lock.lock();
    if (!claimed.ok()) return claimed.status();
    if (*claimed) return absl::OkStatus();
    const absl::Time now = data->runtime->now();
    if (now >= deadline) return held_too_long();
    const Status waited =
        data->changed.wait_until(&data->mutex, std::min(deadline, now + kFirstPoll));
    if (!waited.ok() && error_kind(waited) != ErrorKind::kDeadline) return waited;
  }
}

class FileClient : public TableStore {
 public:
  FileClient(std::shared_ptr<FileData> data, Timeout default_timeout)
      : TableStore(data->runtime, default_timeout), data_(std::move(data)) {}

  void interrupt() override {
    MutexLock lock(&data_->mutex);
    interrupted_ = true;
    data_->changed.notify_all();
  }
  std::string describe() const override { return absl::StrCat("file://", data_->path); }
  std::shared_ptr<FileClient> fork() const {
    return std::make_shared<FileClient>(data_, default_timeout());
  }

 private:
  Status perform(const StoreOp& op, Access access, const std::vector<std::string>&,
                 const Body& body) override {
    absl::Duration poll = kFirstPoll;
    bool looked = false;
    LastLook last;
    MutexLock lock(&data_->mutex);
    while (!interrupted_) {
      // Not over the file: other processes may hold it.
      lock.unlock();
      bool held = false;
      StatusOr<Step> step = step_unless_unchanged(access, body, &last, &held);
      lock.lock();
      if (!step.ok()) return step.status();
      if (*step == Step::kChanged) data_->changed.notify_all();
      if (*step != Step::kNotYet) return absl::OkStatus();
      const absl::Time now = runtime().now();
      looked = looked || !held;
      if (now >= op.deadline) {
        // Others hold the lock for moments, which says nothing about the store.
        if (!looked && now - op.begin >= kLongHeld) return held_too_long();
        return make_error(ErrorKind::kDeadline, "");
      }
      // The lock is held for a moment only, what is waited for may take long.
      if (held) poll = kFirstPoll;
      if (interrupted_) break;
      const Status waited =
          data_->changed.wait_until(&data_->mutex, std::min(op.deadline, now + poll));
      if (!waited.ok() && error_kind(waited) != ErrorKind::kDeadline) return waited;
      poll = std::min(2 * poll, kLastPoll);
    }
    return op.interrupted();
  }

  // When the file was last read, and its stamp of before.
  struct LastLook {
    absl::Time at = absl::InfinitePast();
    FileStamp stamp;
  };

  StatusOr<Step> step_unless_unchanged(Access access, const Body& body, LastLook* last,
                                       bool* held) {
    const absl::Time now = runtime().now();
    const StatusOr<FileStamp> stamp = runtime().files().stamp(data_->path);
    if (stamp.ok() && *stamp == last->stamp && now - last->at < kReread) return Step::kNotYet;
    StatusOr<Step> step = step_once(access, body, held);
    if (stamp.ok() && !*held) *last = {now, *stamp};
    return step;
  }

  // FILE-4, FILE-6.
  StatusOr<Step> step_once(Access access, const Body& body, bool* held) {
    Files& files = runtime().files();
    StatusOr<Step> step = Step::kChanged;
    MutexLock lock(&data_->cache_mutex);
    FileCache* const cache = &data_->cache;
    if (access == Access::kLook) {
      bool have = false;
      WEFT_RETURN_IF_ERROR(files
                               .try_locked(data_->path, Files::Lock::kNone,
                                           [&](LockedFile* file) {
                                             have = cache->refresh_unlocked(file);
                                             return absl::OkStatus();
                                           })
                               .status());
      if (!have) {
        WEFT_ASSIGN_OR_RETURN(
            have, files.try_locked(data_->path, Files::Lock::kShared,
                                   [&](LockedFile* file) { return read(file, cache); }));
      }
      *held = !have;
      if (*held) return Step::kNotYet;
      StoreTable& table = cache->file().table;
      step = body(&table);
      if (!step.ok() || *step != Step::kChanged) return step;
      table.undo();
    }
    WEFT_ASSIGN_OR_RETURN(
        const bool locked,
        files.try_locked(data_->path, Files::Lock::kExclusive,
                         [&](LockedFile* file) { return apply(body, file, cache, &step); }));
    *held = !locked;
    return *held ? Step::kNotYet : step;
  }

  // REQUIRES for both: cache_mutex is held.
  Status read(LockedFile* file, FileCache* cache) const {
    const Status status = cache->refresh(file);
    if (error_kind(status) == ErrorKind::kState) {
      return make_error(ErrorKind::kState, absl::StrCat("file '", data_->path, "' ",
                                                        absl::string_view(status.message())));
    }
    WEFT_RETURN_IF_ERROR(status);
    const std::string& run = cache->file().run_id;
    return run == data_->run_id ? status : foreign(data_->path, run, data_->run_id);
  }

  Status apply(const Body& body, LockedFile* to, FileCache* cache, StatusOr<Step>* step) const {
    WEFT_RETURN_IF_ERROR(read(to, cache));
    StoreFile& file = cache->file();
    *step = body(&file.table);
    if (!step->ok() || **step != Step::kChanged) return absl::OkStatus();
    if (file.table.bytes() > kMaxFileBytes) {
      file.table.undo();
      return make_error(ErrorKind::kResource,
                        absl::StrCat("a file store holds at most ", kMaxFileBytes, " bytes"));
    }
    uint64_t new_generation = 0;
    if (file.end > kLogBytes + 4 * file.table.bytes()) {
      new_generation = std::max<uint64_t>(runtime().random().next(), 1);
    }
    return cache->write(to, new_generation);
  }

  const std::shared_ptr<FileData> data_;
  bool interrupted_ ABSL_GUARDED_BY(data_->mutex) = false;
};

}  // namespace
}  // namespace internal

StatusOr<std::shared_ptr<FileStore>> FileStore::open(std::string_view path,
                                                     const FileStoreOptions& options,
                                                     std::shared_ptr<Runtime> runtime) {
  const std::string context = absl::StrCat("store file://", std::string(path));
  if (path.empty()) {
    return make_error(ErrorKind::kInvalidArgument, absl::StrCat(context, ": there is no path"));
  }
  if (options.run_id.empty() || options.run_id.size() > internal::kMaxRunId) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat(context, ": a file store needs a run id of 1 to ", internal::kMaxRunId,
                     " bytes, so that the file of an earlier run is not taken for this one's; ",
                     "this one has ", options.run_id.size(), " (file:///path?run_id=ID)"));
  }
  auto data =
      std::make_shared<internal::FileData>(std::move(runtime), std::string(path), options.run_id);
  const absl::Duration timeout = options.timeout.value_or(absl::Seconds(60));
  const Status claimed = internal::claim(data.get(), deadline_after(data->runtime->now(), timeout));
  if (!claimed.ok()) return annotate(claimed, absl::StrCat(context, ": cannot open"));
  return std::shared_ptr<FileStore>(
      new FileStore(std::make_shared<internal::FileClient>(std::move(data), options.timeout)));
}

std::shared_ptr<Store> FileStore::new_client() {
  return std::shared_ptr<FileStore>(
      new FileStore(static_cast<internal::FileClient&>(*inner()).fork()));
}

}  // namespace weft
