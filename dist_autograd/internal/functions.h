#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_FUNCTIONS_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_FUNCTIONS_H_

// The two nodes that a message leaves in the graphs of its ends. A send belongs to its context, a
// recv to the tensors that were received. Input or output i is the i-th of the message's tensors
// that require grad.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/dist_autograd/id.h"
#include "weft/dist_autograd/internal/call_order.h"
#include "weft/dist_autograd/internal/torch_compat.h"
#include "weft/rpc/spi/device_code.h"

namespace weft::internal {

// At the worker that sent the tensors: gradients come in here and go on to what made the tensors.
class WEFT_API SendRpcBackward final : public Node {
 public:
  SendRpcBackward(const WorkerKey& to, const std::vector<at::Tensor>& tensors, CallOrder order);
  ~SendRpcBackward() override { end_of(this); }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "SendRpcBackward"; }

  const WorkerKey to;  // from where the gradients come
  const std::shared_ptr<const CallOrder> order;
};

// At the worker that received them: what reaches it leaves for the other end. Only a pass of its
// context can do that; under a plain backward() it throws.
class WEFT_API RecvRpcBackward final : public Node {
 public:
  RecvRpcBackward(const AutogradContextId& context, const WorkerKey& origin, uint64_t message,
                  std::vector<DeviceCode> devices = {});
  ~RecvRpcBackward() override { end_of(this); }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "RecvRpcBackward"; }

  const AutogradContextId context;
  const WorkerKey origin;
  const uint64_t message;
  // Devices of the tensors at the origin, where their gradients belong; empty: all on the CPU.
  const std::vector<DeviceCode> devices;
};

// Those of `tensors` that require grad, and so have an entry in both nodes.
std::vector<at::Tensor> with_gradient(const std::vector<at::Tensor>& tensors);

// The device of each tensor; empty when all are on the CPU.
std::vector<DeviceCode> devices_of(const std::vector<at::Tensor>& tensors);

// Gives those of the received tensors that require grad a RecvRpcBackward as their history.
void claim(const AutogradContextId& context, const WorkerKey& origin, uint64_t message,
           std::vector<DeviceCode> devices, std::vector<at::Tensor>* tensors);
// Instead: of a context that has been released.
void detach(std::vector<at::Tensor>* tensors);

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_FUNCTIONS_H_
