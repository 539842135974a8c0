// What remote references do, step by step: worker0 leads, worker1 and worker2 own things.
//   build/bin/weftrun -n 3 build/bin/rref_tour

#include <iostream>
#include <utility>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/index_select.h"
#include "weft/weft.h"

// An object with state. It never travels: its methods are called where it lives.
class Table {
 public:
  Table(int64_t rows, int64_t width) : values_(at::arange(rows * width).view({rows, width})) {}
  torch::Tensor lookup(torch::Tensor ids) const { return at::index_select(values_, 0, ids); }
  int64_t add(int64_t n) {
    values_ += n;
    return ++version_;
  }

 private:
  torch::Tensor values_;
  int64_t version_ = 0;
};

torch::Tensor squares(int64_t n) {
  const torch::Tensor x = at::arange(n);
  return x * x;
}

// A function that takes references: it starts when their owners have confirmed them.
int64_t sum_of_row(weft::RRef<Table> table, int64_t row) {
  return table.rpc_sync(&Table::lookup, at::arange(row, row + 1)).sum().item<int64_t>();
}

// One that hands out a reference to an object of its own.
weft::RRef<int64_t> count(weft::CallContext& context, int64_t n) {
  return weft::RRef<int64_t>::local(context.worker(), n);
}

weft::Library library() {
  weft::Library lib("tour");
  lib.class_<Table>("Table")
      .constructor<int64_t, int64_t>()
      .def("lookup", &Table::lookup)
      .def("add", &Table::add);
  lib.def("squares", &squares).def("sum_of_row", &sum_of_row).def("count", &count);
  return lib;
}

void lead(const weft::Worker& worker) {
  // A value that a function makes there. remote() does not wait; to_here() does, and copies.
  auto values = weft::remote(worker, 1, &squares, 4);
  std::cout << "squares at " << values.owner_name() << ": sum "
            << values.to_here().sum().item<int64_t>() << "\n";

  // An object, and its methods. Nothing in this chain waits for what is before it.
  auto table = weft::remote<Table>(worker, 1, 3, 2);
  weft::RRef<int64_t> version = table.remote(&Table::add, 10);
  weft::Future<torch::Tensor> row = table.rpc_async(&Table::lookup, at::arange(1));
  std::cout << "row 0 of version " << version.to_here() << ": sum "
            << row.wait().sum().item<int64_t>() << "\n";

  // Passed on: worker2 calls worker1, and holds a share of its own meanwhile.
  std::cout << "worker2 sees row 2: sum " << weft::rpc_sync(worker, 2, &sum_of_row, table, 2)
            << "\n";

  // A reference as a result.
  const weft::RRef<int64_t> theirs = weft::rpc_sync(worker, 2, &count, 42);
  std::cout << theirs.owner_name() << " keeps " << theirs.to_here() << "\n";

  // What a function throws, every use gets.
  auto wrong = table.remote(&Table::lookup, at::arange(7, 8));
  const auto error = wrong.try_to_here().status();
  std::cout << "and an error: " << weft::kind_name(weft::error_kind(error)) << "\n";

  std::cout << weft::live_rrefs(worker).size() << " references are held here" << std::endl;
}  // and given back: their objects end with them

int main() {
  auto worker = weft::join({.library = library()});
  if (worker.world_size() != 3) {
    std::cerr << "rref_tour needs 3 processes: weftrun -n 3 rref_tour\n";
    return 2;
  }
  if (worker.rank() == 0) lead(worker);
  return worker.shutdown().status.ok() ? 0 : 1;
}
