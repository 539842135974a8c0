#ifndef WEFT_RPC_PLAIN_TENSOR_H_
#define WEFT_RPC_PLAIN_TENSOR_H_

// LibTorch's lazy views: conj() and the negative of an imaginary part change how a tensor's memory is to be
// read, not the memory, and a tensor of all zeros has none. is_contiguous() says true of all three.

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"

namespace weft {

// Whether the elements of the defined, strided `tensor` lie in its memory one after another and as they
// are, so that its bytes may be read and written instead of it. Any thread, any device.
WEFT_API bool is_plain(const at::Tensor& tensor);

// The same values in such memory, detached: of `tensor` itself where is_plain(), else of a copy on its
// device. Any thread; throws what LibTorch throws where there is no memory.
WEFT_API at::Tensor plain(const at::Tensor& tensor);

}  // namespace weft

#endif  // WEFT_RPC_PLAIN_TENSOR_H_
