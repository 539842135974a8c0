// The floor under row T15: processes that call each other all to all, one call at a time each, over
// Unix sockets, with nothing in between. A call is 64 bytes there and 64 bytes back; a process that
// waits for its answer serves others meanwhile. With one process per core they spin, otherwise they
// sleep.
//
//   bench_bare_sockets --processes N --seconds S        prints {"rate": calls a second of all}

#include <sched.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

constexpr int kMost = 64;
constexpr int kPollsPerYield = 4;
using Message = std::array<char, 64>;  // its first byte: whether it is an answer

struct Shared {
  std::atomic<bool> stop{false};
  std::array<std::atomic<long>, kMost> calls{};
};

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::_Exit(1);
}

void send(int fd, const Message& message) {
  if (write(fd, message.data(), message.size()) != static_cast<ssize_t>(message.size())) {
    fail("write");
  }
}

// Takes what has come from one; true when the answer was among it.
bool take(int fd) {
  bool answered = false;
  Message message;
  while (read(fd, message.data(), message.size()) == static_cast<ssize_t>(message.size())) {
    if (message[0] != 0) {
      answered = true;
    } else {
      message[0] = 1;
      send(fd, message);
    }
  }
  return answered;
}

void call_all(int rank, const std::vector<int>& others, bool spin, Shared* shared) {
  const int poll = epoll_create1(EPOLL_CLOEXEC);
  if (poll < 0) fail("epoll_create1");
  for (int fd : others) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl");
  }
  long calls = 0;
  unsigned polls = 0;
  for (; !shared->stop.load(std::memory_order_relaxed); ++calls) {
    send(others[static_cast<size_t>(calls) % others.size()], Message{});
    for (bool answered = false; !answered && !shared->stop.load(std::memory_order_relaxed);) {
      std::array<epoll_event, 8> events;
      const int count = epoll_wait(poll, events.data(), events.size(), spin ? 0 : 100);
      if (count == 0 && spin && ++polls % kPollsPerYield == 0) sched_yield();
      for (int i = 0; i < count; ++i) answered |= take(events[static_cast<size_t>(i)].data.fd);
    }
  }
  shared->calls[static_cast<size_t>(rank)].store(calls);
}

}  // namespace

int main(int argc, char** argv) {
  int processes = 0;
  double seconds = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string_view(argv[i]) == "--processes") processes = std::atoi(argv[i + 1]);
    if (std::string_view(argv[i]) == "--seconds") seconds = std::atof(argv[i + 1]);
  }
  if (processes < 2 || processes > kMost || seconds <= 0) {
    std::fprintf(stderr, "usage: bench_bare_sockets --processes 2..%d --seconds S\n", kMost);
    return 2;
  }
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("mmap");
  auto* const shared = new (memory) Shared;
  // The ends of each process, beginning with the one to its successor.
  std::vector<std::vector<int>> ends(static_cast<size_t>(processes),
                                     std::vector<int>(static_cast<size_t>(processes) - 1));
  for (int i = 0; i < processes; ++i) {
    for (int j = i + 1; j < processes; ++j) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) fail("socketpair");
      ends[static_cast<size_t>(i)][static_cast<size_t>(j - i - 1)] = pair[0];
      ends[static_cast<size_t>(j)][static_cast<size_t>(processes + i - j - 1)] = pair[1];
    }
  }
  const bool spin = static_cast<unsigned>(processes) <= std::thread::hardware_concurrency();
  const auto start = std::chrono::steady_clock::now();
  std::vector<pid_t> children;
  for (int rank = 0; rank < processes; ++rank) {
    const pid_t child = fork();
    if (child < 0) fail("fork");
    if (child == 0) {
      call_all(rank, ends[static_cast<size_t>(rank)], spin, shared);
      std::_Exit(0);
    }
    children.push_back(child);
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  shared->stop = true;
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) ++failed;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  long calls = 0;
  for (const auto& one : shared->calls) calls += one.load();
  std::printf("{\"rate\":%.0f}\n", static_cast<double>(calls) / took.count());
  return failed == 0 ? 0 : 1;
}
