weft_fuzzer(NAME store_file_fuzzer SRCS store_file_fuzzer.cc CORPUS corpus/store_file DEPS store)
weft_fuzzer(NAME store_request_fuzzer SRCS store_request_fuzzer.cc CORPUS corpus/store_request
  DEPS store weft_proto protobuf::libprotobuf)
