weft_fuzzer(NAME value_fuzzer SRCS value_fuzzer.cc CORPUS corpus/value DEPS rpc)
weft_fuzzer(NAME safetensors_fuzzer SRCS safetensors_fuzzer.cc CORPUS corpus/safetensors DEPS rpc)
weft_fuzzer(NAME tensor_fuzzer SRCS tensor_fuzzer.cc CORPUS corpus/tensor DEPS rpc)
