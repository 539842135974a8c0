# What ./dev deb packs: one Debian package with all that is installed. CPack reads it when it runs.
#
# LibTorch is no package of Debian's. The libraries and programs look for it where it was when weft was built, so the
# machines of a site have it at one path.
function(weft_debian_package)
  set(CPACK_GENERATOR DEB)
  set(CPACK_PACKAGE_NAME weft)
  set(CPACK_PACKAGE_VERSION "${PROJECT_VERSION}")
  set(CPACK_PACKAGE_CONTACT "the weft developers <weft@localhost>")
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  set(CPACK_STRIP_FILES ON)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
  set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
  # CPack finds what the libraries link; what weft's headers and its CMake package need comes besides.
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${weft_BINARY_DIR}/lib;${LibTorch_RUNTIME_DIRS}")
  set(CPACK_DEBIAN_PACKAGE_DEPENDS
    "libabsl-dev, libgrpc++-dev, libprotobuf-dev, libssl-dev, libc-ares-dev, libre2-dev, zlib1g-dev")
  if(WEFT_PROMETHEUS)
    string(APPEND CPACK_DEBIAN_PACKAGE_DEPENDS ", prometheus-cpp-dev")
  endif()
  set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "cmake, g++")
  include(CPack)
endfunction()
