#ifndef WEFT_RPC_INTERNAL_ATEN_OPERATORS_H_
#define WEFT_RPC_INTERNAL_ATEN_OPERATORS_H_

// From a schema of LibTorch's dispatcher to methods that can be called. Any thread.

#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/rpc/aten_operators.h"
#include "weft/rpc/spi/handler.h"

namespace weft::internal {

// One entry per number of arguments that the operator can be called with. Errors: kind permission
// when it is not on the allow-list, not_found when this LibTorch does not have it.
StatusOr<std::vector<MethodEntry>> aten_entries(const std::string& name);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_ATEN_OPERATORS_H_
