// What a worker reports of its contexts and passes: numbers for programs, tables for observers.

#include "absl/strings/str_cat.h"
#include "weft/dist_autograd/internal/service.h"

namespace weft::internal {
namespace {

std::string text(BackwardPass::State state) {
  switch (state) {
    case BackwardPass::State::kRunning: return "running";
    case BackwardPass::State::kDone: return "done here";
    case BackwardPass::State::kAborted: return "failed";
  }
  return "";
}

}  // namespace

void DistAutogradService::put_debug_info(std::map<std::string, int64_t>* out) const {
  ContextState::Counts sum;
  const std::vector<ContextRef> all = contexts();
  for (const ContextRef& context : all) {
    const ContextState::Counts counts = context->counts();
    sum.sends += counts.sends;
    sum.running += counts.running;
    sum.leaves += counts.leaves;
  }
  MutexLock lock(&mutex_);
  (*out)["num_autograd_contexts"] = static_cast<int64_t>(all.size());
  (*out)["num_current_backward_passes"] = sum.running;
  (*out)["autograd_sends"] = sum.sends;
  (*out)["autograd_leaves"] = sum.leaves;
  (*out)["autograd_releases"] = releases_;
  int64_t tombstones = 0;
  for (const auto& [creator, released] : released_) {
    tombstones += static_cast<int64_t>(released.size());
  }
  (*out)["autograd_tombstones"] = tombstones;
  (*out)["autograd_workers_gone"] = static_cast<int64_t>(gone_.size());
  (*out)["autograd_stall_reports"] = stall_reports_;
  for (const char* kind : {"discover", "gradient", "close", "done", "abort", "progress_report",
                           "release", "norm", "scale"}) {
    const auto at = sent_.find(kind);
    (*out)[absl::StrCat("autograd_", kind, "s_sent")] = at == sent_.end() ? 0 : at->second;
  }
}

void DistAutogradService::put_inspection(Inspection* out) const {
  Inspection::Table& table =
      out->table("autograd_contexts", {"context", "creator", "sends", "leaves", "told", "passes"});
  Inspection::Table& passes =
      out->table("backward_passes", {"pass", "root", "state", "age_s", "deadline_in_s", "peers",
                                     "gradients", "parked_bytes", "waits_for"});
  const absl::Time now = runtime().now();
  for (const ContextRef& context : contexts()) {
    const ContextState::Counts counts = context->counts();
    table.add({weft::to_string(context->id()), name_of(context->id().creator), counts.sends,
               counts.leaves, static_cast<int64_t>(context->known().size()), counts.running});
    for (const auto& pass : context->passes()) {
      if (passes.full()) {
        passes.leave_out(1);
        continue;
      }
      BackwardPass::Sight sight = pass->sight();
      passes.add({to_string(pass->id()), name_of(pass->id().root), text(sight.state),
                  absl::ToDoubleSeconds(sight.age), absl::ToDoubleSeconds(pass->deadline() - now),
                  sight.peers, sight.gradients, sight.parked_bytes, std::move(sight.waits_for)});
    }
  }
}

}  // namespace weft::internal
