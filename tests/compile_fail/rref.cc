// What must not compile of RRefs and remote modules, and in which words it is refused: read by
// compile_fail.py, as the cases in rpc.cc. DA-58.

#include <torch/nn/modules/linear.h>

#include "weft/rref/remote_module.h"
#include "weft/rref/rref.h"

namespace rref_cases {
namespace {

using weft::Library;
using weft::remote;
using weft::RemoteModule;
using weft::RRef;
using weft::Worker;

struct Table {
  int rows() const { return 1; }
  int row(int i) const { return i; }
};
struct OverloadedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
  at::Tensor forward(const at::Tensor& x, int) { return x; }
};
struct TemplateImpl : torch::nn::Module {
  template <class T>
  T forward(T x) {
    return x;
  }
};
struct NoModule {
  int forward(int x) { return x; }
};
struct Undescribed {
  int x = 0;
};
struct OtherUndescribed {
  int x = 0;
};
int add(int a, int b) { return a + b; }
double mean(double a, double b) { return (a + b) / 2; }

}  // namespace

void good(const Worker& worker, Library& lib) {
  weft::module_<torch::nn::Linear>(lib, "Linear").constructor<int64_t, int64_t>();
  const RemoteModule<torch::nn::Linear> linear(worker, "ps0", 2, 3);
  const RRef<int> sum = remote(worker, "ps0", &add, 1, 2);
  const RRef<Table> table = remote<Table>(worker, "ps0");
  (void)table.rpc_sync(&Table::rows);
  (void)sum.to_here();
}

#ifdef WEFT_BAD_CASES
void bad(const Worker& worker, Library& lib, const RRef<Table>& table,
         const RRef<Undescribed>& undescribed, const RemoteModule<OverloadedImpl>& overloaded,
         const RemoteModule<TemplateImpl>& generic, const at::Tensor& x) {
  weft::module_<NoModule>(lib, "NoModule");  // bad: a RemoteModule is of a torch::nn::Module
  table.rpc_sync(&add, 1, 2);                // bad: an RRef calls methods of its object
  (void)undescribed.to_here();               // bad: this class cannot be sent
  remote(worker, "ps0", &add, 1L);           // bad: wrong number of arguments
  remote(worker, "ps0", "added", 1, 2);      // bad: a string is no function
  remote(worker, "ps0", [] { return 1; });   // bad: a lambda or function object
  remote(worker, "ps0", &Table::rows);       // bad: a method needs an object
  remote(worker, "ps0", &mean, {1, 2});      // bad: arguments in braces have no type
  remote<Table>(worker, "ps0", OtherUndescribed{});  // bad: describe the struct with
  table.rpc_sync("rows");                            // bad: an RRef calls methods of its object
  table.rpc_async([] { return 1; });                 // bad: an RRef calls methods of its object
  table.rpc_sync(&Table::row, {1});                  // bad: arguments in braces have no type
  overloaded.forward(x);                             // bad: the module's forward is overloaded
  (void)generic.forward_async(x);                    // bad: the module's forward is overloaded
}
#endif

}  // namespace rref_cases
