// A program that uses a store alone, and starts its own ranks: no worker, no tensor.
#include <weft/common/runtime.h>
#include <weft/store/spawn.h>
#include <weft/store/store.h>

#include <cstdlib>
#include <iostream>
#include <string>

int main() {
  const auto store = weft::open_store("hash://", {}, weft::make_system_runtime());
  if (!store.ok()) return 1;
  const auto count = (*store)->add("visits", 2);
  if (!count.ok() || *count != 2) return 1;
  weft::spawn(2, [](int rank) { return std::getenv("RANK") == std::to_string(rank) ? 0 : 1; });
  std::cout << "store only: ok\n";
  return 0;
}
