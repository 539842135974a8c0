# weft_store: all of Store without LibTorch, a library of its own because the launcher, which must start in
# milliseconds, needs nothing else of this module.
weft_module(NAME store PART_OF rpc
  SRCS
    internal/store/checks.cc
    internal/store/hash_store.cc
    internal/store/table.cc
    internal/store/table_store.cc
  DEPS common absl::status absl::statusor absl::time Threads::Threads
  PRIVATE_DEPS weft_proto absl::strings gRPC::grpc++ protobuf::libprotobuf)
