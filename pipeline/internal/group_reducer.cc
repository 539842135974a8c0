#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/reducer.h"

namespace weft::pipeline {
namespace {

class GroupReducer final : public GradReducer {
 public:
  GroupReducer(ProcessGroup group, const GroupReducerOptions& options)
      : group_(std::move(group)), options_(options) {}

  Status ready(const at::Tensor& gradient) override {
    bucket_.push_back(gradient);
    bytes_ += static_cast<int64_t>(gradient.nbytes());
    if (bytes_ >= options_.bucket_bytes) launch();
    return absl::OkStatus();
  }
  Status finish(absl::Duration time_left) override {
    launch();
    Status first;
    for (const Work& work : std::exchange(under_way_, {})) {
      const Status status = first.ok() ? work.try_wait(Timeout(time_left)) : work.error();
      if (first.ok()) first = status;
    }
    if (first.ok()) return first;
    return annotate(first, absl::StrCat("reducing over group '", group_.name(), "' of ",
                                        group_.size(), " replicas"));
  }
  void drop(const Status&) override {
    bucket_.clear();
    bytes_ = 0;
    under_way_.clear();
  }

 private:
  void launch() {
    if (bucket_.empty()) return;
    under_way_.push_back(group_.all_reduce_coalesced_async(bucket_, {.op = options_.op}));
    bucket_.clear();
    bytes_ = 0;
  }

  ProcessGroup group_;
  const GroupReducerOptions options_;
  TensorList bucket_;
  int64_t bytes_ = 0;
  std::vector<Work> under_way_;
};

}  // namespace

std::shared_ptr<GradReducer> group_reducer(const ProcessGroup& group,
                                           const GroupReducerOptions& options) {
  if (!group.valid() || options.bucket_bytes < 1) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        group.valid() ? absl::StrCat("group_reducer: buckets of ", options.bucket_bytes, " bytes")
                      : "group_reducer: there is no process group"));
  }
  return std::make_shared<GroupReducer>(group, options);
}

}  // namespace weft::pipeline
