// Pipeline::rebuild(): which workers are gone, which state every stage can have again, and a pipeline
// that begins with it.

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/internal/pipeline_state.h"

namespace weft::pipeline {

using internal::ask;
using internal::refused;

struct Pipeline::State::Survey {
  std::set<WorkerInfo> gone;
  // By worker of the plan: which processes keep its stages' state, by how many steps were done.
  std::vector<std::map<int64_t, std::vector<WorkerInfo>>> copies;
};

// Ends the parts at all workers, and finds out what is left.
Pipeline::State::Survey Pipeline::State::survey() const {
  Survey found;
  found.copies.resize(workers_.size());
  const std::set<WorkerInfo> all(workers_.begin(), workers_.end());
  std::vector<std::pair<WorkerInfo, Future<internal::SurveyAnswer>>> asked;
  for (const WorkerInfo& w : all) {
    asked.emplace_back(w,
                       ask<internal::SurveyAnswer>(*worker_, w, "@pipeline.survey",
                                                   internal::PipelineMessage{id_}, long_options()));
  }
  Status first;
  for (auto& [worker, future] : asked) {
    const auto answer = future.try_wait();
    if (!answer.ok()) {
      if (error_kind(answer.status()) == ErrorKind::kPeerLost) {
        found.gone.insert(worker);
      } else if (first.ok()) {
        first = annotate(answer.status(), absl::StrCat("rebuilding a pipeline: whether worker '",
                                                       worker.name, "' is gone"));
      }
      continue;
    }
    for (const internal::KeptCopy& copy : answer->copies) {
      if (copy.owner < 0 || copy.owner >= static_cast<int64_t>(workers_.size())) continue;
      found.copies[static_cast<size_t>(copy.owner)][copy.steps].push_back(worker);
    }
  }
  throw_if_error(first);
  return found;
}

namespace {

// How many steps the state has done that every worker's stages can have: `done` if possible, else the
// most. Steps that their callers have not seen end are repeated, so that no loss is missed.
template <class Copies>
StatusOr<int64_t> common_steps(const Copies& copies, const std::vector<WorkerInfo>& workers,
                               bool kept, int64_t done) {
  std::string lost;
  std::set<int64_t> common;
  for (size_t w = 0; w < copies.size(); ++w) {
    std::set<int64_t> here;
    for (const auto& [steps, holders] : copies[w]) here.insert(steps);
    if (here.empty()) absl::StrAppend(&lost, lost.empty() ? "'" : ", '", workers[w].name, "'");
    if (w == 0) {
      common = here;
    } else {
      std::set<int64_t> both;
      std::set_intersection(common.begin(), common.end(), here.begin(), here.end(),
                            std::inserter(both, both.end()));
      common.swap(both);
    }
  }
  if (!kept) {
    return make_error(ErrorKind::kState,
                      "rebuilding a pipeline: it keeps no copies of its stages' state; set "
                      "PipelineOptions::keep_copies, or give RebuildOptions::checkpoint or state");
  }
  if (common.empty()) {
    return make_error(
        ErrorKind::kState,
        absl::StrCat("rebuilding a pipeline: no worker that is left keeps the state of the stages "
                     "of ",
                     lost.empty() ? "one step at all workers" : absl::StrCat("worker ", lost),
                     "; give RebuildOptions::checkpoint or state"));
  }
  return common.count(done) > 0 ? done : *common.rbegin();
}

}  // namespace

void Pipeline::State::keep() const {
  if (!options_.keep_copies) return;
  std::vector<Future<StateMap>> kept;
  std::set<int> seen;
  for (int s = 0; s < plan_.stages(); ++s) {
    if (seen.insert(plan_.placement[s]).second) {
      kept.push_back(fetch(s, internal::Fetch::kKeep, {}));
    }
  }
  Status first;
  for (auto& f : kept) {
    const Status status = f.try_wait().status();
    if (first.ok()) first = status;
  }
  throw_if_error(first);
}

// Every stage from where its state is: at once if that is its worker, else by way of here.
void Pipeline::State::restore(const State& old, const Survey& found, int64_t steps) const {
  std::vector<std::pair<int, Future<StateMap>>> loading;
  for (int s = 0; s < plan_.stages(); ++s) {
    const int owner = old.plan_.placement[s];
    const std::vector<WorkerInfo>& holders = found.copies[owner].at(steps);
    const WorkerInfo& target = workers_[plan_.placement[s]];
    internal::FetchMessage message{.pipeline = id_, .stage = s};
    message.owner = owner;
    message.steps = steps;
    if (std::find(holders.begin(), holders.end(), target) != holders.end()) {
      message.what = static_cast<int64_t>(internal::Fetch::kLoadCopy);
      message.from = old.id_;
      loading.emplace_back(s, fetch_at(target, message));
      continue;
    }
    message.what = static_cast<int64_t>(internal::Fetch::kCopy);
    message.pipeline = old.id_;
    loading.emplace_back(
        s, fetch(s, internal::Fetch::kLoadState, fetch_at(holders.front(), message).wait()));
  }
  Status first;
  for (auto& [stage, future] : loading) {
    const Status status = future.try_wait().status();
    if (!status.ok() && first.ok())
      first = annotate(status, absl::StrCat("restoring stage ", stage));
  }
  throw_if_error(first);
}

std::shared_ptr<Pipeline::State> Pipeline::State::rebuilt(const std::function<Stage(int)>& replace,
                                                          const RebuildOptions& rebuild) {
  int64_t done = 0;
  {
    MutexLock lock(&mutex_);
    if (closed_) throw_error(make_error(ErrorKind::kState, "the pipeline is closed"));
    if (error_.ok()) error_ = make_error(ErrorKind::kState, "the pipeline is being rebuilt");
    done = done_steps_;
  }
  const Plan& plan = rebuild.plan.has_value() ? *rebuild.plan : plan_;
  if (plan.stages() != plan_.stages() || plan.edges != plan_.edges) {
    throw_error(
        refused(absl::StrCat("rebuilding a pipeline of ", plan_.stages(), " stages with a plan of ",
                             plan.stages(), " stages, or with other edges")));
  }
  const Survey found = survey();
  StatusOr<int64_t> steps = rebuild.steps;
  if (rebuild.state == nullptr) {
    steps = common_steps(found.copies, workers_, options_.keep_copies, done);
  }
  const bool from_checkpoint = !steps.ok() && !rebuild.checkpoint.empty();
  if (!steps.ok() && !from_checkpoint) throw_error(steps.status());
  std::vector<Stage> stages = stages_;
  for (int s = 0; s < plan_.stages(); ++s) {
    const WorkerInfo& owner = workers_[plan_.placement[s]];
    if (found.gone.count(owner) == 0) continue;
    if (replace == nullptr) {
      throw_error(refused(absl::StrCat("rebuilding a pipeline: worker '", owner.name,
                                       "' with stage ", s, " is gone, and nothing replaces it")));
    }
    stages[s] = replace(s);
  }
  PipelineOptions options = options_;
  if (steps.ok()) options.first_step = *steps;
  auto made = std::make_shared<State>(worker_, plan, std::move(options));
  made->rates_ = rates_;
  made->open(std::move(stages));
  try {
    if (from_checkpoint) {
      made->load(rebuild.checkpoint, rebuild.checkpoint_options);
    } else if (rebuild.state == nullptr) {
      made->restore(*this, found, *steps);
    } else {
      for (int s = 0; s < plan.stages(); ++s) {
        made->fetch(s, internal::Fetch::kLoadState, rebuild.state(s)).wait();
      }
    }
    made->keep();
  } catch (...) {
    made->close(/*wait=*/true);
    throw;
  }
  close(/*wait=*/true);
  return made;
}

}  // namespace weft::pipeline
