#ifndef WEFT_TESTS_TESTING_FAKE_DEVICES_H_
#define WEFT_TESTS_TESTING_FAKE_DEVICES_H_

// Devices without hardware, for JoinOptions::device_backend. Their tensors call themselves CUDA and
// lie in host memory, so no operator can be run on them; values are read and made by the functions
// below. Copies are made on a thread of the backend's own, like those of real devices, and can be
// held back. What a real device would do with streams is counted.
//
// Any thread.

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/mutex.h"
#include "weft/rpc/internal/device/device_backend.h"

namespace weft::testing {

inline const c10::Device kCpu(c10::kCPU);
c10::Device cuda(int index);
// A tensor with these values on a fake device, or a copy on the CPU of what such a tensor holds.
at::Tensor on_device(const at::Tensor& values, c10::Device device);
at::Tensor on_cpu(const at::Tensor& fake);

class FakeDevices : public internal::DeviceBackend {
 public:
  explicit FakeDevices(int count) : state_(std::make_shared<State>(count)) {}
  ~FakeDevices() override { shutdown(absl::CancelledError("gone")); }

  // From here on copies wait for release().
  void hold();
  void release();
  // What the next copy of that direction ends with.
  void fail_next_to_host(Status why);
  void fail_next_to_devices(Status why);

  struct Counts {
    int prepared = 0;    // devices
    int marked = 0;      // messages
    int to_host = 0;     // tensors
    int to_devices = 0;  // tensors
    int works = 0;
    int entered = 0;  // by threads that took up a handler's scope
    int inside = 0;   // of these, now
    int used = 0;     // before_use()
    int derived = 0;
  };
  Counts counts() const;

  int device_count() const override;
  Status prepare(const std::vector<c10::Device>& devices) override;
  StatusOr<std::shared_ptr<const void>> mark(const std::vector<at::Tensor>& tensors) override;
  void to_host(std::vector<at::Tensor> sources, std::shared_ptr<const void> after,
               internal::HostMemory memory, Copied done) override;
  StatusOr<std::shared_ptr<internal::DeviceWork>> make_work(
      const std::vector<c10::Device>& devices) override;
  void to_devices(std::vector<at::Tensor> hosts, std::vector<c10::Device> targets,
                  const std::shared_ptr<internal::DeviceWork>& work, Copied done) override;
  void shutdown(const Status& why) override;

 private:
  struct Work;
  struct State {
    explicit State(int n);
    const int count;
    const std::shared_ptr<Executor> loop;  // the backend's thread
    Mutex mutex;
    bool held ABSL_GUARDED_BY(mutex) = false;
    std::vector<Task> waiting ABSL_GUARDED_BY(mutex);
    Status fail_to_host ABSL_GUARDED_BY(mutex);
    Status fail_to_devices ABSL_GUARDED_BY(mutex);
    Counts counts ABSL_GUARDED_BY(mutex);
  };
  void run(Task task);

  const std::shared_ptr<State> state_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_FAKE_DEVICES_H_
