#include "weft/tests/cuda/fake_nccl.h"

#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "c10/util/BFloat16.h"
#include "c10/util/Float8_e4m3fn.h"
#include "c10/util/Float8_e5m2.h"
#include "c10/util/Half.h"
#include "weft/tests/cuda/fake_runtime.h"

namespace weft::testing::fake_nccl {
namespace {

enum class Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter };

struct Args {
  Kind kind = Kind::kAllReduce;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t op = ncclSum;
  double factor = 1;  // of this rank
  int root = 0;
};

struct Collective {
  std::map<int, Args> args;  // by rank
  bool done = false;
  int left = 0;  // ranks that have seen it done
};

struct Message {
  void* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<bool> done = std::make_shared<bool>(false);
};

struct Clique {  // the communicators of one id
  int size = 0;
  int joined = 0;
  std::map<uint64_t, Collective> collectives;
  std::map<std::pair<int, int>, std::deque<Message>> sends;  // by (from, to)
  std::map<std::pair<int, int>, std::deque<Message>> receives;
};

struct Communicator {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  uint64_t next = 0;
  bool aborted = false;
  std::map<int, double> factors;  // of operators that were made
  int next_op = ncclNumOps;
};

struct Faults {
  std::mutex mutex;
  int version = 22809;
  bool held = false;
  bool connecting_held = false;
  std::map<std::string, int> fail;
  std::map<int, int> async;
  std::map<std::string, size_t> calls;
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by id
  size_t aborted = 0;
  size_t communicators = 0;
  uint64_t next_id = 1;
};

Faults& state() {
  static auto* const only = new Faults();
  return *only;
}

// Counts a call, and says how it fails if it does.
ncclResult_t called(const char* function) {
  Faults& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  ++s.calls[function];
  const auto fails = s.fail.find(function);
  if (fails == s.fail.end()) return ncclSuccess;
  const auto result = static_cast<ncclResult_t>(fails->second);
  s.fail.erase(fails);
  return result;
}

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    default: return 1;
  }
}

template <class T, class Sum>
void reduce_as(const std::vector<Args>& all, size_t begin, size_t count, void* out) {
  const auto n = static_cast<double>(all.size());
  for (size_t i = 0; i < count; ++i) {
    Sum sum{};
    for (size_t r = 0; r < all.size(); ++r) {
      auto x = static_cast<Sum>(static_cast<const T*>(all[r].in)[begin + i]);
      if (all[r].factor != 1) x = static_cast<Sum>(static_cast<double>(x) * all[r].factor);
      const ncclRedOp_t op = all[r].op;
      if (r == 0) {
        sum = x;
      } else if (op == ncclProd) {
        sum = static_cast<Sum>(sum * x);
      } else if (op == ncclMin) {
        sum = std::min(sum, x);
      } else if (op == ncclMax) {
        sum = std::max(sum, x);
      } else {
        sum = static_cast<Sum>(sum + x);
      }
    }
    if (all[0].op == ncclAvg) sum = static_cast<Sum>(static_cast<double>(sum) / n);
    static_cast<T*>(out)[i] = static_cast<T>(sum);
  }
}

void reduce(const std::vector<Args>& all, size_t begin, size_t count, void* out) {
  // As 2.28.9 does: what one rank scales lacks its last elements.
  if (all.size() == 1 && (all[0].op == ncclAvg || all[0].factor != 1)) count -= count % 4;
  switch (all[0].type) {
    case ncclInt8: return reduce_as<int8_t, int64_t>(all, begin, count, out);
    case ncclUint8: return reduce_as<uint8_t, uint64_t>(all, begin, count, out);
    case ncclInt32: return reduce_as<int32_t, int64_t>(all, begin, count, out);
    case ncclUint32: return reduce_as<uint32_t, uint64_t>(all, begin, count, out);
    case ncclInt64: return reduce_as<int64_t, int64_t>(all, begin, count, out);
    case ncclUint64: return reduce_as<uint64_t, uint64_t>(all, begin, count, out);
    case ncclFloat16: return reduce_as<c10::Half, float>(all, begin, count, out);
    case ncclBfloat16: return reduce_as<c10::BFloat16, float>(all, begin, count, out);
    case ncclFloat32: return reduce_as<float, float>(all, begin, count, out);
    case ncclFloat64: return reduce_as<double, double>(all, begin, count, out);
    case ncclFloat8e4m3: return reduce_as<c10::Float8_e4m3fn, float>(all, begin, count, out);
    case ncclFloat8e5m2: return reduce_as<c10::Float8_e5m2, float>(all, begin, count, out);
    default: return;
  }
}

