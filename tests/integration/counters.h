#ifndef WEFT_TESTS_INTEGRATION_COUNTERS_H_
#define WEFT_TESTS_INTEGRATION_COUNTERS_H_

// Counters: tables of two copies in which each client counts its acknowledged pushes, and the verbs by
// which a test plays servers and clients of them. Threads: one, beside those that it starts.

#include <atomic>
#include <istream>
#include <memory>
#include <optional>
#include <string>

#include "ATen/core/Tensor.h"
#include "weft/common/runtime.h"
#include "weft/ps/client.h"
#include "weft/ps/server.h"

namespace weft {
class Worker;
}

namespace weft::integration {

class Counters {
 public:
  explicit Counters(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  ~Counters() {
    halt();
    uncut();
  }

  //   serve                          a ps::Server here
  //   open CLIENTS MINE SERVER...    a dense and a sparse table; this client counts in column MINE
  //   run                            pushes without end, each acknowledged by both tables
  //   count                          "ok N", rounds of pushes so far
  //   halt                           ends that: "ok N", or the error that has ended it
  //   many N                         "ok", N rounds of pushes, many of them on their way at once, and some pulls
  //   overfill SERVER MIB TIMES      pushes TIMES as many rows of 256 bytes as a table there may have, of MIB, whose
  //                                  rows make room for others: "ok ROWS"
  //   check N...                     compares every counter with what its client has counted
  //   cut FOLDER                     snapshots without end, whether they are given up or not
  //   cuts                           "ok N", those that have ended well since then
  //   uncut                          ends that: "ok N GIVEN_UP"; or the error, when it was of another kind
  //   look FOLDER                    "ok NUMBER" of the newest snapshot, which must be a cut: in every counter
  //                                  of a client as many pushes as the snapshot says of it
  //   paired                         "ok N", parts that are owned here and have a second copy
  // Throws weft::Error.
  std::string obey(const Worker& worker, std::istream& words);

 private:
  std::string open(const Worker& worker, std::istream& words);
  at::Tensor one() const;
  std::string many(int64_t rounds);
  static std::string overfill(const Worker& worker, std::istream& words);
  std::string check(std::istream& words) const;
  std::string look(const std::string& folder) const;
  void halt();
  void uncut();

  const std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<ps::Server> server_;
  std::optional<ps::Client> client_;
  std::optional<ps::Table> dense_;
  std::optional<ps::Table> sparse_;
  int64_t clients_ = 0;
  int64_t mine_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> count_{0};
  Status failed_;
  std::unique_ptr<Thread> thread_;
  std::atomic<bool> cut_no_more_{false};
  std::atomic<int64_t> cuts_{0};
  int64_t given_up_ = 0;
  Status odd_;  // why a cut failed that should only have been given up
  std::unique_ptr<Thread> cutter_;
};

}  // namespace weft::integration

#endif  // WEFT_TESTS_INTEGRATION_COUNTERS_H_
