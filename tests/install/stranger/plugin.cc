#include "plugin.h"

#include <ATen/TensorOperators.h>

int add(int a, int b) { return a + b; }

torch::Tensor twice(torch::Tensor x) { return x + x; }

std::string greet(const std::string& name) { return "hello, " + name; }

int refuse(const std::string& why) { throw std::invalid_argument(why); }

weft::Library make_library() {
  weft::Library library("plugin");
  library.def("add", &add);
  library.def("twice", &twice);
  library.def("greet", &greet);
  library.def("refuse", &refuse);
  return library;
}
