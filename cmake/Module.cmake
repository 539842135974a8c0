# weft_module, weft_binary and the install rules.

# <build>/include has one entry, weft, a link to the source root: "weft/rpc/worker.h" is spelled alike in the tree
# and after installation. The source root itself is never an include directory (glibc has a directory rpc/).
function(weft_make_include_dir)
  set(dir "${weft_BINARY_DIR}/include")
  file(MAKE_DIRECTORY "${dir}")
  if(NOT EXISTS "${dir}/weft")
    file(CREATE_LINK "${weft_SOURCE_DIR}" "${dir}/weft" SYMBOLIC)
  endif()
endfunction()

# A folder that is not there yet is left out.
function(weft_add_subdirectory dir)
  if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${dir}/CMakeLists.txt")
    add_subdirectory(${dir})
  endif()
endfunction()

# TODO(soon): while several hands write the tree, a listed file that is not there yet is left out with a warning.
function(weft_existing result)
  set(there "")
  foreach(file IN LISTS ARGN)
    get_filename_component(path "${file}" ABSOLUTE)
    if(EXISTS "${path}")
      list(APPEND there "${file}")
    else()
      message(WARNING "${file} is listed but not there")
    endif()
  endforeach()
  set(${result} "${there}" PARENT_SCOPE)
endfunction()

# weft_library_options(weft_rpc): as objects of a library are compiled, shared or static. What they share is compiled alike.
function(weft_library_options target)
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
endfunction()

