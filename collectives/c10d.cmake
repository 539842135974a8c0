# weft::c10d, a group as a backend of LibTorch's c10d: a library of its own, because c10d's classes change with LibTorch
# and few programs want them. Sanitizer builds leave it out: all that it does is done by weft::collectives.
option(WEFT_C10D "Process groups as backends of LibTorch's c10d (weft::c10d)" ON)
if(NOT WEFT_C10D OR WEFT_SANITIZE)
  return()
endif()
weft_side_library(NAME c10d SRCS c10d_backend.cc)
target_link_libraries(weft_c10d PUBLIC weft_collectives LibTorch::LibTorch)
