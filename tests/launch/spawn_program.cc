// A program that starts its own ranks: what the tests of weft::spawn run.
//
//   spawn_program MODE [ARGUMENT...]     see the table at the end
//
// The process that starts the ranks prints "spawned" when its call has returned, and what the call threw
// otherwise, as one line: kind, rank, exit code, signal, and the text behind them.

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/store/rendezvous.h"
#include "weft/store/spawn.h"
#include "weft/store/store.h"

namespace {

using Arguments = std::vector<std::string>;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

[[noreturn]] void wait_forever() {
  while (true) pause();
}

// Calls `body`, and prints how that ended.
int report(const std::function<void()>& body, std::FILE* to = stdout) {
  try {
    body();
  } catch (const weft::SpawnError& e) {
    std::fprintf(to, "error %s rank %d code %d signal %d: %s\n",
                 std::string(weft::kind_name(e.kind())).c_str(), e.rank(), e.exit_code(),
                 e.signal(), e.what());
    return 3;
  } catch (const weft::Error& e) {
    std::fprintf(to, "error %s: %s\n", std::string(weft::kind_name(e.kind())).c_str(), e.what());
    return 3;
  }
  std::fputs("spawned\n", to);
  return 0;
}

int number(const Arguments& arguments, size_t at) { return std::atoi(arguments.at(at).c_str()); }

// The store in which the ranks of this process's job meet.
std::shared_ptr<weft::Store> open_job_store() {
  const weft::Environment environment = weft::process_environment();
  weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  return weft::value_or_throw(weft::open_rendezvous_store(
      {.url = config.store, .config = config, .environment = environment},
      weft::make_system_runtime()));
}

// Each rank adds its number to a sum in the store and waits for all.
int meet(const Arguments& arguments) {
  return report([&] {
    weft::spawn(number(arguments, 0), [&](int rank) {
      const auto store = open_job_store();
      weft::throw_if_error(store->add("sum", rank, absl::Seconds(30)).status());
      const int64_t come = weft::value_or_throw(store->add("come", 1, absl::Seconds(30)));
      const int size = std::atoi(variable("WORLD_SIZE").c_str());
      if (come == size) weft::throw_if_error(store->set("all", "here", absl::Seconds(30)));
      weft::throw_if_error(store->get("all", absl::Seconds(30)).status());
      const int64_t sum = weft::value_or_throw(store->add("sum", 0, absl::Seconds(30)));
      std::printf("rank %d of %d, argument %s, sum %lld\n", rank, size, arguments.at(1).c_str(),
                  static_cast<long long>(sum));
    });
  });
}

int show_environment(const Arguments&) {
  return report([] {
    weft::spawn(2, [](int) {
      for (const auto& [name, value] : weft::process_environment()) {
        std::printf("%s=%s\n", name.c_str(), value.c_str());
      }
    });
  });
}

// The first rank fails in the way that is asked for, the others wait until they are ended.
int fail(const Arguments& arguments) {
  const std::string how = arguments.at(0);
  return report([&] {
    weft::spawn(3, [&](int rank) {
      std::printf("rank %d pid %d\n", rank, getpid());
      std::fflush(stdout);
      if (rank != 1) wait_forever();
      if (how == "throw") throw std::runtime_error("the data is gone");
      if (how == "error") {
        throw weft::Error(absl::StatusCode::kNotFound, "no such row").with_payload("row 7");
      }
      if (how == "number") throw 42;
      if (how == "signal") kill(getpid(), SIGKILL);
      if (how == "abort") std::abort();
      if (how == "exit") std::exit(7);
      if (how == "early") std::exit(0);
      throw std::invalid_argument("no way to fail called " + how);
    });
  });
}

int return_code(const Arguments& arguments) {
  return report(
      [&] { weft::spawn(2, [&](int rank) { return rank == 1 ? number(arguments, 0) : 0; }); });
}

// Rank 1 is the cause, and ends after rank 0, which fails for its sake ("slow"); or it throws after
// rank 0, which has lost it ("lost").
struct AtExit {
  ~AtExit() {
    if (!run) return;
    run();
    wait_forever();
  }
  std::function<void()> run;
};

int both_throw(const Arguments& arguments) {
  static AtExit at_exit;
  const bool slow = arguments.at(0) == "slow";
  return report([&] {
    weft::spawn(2, [&](int rank) {
      const auto store = open_job_store();
      // When the rank has reported.
      const auto tell = [store] {
        weft::throw_if_error(store->set("one", "reported", absl::Seconds(30)));
      };
      if (rank == (slow ? 1 : 0)) {
        at_exit.run = tell;
      } else {
        weft::throw_if_error(store->get("one", absl::Seconds(30)).status());
      }
      if (rank == 1) throw std::runtime_error("the cause");
      weft::throw_error(weft::make_error(slow ? weft::ErrorKind::kUser : weft::ErrorKind::kPeerLost,
                                         "the consequence"));
    });
  });
}

// Two calls at different places, and two loops.
int several(const Arguments&) {
  return report([] {
    weft::spawn(2, [](int rank) { std::printf("first call, rank %d\n", rank); });
    weft::spawn(2, [](int rank) { std::printf("second call, rank %d\n", rank); });
    for (int size = 1; size <= 3; ++size) {
      weft::spawn(size, [size](int rank) { std::printf("size %d, rank %d\n", size, rank); });
    }
    for (const char* rate : {"0.1", "0.2"}) {
      weft::spawn(1, [rate](int) { std::printf("rate %s\n", rate); }, {.name = rate});
    }
  });
}

int nested(const Arguments&) {
  return report([] {
    weft::spawn(2, [](int rank) {
      if (rank == 1) weft::spawn(2, [](int) { std::puts("a rank of a rank"); });
    });
  });
}

int count(const Arguments& arguments) {
  return report([&] { weft::spawn(number(arguments, 0), [](int) {}); });
}

int bad_option(const Arguments& arguments) {
  weft::SpawnOptions options;
  if (arguments.at(0) == "name") options.name = "line\nbreak";
  if (arguments.at(0) == "long-name") options.name = std::string(1001, 'n');
  if (arguments.at(0) == "grace") options.grace = -absl::Seconds(1);
  return report([&] {
    weft::spawn(
        1, [](int) {}, options);
  });
}

int few_descriptors(const Arguments& arguments) {
  const auto most = static_cast<rlim_t>(number(arguments, 1));
  rlimit limit = {.rlim_cur = most, .rlim_max = most};
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
  const int code = report([&] { weft::spawn(number(arguments, 0), [](int) { wait_forever(); }); });
  std::puts(waitpid(-1, nullptr, WNOHANG) == -1 ? "no child is left" : "a child is left");
  return code;
}

// Until the process that started them, or the thread, is gone. Each rank has a child in a session of
// its own.
void with_a_child(int rank) {
  int ready[2];
  if (pipe(ready) != 0) throw std::runtime_error("pipe");
  if (fork() == 0) {
    setsid();
    std::printf("child of %d pid %d\n", rank, getpid());
    std::fflush(stdout);
    close(ready[0]);
    close(ready[1]);
    wait_forever();
  }
  close(ready[1]);
  char end;
  if (read(ready[0], &end, 1) != 0) throw std::runtime_error("read");
  std::printf("rank %d pid %d directory %s\n", rank, getpid(), variable("WEFT_SPAWN_DIR").c_str());
  std::fflush(stdout);
}

int forever(const Arguments& arguments) {
  const bool alone = arguments.at(0) == "alone";
  return report([&] {
    weft::spawn(2, [&](int rank) {
      if (alone) std::printf("rank %d pid %d\n", rank, getpid());
      if (!alone) with_a_child(rank);
      wait_forever();
    });
  });
}

int leave_children(const Arguments&) {
  return report([] { weft::spawn(2, &with_a_child); });
}

// The rank that is left does not heed SIGTERM.
int stubborn(const Arguments&) {
  return report([] {
    weft::spawn(2,
                [](int rank) {
                  signal(SIGTERM, SIG_IGN);
                  const auto store = open_job_store();
                  if (rank == 0) {
                    weft::throw_if_error(store->set("deaf", "yes", absl::Seconds(30)));
                    wait_forever();
                  }
                  weft::throw_if_error(store->get("deaf", absl::Seconds(30)).status());
                  throw std::runtime_error("the cause");
                },
                {.grace = absl::Milliseconds(200)});
  });
}

int on_a_thread(const Arguments&) {
  int code = 1;
  std::thread([&code] {
    code = report([] { weft::spawn(2, [](int rank) { std::printf("rank %d\n", rank); }); });
  }).join();
  return code;
}

// A child of the program itself.
int other_children(const Arguments&) {
  const pid_t child = fork();
  if (child == 0) _exit(9);
  const int code = report([] { weft::spawn(2, [](int) {}); });
  int status = 0;
  const bool mine = waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 9;
  std::printf("own child %s\n", mine ? "kept" : "lost");
  return code;
}

int ignored_sigchld(const Arguments& arguments) {
  signal(SIGCHLD, SIG_IGN);
  return report([&] {
    weft::spawn(2, [&](int rank) {
      if (rank == 1 && arguments.at(0) == "fail") kill(getpid(), SIGKILL);
    });
  });
}

int plain_output(const Arguments&) {
  return report([] { weft::spawn(1, [](int) { std::puts("plain"); }, {.prefix_output = false}); });
}

int chatter(const Arguments&) {
  const auto body = [] {
    weft::spawn(1, [](int) {
      const std::string line = std::string(200, 'y') + "\n";
      while (write(1, line.data(), line.size()) > 0) {
      }
      wait_forever();
    });
  };
  return report(body, stderr);
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

int rounds(const Arguments& arguments) {
  const int before = open_descriptors();
  const int code = report([&] {
    for (int round = 0; round < number(arguments, 0); ++round) {
      weft::spawn(2, [&](int rank) { std::printf("round %d rank %d\n", round, rank); },
                  {.name = std::to_string(round)});
    }
  });
  std::printf("descriptors more: %d\n", open_descriptors() - before);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::map<std::string, int (*)(const Arguments&)> modes = {
      {"meet", &meet},                        // N ARGUMENT
      {"environment", &show_environment},     //
      {"fail", &fail},                        // throw, error, number, signal, abort, exit or early
      {"return", &return_code},               // CODE
      {"both-throw", &both_throw},            // slow or lost
      {"several", &several},                  //
      {"nested", &nested},                    //
      {"count", &count},                      // N
      {"bad-option", &bad_option},            // name, long-name or grace
      {"few-descriptors", &few_descriptors},  // N LIMIT
      {"forever", &forever},                  // alone or family
      {"leave-children", &leave_children},    //
      {"stubborn", &stubborn},                //
      {"thread", &on_a_thread},               //
      {"other-children", &other_children},    //
      {"ignored-sigchld", &ignored_sigchld},  // ok or fail
      {"plain-output", &plain_output},        //
      {"chatter", &chatter},                  //
      {"rounds", &rounds},                    // N
  };
  const auto mode = modes.find(argc > 1 ? argv[1] : "");
  if (mode == modes.end()) {
    std::fprintf(stderr, "spawn_program: unknown mode\n");
    return 2;
  }
  return mode->second(Arguments(argv + 2, argv + argc));
}
