// The program that the launch tests run where a shell is not exact enough.
//
//   launch_child stamp-on-term FIFO FILE   opens FIFO when it is ready, waits for SIGTERM, writes the time to FILE
//   launch_child die FIFO FILE SIGNAL      waits for the one above, writes the time to FILE, dies by SIGNAL
//   launch_child long-line BYTES           one line of that many bytes, in odd pieces
//   launch_child bytes                     every byte value but the line ends
//   launch_child fork-tree                 prints "pid N" for itself, a child in its group and one in its own session
//   launch_child listen                    binds and listens on MASTER_PORT, connects to itself
//   launch_child ranks                     prints its rank and the launcher that gave it
//   launch_child chatter FIFO              writes to standard output and error without end; a byte to FIFO after
//                                          256 KiB each, and at each SIGUSR1

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

void write_stamp(const char* path) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) std::abort();
  std::fprintf(file, "%lld\n", static_cast<long long>(now.tv_sec) * 1'000'000'000 + now.tv_nsec);
  std::fclose(file);
}

[[noreturn]] void wait_forever() {
  while (true) pause();
}

int stamp_on_term(const char* fifo, const char* file) {
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  sigprocmask(SIG_BLOCK, &term, nullptr);
  if (open(fifo, O_WRONLY) < 0) return 1;
  int signal = 0;
  sigwait(&term, &signal);
  write_stamp(file);
  return 0;
}

int die(const char* fifo, const char* file, int signal) {
  if (open(fifo, O_RDONLY) < 0) return 1;
  write_stamp(file);
  kill(getpid(), signal);
  wait_forever();
}

int long_line(size_t bytes) {
  std::string text(bytes, 'x');
  for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>('a' + i % 26);
  for (size_t at = 0; at < bytes;) {
    size_t take = std::min<size_t>(bytes - at, 7919);
    ssize_t n = write(1, text.data() + at, take);
    if (n <= 0) return 1;
    at += static_cast<size_t>(n);
  }
  return 0;
}

int all_bytes() {
  for (int i = 0; i < 256; ++i) {
    if (i != '\n' && i != '\r') std::putchar(i);
  }
  std::putchar('\n');
  return 0;
}

int fork_tree() {
  for (bool own_session : {false, true}) {
    int ready[2];
    if (pipe(ready) != 0) return 1;
    if (fork() == 0) {
      if (own_session) setsid();
      std::printf("pid %d\n", getpid());
      std::fflush(stdout);
      close(ready[0]);
      close(ready[1]);
      wait_forever();
    }
    close(ready[1]);
    char end;
    ssize_t n = read(ready[0], &end, 1);  // its line is out
    (void)n;
    close(ready[0]);
  }
  std::printf("pid %d\ntree up\n", getpid());
  std::fflush(stdout);
  wait_forever();
}

int listen_on_master_port() {
  int port = std::atoi(std::getenv("MASTER_PORT"));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  int server = socket(AF_INET, SOCK_STREAM, 0);
  int on = 1;
  setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(server, generic, sizeof(address)) != 0 || listen(server, 8) != 0) {
    std::perror("bind and listen");
    return 1;
  }
  int client = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(client, generic, sizeof(address)) != 0) {
    std::perror("connect");
    return 1;
  }
  std::puts("connected");
  return 0;
}

int g_fifo = -1;

int chatter(const char* fifo) {
  g_fifo = open(fifo, O_WRONLY);
  if (g_fifo < 0) return 1;
  signal(SIGUSR1, [](int) {
    ssize_t n = write(g_fifo, "u", 1);
    (void)n;  // the test sees that nothing comes
  });
  const std::string line = std::string(200, 'y') + "\n";
  ssize_t n = 1;
  for (size_t bytes = 0; n > 0; bytes += line.size()) {
    for (int fd : {1, 2}) n = write(fd, line.data(), line.size());
    // More than the pipes before and behind weftrun hold.
    const size_t enough = 256 * 1024;
    if (bytes < enough && bytes + line.size() >= enough) n = write(g_fifo, "r", 1);
  }
  return 1;
}

int print_rank() {
  struct Names {
    const char* rank;
    const char* size;
  };
  constexpr Names kKnown[] = {{"RANK", "WORLD_SIZE"},
                              {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                              {"SLURM_PROCID", "SLURM_NTASKS"}};
  for (const Names& names : kKnown) {
    const char* rank = std::getenv(names.rank);
    const char* size = std::getenv(names.size);
    if (rank == nullptr || size == nullptr) continue;
    std::printf("rank %s of %s by %s\n", rank, size, names.rank);
    return 0;
  }
  std::fprintf(stderr, "no launcher's variables\n");
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "stamp-on-term" && argc == 4) return stamp_on_term(argv[2], argv[3]);
  if (mode == "die" && argc == 5) return die(argv[2], argv[3], std::atoi(argv[4]));
  if (mode == "long-line" && argc == 3) return long_line(std::strtoul(argv[2], nullptr, 10));
  if (mode == "bytes") return all_bytes();
  if (mode == "fork-tree") return fork_tree();
  if (mode == "ranks") return print_rank();
  if (mode == "chatter" && argc == 3) return chatter(argv[2]);
  if (mode == "listen") return listen_on_master_port();
  std::fprintf(stderr, "launch_child: unknown mode '%s'\n", mode.c_str());
  return 2;
}
