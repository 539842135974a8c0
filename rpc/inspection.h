#ifndef WEFT_RPC_INSPECTION_H_
#define WEFT_RPC_INSPECTION_H_

// Inspection: what a worker tells about itself to an observer (rpc/inspect.h, weft-inspect): tables
// with names, filled by the worker and its services, as text for people and as JSON for programs.
//
//   Inspection::Table& table = out->table("contexts", {"id", "age_s"});
//   for (const auto& c : contexts) {
//     if (!table.add({to_string(c.id), absl::ToDoubleSeconds(c.age)})) break;
//   }
//
// Bounded: a table keeps its first rows and counts the others. One thread at a time.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "weft/common/api.h"

namespace weft {

class WEFT_API Inspection {
 public:
  // Texts may hold any bytes: what is no printable UTF-8 is shown escaped. Seconds are numbers.
  using Cell = std::variant<std::string, int64_t, double>;

  class WEFT_API Table {
   public:
    Table(std::string name, std::vector<std::string> columns, size_t most_rows)
        : name_(std::move(name)), columns_(std::move(columns)), most_rows_(most_rows) {}

    // One cell for each column; missing ones are empty, those beyond are dropped. False: the table
    // is full, and the row is only counted.
    bool add(std::vector<Cell> row);
    bool full() const { return rows_.size() >= most_rows_; }
    // So many more rows would have come.
    void leave_out(size_t rows) { left_out_ += rows; }

    const std::string& name() const { return name_; }                     // as in weft-inspect
    const std::vector<std::string>& columns() const { return columns_; }  // their names, in order
    const std::vector<std::vector<Cell>>& rows() const { return rows_; }
    size_t left_out() const { return left_out_; }  // rows above the limit

   private:
    std::string name_;
    std::vector<std::string> columns_;
    size_t most_rows_;
    std::vector<std::vector<Cell>> rows_;
    size_t left_out_ = 0;
  };

  explicit Inspection(size_t most_rows) : most_rows_(most_rows) {}
  // A new one at the end; valid as long as this object.
  Table& table(std::string_view name, std::vector<std::string> columns);
  const std::deque<Table>& tables() const { return tables_; }

  // Each table under its name, in columns; the last line says how many rows were left out.
  std::string text() const;
  // {"NAME": {"rows": [{"COLUMN": CELL, ...}, ...], "left_out": N}, ...}
  std::string json() const;

 private:
  size_t most_rows_;
  std::deque<Table> tables_;
};

}  // namespace weft

#endif  // WEFT_RPC_INSPECTION_H_
