// The only file that knows ProcessGroupGloo: see gloo_names/gloo/context.h.
#define USE_C10D_GLOO 1

#include "weft/tests/testing/gloo_group.h"

#include <utility>
#include <vector>

#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "weft/common/mutex.h"

namespace weft::testing {

c10::intrusive_ptr<c10d::Backend> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  // The default device is the one that the host's name resolves to, which need not be loopback.
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(options));
}

at::Tensor all_reduce(const c10::intrusive_ptr<c10d::Backend>& group, const at::Tensor& mine) {
  static Mutex recorder;  // see the header
  std::vector<at::Tensor> tensors{mine.clone()};
  c10::intrusive_ptr<c10d::Work> work;
  {
    MutexLock lock(&recorder);
    work = group->allreduce(tensors);
  }
  work->wait();
  return tensors[0];
}

}  // namespace weft::testing
