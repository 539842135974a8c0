// What must not compile, and with which message it is refused. Read by compile_fail.py: without
// WEFT_BAD_CASES the file is good; with it, the first error of every marked line must have the
// words of its mark. A type is refused with its message where it is first met, so every case has
// its own.

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "weft/rpc/call.h"
#include "weft/rpc/library.h"

namespace rpc_cases {
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
struct OtherUndescribed {
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
  int rows(int i) { return i; }
};
struct Other {
  int get(int i) { return i; }
};

int add(int a, int b) { return a + b; }
double half(int a) { return a / 2.0; }
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
int takes_other(OtherUndescribed u) { return u.x; }
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
using Names = std::vector<std::string>;
using Views = std::vector<std::string_view>;
constexpr absl::Duration kSoon = absl::Seconds(1);
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
  rpc_sync(worker, "a", "add", 1, 2);                   // bad: a string is no function
  rpc_sync(worker, "a", std::string("add"), 1);         // bad: a string is no function
  rpc_async(worker, "a", {.deadline = kSoon}, "app.add", 1);  // bad: a string is no function
  int sum = try_rpc_sync(worker, "a", "add1", 1, 2);          // bad: a string is no function
  rpc_sync(worker, "a", [] { return 1; });                    // bad: a lambda or function object
  rpc_async(worker, "a", [](auto v) { return v; });           // bad: a lambda or function object
  rpc_sync(worker, "a", std::function<int()>());              // bad: a lambda or function object
  rpc_sync(worker, "a", 7, 1);                                // bad: expected a function
  (void)rpc_async(worker, Names{"a"}, &add, 1, 2);            // bad: several callees are
  (void)try_rpc_async(worker, Views{"a"}, &add, 1, 2);        // bad: several callees are
  rpc_sync(worker, 1.5, &add, 1, 2);                          // bad: a callee is a worker's name
  rpc_sync(worker, "a", &add, {1, 2});                      // bad: arguments in braces have no type
  rpc_async(worker, "a", &text, "x", {});                   // bad: arguments in braces have no type
  rpc_sync(worker, "a", {.deadline = kSoon}, &half, {1});   // bad: arguments in braces have no type
  rpc_sync(worker, "a", on("t", &Table::get), {1});         // bad: arguments in braces have no type
  rpc_async(worker, "a", &Table::rows, 1);                  // bad: a method needs an object
  rpc_sync(worker, "a", &takes_other, OtherUndescribed{});  // bad: describe the struct with
}
#endif

}  // namespace rpc_cases
