# WEFT_SANITIZE (a list: address, undefined, thread, leak) and WEFT_FUZZ for everything that weft compiles.
#
# weft_options is the interface target that carries the flags of our own build: warnings, thread-safety
# analysis, sanitizers, path mapping. It is linked privately and never exported, so that no flag of ours
# reaches a user's code.
add_library(weft_options INTERFACE)
# Everything starts threads, through what it links; said here, so that all have it and share precompiled headers.
target_compile_options(weft_options INTERFACE -pthread)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 18)
  # Since 18, clang has another name for a template whose parameters depend on each other than older compilers, with
  # which Debian's Abseil was built.
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_LIBRARIES absl::cord)
  check_cxx_source_compiles("#include <string>\n#include \"absl/strings/cord.h\"\n
    int main(int, char** argv) { return absl::Cord(std::string(argv[0])).empty(); }" WEFT_ABSEIL_HAS_NAMES_OF_CLANG_18)
  unset(CMAKE_REQUIRED_LIBRARIES)
  if(NOT WEFT_ABSEIL_HAS_NAMES_OF_CLANG_18)
    target_compile_options(weft_options INTERFACE -fclang-abi-compat=17)
  endif()
endif()

set(_weft_sanitizers ${WEFT_SANITIZE})
string(REPLACE "," ";" _weft_sanitizers "${_weft_sanitizers}")
if("thread" IN_LIST _weft_sanitizers AND "address" IN_LIST _weft_sanitizers)
  message(FATAL_ERROR "WEFT_SANITIZE: thread and address exclude each other (asked for: ${WEFT_SANITIZE})")
endif()
if(WEFT_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "WEFT_FUZZ needs clang with libFuzzer, the compiler is ${CMAKE_CXX_COMPILER_ID}")
  endif()
  # The modules themselves get -fsanitize=fuzzer-no-link in weft_module: coverage of tests would steer nothing.
endif()
if(_weft_sanitizers)
  list(JOIN _weft_sanitizers "," _weft_joined)
  target_compile_options(weft_options INTERFACE
    -fsanitize=${_weft_joined} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1)
  target_link_options(weft_options INTERFACE -fsanitize=${_weft_joined})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND "undefined" IN_LIST _weft_sanitizers)
    # Types of LibTorch and gRPC have no RTTI that would be visible here under the same identity, so these two
    # checks report their libraries, not our code.
    target_compile_options(weft_options INTERFACE -fno-sanitize=vptr,function)
    target_link_options(weft_options INTERFACE -fno-sanitize=vptr,function)
    # Checks of each use of a pointer are 40 % of the objects of tests that weft_unoptimized() was called of, and of
    # the time to make them. AddressSanitizer reports a use of a null pointer, too, and the modules keep both checks.
    # Here, since the options of a target itself stand before those of what it links: -fsanitize=undefined would undo
    # them there.
    target_compile_options(weft_options INTERFACE
      $<$<BOOL:$<TARGET_PROPERTY:WEFT_UNOPTIMIZED>>:-fno-sanitize=null,alignment>)
  endif()
endif()

if(PROJECT_IS_TOP_LEVEL)
  target_compile_options(weft_options INTERFACE -Wall -Wextra)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # What LibTorch's headers leave in memory is not garbage: a sixth of the time went into looking for some.
    target_compile_options(weft_options INTERFACE --param=ggc-min-heapsize=1048576)
  endif()
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    target_compile_options(weft_options INTERFACE -Wthread-safety -Werror=thread-safety)
  endif()
  # __FILE__ says weft/rpc/worker.cc, wherever the tree and the build folder lie. The last map that fits wins
  # in g++, the longest in clang. The relative ones are for ccache, which makes paths relative (CCACHE_BASEDIR).
  file(RELATIVE_PATH _weft_up "${CMAKE_BINARY_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
  target_compile_options(weft_options INTERFACE
    "-ffile-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}/=weft/"
    "-ffile-prefix-map=${CMAKE_BINARY_DIR}/include/="
    "-ffile-prefix-map=${_weft_up}/=weft/"
    "-ffile-prefix-map=include/weft/=weft/")
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
    find_program(WEFT_CCACHE ccache)
    mark_as_advanced(WEFT_CCACHE)
    if(WEFT_CCACHE)
      # Two clones share objects only when paths inside them are relative to the clone.
      set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
        "CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR}" CCACHE_NOHASHDIR=1
        "CCACHE_SLOPPINESS=pch_defines,time_macros" "${WEFT_CCACHE}")
    endif()
  endif()
endif()
