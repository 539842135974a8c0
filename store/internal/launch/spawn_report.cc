#include "weft/store/internal/launch/spawn_report.h"

#include <array>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace weft::launch {
namespace {

constexpr size_t kMostText = 64 * 1024;

// The numbers before the texts: time, exit code, code, kind and the four lengths.
constexpr size_t kNumbers = 8;
constexpr size_t kFirstLength = 4;

std::string cut(std::string text) {
  if (text.size() > kMostText) {
    const size_t more = text.size() - kMostText;
    text.resize(kMostText);
    absl::StrAppend(&text, "... (", more, " more bytes)");
  }
  return text;
}

}  // namespace

std::string encode_report(const SpawnReport& report) {
  ErrorDetails details = error_details(report.status);
  if (details.payload.size() > kMostText) details.payload.clear();
  const std::array<std::string, 4> texts = {cut(std::string(report.status.message())),
                                            cut(std::move(details.origin)),
                                            cut(std::move(details.remote_trace)), details.payload};
  std::string bytes =
      absl::StrCat(report.at_ns, " ", report.exit_code, " ", static_cast<int>(report.status.code()),
                   " ", static_cast<int>(details.kind));
  for (const std::string& text : texts) absl::StrAppend(&bytes, " ", text.size());
  absl::StrAppend(&bytes, "\n");
  for (const std::string& text : texts) absl::StrAppend(&bytes, text);
  return bytes;
}

StatusOr<SpawnReport> decode_report(std::string_view bytes) {
  const Status broken = absl::DataLossError("the report of a rank cannot be read");
  const size_t line_end = bytes.find('\n');
  if (line_end == std::string_view::npos) return broken;
  const std::vector<std::string> words =
      absl::StrSplit(absl::string_view(bytes.data(), line_end), ' ');
  std::array<int64_t, kNumbers> numbers = {};
  if (words.size() != kNumbers) return broken;
  for (size_t i = 0; i < kNumbers; ++i) {
    if (!absl::SimpleAtoi(words[i], &numbers[i]) || numbers[i] < 0) return broken;
  }
  std::string_view rest = bytes.substr(line_end + 1);
  std::array<std::string, 4> texts;
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto length = static_cast<uint64_t>(numbers[kFirstLength + i]);
    if (length > rest.size()) return broken;
    texts[i] = std::string(rest.substr(0, length));
    rest.remove_prefix(length);
  }
  constexpr int kLastCode = static_cast<int>(absl::StatusCode::kUnauthenticated);
  if (numbers[2] > kLastCode || numbers[3] > static_cast<int>(ErrorKind::kPermission)) {
    return broken;
  }
  SpawnReport report{
      .at_ns = numbers[0], .exit_code = static_cast<int>(numbers[1]), .status = absl::OkStatus()};
  const auto code = static_cast<absl::StatusCode>(numbers[2]);
  if (code == absl::StatusCode::kOk) return report;
  const auto kind = static_cast<ErrorKind>(numbers[3]);
  report.status = with_details(
      make_error(code, kind, texts[0]),
      {.kind = kind, .origin = texts[1], .remote_trace = texts[2], .payload = texts[3]});
  return report;
}

std::string SpawnReports::path(std::string_view what, int rank) const {
  return absl::StrCat(directory_, "/", absl::string_view(what.data(), what.size()), rank);
}

Status SpawnReports::begin(int rank) { return files_->write_atomic(path("begun", rank), ""); }

bool SpawnReports::begun(int rank) { return files_->stamp(path("begun", rank)).ok(); }

Status SpawnReports::end(int rank, const SpawnReport& report) {
  return files_->write_atomic(path("ended", rank), encode_report(report));
}

StatusOr<SpawnReport> SpawnReports::read(int rank) {
  WEFT_ASSIGN_OR_RETURN(const std::string bytes, files_->read(path("ended", rank)));
  return decode_report(bytes);
}

}  // namespace weft::launch
