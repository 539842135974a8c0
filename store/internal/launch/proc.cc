#include "weft/store/internal/launch/proc.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "weft/common/posix.h"
#include "weft/store/internal/launch/system.h"

namespace weft::launch {
namespace {

// What getdents64() gives: one entry of a directory.
struct DirectoryEntry {
  uint64_t inode;
  int64_t next;
  uint16_t length;  // of this entry, the name included
  uint8_t type;
  char name[1];  // to its NUL
};

template <class Visit>
void for_each_entry(int directory, Visit visit) {
  alignas(DirectoryEntry) char buffer[4096];
  while (true) {
    const long bytes = syscall(SYS_getdents64, directory, buffer, sizeof buffer);
    if (bytes <= 0) return;
    for (long at = 0; at < bytes;) {
      const auto* entry = reinterpret_cast<const DirectoryEntry*>(buffer + at);
      visit(static_cast<const char*>(entry->name));
      at += entry->length;
    }
  }
}

// 0 when `name` is no number.
int pid_of(const char* name) {
  int pid = 0;
  for (; *name != '\0'; ++name) {
    if (*name < '0' || *name > '9') return 0;
    pid = pid * 10 + (*name - '0');
  }
  return pid;
}

// Whether one of the tags between colons in `variable` ("NAME=tag:tag") is `tag`.
bool names_tag(const char* variable, size_t length, const char* tag) {
  const size_t name = kTagVariable.size();
  if (length <= name || memcmp(variable, kTagVariable.data(), name) != 0 || variable[name] != '=') {
    return false;
  }
  const size_t wanted = strlen(tag);
  for (size_t at = name + 1; at <= length;) {
    size_t end = at;
    while (end < length && variable[end] != ':') ++end;
    if (end - at == wanted && memcmp(variable + at, tag, wanted) == 0) return true;
    at = end + 1;
  }
  return false;
}

// `process` is a directory of /proc.
bool carries_tag(int proc, const char* process, const char* tag) {
  char path[32];
  const size_t digits = strlen(process);
  constexpr char kFile[] = "/environ";
  if (digits + sizeof kFile > sizeof path) return false;
  memcpy(path, process, digits);
  memcpy(path + digits, kFile, sizeof kFile);
  const internal::UniqueFd file(openat(proc, path, O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return false;
  // Empty for kernel threads and zombies. A variable that is longer is none of interest: hundreds of
  // tags fit.
  char variable[8192];
  size_t length = 0;
  char buffer[4096];
  while (true) {
    const ssize_t n = read(file.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return names_tag(variable, length, tag);
    for (ssize_t i = 0; i < n; ++i) {
      if (buffer[i] == '\0') {
        if (names_tag(variable, length, tag)) return true;
        length = 0;
      } else if (length < sizeof variable) {
        variable[length++] = buffer[i];
      }
    }
  }
}

// What is below the open directory; `depth` more levels.
void remove_below(int directory, int depth) {
  // An entry that is removed while the directory is read may hide another one: until none is left,
  // or none can be removed.
  for (bool removed = true; removed;) {
    removed = false;
    lseek(directory, 0, SEEK_SET);
    for_each_entry(directory, [&](const char* name) {
      if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) return;
      if (unlinkat(directory, name, 0) == 0) {
        removed = true;
        return;
      }
      if (depth == 0) return;
      const internal::UniqueFd below(
          openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (!below.valid()) return;
      remove_below(below.get(), depth - 1);
      if (unlinkat(directory, name, AT_REMOVEDIR) == 0) removed = true;
    });
  }
}

}  // namespace

void visit_tagged(const char* tag, void (*visit)(int pid, void* context), void* context) {
  const internal::UniqueFd proc(open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!proc.valid()) return;
  const int self = getpid();
  for_each_entry(proc.get(), [&](const char* name) {
    const int pid = pid_of(name);
    if (pid != 0 && pid != self && carries_tag(proc.get(), name, tag)) visit(pid, context);
  });
}

void remove_tree(const char* path) {
  constexpr int kMostLevels = 16;  // what launchers make has two
  {
    const internal::UniqueFd directory(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (directory.valid()) remove_below(directory.get(), kMostLevels);
  }
  rmdir(path);
}

}  // namespace weft::launch
