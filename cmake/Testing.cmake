# weft_test and weft_fuzzer.

# weft_test(NAME common_test SRCS a_test.cc ... LABELS unit TIMEOUT 120 [DEPS rpc LibTorch::LibTorch]
#           [SANITIZE asan tsan] [SERIAL] [LOCKS name...] [NO_MAIN] [ENV A=b ...] [GCC_ASAN]
#           [PRECOMPILED plain] [OPTIMIZED] [GROUPS 1])
#
# One GoogleTest program in <build>/tests; every test in it is known to ctest by its own name. In a sanitizer's build
# there are three groups of each program instead, and so many as WEFT_TEST_GROUPS says (default: 0, none; 6 where ./dev test
# runs all) of those that have a SANITIZE in an ordinary one. GROUPS says how many at most, for programs whose tests are few or short,
# and that there are groups of one without SANITIZE, too. DEPS defaults to all of weft. SANITIZE says in which sanitizer
# passes the program takes part (./dev asan, ./dev tsan); without it, it is built only in ordinary builds. SERIAL: nothing else runs meanwhile. LOCKS: none of the same lock does.
# GCC_ASAN: in an ordinary build with g++ the same sources are built once more as <NAME>_asan with g++'s
# AddressSanitizer, tests named asan.*: g++ 12 destroys some temporaries of co_await expressions twice, and clang's
# pass cannot see what g++ does. PRECOMPILED plain (the default), tensor or torch: see cmake/Precompiled.cmake.
# OPTIMIZED: the program itself computes much; it is compiled as what it tests is, and nothing is precompiled.
function(weft_test)
  cmake_parse_arguments(ARG "SERIAL;NO_MAIN;GCC_ASAN;OPTIMIZED" "NAME;TIMEOUT;PRECOMPILED;GROUPS" "SRCS;DEPS;LABELS;SANITIZE;LOCKS;ENV"
    ${ARGN})
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_test(${ARG_NAME}): unknown arguments ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  weft_in_test_set(wanted ${ARG_SANITIZE})
  if(NOT wanted)
    return()
  endif()
  weft_existing(ARG_SRCS ${ARG_SRCS})
  if(NOT ARG_SRCS)
    return()
  endif()
  if(NOT ARG_LABELS)
    message(FATAL_ERROR "weft_test(${ARG_NAME}): LABELS is missing")
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(NOT ARG_DEPS)
    set(ARG_DEPS weft::weft)
  endif()
  if(ARG_OPTIMIZED)
    set(ARG_PRECOMPILED "")
  elseif(NOT ARG_PRECOMPILED)
    set(ARG_PRECOMPILED plain)
  endif()
  weft_make_test(${ARG_NAME} "" ${ARG_SRCS})
  if(ARG_GCC_ASAN AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT WEFT_SANITIZE)
    set(ARG_PRECOMPILED "")  # they would have to be compiled once more
    weft_make_test(${ARG_NAME}_asan "asan." ${ARG_SRCS})
    target_compile_options(${ARG_NAME}_asan PRIVATE -fsanitize=address -fno-omit-frame-pointer -g1)
    target_link_options(${ARG_NAME}_asan PRIVATE -fsanitize=address)
  endif()
endfunction()

