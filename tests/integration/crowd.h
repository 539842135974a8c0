#ifndef WEFT_TESTS_INTEGRATION_CROWD_H_
#define WEFT_TESTS_INTEGRATION_CROWD_H_

// Crowd: many workers of a dynamic group in one process, each with a transport of its own, so that
// one other process has as many peers.

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/tests/integration/answer.h"
#include "weft/tests/integration/stage.h"
#include "weft/weft.h"

namespace weft::integration {

class Crowd {
 public:
  Crowd(const Stage* stage, std::shared_ptr<Runtime> runtime)
      : stage_(*stage), runtime_(std::move(runtime)) {}

  // "crowd0", "crowd1", ... join; each calls `to` over TCP, all at once. "ok N" when all were
  // answered, else the first error.
  std::string gather(int count, const std::string& to) {
    for (int i = 0; i < count; ++i) {
      JoinOptions options;
      options.name = absl::StrCat("crowd", i);
      options.library = stage_.library;
      options.runtime = runtime_;
      options.dynamic = true;
      options.transport = grpc_transport({.local_sockets = false, .same_user = false});
      StatusOr<Worker> worker = try_join(std::move(options));
      if (!worker.ok()) return answer(worker.status());
      workers_.push_back(*std::move(worker));
    }
    std::vector<Future<int64_t>> calls;
    for (const Worker& worker : workers_) {
      auto call = try_rpc_async(worker, to, kBump, 0);
      if (!call.ok()) return answer(call.status());
      calls.push_back(*std::move(call));
    }
    for (const Future<int64_t>& call : calls) {
      if (const auto bumped = call.try_wait(); !bumped.ok()) return answer(bumped.status());
    }
    return absl::StrCat("ok ", calls.size());
  }

  std::string leave() {
    Status status;
    for (const Worker& worker : workers_) {
      const Status left = worker.shutdown().status;
      if (status.ok()) status = left;
    }
    workers_.clear();
    return answer(status);
  }

 private:
  const Stage& stage_;
  const std::shared_ptr<Runtime> runtime_;
  std::vector<Worker> workers_;
};

}  // namespace weft::integration

#endif  // WEFT_TESTS_INTEGRATION_CROWD_H_
