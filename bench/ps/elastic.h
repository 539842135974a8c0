#ifndef WEFT_BENCH_PS_ELASTIC_H_
#define WEFT_BENCH_PS_ELASTIC_H_

// Elastic: the rows of the suite in which servers die, parts move and snapshots are taken while a client
// pushes. Each is a command of the caller, as often as wanted:
//
//   failover VICTIM PID   a table of two copies at w<VICTIM> and the two servers after it; the process PID is killed
//                         {"ms": from then until a push that began then is acknowledged,
//                          "others": pushes to a table of the two servers that stay, in the second from then on, over
//                          those in the second before}
//   evict                 ten times as many rows as a table at w1 may have (kLru) are pushed to it
//                         {"kib_ms": of rows that went, in a millisecond of the time in which they did}
//   move                  both parts of a table of two copies, 256 MiB on w1, w2 and w3, go one after the other to the
//                         server that has no copy of it, while 1,024 rows are pushed again and again
//                         {"before": pushes/s, "during": pushes/s, "before_ms": longest wait, "ms": longest wait,
//                          "seconds": of the moves}
//   cut                   the same with a table of one copy at w1 and w2, while a snapshot of it is taken
//                         {"before_ms": longest wait, "ms": longest wait, "held_ms": what SnapshotInfo::held says}
//
// Threads: the one that serves the commands.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <istream>
#include <optional>
#include <string>
#include <utility>

#include "weft/ps/client.h"

namespace weft {
class Worker;
}

namespace weft::bench {

class Elastic {
 public:
  // `path`: a prefix of names of files.
  Elastic(const Worker& worker, std::string path) : worker_(worker), path_(std::move(path)) {}

  std::string failover(std::istream& in) const;
  std::string move();
  std::string cut();
  std::string evict();

 private:
  struct Waits {
    double rate = 0;     // pushes in a second
    double longest = 0;  // seconds
  };
  // A table of 10^6 rows of 64.
  ps::Table fill(const ps::Client& client, const std::string& name, uint32_t copies) const;
  // Pushes until `enough`.
  Waits push(const ps::Table& table, const std::function<bool(double seconds)>& enough) const;
  Waits push_beside(const ps::Table& table, const std::function<void()>& work) const;

  const Worker& worker_;
  const std::string path_;
  std::optional<ps::Table> moving_;
  size_t moves_ = 0;
  std::optional<ps::Table> cut_;
  int evictions_ = 0;
};

}  // namespace weft::bench

#endif  // WEFT_BENCH_PS_ELASTIC_H_
