#ifndef WEFT_COLLECTIVES_PROCESS_GROUP_H_
#define WEFT_COLLECTIVES_PROCESS_GROUP_H_

// ProcessGroup: ranks that work on tensors together. Needs a store where they meet, a rank and a
// size, but no Worker. collectives/service.h makes a group whose members are workers.
//
//   auto group = weft::init_process_group();           // rank, size and store from the launcher
//   group.broadcast(weights);
//   group.all_reduce(grad, {.op = weft::ReduceOp::kAvg});
//   weft::Work work = group.all_reduce_async(other);   // and go on
//   work.wait();
//
// Every rank calls the same operations in the same order; a difference in operation, type, count,
// root or reduction is an error on all ranks that names both (COLL-2). Operations run in the
// order of their calls: synchronous ones on the thread of the caller, the others on a thread of
// the group. A failure of one rank, or a deadline (10 minutes unless given), ends the group for
// all (COLL-3); an error in the arguments is found at the caller, before anything moves, and does
// not end the group.
//
// Tensors: any strides, any type of elements that a type in ReduceOp's table names, CPU memory
// best; others are staged through it. The elements of an output must not overlap. Operations are
// not recorded by autograd. All ranks get bit-identical results, and so do two runs.
//
// Each operation throws weft::Error; try_x() is x() without exceptions, x_async() begins it and
// returns. A ProcessGroup is a cheap handle on shared state; when the last one is destroyed this
// rank leaves. Threads: all methods from anywhere; a program that calls from several threads has to
// keep the same order on all ranks.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/algorithm.h"
#include "weft/collectives/inproc_fabric.h"
#include "weft/collectives/reduce_op.h"
#include "weft/collectives/work.h"
#include "weft/common/api.h"
#include "weft/common/config.h"
#include "weft/common/error.h"
#include "weft/common/executor.h"
#include "weft/common/log.h"
#include "weft/common/metrics.h"
#include "weft/common/runtime.h"
#include "weft/common/time.h"
#include "weft/store/rendezvous.h"
#include "weft/store/store.h"
#include "weft/transport/credentials.h"

