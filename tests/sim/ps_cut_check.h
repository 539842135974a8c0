#ifndef WEFT_TESTS_SIM_PS_CUT_CHECK_H_
#define WEFT_TESTS_SIM_PS_CUT_CHECK_H_

// What a snapshot has of a table, read from its files.

#include <cstdint>
#include <map>
#include <string>

#include "ATen/core/Tensor.h"
#include "weft/common/error.h"
#include "weft/common/files.h"

namespace weft::testing {

struct CutTable {
  at::Tensor values{};                       // a row for each key, or the dense table
  at::Tensor held{};                         // the sum of the pushes that wait for their step
  std::map<std::string, uint64_t> pushes{};  // of each worker's client
  uint64_t number = 0;                       // of the snapshot
};

// `keys`: of a sparse table; a row that it does not have is 0.
StatusOr<CutTable> read_cut(Files& files, const std::string& folder, const std::string& table,
                            const at::Tensor& keys);

}  // namespace weft::testing

#endif  // WEFT_TESTS_SIM_PS_CUT_CHECK_H_
