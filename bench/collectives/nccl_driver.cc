// Row C12: ours against raw NCCL, in one process, on one GPU with one rank.
//
//   gather BYTES COUNT   alternately ours and raw: COUNT times an all_gather of BYTES into other memory
//                        is queued, then all of it is waited for. Microseconds per operation:
//                        {"ours": [...], "raw": [...]}
//
// With one rank an all_gather is a copy on the GPU, and what a caller adds to it shows.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <nccl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "weft/bench/line_protocol.h"
#include "weft/collectives/process_group.h"
#include "weft/store/hash_store.h"

namespace weft::bench {
namespace {

constexpr int kRounds = 10;

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) {
    throw std::runtime_error(std::string(what) + ": error " + std::to_string(result));
  }
}

// NCCL itself, from the libnccl that the group has brought into the process.
class Raw {
 public:
  Raw() {
    void* const library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) throw std::runtime_error(::dlerror());
    const auto find = [library](const char* name, auto* function) {
      *function =
          reinterpret_cast<std::remove_pointer_t<decltype(function)>>(::dlsym(library, name));
      if (*function == nullptr) throw std::runtime_error(std::string("no ") + name);
    };
    decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
    decltype(&::ncclCommInitRank) init = nullptr;
    find("ncclGetUniqueId", &get_unique_id);
    find("ncclCommInitRank", &init);
    find("ncclAllGather", &all_gather_);
    find("ncclCommDestroy", &destroy_);
    ncclUniqueId id{};
    check(get_unique_id(&id), "ncclGetUniqueId");
    check(init(&comm_, 1, id, 0), "ncclCommInitRank");
  }
  ~Raw() { (void)destroy_(comm_); }
  Raw(const Raw&) = delete;
  Raw& operator=(const Raw&) = delete;

  void all_gather(const at::Tensor& out, const at::Tensor& in) const {
    check(all_gather_(in.const_data_ptr(), out.mutable_data_ptr(), in.nbytes(), ncclUint8, comm_,
                      static_cast<cudaStream_t>(stream_.native_handle())),
          "ncclAllGather");
  }
  void wait() const { cuda().synchronizeStream(stream_); }

 private:
  const c10::Stream stream_ = cuda().getStreamFromGlobalPool(c10::Device(c10::kCUDA, 0));
  decltype(&::ncclAllGather) all_gather_ = nullptr;
  decltype(&::ncclCommDestroy) destroy_ = nullptr;
  ncclComm_t comm_ = nullptr;
};

std::string gather(ProcessGroup* group, const Raw& raw, std::istream& in) {
  int64_t bytes = 0;
  int count = 0;
  if (!(in >> bytes >> count) || bytes < 4 || count < 1) {
    throw std::invalid_argument("gather BYTES COUNT");
  }
  const c10::Device gpu(c10::kCUDA, 0);
  const auto options = at::TensorOptions().dtype(at::kFloat).device(gpu);
  const at::Tensor from = at::full({bytes / 4}, 1.0F, options);
  const at::Tensor to = at::empty({bytes / 4}, options);
  const c10::Stream current = cuda().getStream(gpu);
  cuda().synchronizeStream(current);
  const auto ours = [&] {
    for (int i = 0; i < count; ++i) group->all_gather_into_tensor(to, from);
    cuda().synchronizeStream(current);
  };
  const auto theirs = [&] {
    for (int i = 0; i < count; ++i) raw.all_gather(to, from);
    raw.wait();
  };
  std::vector<double> us[2];
  for (int round = 0; round < kRounds; ++round) {
    // The first round is for warming up.
    const double mine = timed(ours) * 1e6 / count;
    const double other = timed(theirs) * 1e6 / count;
    if (round == 0) continue;
    us[0].push_back(mine);
    us[1].push_back(other);
  }
  if (!to.cpu().equal(at::full({bytes / 4}, 1.0F))) throw std::runtime_error("a wrong result");
  return "{\"ours\":" + json_array(us[0]) + ",\"raw\":" + json_array(us[1]) + "}";
}

int run(int argc, char** argv) {
  (void)argc;
  (void)argv;
  ProcessGroupOptions options;
  options.backend = Backend::kNccl;
  options.runtime = make_system_runtime();
  options.store = std::make_shared<HashStore>(options.runtime)->new_client();
  options.rank = 0;
  options.size = 1;
  options.device = 0;
  ProcessGroup group = init_process_group(options);
  const Raw raw;
  Operations own;
  own.more["gather"] = [&](std::istream& in) { return gather(&group, raw, in); };
  serve(&own);
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("weft-nccl", &weft::bench::run, argc, argv);
}
