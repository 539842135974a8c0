# Finds what weft needs, and prints what was found. Also used by an installed weft (weftConfig.cmake).
#
# WeftDeps::grpc and WeftDeps::protobuf stand for gRPC and protobuf wherever they come from; weft_module puts
# them in the place of gRPC::grpc++ and protobuf::libprotobuf, so module lists need not know about it.
include(CMakeFindDependencyMacro)

if(NOT DEFINED THREADS_PREFER_PTHREAD_FLAG)
  set(THREADS_PREFER_PTHREAD_FLAG ON)
endif()
find_package(Threads REQUIRED)
find_package(absl CONFIG REQUIRED)
# Debian's protobuf has no CMake configuration; newer builds from source have only that.
find_package(Protobuf CONFIG QUIET)
if(NOT TARGET protobuf::libprotobuf)
  find_package(Protobuf MODULE REQUIRED)
endif()
find_package(gRPC CONFIG REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(LibTorch 2.11 REQUIRED)
if(WEFT_PROMETHEUS)
  find_package(prometheus-cpp CONFIG REQUIRED)
endif()

# The static archives, from pkg-config, since Debian's CMake targets name only the shared libraries.
# The usual suspects of the C library stay dynamic.
function(_weft_static_flags result)
  find_package(PkgConfig REQUIRED)
  execute_process(COMMAND "${PKG_CONFIG_EXECUTABLE}" --static --libs ${ARGN}
    OUTPUT_VARIABLE flags RESULT_VARIABLE code ERROR_VARIABLE error OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "WEFT_STATIC_GRPC: pkg-config --static --libs ${ARGN} failed: ${error}")
  endif()
  separate_arguments(flags UNIX_COMMAND "${flags}")
  set(kept "")
  foreach(flag IN LISTS flags)
    if(flag MATCHES "^-l" AND NOT flag MATCHES "^-l(pthread|dl|m|rt|atomic)$")
      list(APPEND kept "${flag}")
    endif()
  endforeach()
  list(REVERSE kept)
  list(REMOVE_DUPLICATES kept)
  list(REVERSE kept)
  set(${result} "${kept}" PARENT_SCOPE)
endfunction()

if(NOT TARGET WeftDeps::grpc)
  add_library(WeftDeps::grpc INTERFACE IMPORTED GLOBAL)
  add_library(WeftDeps::protobuf INTERFACE IMPORTED GLOBAL)
  if(WEFT_STATIC_GRPC)
    # One group for all three: they share Abseil, and a second copy in the process would not work.
    _weft_static_flags(_weft_flags grpc++ protobuf absl_status absl_statusor absl_strings absl_str_format
      absl_time absl_synchronization absl_flat_hash_map absl_flags absl_flags_parse absl_random_random
      absl_hash absl_cord)
    add_library(WeftDeps::static_group INTERFACE IMPORTED GLOBAL)
    target_link_libraries(WeftDeps::static_group INTERFACE
      -Wl,-Bstatic -Wl,--start-group ${_weft_flags} -Wl,--end-group -Wl,-Bdynamic
      Threads::Threads ${CMAKE_DL_LIBS} rt m atomic)
    target_link_libraries(WeftDeps::grpc INTERFACE WeftDeps::static_group)
    target_link_libraries(WeftDeps::protobuf INTERFACE WeftDeps::static_group)
  else()
    target_link_libraries(WeftDeps::grpc INTERFACE gRPC::grpc++)
    target_link_libraries(WeftDeps::protobuf INTERFACE protobuf::libprotobuf)
  endif()
endif()

# Translates the third-party names of a module's list.
function(weft_map_deps result)
  set(mapped "")
  foreach(dep IN LISTS ARGN)
    if(dep STREQUAL "gRPC::grpc++")
      list(APPEND mapped WeftDeps::grpc)
    elseif(dep STREQUAL "protobuf::libprotobuf")
      list(APPEND mapped WeftDeps::protobuf)
    elseif(WEFT_STATIC_GRPC AND dep MATCHES "^(absl|OpenSSL)::")
      list(APPEND mapped WeftDeps::static_group)
    elseif(WEFT_STATIC_GRPC AND dep MATCHES "^gRPC::")
      message(FATAL_ERROR "WEFT_STATIC_GRPC: ${dep} has no static counterpart in cmake/Dependencies.cmake")
    else()
      list(APPEND mapped ${dep})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES mapped)
  set(${result} "${mapped}" PARENT_SCOPE)
endfunction()

if(NOT CMAKE_FIND_PACKAGE_NAME STREQUAL "weft")
  foreach(_weft_variable absl_VERSION Protobuf_VERSION gRPC_VERSION)
    if(NOT ${_weft_variable})
      set(${_weft_variable} "unknown version")
    endif()
  endforeach()
  message(STATUS "weft: LibTorch ${LibTorch_VERSION} in ${LibTorch_PREFIX}")
  message(STATUS "weft: gRPC ${gRPC_VERSION}, protobuf ${Protobuf_VERSION}, Abseil ${absl_VERSION}")
endif()
