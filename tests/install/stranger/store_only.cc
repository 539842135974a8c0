// A program that uses a store alone: no worker, no tensor.
#include <weft/common/runtime.h>
#include <weft/store/store.h>

#include <iostream>

int main() {
  const auto store = weft::open_store("hash://", {}, weft::make_system_runtime());
  if (!store.ok()) return 1;
  const auto count = (*store)->add("visits", 2);
  if (!count.ok() || *count != 2) return 1;
  std::cout << "store only: ok\n";
  return 0;
}
