#include "weft/ps/client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/ps/internal/ask.h"
#include "weft/ps/internal/cutter.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/table_core.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/rpc/worker.h"

namespace weft::ps {
namespace {

using internal::ask_bytes;
using internal::OpenAnswer;
using internal::OpenRequest;
using internal::PsService;
using internal::TableCore;

constexpr absl::Duration kDefaultOpen = absl::Seconds(60);
constexpr absl::Duration kDefaultAttempt = absl::Seconds(10);
constexpr absl::Duration kAskAgain = absl::Milliseconds(50);

StatusOr<OpenAnswer> ask_open(const Worker& worker, const WorkerInfo& server,
                              const OpenRequest& request, absl::Duration deadline) {
  WEFT_ASSIGN_OR_RETURN(const std::string bytes,
                        ask_bytes(worker, server, internal::kOpenMethod, internal::kOpenSignature,
                                  encode(request), deadline));
  return internal::decode_opened(bytes);
}

// What may be otherwise in a moment: a worker that has not come, or serves no tables yet; a table
// that does not exist yet.
bool worth_waiting(const Status& why) {
  return internal::gave_no_answer(error_kind(why)) ||
         (error_kind(why) == ErrorKind::kState && why.code() == absl::StatusCode::kUnavailable);
}

class Opener {
 public:
  Opener(const Worker& worker, std::string name, absl::Duration deadline, absl::Duration attempt)
      : worker_(worker),
        name_(std::move(name)),
        deadline_(deadline_after(worker.now(), deadline)),
        attempt_(attempt) {}

  // Asks the servers in turn until one has an answer, one has an error that stays, or no time is
  // left. One server: that of a part; several: any that knows a table which another client makes.
  StatusOr<std::pair<WorkerInfo, OpenAnswer>> ask(const std::vector<std::string>& servers,
                                                  const OpenRequest& request) {
    Status last = make_error(ErrorKind::kDeadline, "there was no time to ask");
    bool unknown = false;  // a server was there, and has no such table
    while (left() > absl::ZeroDuration()) {
      unknown = false;
      for (const std::string& server : servers) {
        if (left() == absl::ZeroDuration()) break;
        const StatusOr<WorkerInfo> info = worker_.try_get_worker_info(server);
        const StatusOr<OpenAnswer> answer =
            info.ok() ? ask_open(worker_, *info, request, std::min(left(), attempt_))
                      : StatusOr<OpenAnswer>(info.status());
        if (answer.ok()) return std::pair(*info, *answer);
        const std::string what = absl::StrCat("open table '", name_, "' at '", server, "'");
        if (!worth_waiting(answer.status())) return annotate(answer.status(), what);
        const bool says_unknown = info.ok() && error_kind(answer.status()) == ErrorKind::kNotFound;
        if (unknown && !says_unknown) continue;  // that another does not answer says less
        unknown = says_unknown;
        last = annotate(answer.status(), what);
      }
      worker_.runtime().make_parker()->park_until(worker_.now() + std::min(left(), kAskAgain));
    }
    return make_error(unknown ? ErrorKind::kNotFound : ErrorKind::kDeadline,
                      absl::StrCat("not in its time; the last: ", last.message()));
  }

