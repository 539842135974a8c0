#include "weft/tests/integration/stage.h"

#include <algorithm>
#include <utility>

#include "weft/common/runtime.h"
#include "weft/rpc/call.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/group.h"
#include "weft/rpc/worker.h"

namespace weft::integration {

at::Tensor echo(at::Tensor x) { return x; }

int64_t ring_sync(CallContext& context, std::vector<std::string> ring, int64_t depth, bool meet) {
  if (depth == 0) {
    if (meet) barrier(context.worker());
    return 0;
  }
  const std::string next = ring[static_cast<size_t>(depth) % ring.size()];
  return 1 + rpc_sync(context.worker(), next, &ring_sync, ring, depth - 1, meet);
}

Future<int64_t> ring_async(CallContext& context, std::vector<std::string> ring, int64_t depth) {
  if (depth == 0) co_return 0;
  const std::string next = ring[static_cast<size_t>(depth) % ring.size()];
  Future<int64_t> rest = rpc_async(context.worker(), next, &ring_async, ring, depth - 1);
  const int64_t hops = co_await rest;
  co_return hops + 1;
}

Stage::Stage(std::shared_ptr<Runtime> runtime)
    : runtime_(std::move(runtime)), changed_(runtime_.get()) {
  library.def("bump", [this](int64_t id) { return bump(id); })
      .def("hold", [this](int64_t id) { return hold(id); })
      .def("echo", &echo)
      .def("ring_sync", &ring_sync)
      .def("ring_async", &ring_async);
}

void Stage::open(int64_t up_to) {
  {
    MutexLock lock(&mutex_);
    open_ = up_to;
  }
  changed_.notify_all();
}

int64_t Stage::bump(int64_t id) {
  MutexLock lock(&mutex_);
  return ++runs_[id];
}

int64_t Stage::hold(int64_t id) {
  MutexLock lock(&mutex_);
  const int64_t runs = ++runs_[id];
  ++held_;
  while (open_ < id) {
    throw_if_error(changed_.wait_until(&mutex_, runtime_->now() + absl::Seconds(60)));
  }
  return runs;
}

std::map<std::string, int64_t> Stage::counts() const {
  MutexLock lock(&mutex_);
  std::map<std::string, int64_t> out = {{"runs", 0}, {"runs_of_one", 0}, {"held", held_}};
  out["ids"] = static_cast<int64_t>(runs_.size());
  for (const auto& [id, runs] : runs_) {
    out["runs"] += runs;
    out["runs_of_one"] = std::max(out["runs_of_one"], runs);
  }
  return out;
}

void Stage::forget() {
  MutexLock lock(&mutex_);
  runs_.clear();
  held_ = 0;
}

}  // namespace weft::integration
