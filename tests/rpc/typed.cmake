# Values, tensors and the library; the allocations of a call are counted on the simulated wire.
weft_test(NAME rpc_typed_test GROUPS 1 LABELS unit PRECOMPILED tensor TIMEOUT 120 SANITIZE asan
  SRCS
    allocation_test.cc
    chunk_place_test.cc
    library_test.cc
    operators_test.cc
    receive_memory_test.cc
    safetensors_test.cc
    tensor_test.cc
    value_test.cc
    wide_assembler_test.cc
  DEPS rpc testing weft_proto protobuf::libprotobuf)
weft_test(NAME rpc_coroutine_test GROUPS 1 LABELS unit PRECOMPILED tensor TIMEOUT 60 SANITIZE asan GCC_ASAN
  SRCS
    coroutine_handler_test.cc
  DEPS rpc)
# Beside Python's package, where that is installed.
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND AND WEFT_TEST_SET STREQUAL "all")
  add_executable(safetensors_copy safetensors_copy.cc)
  weft_link_deps(safetensors_copy rpc)
  set_target_properties(safetensors_copy PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/tests")
  weft_precompile_program(safetensors_copy program)
  add_test(NAME rpc.safetensors_oracle
    COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/safetensors_oracle_test.py" $<TARGET_FILE:safetensors_copy>)
  set_tests_properties(rpc.safetensors_oracle PROPERTIES LABELS oracle TIMEOUT 60 SKIP_RETURN_CODE 77)
endif()
