// Pipeline::rebuild(): which workers are gone, which state every stage can have again, and a pipeline
// that begins with it.

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "weft/common/condition.h"
#include "weft/pipeline/internal/pipeline_state.h"

namespace weft::pipeline {

using internal::refused;

struct Pipeline::State::Survey {
  std::set<WorkerInfo> gone;
  // By worker of the plan: which processes keep its stages' state, by how many steps were done.
  std::vector<std::map<int64_t, std::vector<WorkerInfo>>> copies;
};

namespace {

// That a process has ended is known at its own host first, and to its host's workers when they ask: so
// they are asked again while another worker is silent.
constexpr absl::Duration kAskAgainAfter = absl::Milliseconds(500);

// The answers of workers that were asked, in any order.
class Answers {
 public:
  explicit Answers(Runtime* runtime) : runtime_(runtime), changed_(runtime) {}

  void put(const WorkerInfo& worker, StatusOr<Payload> answer) {
    StatusOr<internal::SurveyAnswer> said =
        answer.ok() ? internal::decode<internal::SurveyAnswer>(*std::move(answer))
                    : StatusOr<internal::SurveyAnswer>(answer.status());
    {
      MutexLock lock(&mutex_);
      if (said.ok()) gone_.insert(said->gone.begin(), said->gone.end());
      if (error_kind(said.status()) == ErrorKind::kPeerLost) gone_.insert(worker);
      answers_.insert_or_assign(worker, std::move(said));
    }
    changed_.notify_all();
  }
  // Those that have answered, when it is time to ask them again; none when no answer is missing.
  std::vector<WorkerInfo> wait(const std::set<WorkerInfo>& all) {
    const absl::Time end = runtime_->now() + kAskAgainAfter;
    MutexLock lock(&mutex_);
    while (true) {
      bool complete = true;
      for (const WorkerInfo& w : all) {
        complete = complete && (answers_.count(w) > 0 || gone_.count(w) > 0);
      }
      if (complete) return {};
      std::vector<WorkerInfo> heard;
      for (const auto& [worker, answer] : answers_) {
        if (answer.ok() && gone_.count(worker) == 0) heard.push_back(worker);
      }
      if (runtime_->now() >= end && !heard.empty()) return heard;
      (void)changed_.wait_until(&mutex_, heard.empty() ? absl::InfiniteFuture() : end);
    }
  }
  std::set<WorkerInfo> gone() const {
    MutexLock lock(&mutex_);
    return gone_;
  }
  std::map<WorkerInfo, StatusOr<internal::SurveyAnswer>> answers() const {
    MutexLock lock(&mutex_);
    return answers_;
  }

 private:
  Runtime* const runtime_;
  Condition changed_;
  mutable Mutex mutex_;
  std::map<WorkerInfo, StatusOr<internal::SurveyAnswer>> answers_ ABSL_GUARDED_BY(mutex_);
  std::set<WorkerInfo> gone_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

// Ends the parts at all workers, and finds out what is left.
Pipeline::State::Survey Pipeline::State::survey() const {
  Survey found;
  found.copies.resize(workers_.size());
  const std::set<WorkerInfo> all(workers_.begin(), workers_.end());
  const auto answers = std::make_shared<Answers>(&worker_->runtime());
  std::vector<WorkerInfo> asked(all.begin(), all.end());
  while (!asked.empty()) {
    for (const WorkerInfo& w : asked) {
      internal::call(
          *worker_, w, "@pipeline.survey", internal::PipelineMessage{id_}, long_options(),
          [answers, w](StatusOr<Payload> answer) { answers->put(w, std::move(answer)); });
    }
    asked = answers->wait(all);
  }
  found.gone = answers->gone();
  Status first;
  for (const auto& [worker, answer] : answers->answers()) {
    if (found.gone.count(worker) > 0) continue;
    if (!answer.ok()) {
      if (first.ok()) {
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
  {
    MutexLock lock(&mutex_);
    gone_ = found.gone;
  }
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
