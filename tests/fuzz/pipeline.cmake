weft_fuzzer(NAME plan_fuzzer SRCS plan_fuzzer.cc CORPUS corpus/plan DEPS pipeline common)
