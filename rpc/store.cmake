# weft_store: all of Store without LibTorch, a library of its own because the launcher, which must start in
# milliseconds, needs nothing else of this module.
weft_module(NAME store PART_OF rpc
  SRCS
    internal/store/address.cc
    internal/store/checks.cc
    internal/store/etcd_link.cc
    internal/store/etcd_store.cc
    internal/store/file_format.cc
    internal/store/file_store.cc
    internal/store/grpc_util.cc
    internal/store/hash_store.cc
    internal/store/prefix_store.cc
    internal/store/table.cc
    internal/store/table_store.cc
    internal/store/tcp_data.cc
    internal/store/tcp_link.cc
    internal/store/tcp_server.cc
    internal/store/tcp_store.cc
    internal/tls/credentials.cc
    internal/tls/grpc_tls.cc
    store_url.cc
  DEPS common absl::status absl::statusor absl::time Threads::Threads
  PRIVATE_DEPS weft_proto absl::strings gRPC::grpc++ OpenSSL::Crypto protobuf::libprotobuf)
