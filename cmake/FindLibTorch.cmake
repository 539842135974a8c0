# Finds LibTorch and makes one imported target, LibTorch::LibTorch.
#
# Why not find_package(Torch): the configuration of a CUDA build wants a working CUDA language in CMake and
# pulls every CUDA library into every program. We link libtorch_cpu and libc10 by their paths.
#
# Where it looks, in this order: WEFT_LIBTORCH (variable, then environment), LibTorch_ROOT, Torch_ROOT,
# Torch_DIR (".../share/cmake/Torch"), CMAKE_PREFIX_PATH, and the environments that ./dev made below
# ${WEFT_CACHE:-$HOME/.cache/weft}.
#
# The wheel ships old google/protobuf headers in its include directory, which break generated code. So the
# target's include directory is a filtered one in the build folder: a link to every entry but google.
#
# Result: LibTorch_FOUND, LibTorch_PREFIX, LibTorch_VERSION, LibTorch_RUNTIME_DIRS (for rpath), LibTorch_OLD_ABI.
include(FindPackageHandleStandardArgs)

function(_weft_libtorch_is_prefix dir result)
  if(EXISTS "${dir}/include/ATen/core/Tensor.h" AND EXISTS "${dir}/lib/libtorch_cpu.so"
     AND EXISTS "${dir}/lib/libc10.so")
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

set(_weft_candidates "")
set(_weft_named "")
if(WEFT_LIBTORCH)
  set(_weft_named "${WEFT_LIBTORCH}")
elseif(DEFINED ENV{WEFT_LIBTORCH} AND NOT "$ENV{WEFT_LIBTORCH}" STREQUAL "")
  set(_weft_named "$ENV{WEFT_LIBTORCH}")
endif()
if(_weft_named)
  # A prefix that was named is taken or refused, never replaced in silence by another one.
  list(APPEND _weft_candidates "${_weft_named}" "${_weft_named}/torch")
else()
  foreach(_weft_variable LibTorch_ROOT Torch_ROOT)
    if(${_weft_variable})
      list(APPEND _weft_candidates "${${_weft_variable}}")
    endif()
  endforeach()
  if(Torch_DIR)
    get_filename_component(_weft_dir "${Torch_DIR}/../../.." ABSOLUTE)
    list(APPEND _weft_candidates "${_weft_dir}")
  endif()
  foreach(_weft_dir IN LISTS CMAKE_PREFIX_PATH)
    list(APPEND _weft_candidates "${_weft_dir}" "${_weft_dir}/../..")
  endforeach()
  if(WEFT_LIBTORCH_DEFAULT)  # an installed weft remembers where it was built
    list(APPEND _weft_candidates "${WEFT_LIBTORCH_DEFAULT}")
  endif()
  set(_weft_cache "$ENV{WEFT_CACHE}")
  if(NOT _weft_cache)
    set(_weft_cache "$ENV{HOME}/.cache/weft")
  endif()
  file(GLOB _weft_found "${_weft_cache}/full-*/lib/python3*/site-packages/torch"
       "${_weft_cache}/*/lib/python3*/site-packages/torch")
  list(APPEND _weft_candidates ${_weft_found})
endif()

set(LibTorch_PREFIX "")
foreach(_weft_dir IN LISTS _weft_candidates)
  _weft_libtorch_is_prefix("${_weft_dir}" _weft_ok)
  if(_weft_ok)
    get_filename_component(LibTorch_PREFIX "${_weft_dir}" ABSOLUTE)
    break()
  endif()
endforeach()

set(LibTorch_VERSION "")
if(LibTorch_PREFIX AND EXISTS "${LibTorch_PREFIX}/include/torch/headeronly/version.h")
  set(_weft_version_file "${LibTorch_PREFIX}/include/torch/headeronly/version.h")
else()
  set(_weft_version_file "${LibTorch_PREFIX}/include/torch/csrc/api/include/torch/version.h")