# weft_module(NAME rpc SRCS a.cc internal/b.cc DEPS common proto absl::status LibTorch::LibTorch PRIVATE_DEPS gRPC::grpc++)
#
# Makes weft_rpc (alias weft::rpc), shared or static by BUILD_SHARED_LIBS, with hidden visibility. DEPS may name
# modules and, with ::, third-party targets that public headers mention; PRIVATE_DEPS are what only sources use.
# A module without sources becomes an INTERFACE library. Every header outside internal/ is installed.
#
# PRECOMPILED plain (or tensor, autograd): see cmake/Precompiled.cmake.
function(weft_module)
  cmake_parse_arguments(ARG "GENERATED" "NAME;PRECOMPILED" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_module(${ARG_NAME}): unknown arguments ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  set(target weft_${ARG_NAME})
  list(FIND WEFT_MODULES ${ARG_NAME} own_at)
  set(public_deps "")
  foreach(dep IN LISTS ARG_DEPS)
    if(dep MATCHES "::")
      list(APPEND public_deps ${dep})
    else()
      string(REGEX REPLACE "^weft_" "" dep "${dep}")
      list(FIND WEFT_MODULES "${dep}" dep_at)
      if(dep_at LESS 0 OR NOT dep_at LESS own_at)
        message(FATAL_ERROR "weft_module(${ARG_NAME}): ${dep} is not a module that stands before it")
      endif()
      list(APPEND public_deps weft_${dep})
    endif()
  endforeach()
  weft_map_deps(public_deps ${public_deps})
  set(private_deps "")
  foreach(dep IN LISTS ARG_PRIVATE_DEPS)
    if(TARGET weft_${dep})
      list(APPEND private_deps weft_${dep})
    else()
      list(APPEND private_deps ${dep})
    endif()
  endforeach()
  weft_map_deps(private_deps ${private_deps})
  if(NOT ARG_GENERATED)
    weft_existing(ARG_SRCS ${ARG_SRCS})
  endif()
  foreach(dep IN LISTS private_deps)
    if(dep MATCHES "^weft_" AND NOT TARGET ${dep})
      message(WARNING "weft_module(${ARG_NAME}): there is no ${dep}")
      list(REMOVE_ITEM private_deps ${dep})
    endif()
  endforeach()

  if(ARG_SRCS)
    add_library(${target} ${ARG_SRCS})
    set(scope PUBLIC)
    weft_library_options(${target})
    set_target_properties(${target} PROPERTIES
      DEFINE_SYMBOL ""  # so that shared and static objects are the same ones, and come from ccache alike
      VERSION ${weft_VERSION}
      SOVERSION ${weft_VERSION_MAJOR}.${weft_VERSION_MINOR}
      INSTALL_RPATH "$ORIGIN"
      BUILD_RPATH "$ORIGIN"
      LIBRARY_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/lib"
      ARCHIVE_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/lib")
    target_link_libraries(${target} PRIVATE ${private_deps} "$<BUILD_INTERFACE:weft_options>")
    if(ARG_GENERATED)
      target_compile_options(${target} PRIVATE -w)
    elseif(WEFT_FUZZ)
      target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
    endif()
    if(ARG_PRECOMPILED)
      weft_precompile(${target} ${ARG_PRECOMPILED})
    endif()
    if(NOT ARG_GENERATED)
      weft_compile_together(${target} ${WEFT_UNITY})
    endif()
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(weft::${ARG_NAME} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${ARG_NAME})
  target_compile_features(${target} ${scope} cxx_std_20)
  target_include_directories(${target} ${scope}
    "$<BUILD_INTERFACE:${weft_BINARY_DIR}/include>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  target_link_libraries(${target} ${scope} ${public_deps})
  set_property(GLOBAL APPEND PROPERTY WEFT_BUILT_MODULES ${ARG_NAME})

  if(WEFT_INSTALL)
    install(TARGETS ${target} EXPORT weftTargets
      LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
      ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
      RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
    install(DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/weft/${ARG_NAME}"
      FILES_MATCHING PATTERN "*.h" PATTERN "internal" EXCLUDE)
  endif()
endfunction()

# weft_side_library(NAME nccl SRCS internal/nccl/api.cc ... [PLUGIN]): a library beside the module of this folder, weft_nccl
# (alias weft::nccl), with precompiled headers of LibTorch. Programs link it. PLUGIN: none does, a module opens it, so it is
# shared in every build and no part of the package's targets.
function(weft_side_library)
  cmake_parse_arguments(ARG "PLUGIN" "NAME" "SRCS" ${ARGN})
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_side_library(${ARG_NAME}): unknown arguments ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  set(target weft_${ARG_NAME})
  set(kind "")
  set(scope PUBLIC)
  set(export EXPORT weftTargets)
  if(ARG_PLUGIN)
    set(kind SHARED)
    set(scope PRIVATE)
    set(export "")
  endif()
  add_library(${target} ${kind} ${ARG_SRCS})
  add_library(weft::${ARG_NAME} ALIAS ${target})
  weft_library_options(${target})
  set_target_properties(${target} PROPERTIES
    EXPORT_NAME ${ARG_NAME}
    DEFINE_SYMBOL ""
    INSTALL_RPATH "$ORIGIN"
    BUILD_RPATH "$ORIGIN"
    LIBRARY_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/lib"
    ARCHIVE_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/lib")
  if(NOT ARG_PLUGIN)
    set_target_properties(${target} PROPERTIES VERSION ${weft_VERSION} SOVERSION ${weft_VERSION_MAJOR}.${weft_VERSION_MINOR})
  endif()
  target_compile_features(${target} ${scope} cxx_std_20)
  target_include_directories(${target} PRIVATE "${weft_BINARY_DIR}/include")
  target_link_libraries(${target} PRIVATE "$<BUILD_INTERFACE:weft_options>")
  weft_precompile(${target} tensor)
  weft_compile_together(${target} ${WEFT_UNITY})
  if(WEFT_INSTALL)
    install(TARGETS ${target} ${export}
      LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
      ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  endif()
endfunction()

# weft::weft, all modules. Called once, after them.
function(weft_umbrella)
  get_property(modules GLOBAL PROPERTY WEFT_BUILT_MODULES)
  add_library(weft_weft INTERFACE)
  add_library(weft::weft ALIAS weft_weft)
  set_target_properties(weft_weft PROPERTIES EXPORT_NAME weft)
  foreach(module IN LISTS modules)
    target_link_libraries(weft_weft INTERFACE weft_${module})
  endforeach()
  if(WEFT_INSTALL)
    install(TARGETS weft_weft EXPORT weftTargets)
    if(EXISTS "${weft_SOURCE_DIR}/weft.h")
      install(FILES "${weft_SOURCE_DIR}/weft.h" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/weft")
    endif()
  endif()
endfunction()

# weft_compile_together(rpc_test 8): so many sources at once, each of which spends most of its time on the headers that
# all of them include. 0 or 1: each alone.
function(weft_compile_together target batch)
  if(batch GREATER 1)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${batch})
    # g++ takes what is included for a header, where a class had better not have members of unnamed namespaces.
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# weft_binary(NAME weftrun SRCS a.cc DEPS rpc absl::flags [INSTALL] [PRECOMPILED] [EXAMPLE [UNPRECOMPILED]]): a program in
# <build>/bin. PRECOMPILED: with precompiled headers. EXAMPLE: with those, too, unless UNPRECOMPILED, and not optimised.
function(weft_binary)
  cmake_parse_arguments(ARG "INSTALL;PRECOMPILED;EXAMPLE;UNPRECOMPILED" "NAME" "SRCS;DEPS" ${ARGN})
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_binary(${ARG_NAME}): unknown arguments ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  weft_existing(ARG_SRCS ${ARG_SRCS})
  if(NOT ARG_SRCS)
    return()
  endif()
  add_executable(${ARG_NAME} ${ARG_SRCS})
  weft_link_deps(${ARG_NAME} ${ARG_DEPS})
  weft_compile_together(${ARG_NAME} ${WEFT_UNITY})
  if(ARG_EXAMPLE)
    weft_unoptimized(${ARG_NAME})
    if(NOT ARG_UNPRECOMPILED)
      weft_precompile_program(${ARG_NAME} example)
    endif()
  elseif(ARG_PRECOMPILED)
    weft_precompile_program(${ARG_NAME} program)
  endif()
  set_target_properties(${ARG_NAME} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/bin"
    INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  if(ARG_INSTALL AND WEFT_INSTALL)
    install(TARGETS ${ARG_NAME} RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  endif()
endfunction()

# weft_unoptimized(rpc_test): for tests, examples and what they share. Such a program is run a few times and compiled as
# often, and optimising it takes half of that (most of it with a sanitizer); the libraries that it uses are optimised.
function(weft_unoptimized target)
  # g++ otherwise compiles each std::move and std::forward as a function that is called.
  target_compile_options(${target} PRIVATE -O0 $<$<CXX_COMPILER_ID:GNU>:-ffold-simple-inlines>)
  set_target_properties(${target} PROPERTIES WEFT_UNOPTIMIZED ON)  # see cmake/Sanitizers.cmake
endfunction()

# weft_optimized_sources(protocol_test.cc): of a program that weft_unoptimized() was called of, those that compute much.
function(weft_optimized_sources)
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS -O2 SKIP_PRECOMPILE_HEADERS ON
    SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# weft_part(NAME example_parts SRCS loss_log.cc async_ps/digits.cc DEPS LibTorch::LibTorch): sources that several examples share,
# compiled once. A program has its name among its DEPS.
function(weft_part)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS" ${ARGN})
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_part(${ARG_NAME}): unknown arguments ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  add_library(weft_${ARG_NAME} STATIC EXCLUDE_FROM_ALL ${ARG_SRCS})
  weft_link_deps(weft_${ARG_NAME} ${ARG_DEPS})
  weft_compile_together(weft_${ARG_NAME} ${WEFT_UNITY})
  weft_unoptimized(weft_${ARG_NAME})
  weft_precompile_program(weft_${ARG_NAME} example)
endfunction()

# Links modules (plain names) and third-party targets to a program or a test.
function(weft_link_deps target)
  set(deps "")
  foreach(dep IN LISTS ARGN)
    if(dep MATCHES "::" OR NOT TARGET weft_${dep})
      list(APPEND deps ${dep})
    else()
      list(APPEND deps weft_${dep})
    endif()
  endforeach()
  weft_map_deps(deps ${deps})
  target_link_libraries(${target} PRIVATE ${deps} weft_options)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_include_directories(${target} PRIVATE "${weft_BINARY_DIR}/include")
endfunction()

function(weft_install_package)
  include(CMakePackageConfigHelpers)
  set(dir "${CMAKE_INSTALL_LIBDIR}/cmake/weft")
  configure_package_config_file("${weft_SOURCE_DIR}/cmake/weftConfig.cmake.in"
    "${weft_BINARY_DIR}/weftConfig.cmake" INSTALL_DESTINATION "${dir}")
  write_basic_package_version_file("${weft_BINARY_DIR}/weftConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
  install(EXPORT weftTargets NAMESPACE weft:: DESTINATION "${dir}")
  install(FILES "${weft_BINARY_DIR}/weftConfig.cmake" "${weft_BINARY_DIR}/weftConfigVersion.cmake"
    "${weft_SOURCE_DIR}/cmake/FindLibTorch.cmake" "${weft_SOURCE_DIR}/cmake/Dependencies.cmake"
    DESTINATION "${dir}")
  # For programs without CMake. Static archives need the order and the flags of everything below them: CMake knows those.
  if(BUILD_SHARED_LIBS)
    get_property(modules GLOBAL PROPERTY WEFT_BUILT_MODULES)
    list(REVERSE modules)
    list(TRANSFORM modules PREPEND "-lweft_" OUTPUT_VARIABLE _weft_pc_libraries)
    list(JOIN _weft_pc_libraries " " _weft_pc_libraries)
    list(TRANSFORM LibTorch_RUNTIME_DIRS PREPEND "-Wl,-rpath," OUTPUT_VARIABLE _weft_pc_runtime)
    list(JOIN _weft_pc_runtime " " _weft_pc_runtime)
    configure_file("${weft_SOURCE_DIR}/cmake/weft.pc.in" "${weft_BINARY_DIR}/weft.pc" @ONLY)
    install(FILES "${weft_BINARY_DIR}/weft.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
  endif()
endfunction()
