weft_fuzzer(NAME ps_fuzzer SRCS ps_fuzzer.cc CORPUS corpus/ps DEPS ps dist_optim rpc common)
