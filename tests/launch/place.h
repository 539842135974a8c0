#ifndef WEFT_TESTS_LAUNCH_PLACE_H_
#define WEFT_TESTS_LAUNCH_PLACE_H_

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/store/internal/launch/system.h"
#include "weft/tests/launch/harness.h"

namespace weft::launch {

// A meeting place of each kind. Node 0 is started first and says when it is there.
class Place {
 public:
  explicit Place(bool tcp) {
    if (tcp) {
      absl::StatusOr<HeldPort> held = hold_port();
      if (!held.ok()) abort();
      port_ = *std::move(held);
      url_ = absl::StrCat("tcp://127.0.0.1:", port_.port);
    } else {
      url_ = absl::StrCat("file://", dir_.path("meet"));
    }
  }

  const std::string& url() const { return url_; }
  std::string path() const { return dir_.path("meet"); }
  bool empty() const { return std::filesystem::is_empty(dir_.path("")); }

  Running start(int node, int nnodes, std::vector<std::string> more,
                const RunOptions& options = {}) const {
    std::vector<std::string> args = {
        "--nnodes", absl::StrCat(nnodes), "--node-rank", absl::StrCat(node), "--rdzv", url_};
    args.insert(args.end(), more.begin(), more.end());
    return Running::start(args, options);
  }

 private:
  TestDir dir_;
  HeldPort port_;
  std::string url_;
};

inline constexpr char kThere[] = "waits for the others";

}  // namespace weft::launch

#endif  // WEFT_TESTS_LAUNCH_PLACE_H_
