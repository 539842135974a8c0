# The transports: no file here includes LibTorch, so they compile quickly.
set(WEFT_RPC_TRANSPORT_SRCS
  transport.cc
  internal/wire/frame.cc
  internal/wire/handshake.cc
  internal/inproc/network.cc
  internal/inproc/transport.cc)