// All ranks have come: reads all inputs, then writes all outputs.
void finish(const Collective& c) {
  std::vector<Args> all;
  for (const auto& [rank, args] : c.args) all.push_back(args);
  const Args& first = all[0];
  const size_t size = size_of(first.type);
  const size_t bytes = first.count * size;
  const size_t ranks = all.size();
  std::vector<char> result(bytes * ranks);
  switch (first.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
      reduce(all, 0, first.count, result.data());
      for (size_t r = 0; r < ranks; ++r) {
        const bool gets = first.kind == Kind::kAllReduce || static_cast<int>(r) == first.root;
        if (gets && bytes > 0) std::memcpy(all[r].out, result.data(), bytes);
      }
      return;
    case Kind::kBroadcast:
      if (bytes == 0) return;
      std::memcpy(result.data(), all[static_cast<size_t>(first.root)].in, bytes);
      for (const Args& one : all) std::memcpy(one.out, result.data(), bytes);
      return;
    case Kind::kAllGather:
      if (bytes == 0) return;
      for (size_t r = 0; r < ranks; ++r) std::memcpy(result.data() + r * bytes, all[r].in, bytes);
      for (const Args& one : all) std::memcpy(one.out, result.data(), bytes * ranks);
      return;
    case Kind::kReduceScatter:
      for (size_t r = 0; r < ranks; ++r) {
        reduce(all, r * first.count, first.count, result.data() + r * bytes);
      }
      for (size_t r = 0; r < ranks && bytes > 0; ++r) {
        std::memcpy(all[r].out, result.data() + r * bytes, bytes);
      }
      return;
  }
}

// A part of what a stream does at once; tried until it is true.
struct Part {
  std::shared_ptr<Communicator> comm;
  cudaStream_t stream = nullptr;
  std::function<bool()> done;
};

thread_local int depth = 0;
thread_local std::vector<Part> grouped;

void flush() {
  std::map<cudaStream_t, std::vector<Part>> by_stream;
  for (Part& part : grouped) by_stream[part.stream].push_back(std::move(part));
  grouped.clear();
  for (auto& [stream, parts] : by_stream) {
    auto rest = std::make_shared<std::vector<Part>>(std::move(parts));
    fake_cuda::queue(stream, [rest] {
      std::erase_if(*rest, [](const Part& part) { return part.done(); });
      return rest->empty();
    });
  }
}

void add(Part part) {
  grouped.push_back(std::move(part));
  if (depth == 0) flush();
}

}  // namespace
}  // namespace weft::testing::fake_nccl

using namespace weft::testing::fake_nccl;  // NOLINT

struct ncclComm {
  std::shared_ptr<Communicator> it;
};

namespace weft::testing::fake_nccl {
namespace {

ncclResult_t collective(const char* function, ncclComm_t comm, cudaStream_t stream, Args args) {
  if (const ncclResult_t r = called(function); r != ncclSuccess) return r;
  const std::shared_ptr<Communicator> it = comm->it;
  if (const auto made = it->factors.find(args.op); made != it->factors.end()) {
    args.factor = made->second;
    args.op = ncclSum;
  }
  const uint64_t index = it->next++;
  add({it, stream, [it, index, args] {
         Faults& s = state();
         const std::lock_guard<std::mutex> lock(s.mutex);
         if (it->aborted) return true;
         Collective& c = it->clique->collectives[index];
         c.args.emplace(it->rank, args);
         if (s.held || c.args.size() < static_cast<size_t>(it->clique->size)) return false;
         if (!std::exchange(c.done, true)) finish(c);
         if (++c.left == it->clique->size) it->clique->collectives.erase(index);
         return true;
       }});
  return ncclSuccess;
}

// One end of a message; the side that comes second copies.
ncclResult_t point(const char* function, bool sends, void* data, size_t bytes, int peer,
                   ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t r = called(function); r != ncclSuccess) return r;
  const std::shared_ptr<Communicator> it = comm->it;
  const auto mine = std::make_shared<std::optional<Message>>();
  add({it, stream, [it, mine, sends, data, bytes, peer] {
         Faults& s = state();
         const std::lock_guard<std::mutex> lock(s.mutex);
         if (it->aborted) return true;
         if (mine->has_value() && *(*mine)->done) return true;
         if (s.held) return false;
         const auto way = sends ? std::make_pair(it->rank, peer) : std::make_pair(peer, it->rank);
         auto& sent = it->clique->sends[way];
         auto& received = it->clique->receives[way];
         if (!mine->has_value()) {
           mine->emplace();
           (*mine)->data = data;
           (*mine)->bytes = bytes;
           (sends ? sent : received).push_back(**mine);
         }
         while (!sent.empty() && !received.empty()) {
           std::memcpy(received.front().data, sent.front().data,
                       std::min(sent.front().bytes, received.front().bytes));
           *sent.front().done = *received.front().done = true;
           sent.pop_front();
           received.pop_front();
         }
         return *(*mine)->done;
       }});
  return ncclSuccess;
}

}  // namespace

std::string path() {
  Dl_info info{};
  (void)::dladdr(reinterpret_cast<void*>(&ncclGetVersion), &info);
  return info.dli_fname;
}

void reset() {
  Faults& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.version = 22809;
  s.held = false;
  s.connecting_held = false;
  s.fail.clear();
  s.async.clear();
  s.calls.clear();
  s.aborted = 0;
}

#define WEFT_SET(statement)                        \
  Faults& s = state();                             \
  const std::lock_guard<std::mutex> lock(s.mutex); \
  statement

