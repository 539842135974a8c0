# weft_store: all of Store without LibTorch, for weft_rpc and for the launcher, which must start in milliseconds.
# An object library: whoever links it holds the objects itself, and nothing of it is installed. The functions that
# users call become part of weft_rpc.
add_library(weft_store OBJECT
  internal/store/checks.cc
  internal/store/hash_store.cc
  internal/store/table.cc
  internal/store/table_store.cc)
weft_map_deps(_weft_store_deps absl::status absl::statusor absl::strings absl::time absl::any_invocable
  gRPC::grpc++ protobuf::libprotobuf Threads::Threads)
target_link_libraries(weft_store PUBLIC weft_common weft_proto ${_weft_store_deps} PRIVATE weft_options)
set_target_properties(weft_store PROPERTIES
  CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON
  POSITION_INDEPENDENT_CODE ON)
target_compile_features(weft_store PUBLIC cxx_std_20)
target_include_directories(weft_store PUBLIC "${weft_BINARY_DIR}/include")
