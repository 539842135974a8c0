#include "weft/store/file_store.h"

#include <algorithm>
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
// Every operation reads the file, so a large one is a mistake that is better told early.
constexpr size_t kMaxFileBytes = 256 << 20;

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
  Condition changed;  // by someone in this process; others are seen by polling
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
  Status perform(const StoreOp& op, Access access, const Body& body) override {
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

  // FILE-4.
  StatusOr<Step> step_once(Access access, const Body& body, bool* held) {
    Files& files = runtime().files();
    StatusOr<Step> step = Step::kChanged;
    if (access == Access::kLook) {
      WEFT_ASSIGN_OR_RETURN(const std::optional<std::string> seen,
                            files.try_read_locked(data_->path));
      *held = !seen.has_value();
      if (*held) return Step::kNotYet;
      step = look(body, *seen).step;
      if (!step.ok() || *step != Step::kChanged) return step;
    }
    WEFT_ASSIGN_OR_RETURN(const bool locked,
                          files.try_update_locked(data_->path, [&](std::string* content) {
                            return apply(body, content, &step);
                          }));
    *held = !locked;
    return *held ? Step::kNotYet : step;
  }

  struct Look {
    StatusOr<StoreFile> file;
    StatusOr<Step> step;
  };
  Look look(const Body& body, const std::string& content) const {
    StatusOr<StoreFile> file = parse_store_file(content);
    StatusOr<Step> step = Step::kDone;
    if (!file.ok()) {
      step = content.empty()
                 ? make_error(ErrorKind::kState,
                              absl::StrCat("file '", data_->path, "' was removed or emptied"))
                 : file.status();
    } else if (file->run_id != data_->run_id) {
      step = foreign(data_->path, file->run_id, data_->run_id);
    } else {
      step = body(&file->table);
    }
    return {std::move(file), std::move(step)};
  }

  // Whether `content` was changed.
  bool apply(const Body& body, std::string* content, StatusOr<Step>* step) {
    Look now = look(body, *content);
    StatusOr<StoreFile>& file = now.file;
    *step = std::move(now.step);
    if (!step->ok() || **step != Step::kChanged) return false;
    if (file->table.bytes() > kMaxFileBytes) {
      *step = make_error(ErrorKind::kResource,
                         absl::StrCat("a file store holds at most ", kMaxFileBytes, " bytes"));
      return false;
    }
    if (file->end > kLogBytes + 4 * file->table.bytes()) {
      file->generation = runtime().random().next();
      *content = begin_store_file(*file);
    } else {
      append_store_record(*file, file->table.last_changed(), content);
    }
    return true;
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
