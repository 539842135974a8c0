#ifndef WEFT_TESTS_INTEGRATION_JOB_H_
#define WEFT_TESTS_INTEGRATION_JOB_H_

// Job: the workers of one test, each a process (integration_worker.cc), and what a test says to
// them.
//
//   Job job;
//   job.start_group(2);
//   EXPECT_EQ(job[0].ask("call worker1 bump 7 5000 0").text, "1");
//   job.shut_down();
//
// When a test fails, the ends of what its workers logged are printed. Not thread-safe.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "weft/tests/integration/process.h"

namespace weft::integration {

struct Answer {
  bool ok = false;
  std::string kind;  // of an error; "silent" when no answer came
  std::string text;
};
std::ostream& operator<<(std::ostream& out, const Answer& answer);

using Info = std::map<std::string, int64_t>;

struct PlayerOptions {
  std::string name = {};
  int rank = 0;
  int world_size = 0;  // 0: a dynamic group
  std::map<std::string, std::string> environment = {};
  std::vector<std::string> arguments = {};
};

// Asks again until it is so; false when it never is.
bool eventually(const std::function<bool()>& wanted);

class Player {
 public:
  Player(const ProcessOptions& process, std::string name)
      : process_(process), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  Process& process() { return process_; }

  void say(const std::string& line);
  Answer answer(std::chrono::milliseconds limit = kLimit);
  Answer ask(const std::string& line) {
    say(line);
    return answer();
  }
  // The line that a worker prints when it has joined, or the error.
  Answer joined();
  Info info();
  // Asks for numbers until they are as wanted; false when they never are.
  bool eventually(const std::function<bool(const Info&)>& wanted);
  // "name/id/incarnation", address and so on of the "joined" line.
  const std::string& identity() const { return identity_; }
  const std::string& address() const { return address_; }
  // Ends the process by its input; its exit code.
  int leave();

 private:
  Process process_;
  std::string name_;
  std::string identity_;
  std::string address_;
};

// The relay as a process between two workers.
class RelayProcess {
 public:
  explicit RelayProcess(const std::string& target);
  const std::string& address() const { return address_; }
  void tell(const std::string& line);
  // How many connections were accepted so far.
  int accepted();
  // Bytes that have passed on the n-th open connection, in one direction.
  int64_t passed(int connection, const std::string& direction);

 private:
  Process process_;
  std::string address_;
};

class Job {
 public:
  Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();

  // For all that start from now on; a test of deaths wants short leases.
  std::map<std::string, std::string> environment = {};

  // The store is a server in worker0 instead of a file. For tests that stop a process: one that is
  // stopped while it holds the lock of the file holds up the others, which is not their subject.
  void host_store();
  // Starts a process; it has not joined yet.
  Player& start(PlayerOptions options);
  // worker0 to worker<n-1> of a static group, all joined.
  void start_group(int size);
  // The same; worker1 is reached through a relay in front of it.
  std::unique_ptr<RelayProcess> start_group_with_relay(int size);
  std::unique_ptr<RelayProcess> start_pair_with_relay() { return start_group_with_relay(2); }
  // The same with a relay in front of each, in order: no connection is without one.
  std::vector<std::unique_ptr<RelayProcess>> start_group_behind_relays(int size);
  // The relay of a player that was started with --ask-address, before joined().
  std::unique_ptr<RelayProcess> relay_for(Player* player);
  Player& operator[](size_t i) { return *players_.at(i); }
  size_t size() const { return players_.size(); }

  // All leave together; every answer must be "ok", every exit code 0, and nothing left over.
  void shut_down();
  std::string path(const std::string& name) const { return dir_.path(name); }
  // The keys of this job that begin so, as the store has them now.
  std::vector<std::string> keys(const std::string& prefix);
  std::string store() const { return "file://" + dir_.path("store"); }

 private:
  void expect_all_joined();

  TempDir dir_;
  QuietPort store_port_;
  std::vector<std::unique_ptr<Player>> players_;
};

// A call from one to the other, which may take a minute.
void expect_works(Job* job, size_t from, size_t to);
// Asks again until the player knows that `who` is dead.
void expect_told_of_death(Player* player, const std::string& who);

// Nothing of RRefs is left at this worker, now or soon: neither objects nor shares, and nothing
// about them under way.
void expect_no_rrefs(Player* player);

std::string read_file(const std::string& path);

// A lease that ends within a test, and still bears a machine with other work.
std::map<std::string, std::string> short_lease();

}  // namespace weft::integration

#endif  // WEFT_TESTS_INTEGRATION_JOB_H_