namespace weft {

class FlightRecorder;
class TraceWriter;

namespace internal {
class GroupHandle;
class HostLibrary;
struct GroupWorkers;
struct Operation;
}  // namespace internal

enum class Backend {
  // nccl when every rank gives a device and has NCCL. Else inproc with a fabric; else shm when all
  // ranks belong to one user on one host; else shared memory inside hosts and sockets between
  // them, when some ranks share a host; else tcp.
  kAuto,
  kInproc,  // ranks in one process, over a fabric: simulation and tests
  kShm,     // shared memory
  kTcp,     // sockets
  kNccl,    // tensors of a GPU per rank, by NCCL (docs/collectives.md)
  kMpi,     // by MPI, with what a weft::Mpi of the program hands in (collectives/mpi.h)
};

struct ProcessGroupOptions {  // how a group is made
  // Name of the group, unique among the groups that meet at the store at the same time.
  std::string name = "world";
  Backend backend = Backend::kAuto;
  // Where to meet: a store, or else a URL, or else (also "env://") the launcher's variables.
  std::shared_ptr<Store> store = nullptr;
  std::string rendezvous = {};
  // Default: those of the launcher.
  std::optional<int> rank = std::nullopt;
  std::optional<int> size = std::nullopt;
  // Deadline of operations without one of their own. Default: 10 minutes.
  Timeout timeout{};
  // Deadline for all members to join. Default: 10 minutes.
  Timeout init_timeout{};
  // Default: threads and the clock of the system.
  std::shared_ptr<Runtime> runtime = nullptr;
  // Where continuations of Work run. Default: on a thread of the group.
  std::shared_ptr<Executor> executor = nullptr;
  std::shared_ptr<InprocFabric> fabric = nullptr;
  // mpi: that of the program's weft::Mpi.
  std::shared_ptr<internal::HostLibrary> host_library = nullptr;
  // nccl: number of this rank's GPU. Default: the calling thread's current one.
  std::optional<int> device = std::nullopt;
  // nccl and mpi: before each operation the ranks compare, by way of the CPU, what they are about to
  // do, as the other backends always do. The caller then waits until all ranks have called it.
  bool compare_operations = false;
  // tcp: where to listen, and whether that may be more than loopback without credentials.
  std::string listen_address = "127.0.0.1";
  bool allow_insecure = false;
  // tcp: with credentials all connections are mutual TLS, and a rank is the worker that its
  // certificate names. Default: WEFT_TLS_CA and so on. All members have them, or none.
  Credentials credentials{};
  // Name of this worker, and its rank in the job, as its certificate has them. Default: WEFT_NAME,
  // else the first name in the certificate; the launcher's rank, else `rank`.
  std::string worker_name = {};
  std::optional<int> job_rank = std::nullopt;
  // Ranks with different texts count as on different hosts, whatever the probe says: they share no
  // memory, and hierarchical algorithms keep them apart. Equal texts prove nothing.
  std::string host = {};
  // Rules that choose the algorithm of an operation by its size, such as "star:0-1024;
  // ring:1025-max ranks=3-64 hosts=some" (docs/collectives.md). The rules of rank 0 hold for all
  // members; after them the rules in rank 0's file WEFT_COLLECTIVES_TABLE apply, then the built-in
  // choice.
  std::string algorithms = {};
  Logger log{};
  // Receive the metrics weft_collectives_*, the timeline (category "collectives") and the last
  // operations (docs/sight.md). Default: none.
  std::shared_ptr<Metrics> metrics = nullptr;
  std::shared_ptr<TraceWriter> trace = nullptr;
  std::shared_ptr<FlightRecorder> flight_recorder = nullptr;
  // Default: that of the process.
  std::optional<Environment> environment = std::nullopt;
  std::map<std::string, OpenStoreFunction> schemes{};
  // Set by init_process_group(worker), collectives/service.h; programs must not set it.
  std::shared_ptr<const internal::GroupWorkers> workers = nullptr;
};

inline constexpr int kAnySource = -1;  // recv() from whichever rank sends first

struct CollectiveOptions {  // of operations without other options
  Timeout timeout{};        // default: the group's
  // all_gather: kRing, kRecursiveDoubling, kBruck. all_to_all: kPairwise; kBruck when all blocks on
  // all ranks have one length. Default: by size. Here and below, an algorithm that an operation
  // does not have is an error at the caller.
  Algorithm algorithm = Algorithm::kAuto;
};
struct AllReduceOptions {  // of all_reduce()
  ReduceOp op{};
  Timeout timeout{};  // default: the group's
  // Default: by the group's table of algorithms, else by size, number of ranks and hosts.
  Algorithm algorithm = Algorithm::kAuto;
};
struct ReduceScatterOptions {  // of reduce_scatter()
  ReduceOp op{};
  Timeout timeout{};  // default: the group's
  // kRing, kRecursiveHalving.
  Algorithm algorithm = Algorithm::kAuto;
};
struct RootedOptions {  // of broadcast(), gather(), scatter()
  int root = 0;
  Timeout timeout{};  // default: the group's
  // broadcast: kBinomialTree, kScatterAllGather. gather and scatter: kDirect; kBinomialTree, where
  // the tensors of all ranks are of one length.
  Algorithm algorithm = Algorithm::kAuto;
};
struct ReduceOptions {  // of reduce()
  int root = 0;
  ReduceOp op{};
  Timeout timeout{};  // default: the group's
};
struct AllToAllOptions {  // of all_to_all()
  // Rows of the input for each rank, and of the output from each. Empty: equal parts.
  std::vector<int64_t> output_splits = {};
  std::vector<int64_t> input_splits = {};
  Timeout timeout{};
  Algorithm algorithm = Algorithm::kAuto;  // those of all_to_all() in CollectiveOptions
};
struct PointOptions {  // of send() and recv()
  int tag = 0;         // messages of equal tags match
  Timeout timeout{};   // default: the group's
};

struct NewGroupOptions {  // of new_group()
  std::string name = {};  // distinguishes groups of the same ranks
  // Deadline of operations without one of their own. Default: that of this group.
  Timeout timeout{};
  // Deadline for all members to join. Default: 10 minutes.
  Timeout init_timeout{};
};

struct RebuildOptions {  // of rebuild()
  // How long to wait for members that do not join and are not known to be gone. Default: 30 s.
  Timeout timeout{};
};

using TensorList = std::vector<at::Tensor>;  // one tensor per rank, or several of one rank

// Declares an operation in three forms: try_name(), name_async() and name().
#define WEFT_COLLECTIVE(name, parameters, arguments) \
  Status try_##name parameters;                      \
  Work name##_async parameters;                      \
  void name parameters { throw_if_error(try_##name arguments); }

class WEFT_API ProcessGroup {
 public:
  // An empty handle: only assignment and valid() are allowed.
  ProcessGroup() = default;

  bool valid() const { return handle_ != nullptr; }  // refers to a group
  int rank() const;
  int size() const;
  const std::string& name() const;  // the name that errors have
  // "inproc", "shm", "tcp", "nccl", "mpi", or "shm+tcp": shared memory inside hosts, sockets between
  // them.
  std::string_view backend() const;
  // Generation of the group: 1, and one more at each rebuild, or several where members died in it.
  uint32_t generation() const;
  // Number of collective operations begun so far.
  uint64_t sequence() const;
  const std::shared_ptr<Runtime>& runtime() const;
  // Deadline of operations without one of their own.
  absl::Duration timeout() const;
  // For DistributedDataParallel.
  const std::shared_ptr<internal::GroupHandle>& handle() const { return handle_; }

  // Returns when every rank has called it.
  WEFT_COLLECTIVE(barrier, (const CollectiveOptions& options = {}), (options))

  // Reduces the tensors of all ranks, element by element, in place on every rank. The coalesced
  // form takes several tensors of one type and treats them as one.
  WEFT_COLLECTIVE(all_reduce, (const at::Tensor& tensor, const AllReduceOptions& options = {}),
                  (tensor, options))
  WEFT_COLLECTIVE(all_reduce_coalesced,
                  (const TensorList& tensors, const AllReduceOptions& options = {}),
                  (tensors, options))

  // Copies the root's tensor into the tensor of every rank.
  WEFT_COLLECTIVE(broadcast, (const at::Tensor& tensor, const RootedOptions& options = {}),
                  (tensor, options))
  WEFT_COLLECTIVE(broadcast_coalesced,
                  (const TensorList& tensors, const RootedOptions& options = {}),
                  (tensors, options))

  // Reduces the tensors of all ranks in place at the root; those of other ranks stay the same.
  WEFT_COLLECTIVE(reduce, (const at::Tensor& tensor, const ReduceOptions& options = {}),
                  (tensor, options))

  // Sets outputs[r] to the input of rank r, on all ranks. Sizes may differ; each must know all.
  WEFT_COLLECTIVE(all_gather,
                  (const TensorList& outputs, const at::Tensor& input,
                   const CollectiveOptions& options = {}),
                  (outputs, input, options))
  // The same with inputs of equal size, one behind the other in `output`. `input` may be this
  // rank's part of `output`.
  WEFT_COLLECTIVE(all_gather_into_tensor,
                  (const at::Tensor& output, const at::Tensor& input,
                   const CollectiveOptions& options = {}),
                  (output, input, options))

  // Sets outputs[r] at the root to rank r's input, of any size. Other ranks give no outputs.
  WEFT_COLLECTIVE(gather,
                  (const TensorList& outputs, const at::Tensor& input,
                   const RootedOptions& options = {}),
                  (outputs, input, options))
  // Sets the output of rank r to the root's inputs[r], of any size. Other ranks give no inputs.
  WEFT_COLLECTIVE(scatter,
                  (const at::Tensor& output, const TensorList& inputs,
                   const RootedOptions& options = {}),
                  (output, inputs, options))

  // Sets `output` to inputs[rank()], reduced over all ranks. Sizes may differ.
  WEFT_COLLECTIVE(reduce_scatter,
                  (const at::Tensor& output, const TensorList& inputs,
                   const ReduceScatterOptions& options = {}),
                  (output, inputs, options))
  // The same with one input that is cut into equal parts.
  WEFT_COLLECTIVE(reduce_scatter_tensor,
                  (const at::Tensor& output, const at::Tensor& input,
                   const ReduceScatterOptions& options = {}),
                  (output, input, options))

  // Sets outputs[r] to rank r's input for this rank, its inputs[rank()]. Sizes may differ.
  WEFT_COLLECTIVE(all_to_all,
                  (const TensorList& outputs, const TensorList& inputs,
                   const CollectiveOptions& options = {}),
                  (outputs, inputs, options))
  // The same with rows of one tensor.
  WEFT_COLLECTIVE(all_to_all_single,
                  (const at::Tensor& output, const at::Tensor& input,
                   const AllToAllOptions& options = {}),
                  (output, input, options))

  // Sends a tensor to rank `to`. Returns when the tensor may be changed again, which may be before
  // it is received. Messages of one rank with one tag are received in the order sent.
  WEFT_COLLECTIVE(send, (const at::Tensor& tensor, int to, const PointOptions& options = {}),
                  (tensor, to, options))
  // Receives into `tensor` a message of its type and number of elements, from a rank or from any
  // (kAnySource). Returns the rank that sent it.
  StatusOr<int> try_recv(const at::Tensor& tensor, int from = kAnySource,
                         const PointOptions& options = {});
  Work recv_async(const at::Tensor& tensor, int from = kAnySource,
                  const PointOptions& options = {});
  int recv(const at::Tensor& tensor, int from = kAnySource, const PointOptions& options = {}) {
    return value_or_throw(try_recv(tensor, from, options));
  }
  // Receives a tensor of any type and shape.
  StatusOr<at::Tensor> try_recv_any_shape(int from = kAnySource, const PointOptions& options = {});
  at::Tensor recv_any_shape(int from = kAnySource, const PointOptions& options = {}) {
    return value_or_throw(try_recv_any_shape(from, options));
  }

  // Returns an uninitialised tensor in memory on which this group works with fewer copies, if its
  // backend has such memory. The tensor may outlive the group, and keeps its shared memory.
  StatusOr<at::Tensor> try_empty(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) const;
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) const {
    return value_or_throw(try_empty(sizes, type));
  }

  // Makes a group of some of the ranks, numbered anew in the order of the list. Only these ranks
  // call it. `name` distinguishes two groups of the same ranks at one time. The new group is
  // independent: it lives on when this group fails or is destroyed.
  StatusOr<ProcessGroup> try_new_group(const std::vector<int>& ranks,
                                       const NewGroupOptions& options = {}) const;
  ProcessGroup new_group(const std::vector<int>& ranks, const NewGroupOptions& options = {}) const {
    return value_or_throw(try_new_group(ranks, options));
  }
  // Splits the group; all ranks call it. Ranks with the same color make a group, ordered by key and
  // then by rank. A rank with a negative color joins none: its result is not valid().
  StatusOr<ProcessGroup> try_split(int color, int key = 0, const NewGroupOptions& options = {});
  ProcessGroup split(int color, int key = 0, const NewGroupOptions& options = {}) {
    return value_or_throw(try_split(color, key, options));
  }

  // A barrier that names missing ranks: rank 0 names all of them, and tells the other ranks.
  WEFT_COLLECTIVE(monitored_barrier, (const CollectiveOptions& options = {}), (options))

  // Makes the group of the next generation from the survivors of this one, after a failure. Every
  // living rank calls it. Ranks that do not call it within the timeout, and are not known to be
  // gone, are left out, and get an error of kind state when they call it later. A rank that dies
  // inside it is left out, too, which takes up to the timeout, and 30 s at least. New ranks are
  // dense, in the old order. This group has failed afterwards, whether it had before or not.
  StatusOr<ProcessGroup> try_rebuild(const RebuildOptions& options = {});
  ProcessGroup rebuild(const RebuildOptions& options = {}) {
    return value_or_throw(try_rebuild(options));
  }
  // Returns, for a rebuilt group, each rank's number in the generation before; otherwise empty.
  const std::vector<int>& previous_ranks() const;

  // Fails the group at every rank, for the reason given.
  void abort(std::string_view why);
  // Returns OK while the group works, and the first cause after it has failed.
  Status failure() const;
  // Returns the last 256 operations of this rank with their numbers, states and times, as JSON.
  std::string flight_record() const;

 private:
  friend WEFT_API StatusOr<ProcessGroup> try_init_process_group(const ProcessGroupOptions&);
  explicit ProcessGroup(std::shared_ptr<internal::GroupHandle> handle)
      : handle_(std::move(handle)) {}
  Status run(internal::Operation operation, Timeout timeout);
  // Runs an operation on the engine for the CPU, whatever the backend.
  Status run_on_host(internal::Operation* operation, Timeout timeout);
  Work start(internal::Operation operation, Timeout timeout);

  std::shared_ptr<internal::GroupHandle> handle_;
};

#undef WEFT_COLLECTIVE

// Makes a group; returns when all members have joined and are connected. Errors: deadline, naming
// the missing ranks; invalid_argument, on every member, when their options do not fit together.
WEFT_API StatusOr<ProcessGroup> try_init_process_group(const ProcessGroupOptions& options = {});
WEFT_API ProcessGroup init_process_group(const ProcessGroupOptions& options = {});

}  // namespace weft

#endif  // WEFT_COLLECTIVES_PROCESS_GROUP_H_