  // With two copies: the server that owns the part now.
  StatusOr<internal::PartTarget> find_owner(PsService& service, const OpenRequest& request) {
    const size_t count = request.servers.size();
    const size_t home =
        home_of(request.index, internal::part_count(*request.definition, count), count);
    std::vector<std::string> names = request.servers;
    std::rotate(names.begin(), names.begin() + static_cast<int64_t>(home), names.end());
    Status last = make_error(ErrorKind::kDeadline, "there was no time to ask");
    for (int round = 0;; ++round) {
      // Servers that are in no list may have all copies by now.
      if (round > 0) names = service.with_joined(std::move(names), left());
      for (size_t i = 0; i < names.size(); ++i) {
        const StatusOr<WorkerInfo> info = worker_.try_get_worker_info(names[i]);
        const absl::Duration time = std::min(left(), attempt_);
        if (!info.ok()) last = info.status();
        if (!info.ok() || time == absl::ZeroDuration()) continue;
        const StatusOr<OpenAnswer> answer = ask_open(worker_, *info, request, time);
        if (answer.ok() && answer->part != 0) {
          return internal::PartTarget{*info, answer->part, answer->map};
        }
        if (!answer.ok() && !worth_waiting(answer.status())) return answer.status();
        if (!answer.ok()) last = answer.status();
        if (answer.ok() && answer->map.epoch != 0) {
          internal::add_name(answer->map.owner.name, &names);
        }
      }
      // None says that it is the owner: a backup is to look for it.
      for (const std::string& name : names) {
        const StatusOr<WorkerInfo> info = worker_.try_get_worker_info(name);
        const absl::Duration time = std::min(left(), attempt_);
        if (!info.ok() || time == absl::ZeroDuration()) continue;
        const internal::FindRequest find{name_, request.index, true};
        (void)ask_bytes(worker_, *info, internal::kFindMethod, internal::kFindSignature,
                        encode(find), time);
      }
      if (left() == absl::ZeroDuration()) {
        return make_error(ErrorKind::kDeadline,
                          absl::StrCat("open table '", name_, "', part ", request.index,
                                       ": not in its time; the last: ", last.message()));
      }
      worker_.runtime().make_parker()->park_until(worker_.now() + std::min(left(), kAskAgain));
    }
  }

  absl::Duration left() const { return std::max(absl::ZeroDuration(), deadline_ - worker_.now()); }

 private:
  const Worker& worker_;
  const std::string name_;
  const absl::Time deadline_;
  const absl::Duration attempt_;
};

// The client takes part with the same clock everywhere: at least that of the part which is
// furthest. Once it has entered a part with a clock, that part's steps do not pass it, so the
// second round is the last.
Status enter(TableCore& core, const Opener& opener) {
  uint64_t clock = 0;
  for (int round = 0; round < 2; ++round) {
    const Continuation with = continuation_of(core.service()->worker());
    Promise<uint64_t> promise(with.executor);
    promise.state()->set_default_wait(absl::InfiniteDuration());
    promise.state()->set_wait_driver(with.driver);
    const Future<uint64_t> entered = promise.future();
    core.submit(internal::Ask{.what = "enter", .enter = clock, .deadline = opener.left()},
                [promise = std::move(promise)](StatusOr<internal::OpResult> result) mutable {
                  if (!result.ok()) {
                    promise.try_set(result.status());
                  } else {
                    promise.try_set(result->clock);
                  }
                });
    WEFT_ASSIGN_OR_RETURN(clock, entered.try_wait());
    if (clock == 0) break;  // every part is at the beginning
  }
  core.set_clock(clock);
  return absl::OkStatus();
}

}  // namespace

struct Client::State {
  std::shared_ptr<PsService> service;
  ClientOptions options;
};

Client::Client(const Worker& worker, ClientOptions options)
    : state_(std::make_shared<State>(State{PsService::of(worker), std::move(options)})) {
  std::vector<std::string> names = state_->options.servers;
  std::sort(names.begin(), names.end());
  if (names.empty() || std::adjacent_find(names.begin(), names.end()) != names.end()) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           "ps::Client: servers must be one name or more, each once"));
  }
  throw_if_error(annotate(internal::check_rules(state_->options.rules), "ps::Client"));
}

Table Client::open_table(std::string_view name, const TableDefinition& definition,
                         const OpenOptions& options) const {
  return value_or_throw(try_open_table(name, definition, options));
}
Table Client::open_table(std::string_view name, const OpenOptions& options) const {
  return value_or_throw(try_open_table(name, std::nullopt, options));
}

