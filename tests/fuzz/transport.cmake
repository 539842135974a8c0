weft_fuzzer(NAME frame_fuzzer SRCS frame_fuzzer.cc CORPUS corpus/frame
  DEPS rpc common weft_proto protobuf::libprotobuf)
weft_fuzzer(NAME hello_fuzzer SRCS hello_fuzzer.cc CORPUS corpus/hello DEPS rpc common)
weft_fuzzer(NAME chunk_fuzzer SRCS chunk_fuzzer.cc CORPUS corpus/chunk DEPS rpc common weft_proto protobuf::libprotobuf)
weft_fuzzer(NAME arena_fuzzer SRCS arena_fuzzer.cc CORPUS corpus/arena DEPS rpc common)
weft_fuzzer(NAME data_fuzzer SRCS data_fuzzer.cc CORPUS corpus/data DEPS rpc common weft_proto protobuf::libprotobuf)