# Part of weft_test: one program, with the arguments of weft_test in ARG_*.
macro(weft_make_test _target _prefix)
  add_executable(${_target} ${ARGN})
  # What nearly every test uses of Abseil, so that their lists need not say it.
  weft_link_deps(${_target} ${ARG_DEPS} absl::flat_hash_map absl::hash absl::status absl::statusor absl::str_format
    absl::strings absl::time)
  if(ARG_NO_MAIN)
    target_link_libraries(${_target} PRIVATE GTest::gmock GTest::gtest)
  else()
    target_link_libraries(${_target} PRIVATE GTest::gmock GTest::gtest GTest::gtest_main)
  endif()
  set_target_properties(${_target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/tests")
  weft_compile_together(${_target} ${WEFT_UNITY_TESTS})
  if(NOT ARG_OPTIMIZED)
    weft_unoptimized(${_target})
  endif()
  if(ARG_PRECOMPILED)
    weft_precompile_program(${_target} ${ARG_PRECOMPILED}_test)
  endif()
  set(environment "WEFT_BUILD_DIR=${weft_BINARY_DIR}" "WEFT_SOURCE_DIR=${weft_SOURCE_DIR}" ${ARG_ENV})
  if(WEFT_SANITIZE)
    set(_weft_groups 3)
    if(ARG_GROUPS AND ARG_GROUPS LESS 3)
      set(_weft_groups ${ARG_GROUPS})
    endif()
    weft_add_groups(${_target} "${_prefix}" ${_weft_groups})
  elseif(WEFT_TEST_GROUPS AND ARG_GROUPS AND ARG_GROUPS LESS WEFT_TEST_GROUPS)
    weft_add_groups(${_target} "${_prefix}" ${ARG_GROUPS})
  elseif(WEFT_TEST_GROUPS AND (ARG_SANITIZE OR ARG_GROUPS))
    weft_add_groups(${_target} "${_prefix}" ${WEFT_TEST_GROUPS})
  elseif(WEFT_TEST_GROUPS AND "gpu" IN_LIST ARG_LABELS)
    # Where there is no GPU, each of them says so and ends.
    weft_add_groups(${_target} "${_prefix}" 1)
  else()
    weft_add_each_test(${_target} "${_prefix}")
  endif()
endmacro()

# Part of weft_make_test: a process runs many tests, since loading LibTorch takes half a second, under a sanitizer more.
# The log of a failure names the one. Each leaves a list of its tests for scripts/check_skips.py.
macro(weft_add_groups _target _prefix _groups)
  math(EXPR last "${_groups} - 1")
  foreach(group RANGE ${last})
    set(name "${_prefix}${_target}.${group}")
    add_test(NAME ${name} COMMAND ${_target} WORKING_DIRECTORY "${weft_BINARY_DIR}/tests")
    set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 900
      ENVIRONMENT "${environment};GTEST_TOTAL_SHARDS=${_groups};GTEST_SHARD_INDEX=${group};GTEST_OUTPUT=xml:${weft_BINARY_DIR}/tests/groups/${name}.xml")
    if(WEFT_SANITIZE)
      # A fresh clone has no times of earlier runs: what has most sources begins first, so as not to be alone at the end.
      list(LENGTH ARG_SRCS cost)
      set_tests_properties(${name} PROPERTIES COST ${cost})
    else()
      set_tests_properties(${name} PROPERTIES PROCESSORS 2 COST 10)  # see command_test in scripts/commands.sh
    endif()
    if(ARG_SERIAL)
      set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
    endif()
    if(ARG_LOCKS)
      set_tests_properties(${name} PROPERTIES RESOURCE_LOCK "${ARG_LOCKS}")
    endif()
  endforeach()
endmacro()

# Part of weft_make_test: each test by its own name.
macro(weft_add_each_test _target _prefix)
  gtest_discover_tests(${_target} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 NO_PRETTY_VALUES
    TEST_PREFIX "${_prefix}" TEST_LIST ${_target}_TESTS WORKING_DIRECTORY "${weft_BINARY_DIR}/tests")
  # gtest_discover_tests loses the semicolons of a list on its way, so properties are set in a file of our own,
  # which ctest reads after the discovered list.
  set(properties "LABELS \"${ARG_LABELS}\" TIMEOUT ${ARG_TIMEOUT}")
  if(ARG_SERIAL)
    string(APPEND properties " RUN_SERIAL TRUE")
  endif()
  if(ARG_LOCKS)
    string(APPEND properties " RESOURCE_LOCK \"${ARG_LOCKS}\"")
  endif()
  string(APPEND properties " ENVIRONMENT \"${environment}\"")
  set(file "${CMAKE_CURRENT_BINARY_DIR}/${_target}_properties.cmake")
  file(WRITE "${file}" "if(${_target}_TESTS)\n  set_tests_properties(\${${_target}_TESTS} PROPERTIES ${properties})\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${file}")
endmacro()

# Whether a program of these sanitizer passes belongs to the set that this build folder makes.
function(weft_in_test_set result)
  if(WEFT_TEST_SET STREQUAL "sanitizer")
    list(FIND ARGN asan at)
  elseif(WEFT_TEST_SET STREQUAL "thread")
    list(FIND ARGN tsan at)
  else()
    set(at 0)
  endif()
  if(at LESS 0)
    set(${result} FALSE PARENT_SCOPE)
  else()
    set(${result} TRUE PARENT_SCOPE)
  endif()
endfunction()

# weft_fuzzer(NAME fuzz_frame SRCS fuzz_frame.cc CORPUS corpus/frame [DEPS rpc])
#
# The source defines fuzz_one() of tests/fuzz/target.h. With WEFT_FUZZ it becomes a libFuzzer program; with other
# builds, a program that replays the corpus and compares what the decoder says of each seed with <CORPUS>.expected.
# Either way the replay is a test with the label fuzz.
function(weft_fuzzer)
  cmake_parse_arguments(ARG "" "NAME;CORPUS;TIMEOUT" "SRCS;DEPS" ${ARGN})
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_fuzzer(${ARG_NAME}): unknown arguments ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(WEFT_TEST_SET STREQUAL "thread")
    return()
  endif()
  if(NOT ARG_DEPS)
    set(ARG_DEPS weft::weft)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  weft_existing(ARG_SRCS ${ARG_SRCS})
  if(NOT ARG_SRCS)
    return()
  endif()
  get_filename_component(corpus "${ARG_CORPUS}" ABSOLUTE)
  if(NOT IS_DIRECTORY "${corpus}")
    message(FATAL_ERROR "weft_fuzzer(${ARG_NAME}): there is no corpus ${corpus}")
  endif()
  if(WEFT_FUZZ)
    weft_fuzz_driver(libfuzzer.cc)
    add_executable(${ARG_NAME} ${ARG_SRCS} $<TARGET_OBJECTS:weft_fuzz_driver>)
    target_link_options(${ARG_NAME} PRIVATE -fsanitize=fuzzer)
    set(arguments -runs=0)  # the corpus once, nothing new
  else()
    weft_fuzz_driver(replay.cc memory.cc)
    add_executable(${ARG_NAME} ${ARG_SRCS} $<TARGET_OBJECTS:weft_fuzz_driver>)
    set(arguments "")
  endif()
  weft_link_deps(${ARG_NAME} ${ARG_DEPS})
  set_target_properties(${ARG_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/tests/fuzz")
  # ./dev fuzz reads this list: program, corpus.
  set_property(GLOBAL APPEND_STRING PROPERTY WEFT_FUZZERS "${ARG_NAME} ${corpus}\n")
  add_test(NAME fuzz.${ARG_NAME} COMMAND ${ARG_NAME} ${arguments} "${corpus}")
  # A peer whose bytes make protobuf print a line could fill a log.
  set_tests_properties(fuzz.${ARG_NAME} PROPERTIES LABELS fuzz TIMEOUT ${ARG_TIMEOUT}
    FAIL_REGULAR_EXPRESSION "libprotobuf")
endfunction()

# Part of weft_fuzzer: what all targets share, compiled once.
function(weft_fuzz_driver)
  if(TARGET weft_fuzz_driver)
    return()
  endif()
  list(TRANSFORM ARGN PREPEND "${weft_SOURCE_DIR}/tests/fuzz/")
  add_library(weft_fuzz_driver OBJECT EXCLUDE_FROM_ALL ${ARGN})
  weft_link_deps(weft_fuzz_driver common absl::strings)
endfunction()

# Writes <build>/tests/fuzzers.txt. Called at the end of tests/CMakeLists.txt.
function(weft_write_fuzzers)
  get_property(list GLOBAL PROPERTY WEFT_FUZZERS)
  file(GENERATE OUTPUT "${weft_BINARY_DIR}/tests/fuzzers.txt" CONTENT "${list}")
endfunction()

set(WEFT_TEST_GROUPS 0 CACHE STRING "Run programs of tests in so many groups, not each test alone")
if(WEFT_BUILD_TESTS)
  find_package(GTest CONFIG REQUIRED)
  include(GoogleTest)
endif()
