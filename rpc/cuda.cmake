# weft::cuda, all that knows CUDA: a shared library that the core opens when devices are used
# (internal/device/cuda_library.cc). Nothing links it, so programs load no CUDA library before that. Host code only: it needs
# the headers of the toolkit and LibTorch's CUDA libraries, no compiler for devices and no GPU.
#
# Where weft and Abseil are static, they are in the program, and this library takes them from there: copies of its own
# would be a second Abseil in the process. So programs then export their symbols.
set(_weft_cuda_missing "")
if(NOT WEFT_CUDA)
  set(_weft_cuda_missing "WEFT_CUDA is off")
elseif(WEFT_SANITIZE)
  set(_weft_cuda_missing "this is a sanitizer's build")
else()
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND)
    set(_weft_cuda_missing "there is no CUDA toolkit")
  elseif(NOT EXISTS "${LibTorch_PREFIX}/lib/libc10_cuda.so" OR NOT EXISTS "${LibTorch_PREFIX}/lib/libtorch_cuda.so")
    set(_weft_cuda_missing "this LibTorch is for the CPU only")
  endif()
endif()
if(_weft_cuda_missing)
  message(STATUS "weft: no weft::cuda (tensors on GPUs): ${_weft_cuda_missing}")
  return()
endif()
message(STATUS "weft: weft::cuda (tensors on GPUs) with CUDA toolkit ${CUDAToolkit_VERSION}")

weft_side_library(NAME cuda PLUGIN
  SRCS
    internal/device/cuda/copier.cc
    internal/device/cuda/library.cc
    internal/device/cuda/slots.cc
    internal/device/cuda/streams.cc)
target_include_directories(weft_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
# libtorch_cuda brings the operators of CUDA tensors into the process, though no symbol of it is used here.
target_link_libraries(weft_cuda PRIVATE LibTorch::LibTorch "${LibTorch_PREFIX}/lib/libc10_cuda.so"
  -Wl,--no-as-needed "${LibTorch_PREFIX}/lib/libtorch_cuda.so" -Wl,--as-needed CUDA::cudart)
if(BUILD_SHARED_LIBS)
  target_link_libraries(weft_cuda PRIVATE weft_common absl::status absl::statusor absl::strings absl::time)
else()
  target_link_options(weft_rpc INTERFACE LINKER:--export-dynamic
    "$<BUILD_INTERFACE:LINKER:-rpath,${weft_BINARY_DIR}/lib>")
endif()
# What libtorch_cuda wants is found by its own search path, at run time, on machines that have it.
target_link_options(weft_cuda PRIVATE LINKER:--allow-shlib-undefined)
