# Precompiled headers: what a source spends most of its time on is LibTorch's headers (torch/torch.h takes g++ 24 s,
# ATen/core/Tensor.h with Abseil and the standard library 6 s), and a source of ours rarely needs more than a few
# seconds beyond them. They hold nothing of weft's own, so that a change in the tree rebuilds none of them; those of
# the examples, each of which includes all of weft anyway, are the exception.
#
# A source still includes what it uses: with WEFT_PRECOMPILED_HEADERS=OFF nothing is precompiled, which is what a
# project that adds weft with add_subdirectory gets.
option(WEFT_PRECOMPILED_HEADERS "Precompile the headers of LibTorch, Abseil and GoogleTest" ${PROJECT_IS_TOP_LEVEL})

set(_weft_pch_plain <algorithm> <atomic> <cstdint> <cstring> <deque> <functional> <map> <memory> <optional> <set>
  <string> <string_view> <utility> <vector> <absl/container/flat_hash_map.h> <absl/container/flat_hash_set.h>
  <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/synchronization/mutex.h> <absl/time/time.h>)
set(_weft_pch_tensor ${_weft_pch_plain} <ATen/core/Tensor.h>)
set(_weft_pch_autograd ${_weft_pch_tensor} <ATen/Functions.h> <ATen/TensorOperators.h>
  <torch/csrc/autograd/function.h> <torch/csrc/autograd/variable.h>)
set(_weft_pch_program ${_weft_pch_tensor} <ATen/TensorOperators.h> <ATen/ops/empty.h>)
# Every example includes weft.h.
set(_weft_pch_example ${_weft_pch_program} <weft/weft.h>)
set(_weft_pch_plain_test ${_weft_pch_plain} <gmock/gmock.h> <gtest/gtest.h>)
set(_weft_pch_tensor_test ${_weft_pch_program} <gmock/gmock.h> <gtest/gtest.h>)
# Not torch/torch.h: the templates that it uses itself take g++ 8 s in each source, precompiled or not.
set(_weft_pch_torch_test ${_weft_pch_tensor_test} <torch/autograd.h> <torch/types.h>)

# A target of its own compiles the headers of one kind: a library that took them from another library would wait until
# all of that is built, and ./dev demo would build it for its headers alone.
function(_weft_precompiled_target shared kind)
  set(source "${weft_BINARY_DIR}/pch/${shared}.cc")
  if(NOT EXISTS "${source}")
    file(WRITE "${source}" "// CMake wants a source.\n")
  endif()
  add_library(${shared} OBJECT EXCLUDE_FROM_ALL "${source}")
  weft_link_deps(${shared} absl::flat_hash_map absl::statusor absl::strings absl::synchronization absl::time)
  if(NOT kind MATCHES "^plain")
    weft_link_deps(${shared} LibTorch::LibTorch)
  endif()
  target_precompile_headers(${shared} PRIVATE ${_weft_pch_${kind}})
  if(CMAKE_CXX_COMPILER_LAUNCHER)
    set_target_properties(${shared} PROPERTIES
      CXX_COMPILER_LAUNCHER "${weft_SOURCE_DIR}/scripts/new_pch.sh;${CMAKE_CXX_COMPILER_LAUNCHER}")
  endif()
endfunction()

# weft_precompile(weft_rpc tensor): headers for a library, of the kind plain, tensor or autograd.
function(weft_precompile target kind)
  if(NOT WEFT_PRECOMPILED_HEADERS)
    return()
  endif()
  set(shared weft_pch_library_${kind})
  if(NOT TARGET ${shared})
    _weft_precompiled_target(${shared} ${kind})
    # Precompiled headers are of use only to sources with the same flags.
    weft_library_options(${shared})
    if(WEFT_FUZZ)
      target_compile_options(${shared} PRIVATE -fsanitize=fuzzer-no-link)
    endif()
  endif()
  target_precompile_headers(${target} REUSE_FROM ${shared})
endfunction()

# weft_precompile_program(rpc_test tensor_test): the same for programs, of the kind program or, for one that
# weft_unoptimized() was called of, example, plain_test, tensor_test or torch_test.
function(weft_precompile_program target kind)
  if(NOT WEFT_PRECOMPILED_HEADERS)
    return()
  endif()
  set(shared weft_pch_${kind})
  if(NOT TARGET ${shared})
    _weft_precompiled_target(${shared} ${kind})
    if(kind MATCHES "_test$")
      target_link_libraries(${shared} PRIVATE GTest::gmock GTest::gtest)
    endif()
    if(NOT kind STREQUAL "program")
      weft_unoptimized(${shared})
    endif()
  endif()
  target_precompile_headers(${target} REUSE_FROM ${shared})
endfunction()
