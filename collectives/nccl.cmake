# weft::nccl, all that knows NCCL: a shared library that a group opens when it is to work by NCCL
# (internal/nccl_library.cc). Nothing links it, and it links no libnccl: it looks the functions up in the one that the
# process has. Host code only: it needs nccl.h, the headers of the toolkit and LibTorch's CUDA libraries, no GPU.
#
# Where weft and Abseil are static, they are in the program, and this library takes them from there: copies of its own
# would be a second Abseil in the process. So programs then export their symbols.
set(_weft_nccl_missing "")
if(NOT WEFT_CUDA)
  set(_weft_nccl_missing "WEFT_CUDA is off")
elseif(WEFT_SANITIZE)
  set(_weft_nccl_missing "this is a sanitizer's build")
else()
  find_package(CUDAToolkit QUIET)
  find_path(WEFT_NCCL_INCLUDE_DIR nccl.h
    HINTS ${CUDAToolkit_INCLUDE_DIRS} "${LibTorch_PREFIX}/../nvidia/nccl/include"
    DOC "Directory with nccl.h")
  mark_as_advanced(WEFT_NCCL_INCLUDE_DIR)
  if(NOT CUDAToolkit_FOUND)
    set(_weft_nccl_missing "there is no CUDA toolkit")
  elseif(NOT EXISTS "${LibTorch_PREFIX}/lib/libc10_cuda.so" OR NOT EXISTS "${LibTorch_PREFIX}/lib/libtorch_cuda.so")
    set(_weft_nccl_missing "this LibTorch is for the CPU only")
  elseif(NOT WEFT_NCCL_INCLUDE_DIR)
    set(_weft_nccl_missing "there is no nccl.h")
  else()
    file(STRINGS "${WEFT_NCCL_INCLUDE_DIR}/nccl.h" _weft_nccl_lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) +[0-9]+")
    list(TRANSFORM _weft_nccl_lines REPLACE "^#define NCCL_[A-Z]+ +([0-9]+).*" "\\1")
    list(JOIN _weft_nccl_lines "." _weft_nccl_version)
    if(_weft_nccl_version VERSION_LESS 2.24)
      set(_weft_nccl_missing "the nccl.h is of NCCL ${_weft_nccl_version}, and 2.24 or newer is needed")
    endif()
  endif()
endif()
if(_weft_nccl_missing)
  message(STATUS "weft: no weft::nccl (process groups by NCCL): ${_weft_nccl_missing}")
  return()
endif()
message(STATUS "weft: weft::nccl (process groups by NCCL) with the nccl.h of NCCL ${_weft_nccl_version}")

weft_side_library(NAME nccl PLUGIN
  SRCS
    internal/nccl/api.cc
    internal/nccl/comm.cc
    internal/nccl/engine.cc
    internal/nccl/library.cc
    internal/nccl/types.cc
    internal/nccl/watch.cc)
target_include_directories(weft_nccl SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS} "${WEFT_NCCL_INCLUDE_DIR}")
# libtorch_cuda brings the operators of CUDA tensors and its libnccl into the process, though no symbol of it is used
# here.
target_link_libraries(weft_nccl PRIVATE LibTorch::LibTorch "${LibTorch_PREFIX}/lib/libc10_cuda.so"
  -Wl,--no-as-needed "${LibTorch_PREFIX}/lib/libtorch_cuda.so" -Wl,--as-needed CUDA::cudart)
if(BUILD_SHARED_LIBS)
  target_link_libraries(weft_nccl PRIVATE weft_common absl::any_invocable absl::function_ref absl::inlined_vector
    absl::span absl::status absl::statusor absl::strings absl::time)
else()
  target_link_options(weft_collectives INTERFACE LINKER:--export-dynamic)
endif()
# What libtorch_cuda wants is found by its own search path, at run time, on machines that have it.
target_link_options(weft_nccl PRIVATE LINKER:--allow-shlib-undefined)
