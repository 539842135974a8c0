# The transports: no file here includes LibTorch, so they compile quickly.
set(WEFT_RPC_TRANSPORT_SRCS
  transport.cc
  internal/wire/frame.cc
  internal/wire/handshake.cc
  internal/inproc/network.cc
  internal/inproc/transport.cc
  internal/grpc/address.cc
  internal/grpc/bytes.cc
  internal/grpc/connection.cc
  internal/grpc/core.cc
  internal/grpc/lane.cc
  internal/grpc/crowd.cc
  internal/grpc/poller.cc
  internal/grpc/server.cc
  internal/faulty/faulty.cc
  internal/faulty/plan.cc)
