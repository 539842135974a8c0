#include "weft/dist_autograd/internal/functions.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "torch/csrc/autograd/functions/utils.h"
#include "torch/csrc/autograd/variable.h"
#include "weft/common/error.h"
#include "weft/rpc/spi/device_order.h"

namespace weft::internal {

using torch::autograd::variable_list;

SendRpcBackward::SendRpcBackward(const WorkerKey& receiver, const std::vector<at::Tensor>& tensors,
                                 CallOrder place)
    : to(receiver), order(std::make_shared<const CallOrder>(std::move(place))) {
  torch::autograd::edge_list edges;
  edges.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    add_input_metadata(tensor);
  }
  set_next_edges(std::move(edges));
}

variable_list SendRpcBackward::apply(variable_list&& gradients) { return std::move(gradients); }

// It runs as soon as it can: others wait for it.
RecvRpcBackward::RecvRpcBackward(const AutogradContextId& context_id, const WorkerKey& from,
                                 uint64_t number, std::vector<DeviceCode> where)
    : Node(std::numeric_limits<uint64_t>::max(), {}),
      context(context_id),
      origin(from),
      message(number),
      devices(std::move(where)) {}

variable_list RecvRpcBackward::apply(variable_list&&) {
  throw Error(make_error(ErrorKind::kState,
                         absl::StrCat("a gradient has reached a tensor that was received from ",
                                      to_string(origin), " in ", to_string(context),
                                      ", outside of a distributed backward: call backward() of the "
                                      "context, not of a tensor")));
}

std::vector<at::Tensor> with_gradient(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) out.push_back(tensor);
  }
  return out;
}

std::vector<DeviceCode> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<DeviceCode> devices;
  if (!any_on_device(tensors)) return devices;
  for (const at::Tensor& tensor : tensors) devices.push_back(device_code(tensor.device()));
  return devices;
}

void claim(const AutogradContextId& context, const WorkerKey& origin, uint64_t message,
           std::vector<DeviceCode> devices, std::vector<at::Tensor>* tensors) {
  const auto recv = make_node<RecvRpcBackward>(context, origin, message, std::move(devices));
  for (at::Tensor& tensor : *tensors) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    // With its own flag set it would silently stop to be a leaf and yet not get the history.
    tensor.set_requires_grad(false);
    torch::autograd::set_history(tensor, recv);
  }
}

void detach(std::vector<at::Tensor>* tensors) {
  for (at::Tensor& tensor : *tensors) {
    if (tensor.defined() && tensor.requires_grad()) tensor.set_requires_grad(false);
  }
}

}  // namespace weft::internal
