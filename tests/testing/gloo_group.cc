// The only file that knows ProcessGroupGloo: see gloo_names/gloo/context.h.
#define USE_C10D_GLOO 1

#include "weft/tests/testing/gloo_group.h"

#include <utility>
#include <vector>

#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "weft/common/mutex.h"

namespace weft::testing {
namespace {

Mutex& recorder() {  // see the header
  static Mutex mutex;
  return mutex;
}

class OneAtATime final : public c10d::Backend {
 public:
  explicit OneAtATime(c10::intrusive_ptr<c10d::Backend> group)
      : c10d::Backend(group->getRank(), group->getSize()), group_(std::move(group)) {}

  const std::string getBackendName() const override { return group_->getBackendName(); }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    MutexLock lock(&recorder());
    return group_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    MutexLock lock(&recorder());
    return group_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    MutexLock lock(&recorder());
    return group_->allgather(outputs, inputs, options);
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> group_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  // The default device is the one that the host's name resolves to, which need not be loopback.
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(options));
}

at::Tensor all_reduce(const c10::intrusive_ptr<c10d::Backend>& group, const at::Tensor& mine) {
  std::vector<at::Tensor> tensors{mine.clone()};
  c10::intrusive_ptr<c10d::Work> work;
  {
    MutexLock lock(&recorder());
    work = group->allreduce(tensors);
  }
  work->wait();
  return tensors[0];
}

c10::intrusive_ptr<c10d::Backend> begun_one_at_a_time(c10::intrusive_ptr<c10d::Backend> group) {
  return c10::make_intrusive<OneAtATime>(std::move(group));
}

}  // namespace weft::testing
