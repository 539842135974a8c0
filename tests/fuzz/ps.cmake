weft_fuzzer(NAME ps_fuzzer SRCS ps_fuzzer.cc CORPUS corpus/ps DEPS ps dist_optim rpc common)
weft_fuzzer(NAME ps_copy_fuzzer SRCS ps_copy_fuzzer.cc CORPUS corpus/ps_copy
  DEPS ps dist_optim rpc common weft_proto protobuf::libprotobuf)
