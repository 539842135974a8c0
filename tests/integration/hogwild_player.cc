#include "weft/tests/integration/hogwild_player.h"

#include "ATen/ops/full.h"
#include "ATen/ops/sparse_coo_tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "weft/dist_optim/optim.h"
#include "weft/rpc/worker.h"

namespace weft::integration {
namespace {

constexpr int64_t kColumns = 16;

}  // namespace

std::string HogwildPlayer::obey(const Worker& worker, std::istream& words) {
  std::string verb;
  int64_t number = 0;
  words >> verb >> number;
  if (verb == "share") {
    std::string owner;
    words >> owner;
    matrix_ = at::zeros({number, kColumns});
    memory_ = ps::share_memory(worker, {{"matrix", matrix_}}, {.name = "m", .owner = owner});
    return "ok";
  }
  if (verb == "run") {
    stop_ = false;
    thread_ = runtime_->spawn("hogwild", [this, number] {
      const ps::Hogwild table(*memory_, ps::rule<optim::SGD>({.lr = 1}));
      const at::Tensor one = at::sparse_coo_tensor(at::full({1, 1}, number, at::kLong),
                                                   at::full({1, kColumns}, -1.0), matrix_.sizes());
      while (!stop_) {
        table.push({one});
        ++count_;
      }
    });
    return "ok";
  }
  if (verb == "row") {
    const at::Tensor row = matrix_[number];
    return absl::StrCat("ok ", static_cast<int64_t>(row.min().item<double>()), " ",
                        static_cast<int64_t>(row.max().item<double>()));
  }
  if (verb == "halt") halt();
  return absl::StrCat("ok ", count_.load());
}

void HogwildPlayer::halt() {
  stop_ = true;
  if (thread_ != nullptr) thread_->join();
  thread_ = nullptr;
}

}  // namespace weft::integration
