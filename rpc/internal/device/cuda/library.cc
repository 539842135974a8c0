// weft::cuda: the backend of CUDA devices, opened by the core at run time
// (internal/cuda_library.cc).

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/cuda/CUDAFunctions.h"
#include "weft/rpc/internal/device/cuda/copier.h"
#include "weft/rpc/internal/device/cuda/streams.h"
#include "weft/rpc/internal/device/device_backend.h"
#include "weft/rpc/spi/device_copies.h"

namespace weft::internal {
namespace {

StatusOr<std::shared_ptr<const void>> mark_of(const std::vector<at::Tensor>& tensors,
                                              std::string_view doing) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
      devices.push_back(tensor.device());
    }
  }
  std::shared_ptr<const StreamMark> made;
  WEFT_RETURN_IF_ERROR(guarded(doing, [&] { made = std::make_shared<StreamMark>(devices); }));
  return std::shared_ptr<const void>(std::move(made));
}

class CudaBackend : public DeviceBackend {
 public:
  CudaBackend(std::shared_ptr<Runtime> runtime, Logger log)
      : log_(std::move(log)), copier_(std::move(runtime)) {}

  int device_count() const override { return c10::cuda::device_count(); }
  Status prepare(const std::vector<c10::Device>& devices) override {
    for (const c10::Device device : devices) {
      WEFT_RETURN_IF_ERROR(guarded("making streams", [&] { streams_->prepare(device.index()); }));
    }
    return copier_.prepare(devices);
  }

  StatusOr<std::shared_ptr<const void>> mark(const std::vector<at::Tensor>& tensors) override {
    return mark_of(tensors, "marking the tensors of a message");
  }
  void to_host(std::vector<at::Tensor> sources, std::shared_ptr<const void> after,
               HostMemory memory, Copied done) override {
    copier_.to_host(std::move(sources), std::static_pointer_cast<const StreamMark>(after),
                    std::move(memory), std::move(done));
  }

  StatusOr<std::shared_ptr<DeviceWork>> make_work(
      const std::vector<c10::Device>& devices) override {
    std::shared_ptr<DeviceWork> made;
    WEFT_RETURN_IF_ERROR(guarded("taking streams for a message", [&] {
      made = std::make_shared<CudaWork>(devices, streams_, log_);
    }));
    return made;
  }
  void to_devices(std::vector<at::Tensor> hosts, std::vector<c10::Device> targets,
                  const std::shared_ptr<DeviceWork>& work, Copied done) override {
    copier_.to_devices(std::move(hosts), std::move(targets),
                       std::static_pointer_cast<CudaWork>(work), std::move(done));
  }
  void shutdown(const Status& why) override { copier_.shutdown(why); }

 private:
  const Logger log_;
  const std::shared_ptr<StreamPool> streams_ = std::make_shared<StreamPool>();
  Copier copier_;
};

class CudaCopies final : public DeviceCopies {
 public:
  explicit CudaCopies(std::shared_ptr<Runtime> runtime) : copier_(std::move(runtime)) {}

  StatusOr<Mark> mark(const std::vector<at::Tensor>& tensors) override {
    return mark_of(tensors, "marking tensors to be copied");
  }
  void copy(std::vector<at::Tensor> from, std::vector<at::Tensor> to, Mark after,
            absl::AnyInvocable<void(Status)> done) override {
    copier_.copy(std::move(from), std::move(to),
                 std::static_pointer_cast<const StreamMark>(std::move(after)),
                 [done = std::move(done)](const StatusOr<std::vector<at::Tensor>>& copied) mutable {
                   done(copied.status());
                 });
  }
  void shutdown(const Status& why) override { copier_.shutdown(why); }

 private:
  Copier copier_;
};

}  // namespace
}  // namespace weft::internal

extern "C" WEFT_API void weft_cuda_open(
    const std::shared_ptr<weft::Runtime>& runtime, const weft::Logger& log,
    weft::StatusOr<std::shared_ptr<weft::internal::DeviceBackend>>* backend) {
  // No device is touched here: a worker that finds out that there is none says so itself.
  *backend = std::make_shared<weft::internal::CudaBackend>(runtime, log);
  WEFT_LOG(log, kDebug) << "weft::cuda is loaded, " << (**backend)->device_count() << " devices";
}

extern "C" WEFT_API void weft_cuda_open_copies(
    const std::shared_ptr<weft::Runtime>& runtime, const weft::Logger&,
    weft::StatusOr<std::shared_ptr<weft::DeviceCopies>>* copies) {
  *copies = std::make_shared<weft::internal::CudaCopies>(runtime);
}
