# Values, tensors and the library; the allocations of a call are counted on the simulated wire.
weft_test(NAME rpc_typed_test LABELS unit PRECOMPILED tensor TIMEOUT 120 SANITIZE asan
  SRCS
    allocation_test.cc
    chunk_place_test.cc
    library_test.cc
    receive_memory_test.cc
    tensor_test.cc
    value_test.cc
    wide_assembler_test.cc
  DEPS rpc testing weft_proto protobuf::libprotobuf)
weft_test(NAME rpc_coroutine_test LABELS unit PRECOMPILED tensor TIMEOUT 60 SANITIZE asan GCC_ASAN
  SRCS
    coroutine_handler_test.cc
  DEPS rpc)
add_subdirectory(compile_fail)
