#include <utility>

#include "weft/ps/client.h"
#include "weft/ps/internal/table_future.h"

namespace weft::ps {
namespace {

using internal::Ask;
using internal::nothing_of;
using internal::push_of;
using internal::start;
using internal::values_of;

Ask ask_push(std::string_view what, const at::Tensor& values, const PushOptions& options) {
  Ask ask{.what = what};
  ask.push = values;
  ask.rate = options.rate;
  ask.max_norm = options.max_norm;
  ask.then = options.computed_with;
  ask.advance = options.advance;
  ask.position = options.position;
  return ask;
}

}  // namespace

const std::string& Table::name() const { return handle_->core().setup().name; }
const TableDefinition& Table::definition() const { return handle_->core().setup().definition; }
uint64_t Table::clock() const { return handle_->core().clock(); }
TableStats Table::stats() const { return handle_->core().stats(); }

Future<at::Tensor> Table::pull(Timeout deadline) const {
  return start<at::Tensor, values_of>(handle_->core(), Ask{.what = "pull", .pull = true}, deadline);
}

Future<PushResult> Table::push(const at::Tensor& gradient, const PushOptions& options) const {
  return start<PushResult, push_of>(handle_->core(), ask_push("push", gradient, options),
                                    options.deadline);
}

Future<at::Tensor> Table::push_pull(const at::Tensor& gradient, const PushOptions& options) const {
  Ask ask = ask_push("push_pull", gradient, options);
  ask.pull = true;
  return start<at::Tensor, values_of>(handle_->core(), std::move(ask), options.deadline);
}

Future<void> Table::assign(const at::Tensor& values, const PushOptions& options) const {
  Ask ask = ask_push("assign", values, options);
  ask.kind = internal::PushKind::kAssign;
  return start<void, nothing_of>(handle_->core(), std::move(ask), options.deadline);
}

Future<at::Tensor> Table::pull_rows(const at::Tensor& keys, Timeout deadline) const {
  Ask ask{.what = "pull_rows"};
  ask.pull = true;
  ask.pull_keys = keys;
  return start<at::Tensor, values_of>(handle_->core(), std::move(ask), deadline);
}

Future<PushResult> Table::push_rows(const at::Tensor& keys, const at::Tensor& gradients,
                                    const PushOptions& options) const {
  Ask ask = ask_push("push_rows", gradients, options);
  ask.push_keys = keys;
  return start<PushResult, push_of>(handle_->core(), std::move(ask), options.deadline);
}

Future<at::Tensor> Table::push_pull_rows(const at::Tensor& keys, const at::Tensor& gradients,
                                         const at::Tensor& pull_keys,
                                         const PushOptions& options) const {
  Ask ask = ask_push("push_pull_rows", gradients, options);
  ask.push_keys = keys;
  ask.pull = true;
  ask.pull_keys = pull_keys;
  return start<at::Tensor, values_of>(handle_->core(), std::move(ask), options.deadline);
}

Future<void> Table::advance(Timeout deadline) const {
  return start<void, nothing_of>(handle_->core(), Ask{.what = "advance", .advance = true},
                                 deadline);
}

Future<void> Table::leave(Timeout deadline) const {
  return start<void, nothing_of>(handle_->core(), Ask{.what = "leave", .leave = true}, deadline);
}

}  // namespace weft::ps
