#ifndef WEFT_PS_INTERNAL_DEFINITION_H_
#define WEFT_PS_INTERNAL_DEFINITION_H_

// What can be wrong with a definition, and how two of them differ. Pure functions; any thread.

#include <memory>
#include <string>
#include <string_view>

#include "weft/common/error.h"
#include "weft/ps/table.h"

namespace weft::ps::internal {

// Of a table's name: 1 to 128 characters of [A-Za-z0-9-_:./].
WEFT_API Status check_name(std::string_view name);
// Kind invalid_argument, naming the field.
WEFT_API Status check_definition(const TableDefinition& definition);
// "" when they are the same, else the first field that differs, with both values.
WEFT_API std::string difference(const TableDefinition& there, const TableDefinition& given);

// Of all of a dense table.
WEFT_API int64_t element_count(const TableDefinition& definition);
// A sparse table has a part for each server; a dense one see dense_parts(). REQUIRES: servers > 0.
WEFT_API size_t part_count(const TableDefinition& definition, size_t servers);

// The value of column `column` of row `row` (dense: of element `row`, column 0) before any push.
class WEFT_API FirstValues {
 public:
  FirstValues(const Init& init, const std::string& table);
  double at(uint64_t row, uint64_t column) const;

 private:
  const Init init_;
  const uint64_t seed_;
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_DEFINITION_H_