StatusOr<Table> Client::try_open_table(std::string_view name,
                                       const std::optional<TableDefinition>& definition,
                                       const OpenOptions& options) const {
  const Worker& worker = state_->service->worker();
  WEFT_RETURN_IF_ERROR(internal::check_name(name));
  if (definition.has_value()) {
    Status s = internal::check_definition(*definition);
    if (s.ok()) s = internal::rule_of(*definition, state_->options.rules).status();
    if (!s.ok()) return annotate(s, absl::StrCat("table '", std::string(name), "'"));
  }
  TableCore::Setup setup;
  setup.name = std::string(name);
  setup.observer = options.observer;
  setup.attempt = state_->options.attempt_timeout.value_or(kDefaultAttempt);
  Opener opener(worker, setup.name, options.deadline.value_or(kDefaultOpen), setup.attempt);
  OpenRequest request{setup.name, definition, state_->options.servers, 0};
  if (!definition.has_value()) {
    WEFT_ASSIGN_OR_RETURN(const auto found, opener.ask(state_->options.servers, request));
    request.definition = found.second.definition;
    request.servers = found.second.servers;
  }
  setup.definition = *request.definition;
  setup.rule = internal::find_rule(setup.definition.rule.name, state_->options.rules);
  setup.servers = request.servers;
  if (setup.definition.copies > 1 && request.servers.size() < 2) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("table '", setup.name, "' of two copies wants two servers or more, not ",
                     request.servers.size()));
  }
  const size_t servers = request.servers.size();
  const size_t parts = internal::part_count(setup.definition, servers);
  for (size_t i = 0; i < parts; ++i) {
    request.index = static_cast<uint32_t>(i);
    if (internal::in_map(setup.definition)) {
      WEFT_ASSIGN_OR_RETURN(internal::PartTarget owner,
                            opener.find_owner(*state_->service, request));
      setup.parts.push_back(std::move(owner));
      continue;
    }
    const std::string& server = request.servers[home_of(i, parts, servers)];
    WEFT_ASSIGN_OR_RETURN(const auto opened, opener.ask({server}, request));
    setup.parts.push_back({opened.first, opened.second.part, {}});
  }
  auto core = TableCore::make(state_->service, std::move(setup));
  auto handle = std::make_shared<internal::TableHandle>(core);
  if (!options.observer) {
    if (Status s = enter(*core, opener); !s.ok()) return s;
  }
  return Table(std::move(handle));
}

void Client::move_part(std::string_view table, size_t part, std::string_view server,
                       Timeout deadline) const {
  throw_if_error(try_move_part(table, part, server, deadline));
}
Status Client::try_move_part(std::string_view table, size_t part, std::string_view server,
                             Timeout deadline) const {
  const Worker& worker = state_->service->worker();
  WEFT_RETURN_IF_ERROR(internal::check_name(table));
  if (part >= kMostParts) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("table '", std::string(table), "' has no part ", part));
  }
  WEFT_ASSIGN_OR_RETURN(const WorkerInfo to, worker.try_get_worker_info(server));
  return state_->service->move(std::string(table), static_cast<uint32_t>(part),
                               {to.name, to.incarnation}, state_->options.servers,
                               deadline_after(worker.now(), deadline.value_or(kDefaultOpen)));
}

SnapshotInfo Client::snapshot(std::string_view folder, const SnapshotOptions& options) const {
  return value_or_throw(try_snapshot(folder, options));
}
StatusOr<SnapshotInfo> Client::try_snapshot(std::string_view folder,
                                            const SnapshotOptions& options) const {
  return internal::take_snapshot(*state_->service, state_->options.servers, folder, options);
}
SnapshotInfo Client::restore(std::string_view folder, const RestoreOptions& options) const {
  return value_or_throw(try_restore(folder, options));
}
StatusOr<SnapshotInfo> Client::try_restore(std::string_view folder,
                                           const RestoreOptions& options) const {
  return internal::restore_snapshot(*state_->service, state_->options.servers, folder, options);
}

}  // namespace weft::ps