endif()
if(LibTorch_PREFIX AND EXISTS "${_weft_version_file}")
  foreach(_weft_part MAJOR MINOR PATCH)
    file(STRINGS "${_weft_version_file}" _weft_line REGEX "define TORCH_VERSION_${_weft_part} +[0-9]+")
    string(REGEX MATCH "[0-9]+$" _weft_${_weft_part} "${_weft_line}")
  endforeach()
  set(LibTorch_VERSION "${_weft_MAJOR}.${_weft_MINOR}.${_weft_PATCH}")
endif()

if(_weft_named AND NOT LibTorch_PREFIX)
  set(LibTorch_NOT_FOUND_MESSAGE
      "WEFT_LIBTORCH is ${_weft_named}, but there is no include/ATen/core/Tensor.h and lib/libtorch_cpu.so below it")
else()
  set(LibTorch_NOT_FOUND_MESSAGE
      "give its prefix with -DWEFT_LIBTORCH=DIR, or run ./dev build, which installs the torch wheel")
endif()
find_package_handle_standard_args(
  LibTorch REQUIRED_VARS LibTorch_PREFIX VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${LibTorch_NOT_FOUND_MESSAGE}")

# What its own configuration gives to programs.
set(LibTorch_OLD_ABI FALSE)
set(_weft_torch_config "${LibTorch_PREFIX}/share/cmake/Torch/TorchConfig.cmake")
if(LibTorch_PREFIX AND EXISTS "${_weft_torch_config}")
  file(STRINGS "${_weft_torch_config}" _weft_line REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(_weft_line)
    set(LibTorch_OLD_ABI TRUE)
  endif()
endif()

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  set(_weft_filtered "${CMAKE_BINARY_DIR}/weft_libtorch_include")
  # Made again when the prefix changes; otherwise left alone, so that nothing is rebuilt for nothing.
  set(_weft_stamp "${_weft_filtered}/.prefix")
  set(_weft_old "")
  if(EXISTS "${_weft_stamp}")
    file(READ "${_weft_stamp}" _weft_old)
  endif()
  if(NOT _weft_old STREQUAL LibTorch_PREFIX)
    file(REMOVE_RECURSE "${_weft_filtered}")
    file(MAKE_DIRECTORY "${_weft_filtered}")
    file(GLOB _weft_entries RELATIVE "${LibTorch_PREFIX}/include" "${LibTorch_PREFIX}/include/*")
    foreach(_weft_entry IN LISTS _weft_entries)
      if(NOT _weft_entry STREQUAL "google")
        file(CREATE_LINK "${LibTorch_PREFIX}/include/${_weft_entry}" "${_weft_filtered}/${_weft_entry}" SYMBOLIC)
      endif()
    endforeach()
    file(WRITE "${_weft_stamp}" "${LibTorch_PREFIX}")
  endif()

  # The wheel's libtorch_cpu wants libcudart and libcupti, which lie in wheels beside it.
  set(LibTorch_RUNTIME_DIRS "${LibTorch_PREFIX}/lib")
  file(GLOB _weft_nvidia "${LibTorch_PREFIX}/../nvidia/*/lib")
  foreach(_weft_dir IN LISTS _weft_nvidia)
    file(GLOB _weft_needed "${_weft_dir}/libcudart.so*" "${_weft_dir}/libcupti.so*")
    if(_weft_needed)
      get_filename_component(_weft_dir "${_weft_dir}" ABSOLUTE)
      list(APPEND LibTorch_RUNTIME_DIRS "${_weft_dir}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES LibTorch_RUNTIME_DIRS)

  add_library(LibTorch::LibTorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(LibTorch::LibTorch SYSTEM INTERFACE
    "${_weft_filtered}" "${_weft_filtered}/torch/csrc/api/include")
  target_link_libraries(LibTorch::LibTorch INTERFACE
    "${LibTorch_PREFIX}/lib/libtorch_cpu.so" "${LibTorch_PREFIX}/lib/libc10.so")
  # CMake adds the directories of the two libraries to the build rpath by itself, not those of what they need.
  foreach(_weft_dir IN LISTS LibTorch_RUNTIME_DIRS)
    target_link_options(LibTorch::LibTorch INTERFACE
      "LINKER:-rpath,${_weft_dir}" "LINKER:-rpath-link,${_weft_dir}")
  endforeach()
  target_compile_features(LibTorch::LibTorch INTERFACE cxx_std_20)
endif()
