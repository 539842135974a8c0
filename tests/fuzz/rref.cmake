weft_fuzzer(NAME rref_fuzzer SRCS rref_fuzzer.cc CORPUS corpus/rref DEPS rref rpc common)
