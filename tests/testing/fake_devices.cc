#include "weft/tests/testing/fake_devices.h"

#include <cstdlib>
#include <cstring>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty_strided.h"
#include "c10/core/Storage.h"
#include "c10/core/TensorImpl.h"

namespace weft::testing {
namespace {

// Dense, with these strides.
at::Tensor empty_fake(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                      size_t bytes, c10::Device device) {
  void* const data = std::calloc(bytes + 1, 1);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(data, data, &std::free, device), nullptr, false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

void copy_bytes(const at::Tensor& from, const at::Tensor& to) {
  if (from.nbytes() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
}

at::Tensor on_cpu_in(const at::Tensor& fake, const internal::HostMemory& memory) {
  at::Tensor out = internal::empty_on_host(fake, memory);
  copy_bytes(fake, out);
  return out;
}

}  // namespace

c10::Device cuda(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

at::Tensor on_device(const at::Tensor& values, c10::Device device) {
  at::Tensor out =
      empty_fake(values.sizes(), values.strides(), values.scalar_type(), values.nbytes(), device);
  copy_bytes(values, out);
  return out;
}

at::Tensor on_cpu(const at::Tensor& fake) { return on_cpu_in(fake, nullptr); }

struct FakeDevices::Work : public internal::DeviceWork {
  explicit Work(std::shared_ptr<State> s) : state(std::move(s)) {}

  struct Entry : ScopeEntry {
    explicit Entry(std::shared_ptr<State> s) : state(std::move(s)) {
      MutexLock lock(&state->mutex);
      ++state->counts.entered;
      ++state->counts.inside;
    }
    ~Entry() override {
      MutexLock lock(&state->mutex);
      --state->counts.inside;
    }
    const std::shared_ptr<State> state;
  };
  std::unique_ptr<ScopeEntry> enter() const override { return std::make_unique<Entry>(state); }
  void before_use() override {
    MutexLock lock(&state->mutex);
    ++state->counts.used;
  }
  std::shared_ptr<ValueGuard> derive() override {
    MutexLock lock(&state->mutex);
    ++state->counts.derived;
    return std::make_shared<Work>(state);
  }
  const std::shared_ptr<State> state;
};

FakeDevices::State::State(int n)
    : count(n), loop(make_system_runtime()->make_loop("fake-devices")) {}

void FakeDevices::hold() {
  MutexLock lock(&state_->mutex);
  state_->held = true;
}

void FakeDevices::release() {
  std::vector<Task> waiting;
  {
    MutexLock lock(&state_->mutex);
    state_->held = false;
    waiting.swap(state_->waiting);
  }
  for (Task& task : waiting) post_or_run(state_->loop.get(), std::move(task));
}

void FakeDevices::fail_next_to_host(Status why) {
  MutexLock lock(&state_->mutex);
  state_->fail_to_host = std::move(why);
}
void FakeDevices::fail_next_to_devices(Status why) {
  MutexLock lock(&state_->mutex);
  state_->fail_to_devices = std::move(why);
}

FakeDevices::Counts FakeDevices::counts() const {
  MutexLock lock(&state_->mutex);
  return state_->counts;
}

int FakeDevices::device_count() const { return state_->count; }

Status FakeDevices::prepare(const std::vector<c10::Device>& devices) {
  MutexLock lock(&state_->mutex);
  state_->counts.prepared += static_cast<int>(devices.size());
  return absl::OkStatus();
}

StatusOr<std::shared_ptr<const void>> FakeDevices::mark(const std::vector<at::Tensor>&) {
  MutexLock lock(&state_->mutex);
  ++state_->counts.marked;
  return std::shared_ptr<const void>(state_);
}

void FakeDevices::run(Task task) {
  {
    MutexLock lock(&state_->mutex);
    if (state_->held) {
      state_->waiting.push_back(std::move(task));
      return;
    }
  }
  post_or_run(state_->loop.get(), std::move(task));
}

void FakeDevices::to_host(std::vector<at::Tensor> sources, std::shared_ptr<const void> after,
                          internal::HostMemory memory, Copied done) {
  run([state = state_, sources = std::move(sources), after = std::move(after),
       memory = std::move(memory), done = std::move(done)]() mutable {
    Status failed;
    {
      MutexLock lock(&state->mutex);
      std::swap(failed, state->fail_to_host);
      state->counts.to_host += static_cast<int>(sources.size());
    }
    if (!failed.ok()) return done(failed);
    std::vector<at::Tensor> out;
    for (const at::Tensor& source : sources) out.push_back(on_cpu_in(source, memory));
    done(std::move(out));
  });
}

StatusOr<std::shared_ptr<internal::DeviceWork>> FakeDevices::make_work(
    const std::vector<c10::Device>&) {
  {
    MutexLock lock(&state_->mutex);
    ++state_->counts.works;
  }
  return std::make_shared<Work>(state_);
}

void FakeDevices::to_devices(std::vector<at::Tensor> hosts, std::vector<c10::Device> targets,
                             const std::shared_ptr<internal::DeviceWork>& work, Copied done) {
  run([state = state_, hosts = std::move(hosts), targets = std::move(targets), work,
       done = std::move(done)]() mutable {
    Status failed;
    {
      MutexLock lock(&state->mutex);
      std::swap(failed, state->fail_to_devices);
      state->counts.to_devices += static_cast<int>(hosts.size());
    }
    if (!failed.ok()) return done(failed);
    std::vector<at::Tensor> out;
    for (size_t i = 0; i < hosts.size(); ++i) out.push_back(on_device(hosts[i], targets[i]));
    done(std::move(out));
  });
}

void FakeDevices::shutdown(const Status&) {
  release();
  state_->loop->shutdown();
}

}  // namespace weft::testing
