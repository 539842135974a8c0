#include "weft/store/internal/launch/guard.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "weft/store/internal/launch/proc.h"

namespace weft::launch {
namespace {

// A process that forks while it is looked for is found in the next round; a few rounds without a
// find end it.
void kill_tagged(const char* tag) {
  for (int round = 0, quiet = 0; quiet < 2 && round < 1000; ++round) {
    int found = 0;
    visit_tagged(
        tag,
        [](int pid, void* count) {
          kill(pid, SIGKILL);
          ++*static_cast<int*>(count);
        },
        &found);
    quiet = found == 0 ? quiet + 1 : 0;
  }
}

// The guard's life. The launcher may have had threads, so that only async-signal-safe functions are
// allowed.
[[noreturn]] void stand_guard(int line, const char* name, const char* tag, const char* directory) {
  // A group of its own and every signal blocked: what ends the launcher must not end its guard.
  setpgid(0, 0);
  prctl(PR_SET_NAME, name);
  // The guard of a launcher inside another job must survive the sweep of that job: it takes the tag
  // of the outer one out of the memory that /proc/self/environ shows.
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (strncmp(*entry, kTagVariable.data(), kTagVariable.size()) == 0) {
      memset(*entry, 'x', strlen(*entry));
    }
  }
  // Holds nothing of the launcher's: a reader of its output must see the end when it ends.
  const int null = open("/dev/null", O_RDWR);
  const int keep = fcntl(line, F_DUPFD, 3);
  for (int fd = 0; fd < 3; ++fd) dup2(null, fd);
  if (keep > 3) close_range(3, static_cast<unsigned>(keep) - 1, 0);
  close_range(static_cast<unsigned>(keep) + 1, ~0U, 0);

  char word = 0;
  ssize_t n;
  do {
    n = read(keep, &word, 1);
  } while (n < 0 && errno == EINTR);
  if (n == 0) {
    kill_tagged(tag);
    if (directory[0] != '\0') remove_tree(directory);
  }
  _exit(0);
}

}  // namespace

absl::StatusOr<Guard> Guard::start(const std::string& name, const std::string& tag,
                                   const std::string& temporary_dir) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return os_error(errno, "socketpair");
  }
  const UniqueFd theirs(ends[0]);
  UniqueFd ours(ends[1]);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = _Fork();  // not fork(): no library's atfork handlers
  if (pid == 0) {
    stand_guard(theirs.get(), name.c_str(), tag.c_str(), temporary_dir.c_str());
  }
  const int fork_errno = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) return os_error(fork_errno, "fork");
  return Guard(pid, std::move(ours));
}

Guard::~Guard() {
  if (pid_ < 0) return;
  line_.reset();
  wait_for(pid_, nullptr);
}

void Guard::dismiss() {
  if (pid_ < 0) return;
  const char word = 'q';
  while (send(line_.get(), &word, 1, MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
  line_.reset();
  wait_for(pid_, nullptr);
  pid_ = -1;
}

}  // namespace weft::launch
