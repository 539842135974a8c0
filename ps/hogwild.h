#ifndef WEFT_PS_HOGWILD_H_
#define WEFT_PS_HOGWILD_H_

// Hogwild (Recht et al., 2011): parameters that all threads of a process, or all processes of one host, read
// and update in place, without a lock, a server or a message.
//
//   auto net = Net();                                              // equal at each worker
//   weft::ps::SharedMemory memory = weft::ps::share_memory(
//       worker, *net, {.name = "net", .owner = worker.name() == "trainer0" ? "" : "trainer0"});
//   weft::ps::Hogwild table(memory, weft::ps::rule<weft::optim::SGD>({.lr = 0.1}));
//   while (training) {
//     loss(net->forward(batch)).backward();                        // reads what is there now
//     table.push_grads();                                          // net's parameters, those of all
//     net->zero_grad();
//   }
//
// What lies in such memory is written by every process that has it: it is the exception to the rule that
// memory which another worker has made is only read. Two updates of one element at the same time may lose one
// of them; no element is ever read half written. An update of rows (a sparse gradient) touches no other row.
// What the rule keeps (momentum, counts of steps) is a Hogwild's own, and so each process's own.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/time.h"
#include "weft/ps/table.h"

namespace weft {

class Worker;

namespace ps {

namespace internal {
struct SharedRegion;
}

struct ShareOptions {  // of share_memory()
  // What is shared, at its owner: 1 to 128 characters of [A-Za-z0-9-_:./].
  std::string name = "module";
  // "": this worker makes the memory, with the values that its parameters have. Else the worker that does so:
  // the parameters here then have that one's values. It may be this worker: another module of the process.
  std::string owner{};
  // Where another worker is the owner: for it to come and to share. Default: 60 s.
  Timeout deadline{};
};

// A parameter with its name, for messages: it is the same at all that share it.
struct NamedParameter {
  std::string name{};
  at::Tensor tensor{};  // of Float or Double, on the CPU
};

// Parameters in memory of this host. The memory stays as long as a tensor in any process lies in it, whatever
// becomes of the owner. Others can still come as long as the owner has this object, a copy or a Hogwild of it.
// Threads: any.
class WEFT_API SharedMemory {
 public:
  const std::string& name() const;
  const std::string& owner() const;  // the worker that has made it
  int64_t bytes() const;
  // Updates that Hogwilds of all processes have made, at most a few behind.
  uint64_t updates() const;

 private:
  friend class Hogwild;
  friend StatusOr<SharedMemory> try_share_memory(const Worker&, const std::vector<NamedParameter>&,
                                                 const ShareOptions&);
  explicit SharedMemory(std::shared_ptr<internal::SharedRegion> region)
      : region_(std::move(region)) {}

  std::shared_ptr<internal::SharedRegion> region_;
};

// Has these parameters lie in memory that other processes of this host have, too: the tensors stay the same,
// their values move (set_data()). Blocks when another worker is the owner. The parameters must not be used by
// another thread meanwhile. Buffers of a module are not shared.
// Errors, after which no parameter has changed: kind invalid_argument, no parameters, one that is undefined,
// sparse, on a device, not contiguous, no leaf, neither Float nor Double, shares memory with another tensor or
// lies in shared memory already (naming it), or that differs from the owner's (both named); state, the owner
// shares one of this name already; resource, no memory, and no ordinary memory instead; unavailable, the owner
// runs on another host; permission, as another user; peer_lost, it has died or left; deadline, it has not come
// or has not shared that, naming what it shares.
WEFT_API SharedMemory share_memory(const Worker& worker,
                                   const std::vector<NamedParameter>& parameters,
                                   const ShareOptions& options = {});
WEFT_API StatusOr<SharedMemory> try_share_memory(const Worker& worker,
                                                 const std::vector<NamedParameter>& parameters,
                                                 const ShareOptions& options = {});
// The same for a torch::nn::Module, all parameters of its submodules included.
template <class Module>
requires requires(const Module& m) { m.named_parameters(); }
SharedMemory share_memory(const Worker& worker, const Module& module,
                          const ShareOptions& options = {}) {
  std::vector<NamedParameter> parameters;
  for (const auto& one : module.named_parameters()) parameters.push_back({one.key(), one.value()});
  return share_memory(worker, parameters, options);
}

// Applies gradients to parameters where they lie. Copies are the same one, with one state of the rule.
// Threads: all methods from anywhere, at once, without a lock, but for the first push of each parameter.
class WEFT_API Hogwild {
 public:
  // Threads of this process alone. Throws weft::Error, kind invalid_argument: no parameters, one that is no
  // dense leaf of Float or Double on the CPU (its number), an unknown rule or a bad option. `rules`: of users,
  // among which the rule may be.
  Hogwild(std::vector<at::Tensor> parameters, const RuleChoice& rule, const UserRules& rules = {});
  // All processes that have the memory.
  Hogwild(const SharedMemory& memory, const RuleChoice& rule, const UserRules& rules = {});

  // Applies a gradient for each parameter, in their order; an undefined one leaves its parameter. Sparse COO
  // ones change the rows that they have. `rate`: instead of the rule's own. Returns how many updates there had
  // been before. Errors, after which nothing has changed: kind invalid_argument, another number of them, another
  // shape or type, not on the CPU, values that are not finite, or what the rule does not take (naming the
  // parameter).
  uint64_t push(const std::vector<at::Tensor>& gradients, std::optional<double> rate = {}) const;
  StatusOr<uint64_t> try_push(const std::vector<at::Tensor>& gradients,
                              std::optional<double> rate = {}) const;
  // What .grad of the parameters has; it stays there. One thread at a time for each module.
  uint64_t push_grads(std::optional<double> rate = {}) const;
  // Pushes so far, of all that update these parameters.
  uint64_t updates() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ps
}  // namespace weft

#endif  // WEFT_PS_HOGWILD_H_
