// What must not compile, and in which words it is refused. Read by compile_fail.py: without
// WEFT_BAD_CASES the file is good; with it, every marked line must be named by an error that has
// the words of its mark. A type is refused in words where it is first met, so every case has its
// own.

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "weft/rpc/call.h"
#include "weft/rpc/library.h"

namespace {

using weft::CallContext;
using weft::Future;
using weft::Library;
using weft::on;
using weft::rpc_async;
using weft::rpc_sync;
using weft::Worker;

struct Described {
  int x = 0;
};
WEFT_STRUCT(Described, x);
struct Undescribed {
  int x = 0;
};
struct UndescribedToo {
  int x = 0;
};
struct HoldsPointer {
  double* p = nullptr;
};
WEFT_STRUCT(HoldsPointer, p);
struct NoDefault {
  explicit NoDefault(int v) : x(v) {}
  int x;
};
WEFT_STRUCT(NoDefault, x);

struct Table {
  explicit Table(int) {}
  int get(int i) const { return i; }
};
struct Other {
  int get(int i) { return i; }
};

int add(int a, int b) { return a + b; }
std::string text(CallContext&, const std::string& s, Described) { return s; }
void out_parameter(int& result) { result = 1; }
void out_tensor(at::Tensor& result) { result = at::Tensor(); }
void out_double(double& result) { result = 1; }
int takes_future(Future<int>) { return 1; }
int takes_pointer(const int* p) { return *p; }
int takes_function(std::function<int()> f) { return f(); }
int takes_undescribed(Undescribed u) { return u.x; }
int takes_nested(std::map<std::string, std::vector<Undescribed>> m) {
  return static_cast<int>(m.size());
}
int* returns_pointer() { return nullptr; }
Future<UndescribedToo> returns_undescribed() { return {}; }
std::vector<Future<int>> returns_futures() { return {}; }

}  // namespace

void good(const Worker& worker, Library& lib) {
  lib.def("add", &add).def("text", &text).def("lambda", [](int v) { return v; });
  lib.class_<Table>("Table").constructor<int>().def("get", &Table::get);
  int sum = rpc_sync(worker, "a", &add, 1, 2L);
  Future<std::string> f = rpc_async(worker, 3, &text, "literal", Described{});
  sum += rpc_sync(worker, "a", on("t", &Table::get), int16_t{1});
  (void)sum;
  (void)f;
}

#ifdef WEFT_BAD_CASES
void bad(const Worker& worker, Library& lib) {
  lib.def("f", &out_parameter);            // bad: is an out-parameter
  lib.def("f", &out_tensor);               // bad: is an out-parameter
  lib.def("f", &takes_future);             // bad: a Future cannot be sent
  lib.def("f", &takes_pointer);            // bad: a pointer cannot be sent
  lib.def("f", &takes_function);           // bad: a function or lambda cannot be sent
  lib.def("f", &takes_undescribed);        // bad: describe the struct with WEFT_STRUCT
  lib.def("f", &takes_nested);             // bad: every element of a container must be sendable
  lib.def("f", &returns_pointer);          // bad: a pointer cannot be sent
  lib.def("f", &returns_undescribed);      // bad: describe the struct with WEFT_STRUCT
  lib.def("f", &returns_futures);          // bad: every element of a container must be sendable
  lib.def("f", [](HoldsPointer) {});       // bad: a pointer cannot be sent
  lib.def("f", [](NoDefault) {});          // bad: needs a default constructor
  lib.def("f", [](auto v) { return v; });  // bad: exactly one operator()
  lib.def("f", 3);                         // bad: def() takes a function
  lib.def("f", &Table::get);               // bad: a method is registered with class_<T>
  lib.class_<Table>("T").constructor<std::string>();    // bad: no constructor that takes these
  lib.class_<Table>("T").def("get", &Other::get);       // bad: the method belongs to another class
  lib.class_<Table>("T").def("f", &add);                // bad: takes a method pointer
  rpc_sync(worker, "a", &add, 1);                       // bad: wrong number of arguments
  rpc_sync(worker, "a", &add, 1, 2, 3);                 // bad: wrong number of arguments
  rpc_sync(worker, "a", &add, 1, "two");                // bad: an argument does not convert
  rpc_sync(worker, "a", &add, 1, Future<int>());        // bad: an argument does not convert
  (void)rpc_async(worker, "a", &text, 5, Described{});  // bad: an argument does not convert
  rpc_sync(worker, "a", &Table::get, 1);                // bad: a method needs an object
  rpc_sync(worker, "a", &out_double, 1.0);              // bad: is an out-parameter
  on("t", &add);                                        // bad: on() takes a method pointer
}
#endif