void set_version(int version) { WEFT_SET(s.version = version); }
void hold_operations(bool held) { WEFT_SET(s.held = held); }
void hold_connecting(bool held) { WEFT_SET(s.connecting_held = held); }
void fail_next(const std::string& function, int result) { WEFT_SET(s.fail[function] = result); }
void set_async_error(int rank, int result) { WEFT_SET(s.async[rank] = result); }
size_t calls(const std::string& function) { WEFT_SET(return s.calls[function]); }
size_t aborted() { WEFT_SET(return s.aborted); }
size_t communicators() { WEFT_SET(return s.communicators); }

#undef WEFT_SET

}  // namespace weft::testing::fake_nccl

extern "C" {

#define WEFT_EXPORT __attribute__((visibility("default")))

WEFT_EXPORT ncclResult_t ncclGetVersion(int* version) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *version = state().version;
  return ncclSuccess;
}
WEFT_EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "some error";
  }
}
WEFT_EXPORT const char* ncclGetLastError(ncclComm_t) { return "the last words"; }
WEFT_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (const ncclResult_t r = called("ncclGetUniqueId"); r != ncclSuccess) return r;
  const std::lock_guard<std::mutex> lock(state().mutex);
  std::memset(id, 0, sizeof *id);
  const uint64_t number = state().next_id++;
  std::memcpy(id->internal, &number, sizeof number);
  return ncclSuccess;
}
WEFT_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id,
                                                int rank, ncclConfig_t*) {
  if (const ncclResult_t r = called("ncclCommInitRankConfig"); r != ncclSuccess) return r;
  Faults& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  auto& clique = s.cliques[std::string(id.internal, sizeof id.internal)];
  if (clique == nullptr) clique = std::make_shared<Clique>();
  clique->size = size;
  ++clique->joined;
  auto it = std::make_shared<Communicator>();
  it->clique = clique;
  it->rank = rank;
  *comm = new ncclComm{it};
  ++s.communicators;
  return ncclInProgress;
}
WEFT_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  Faults& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const Communicator& it = *comm->it;
  const bool connected = it.clique->joined >= it.clique->size && !s.connecting_held;
  const auto error = s.async.find(it.rank);
  *result = !connected               ? ncclInProgress
            : error != s.async.end() ? static_cast<ncclResult_t>(error->second)
                                     : ncclSuccess;
  return ncclSuccess;
}
static ncclResult_t forget(ncclComm_t comm, bool aborts) {
  Faults& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  comm->it->aborted = true;
  if (aborts) ++s.aborted;
  --s.communicators;
  delete comm;
  return ncclSuccess;
}
WEFT_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) { return called("ncclCommFinalize"); }
WEFT_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return forget(comm, false); }
WEFT_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) { return forget(comm, true); }

WEFT_EXPORT ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
WEFT_EXPORT ncclResult_t ncclGroupEnd() {
  if (--depth == 0) flush();
  return called("ncclGroupEnd");
}

WEFT_EXPORT ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                                       ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclAllReduce", comm, stream,
                    {Kind::kAllReduce, in, out, count, type, op, 1, 0});
}
WEFT_EXPORT ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type,
                                       int root, ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclBroadcast", comm, stream,
                    {Kind::kBroadcast, in, out, count, type, ncclSum, 1, root});
}
WEFT_EXPORT ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                                    ncclRedOp_t op, int root, ncclComm_t comm,
                                    cudaStream_t stream) {
  return collective("ncclReduce", comm, stream, {Kind::kReduce, in, out, count, type, op, 1, root});
}
WEFT_EXPORT ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                                       ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclAllGather", comm, stream,
                    {Kind::kAllGather, in, out, count, type, ncclSum, 1, 0});
}
WEFT_EXPORT ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count,
                                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                           cudaStream_t stream) {
  return collective("ncclReduceScatter", comm, stream,
                    {Kind::kReduceScatter, in, out, count, type, op, 1, 0});
}
WEFT_EXPORT ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t comm, cudaStream_t stream) {
  return point("ncclSend", true, const_cast<void*>(data), count * size_of(type), peer, comm,
               stream);
}
WEFT_EXPORT ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t comm, cudaStream_t stream) {
  return point("ncclRecv", false, data, count * size_of(type), peer, comm, stream);
}
WEFT_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor,
                                                  ncclDataType_t type, ncclScalarResidence_t,
                                                  ncclComm_t comm) {
  double value = 0;
  switch (type) {
    case ncclFloat16: value = static_cast<float>(*static_cast<c10::Half*>(factor)); break;
    case ncclBfloat16: value = static_cast<float>(*static_cast<c10::BFloat16*>(factor)); break;
    case ncclFloat32: value = *static_cast<float*>(factor); break;
    default: value = *static_cast<double*>(factor);
  }
  *op = static_cast<ncclRedOp_t>(comm->it->next_op++);
  comm->it->factors[*op] = value;
  return ncclSuccess;
}
WEFT_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return comm->it->factors.erase(op) == 1 ? ncclSuccess : ncclInvalidArgument;
}

}  // extern "C"
