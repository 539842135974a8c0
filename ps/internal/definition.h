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
// Kind invalid_argument, naming the field. Of the rule nothing but its form: see rule_of().
WEFT_API Status check_definition(const TableDefinition& definition);
// Kind invalid_argument: one is null, its name is none, or it is that of another.
WEFT_API Status check_rules(const UserRules& rules);
// Which servers have its parts is in the job's store.
inline bool in_map(const TableDefinition& definition) {
  return definition.copies > 1 || definition.movable;
}
// One of weft::optim, or of these; null: there is none of that name.
WEFT_API std::shared_ptr<const UpdateRule> find_rule(std::string_view name, const UserRules& rules);
// That of a definition. Kind invalid_argument: there is none, or it does not fit the table.
WEFT_API StatusOr<std::shared_ptr<const UpdateRule>> rule_of(const TableDefinition& definition,
                                                             const UserRules& rules);
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
