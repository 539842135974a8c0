# weft::c10d, a group as a backend of LibTorch's c10d: a library of its own, because c10d's classes change with LibTorch
# and few programs want them. Sanitizer builds leave it out: all that it does is done by weft::collectives.
option(WEFT_C10D "Process groups as backends of LibTorch's c10d (weft::c10d)" ON)
if(NOT WEFT_C10D OR WEFT_SANITIZE)
  return()
endif()
add_library(weft_c10d c10d_backend.cc)
add_library(weft::c10d ALIAS weft_c10d)
set_target_properties(weft_c10d PROPERTIES
  EXPORT_NAME c10d
  CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON
  POSITION_INDEPENDENT_CODE ON
  DEFINE_SYMBOL ""
  VERSION ${weft_VERSION}
  SOVERSION ${weft_VERSION_MAJOR}.${weft_VERSION_MINOR}
  INSTALL_RPATH "$ORIGIN"
  BUILD_RPATH "$ORIGIN"
  LIBRARY_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/lib"
  ARCHIVE_OUTPUT_DIRECTORY "${weft_BINARY_DIR}/lib")
target_compile_features(weft_c10d PUBLIC cxx_std_20)
target_link_libraries(weft_c10d PUBLIC weft_collectives LibTorch::LibTorch PRIVATE "$<BUILD_INTERFACE:weft_options>")
weft_precompile(weft_c10d tensor)
if(WEFT_INSTALL)
  install(TARGETS weft_c10d EXPORT weftTargets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()
