weft_fuzzer(NAME point_fuzzer SRCS point_fuzzer.cc CORPUS corpus/point DEPS collectives rpc common)
