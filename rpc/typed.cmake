# Everything that knows types: values, signatures, the library and the calls.
set(WEFT_RPC_TYPED_SRCS
  call.cc
  library.cc
  codec.cc
  internal/aten/allow_list.cc
  internal/aten/operators.cc
  internal/codec/exceptions.cc
  internal/agent/receive_memory.cc
  internal/agent/tensor_meta.cc
  internal/agent/tensor_parts.cc)
