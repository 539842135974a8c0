#include "weft/rpc/inspection.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "weft/common/internal/utf8.h"
#include "weft/common/trace.h"

namespace weft {
namespace {

// Names of methods and the like come from other workers, and are printed on a user's terminal.
std::string printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t length = internal::utf8_length(text);
    const auto c = static_cast<unsigned char>(text[0]);
    // The control characters of Latin-1 are two bytes.
    const bool control = c < 0x20 || c == 0x7f ||
                         (length == 2 && c == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0);
    if (length == 0 || control) {
      absl::StrAppendFormat(&out, "\\x%02x", c);
      text.remove_prefix(1);
      continue;
    }
    out.append(text.substr(0, length));
    text.remove_prefix(length);
  }
  return out;
}

std::string number(double value) {
  return std::isfinite(value) ? absl::StrFormat("%.3f", value) : std::string();
}

std::string shown(const Inspection::Cell& cell) {
  if (const auto* text = std::get_if<std::string>(&cell)) {
    return text->empty() ? "-" : printable(*text);
  }
  if (const auto* integer = std::get_if<int64_t>(&cell)) return absl::StrCat(*integer);
  const std::string out = number(std::get<double>(cell));
  return out.empty() ? "-" : out;
}

std::string json_cell(const Inspection::Cell& cell) {
  if (const auto* text = std::get_if<std::string>(&cell)) return json_quoted(*text);
  if (const auto* integer = std::get_if<int64_t>(&cell)) return absl::StrCat(*integer);
  const std::string out = number(std::get<double>(cell));
  return out.empty() ? "null" : out;
}

// Characters, not bytes.
size_t width(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

void append_line(const std::vector<std::string>& cells, const std::vector<size_t>& widths,
                 std::string* out) {
  std::string line = " ";
  for (size_t i = 0; i < cells.size(); ++i) {
    absl::StrAppend(&line, " ", cells[i],
                    std::string(widths[i] - std::min(widths[i], width(cells[i])), ' '));
  }
  line.erase(line.find_last_not_of(' ') + 1);
  absl::StrAppend(out, line, "\n");
}

}  // namespace

bool Inspection::Table::add(std::vector<Cell> row) {
  if (full()) {
    ++left_out_;
    return false;
  }
  row.resize(columns_.size());
  rows_.push_back(std::move(row));
  return true;
}

Inspection::Table& Inspection::table(std::string_view name, std::vector<std::string> columns) {
  return tables_.emplace_back(std::string(name), std::move(columns), most_rows_);
}

std::string Inspection::text() const {
  std::string out;
  for (const Table& table : tables_) {
    const size_t all = table.rows().size() + table.left_out();
    absl::StrAppend(&out, table.name(), ": ", all, "\n");
    if (table.rows().empty()) continue;
    std::vector<size_t> widths;
    for (const std::string& column : table.columns()) widths.push_back(width(column));
    std::vector<std::vector<std::string>> lines;
    for (const std::vector<Cell>& row : table.rows()) {
      std::vector<std::string>& line = lines.emplace_back();
      for (size_t i = 0; i < row.size(); ++i) {
        line.push_back(shown(row[i]));
        widths[i] = std::max(widths[i], width(line.back()));
      }
    }
    append_line(table.columns(), widths, &out);
    for (const std::vector<std::string>& line : lines) append_line(line, widths, &out);
    if (table.left_out() > 0) absl::StrAppend(&out, "  and ", table.left_out(), " more\n");
  }
  return out;
}

std::string Inspection::json() const {
  std::string out = "{";
  for (const Table& table : tables_) {
    absl::StrAppend(&out, out.size() > 1 ? ",\n" : "\n", json_quoted(table.name()),
                    ": {\"rows\": [");
    const char* separator = "\n";
    for (const std::vector<Cell>& row : table.rows()) {
      absl::StrAppend(&out, separator, "{");
      for (size_t i = 0; i < row.size(); ++i) {
        absl::StrAppend(&out, i > 0 ? ", " : "", json_quoted(table.columns()[i]), ": ",
                        json_cell(row[i]));
      }
      absl::StrAppend(&out, "}");
      separator = ",\n";
    }
    absl::StrAppend(&out, "], \"left_out\": ", table.left_out(), "}");
  }
  return out + "\n}\n";
}

}  // namespace weft
