weft_fuzzer(NAME autograd_fuzzer SRCS autograd_fuzzer.cc CORPUS corpus/autograd DEPS dist_autograd rref rpc common)
