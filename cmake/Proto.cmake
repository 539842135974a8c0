# weft_proto(NAME proto PROTOS a.proto b.proto DEPS common)
#
# protoc for every file, in one library (weft_proto, alias weft::proto): generated code must lie in exactly one
# shared library. Only messages: weft moves bytes over gRPC's generic interface, so there are no service stubs.
# The headers appear as "weft/proto/x.pb.h" below <build>/gen; they are private and not installed.
# Imports inside the .proto files are spelled import "weft/proto/x.proto".
function(weft_proto)
  cmake_parse_arguments(ARG "" "NAME" "PROTOS;DEPS" ${ARGN})
  weft_existing(ARG_PROTOS ${ARG_PROTOS})
  set(gen "${weft_BINARY_DIR}/gen")
  file(MAKE_DIRECTORY "${gen}/weft/${ARG_NAME}")
  set(include "${weft_BINARY_DIR}/include")
  if(TARGET protobuf::protoc)
    set(protoc protobuf::protoc)
  else()
    set(protoc "${Protobuf_PROTOC_EXECUTABLE}")
  endif()
  set(all_protos "")
  foreach(file IN LISTS ARG_PROTOS)
    list(APPEND all_protos "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
  endforeach()
  set(sources "")
  foreach(file IN LISTS ARG_PROTOS)
    string(REGEX REPLACE "\\.proto$" "" base "${file}")
    set(out "${gen}/weft/${ARG_NAME}/${base}.pb")
    # WEFT_API makes the messages visible outside of the library, and its header must come before its first use.
    # protoc offers no way to add an include, so the line is put in front of the header that it made.
    add_custom_command(
      OUTPUT "${out}.cc" "${out}.h"
      COMMAND ${protoc} -I "${include}" "--cpp_out=dllexport_decl=WEFT_API:${gen}" "weft/${ARG_NAME}/${file}"
      COMMAND ${CMAKE_COMMAND} "-DHEADER=${out}.h" -P "${weft_SOURCE_DIR}/cmake/prepend_api.cmake"
      DEPENDS ${all_protos} "${weft_SOURCE_DIR}/cmake/prepend_api.cmake"
      COMMENT "protoc weft/${ARG_NAME}/${file}"
      VERBATIM)
    list(APPEND sources "${out}.cc")
  endforeach()
  weft_module(NAME ${ARG_NAME} SRCS ${sources} DEPS ${ARG_DEPS} PRIVATE_DEPS protobuf::libprotobuf GENERATED)
  # Small files, half of whose time goes into the same headers. protoc 3 has names that all of its files define; what a
  # later one has is not known here.
  if(WEFT_UNITY GREATER 1 AND Protobuf_VERSION VERSION_LESS 4)
    weft_compile_together(weft_${ARG_NAME} 16)
    set_target_properties(weft_${ARG_NAME} PROPERTIES UNITY_BUILD_UNIQUE_ID WEFT_PROTO_FILE UNITY_BUILD_CODE_BEFORE_INCLUDE
      "#define WEFT_PROTO_JOIN(a, b) a##b\n#define WEFT_PROTO_NAME(a, b) WEFT_PROTO_JOIN(a, b)\n#define file_default_instances WEFT_PROTO_NAME(instances_, WEFT_PROTO_FILE)\n#define schemas WEFT_PROTO_NAME(schemas_, WEFT_PROTO_FILE)"
      UNITY_BUILD_CODE_AFTER_INCLUDE
      "#undef schemas\n#undef file_default_instances\n#undef WEFT_PROTO_NAME\n#undef WEFT_PROTO_JOIN")
  endif()
  target_include_directories(weft_${ARG_NAME} SYSTEM PUBLIC "$<BUILD_INTERFACE:${gen}>")
  # Users of an installed weft never see these headers; modules and tests in the tree do.
  target_link_libraries(weft_${ARG_NAME} PUBLIC "$<BUILD_INTERFACE:WeftDeps::protobuf>")
  # Targets that compile against the headers wait until they exist.
  add_custom_target(weft_${ARG_NAME}_headers DEPENDS ${sources})
  add_dependencies(weft_${ARG_NAME} weft_${ARG_NAME}_headers)
  if(WEFT_INSTALL)
    # For readers and for programs in other languages.
    install(FILES ${ARG_PROTOS} DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/weft/${ARG_NAME}")
  endif()
endfunction()
