#ifndef WEFT_TOOLS_WEFT_INSPECT_HTML_H_
#define WEFT_TOOLS_WEFT_INSPECT_HTML_H_

// A picture of a job as one HTML file: its workers with their connections, the calls and passes
// under way, and every table of weft-inspect. It needs nothing from elsewhere, so it can be sent to
// a colleague. Any thread.

#include <string>
#include <string_view>
#include <vector>

namespace weft::inspect_tool {

// One worker: its tables as JSON (rpc/inspect.h), or why there are none.
struct SeenWorker {
  std::string name;
  std::string address;
  std::string tables{};
  std::string error{};
};

// `at` says when it was looked, `source` where.
std::string page(std::string_view source, std::string_view at,
                 const std::vector<SeenWorker>& workers);

}  // namespace weft::inspect_tool

#endif  // WEFT_TOOLS_WEFT_INSPECT_HTML_H_
