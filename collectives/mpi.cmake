# weft::mpi, groups whose operations MPI performs: a library of its own, with all that knows MPI. A program links it and
# hands what it has to its groups (collectives/mpi.h). Sanitizer builds leave it out: MPI's own memory and threads are
# not theirs.
option(WEFT_MPI "Process groups by MPI (weft::mpi), where an MPI with its headers is installed" ON)
set(_weft_mpi_missing "")
if(NOT WEFT_MPI)
  set(_weft_mpi_missing "WEFT_MPI is off")
elseif(WEFT_SANITIZE)
  set(_weft_mpi_missing "this is a sanitizer's build")
else()
  find_program(WEFT_MPICC NAMES mpicc.openmpi mpicc DOC "MPI's compiler, which says where its headers are")
  mark_as_advanced(WEFT_MPICC)
  if(NOT WEFT_MPICC)
    set(_weft_mpi_missing "there is no mpicc (libopenmpi-dev)")
  else()
    enable_language(C)  # which FindMPI asks for, nothing else
    find_package(MPI QUIET COMPONENTS C)
    if(NOT TARGET MPI::MPI_C)
      set(_weft_mpi_missing "${WEFT_MPICC} does not say where MPI is")
    endif()
  endif()
endif()
if(_weft_mpi_missing)
  message(STATUS "weft: no weft::mpi (process groups by MPI): ${_weft_mpi_missing}")
  return()
endif()
message(STATUS "weft: weft::mpi (process groups by MPI) with MPI ${MPI_C_VERSION} of ${WEFT_MPICC}")

weft_side_library(NAME mpi
  SRCS
    internal/mpi/engine.cc
    internal/mpi/life.cc
    internal/mpi/transfer.cc
    internal/mpi/types.cc)
# Its own headers have no part of MPI, so programs need none to compile.
target_compile_definitions(weft_mpi PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)  # its bindings for C++, long abandoned
target_include_directories(weft_mpi SYSTEM PRIVATE ${MPI_C_INCLUDE_DIRS})
target_link_libraries(weft_mpi PUBLIC weft_collectives
  PRIVATE ${MPI_C_LIBRARIES} absl::function_ref absl::strings)
