#ifndef WEFT_TESTS_INTEGRATION_HOGWILD_PLAYER_H_
#define WEFT_TESTS_INTEGRATION_HOGWILD_PLAYER_H_

// HogwildPlayer: a matrix in memory that several processes write, and the verbs by which a test plays one of them.
// Threads: one, beside the one that it starts.

#include <atomic>
#include <istream>
#include <memory>
#include <optional>
#include <string>

#include "ATen/core/Tensor.h"
#include "weft/common/runtime.h"
#include "weft/ps/hogwild.h"

namespace weft {
class Worker;
}

namespace weft::integration {

class HogwildPlayer {
 public:
  explicit HogwildPlayer(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  ~HogwildPlayer() { halt(); }

  //   share ROWS [OWNER]   a matrix of ROWS x 16, made here, or the owner's
  //   run ROW              adds 1 to this row, without end
  //   count                "ok N", so often until now
  //   halt                 ends that: "ok N"
  //   row ROW              "ok LEAST GREATEST" of what is in the row
  // Throws weft::Error.
  std::string obey(const Worker& worker, std::istream& words);

 private:
  void halt();

  const std::shared_ptr<Runtime> runtime_;
  at::Tensor matrix_;
  std::optional<ps::SharedMemory> memory_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> count_{0};
  std::unique_ptr<Thread> thread_;
};

}  // namespace weft::integration

#endif  // WEFT_TESTS_INTEGRATION_HOGWILD_PLAYER_H_
