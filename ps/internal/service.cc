#include "weft/ps/internal/service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/ps/internal/definition.h"
#include "weft/rpc/spi/service_worker.h"

namespace weft::ps::internal {
namespace {

constexpr size_t kMostTables = 1 << 16;

int64_t bytes_of_dense(const TableDefinition& definition, const UpdateRule& rule,
                       const ElementRange& range) {
  int64_t copies = 1;
  for (size_t b = 0; b < rule.buffer_names().size(); ++b) {
    copies += rule.first_value(definition.rule.options, b).has_value() ? 1 : 0;
  }
  return range.size() * copies * static_cast<int64_t>(c10::elementSize(definition.dtype));
}

}  // namespace

std::shared_ptr<PsService> PsService::of(const Worker& worker) {
  auto service = worker.service<PsService>();
  if (service == nullptr) {
    throw_error(make_error(ErrorKind::kState,
                           absl::StrCat("worker '", worker.name(), "' has no parameter servers: ",
                                        "list ps_service() at join")));
  }
  return service;
}

Status PsService::serve(const ServerOptions& options) {
  if (options.table_bytes <= 0 || options.queue_bytes <= 0 || options.log_bytes <= 0) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("ps::Server: table_bytes is ", options.table_bytes,
                                   ", queue_bytes ", options.queue_bytes, ", log_bytes ",
                                   options.log_bytes, "; each must be above 0"));
  }
  if (const Status s = check_rules(options.rules); !s.ok()) return annotate(s, "ps::Server");
  MutexLock lock(&mutex_);
  if (!closed_.ok()) return closed_;
  if (limits_ != nullptr) {
    return make_error(ErrorKind::kState,
                      absl::StrCat("worker '", worker().name(), "' has a ps::Server already"));
  }
  limits_ = std::make_shared<ServerLimits>();
  limits_->table_bytes = options.table_bytes;
  limits_->queue_bytes = options.queue_bytes;
  limits_->log_bytes = options.log_bytes;
  limits_->rules = options.rules;
  return absl::OkStatus();
}

void PsService::stop_serving() {
  std::map<uint64_t, PartRef> parts;
  {
    MutexLock lock(&mutex_);
    limits_ = nullptr;
    draining_ = false;
    cut_ = nullptr;
    loaded_ = nullptr;
    by_name_.clear();
    parts = std::exchange(by_id_, {});
  }
  for (const auto& [id, part] : parts) {
    part->close(make_error(ErrorKind::kState, "the server of the table has ended"));
  }
}

std::vector<PsService::PartRef> PsService::parts() const {
  std::vector<PartRef> out;
  MutexLock lock(&mutex_);
  for (const auto& [id, part] : by_id_) out.push_back(part);
  return out;
}

std::map<PsService::PartName, std::shared_ptr<Part>> PsService::parts_by_name() const {
  MutexLock lock(&mutex_);
  return by_name_;
}

// ---- requests ----------------------------------------------------------------------------------

std::vector<Method> PsService::methods() {
  // `handle(context, arguments, reply)`.
  const auto method = [](std::string_view name, std::string_view signature, auto handle) {
    Method out;
    out.name = std::string(name);
    out.signature = std::string(signature);
    out.invoke = [handle](CallContext& context, const std::shared_ptr<void>&, Payload arguments,
                          ReplyFn reply) {
      handle(context, std::move(arguments), std::move(reply));
    };
    return out;
  };
  const auto without_caller = [this](auto handle) {
    return [this, handle](CallContext&, Payload arguments, ReplyFn reply) {
      (this->*handle)(std::move(arguments), std::move(reply));
    };
  };
  const auto with_caller = [this](auto handle) {
    return [this, handle](CallContext& context, Payload arguments, ReplyFn reply) {
      (this->*handle)(context, std::move(arguments), std::move(reply));
    };
  };
  Method call = method(kCallMethod, kCallSignature, with_caller(&PsService::on_call));
  // The answer to a pull is a copy of its own, in the arena already (answer_memory.h).
  call.results = TensorResults::kBorrow;
  return {method(kOpenMethod, kOpenSignature, without_caller(&PsService::on_open)),
          call,
          method(kFindMethod, kFindSignature, without_caller(&PsService::on_find)),
          method(kCopyMethod, kCopySignature, without_caller(&PsService::on_copy)),
          method(kMoveMethod, kMoveSignature, without_caller(&PsService::on_move)),
          method(kListMethod, kMoveSignature,
                 [this](CallContext&, Payload, ReplyFn reply) { on_list(std::move(reply)); }),
          method(kShareMethod, kShareSignature, with_caller(&PsService::on_share)),
          method(kCutMethod, kCutSignature, with_caller(&PsService::on_cut)),
          method(kHoldMethod, kCutSignature, with_caller(&PsService::on_hold)),
          method(kRestoreMethod, kCutSignature, with_caller(&PsService::on_restore))};
}

void PsService::on_open(Payload arguments, ReplyFn reply) {
  const auto answer = [&]() -> StatusOr<OpenAnswer> {
    WEFT_ASSIGN_OR_RETURN(const std::string bytes, unpack_bytes(std::move(arguments)));
    WEFT_ASSIGN_OR_RETURN(const OpenRequest request, decode_open(bytes));
    return open(request);
  };
  const StatusOr<OpenAnswer> opened = answer();
  if (!opened.ok()) return reply(opened.status());
  reply(pack_bytes(encode(*opened)));
}

StatusOr<PsService::PartRef> PsService::find(const OpenRequest& request) const {
  if (!closed_.ok()) return closed_;
  if (limits_ == nullptr) {
    return make_error(absl::StatusCode::kUnavailable, ErrorKind::kState,
                      absl::StrCat("worker '", worker().name(), "' serves no tables, such as '",
                                   request.name, "': make a ps::Server there"));
  }
  if (!request.definition.has_value()) {  // any part of it knows what it is
    const auto at = by_name_.lower_bound({request.name, 0});
    return at == by_name_.end() || at->first.first != request.name ? nullptr : at->second;
  }
  const auto at = by_name_.find({request.name, request.index});
  return at == by_name_.end() ? nullptr : at->second;
}

Status PsService::check_same(const OpenRequest& request, const Part& part) const {
  const PartIdentity& there = part.identity();
  std::string why = difference(there.definition, *request.definition);
  if (why.empty() && (there.servers != request.servers || there.index != request.index)) {
    why = absl::StrCat("servers are ", absl::StrJoin(there.servers, ", "), " there and ",
                       absl::StrJoin(request.servers, ", "), " here");
  }
  if (why.empty()) return absl::OkStatus();
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("table '", request.name, "' at '", worker().name(),
                                 "' has another definition: ", why));
}

StatusOr<OpenAnswer> PsService::answer_open(const OpenRequest& request, const Part& part) const {
  const PartIdentity& there = part.identity();
  OpenAnswer answer{there.id, there.definition, there.servers, {}};
  if (request.definition.has_value()) WEFT_RETURN_IF_ERROR(check_same(request, part));
  if (!in_map(there.definition)) return answer;
  const PartReport report = part.report();
  answer.map = report.map;
  if (report.role != ReplicaProtocol::Role::kOwner) {
    answer.part = 0;
  } else if (!report.formed) {
    return make_error(absl::StatusCode::kUnavailable, ErrorKind::kState,
                      absl::StrCat("table '", request.name, "', part ", there.index, " at '",
                                   worker().name(), "' waits for another server to be its backup"));
  }
  return answer;
}

StatusOr<OpenAnswer> PsService::open(const OpenRequest& request) {
  std::shared_ptr<ServerLimits> limits;
  std::shared_ptr<void> until_there;
  uint64_t id = 0;
  {
    MutexLock lock(&mutex_);
    WEFT_ASSIGN_OR_RETURN(const PartRef part, find(request));
    if (part != nullptr) return answer_open(request, *part);
    if (!request.definition.has_value()) {
      std::vector<std::string> names;
      for (const auto& [name, other] : by_name_) {
        if (names.size() < 8) names.push_back(name.first);
      }
      return make_error(
          ErrorKind::kNotFound,
          absl::StrCat("there is no table '", request.name, "' at '", worker().name(),
                       "', there are ", by_name_.size(), ": ", absl::StrJoin(names, ", ")));
    }
    if (by_name_.size() >= kMostTables) {
      return make_error(ErrorKind::kResource,
                        absl::StrCat("table '", request.name, "' at '", worker().name(),
                                     "': there are ", kMostTables, " already"));
    }
    if (draining_) {
      return make_error(absl::StatusCode::kUnavailable, ErrorKind::kState,
                        absl::StrCat("worker '", worker().name(),
                                     "' drains, and makes no part of '", request.name, "'"));
    }
    until_there = making();
    limits = limits_;
    id = ++last_part_;
  }
  const bool copied = in_map(*request.definition);
  if (!makes(request)) {
    // Any server may be asked.
    if (copied) return OpenAnswer{0, *request.definition, request.servers, {}};
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("table '", request.name, "' wants part ", request.index,
                                   " at another server of its list than '", worker().name(), "'"));
  }
  std::optional<RangeMap> map;
  if (copied) {
    WEFT_ASSIGN_OR_RETURN(map, claim(request));
    if (map->owner != self()) return OpenAnswer{0, *request.definition, request.servers, *map};
  }
  WEFT_ASSIGN_OR_RETURN(const PartRef made, make_part(request, limits, id, map));
  if (map.has_value()) made->own(*map, weak_from_this());
  std::vector<WorkerKey> gone;
  PartRef there;
  {
    MutexLock lock(&mutex_);
    WEFT_ASSIGN_OR_RETURN(there, find(request));
    uint64_t& epoch = epochs_[{request.name, request.index}];
    if (there == nullptr && map.has_value() && map->epoch <= epoch) {
      return make_error(
          ErrorKind::kPeerLost,
          absl::StrCat("table '", request.name, "', part ", request.index, ": its server '",
                       worker().name(), "' has ended since, and no copy is left"));
    }
    if (there == nullptr && limits_ == limits) {
      there = made;
      if (map.has_value()) epoch = map->epoch;
      by_name_.emplace(PartName(request.name, request.index), made);
      by_id_.emplace(made->identity().id, made);
      gone.assign(gone_.begin(), gone_.end());
    }
  }
  if (there == nullptr) return make_error(ErrorKind::kState, "the server of the table has ended");
  for (const WorkerKey& worker : gone) there->worker_gone(worker);
  if (copied) {
    WEFT_ASSIGN_OR_RETURN(Keeper * keeper, this->keeper());
    keeper->tick_soon();
  }
  return answer_open(request, *there);
}

StatusOr<PsService::PartRef> PsService::make_part(const OpenRequest& request,
                                                  std::shared_ptr<ServerLimits> limits, uint64_t id,
                                                  const std::optional<RangeMap>& map) {
  PartIdentity identity{id,           self(), request.name, *request.definition, request.servers,
                        request.index};
  StatusOr<RuleRef> rule = rule_of(identity.definition, limits->rules);
  if (!rule.ok()) {
    return annotate(rule.status(),
                    absl::StrCat("table '", request.name, "' at '", worker().name(), "'"));
  }
  const bool dense = identity.definition.kind == TableKind::kDense;
  const ElementRange range =
      !dense ? ElementRange{}
             : element_range(element_count(identity.definition), identity.parts(), request.index);
  if (dense) {
    // All parts that this server has of it at first, so that a table which is refused leaves none.
    const size_t at_each = identity.parts() / request.servers.size();
    const size_t first = request.index / at_each * at_each;
    const int64_t all = element_count(identity.definition);
    ElementRange needed = range;
    if (identity.home() == worker().name()) {
      needed = {element_range(all, identity.parts(), first).begin,
                element_range(all, identity.parts(), first + at_each - 1).end};
    }
    int64_t used = bytes_of_dense(identity.definition, **rule, needed);
    for (const PartRef& other : parts()) {
      const bool counted = needed != range && other->identity().table == request.name &&
                           other->identity().home() == worker().name();
      if (!counted) used += other->report().bytes;
    }
    if (used > limits->table_bytes) {
      return make_error(
          ErrorKind::kResource,
          absl::StrCat("table '", request.name, "' at '", worker().name(), "' would make ", used,
                       " bytes of tables, and table_bytes is ", limits->table_bytes));
    }
  }
  const AnswerMemory memory(context_.worker, context_.runtime);
  WEFT_ASSIGN_OR_RETURN(
      std::unique_ptr<PartData> data,
      dense ? make_dense_data(identity.definition, request.name, range, memory, *std::move(rule))
            : make_sparse_data(identity.definition, request.name, limits->table_bytes,
                               context_.runtime, memory, *std::move(rule)));
  std::shared_ptr<Metrics> metrics = metrics_of(worker());
  if (metrics == nullptr) return make_error(ErrorKind::kState, "the worker is gone");
  if (map.has_value()) {
    WEFT_RETURN_IF_ERROR(keeper().status());
  }
  return std::make_shared<Part>(std::move(identity), std::move(data), std::move(limits),
                                std::move(metrics), context_.runtime);
}

// ---- the worker --------------------------------------------------------------------------------

void PsService::on_worker_gone(const WorkerInfo& gone, const Status&) {
  const WorkerKey key = key_of(gone);
  {
    MutexLock lock(&mutex_);
    gone_.insert(key);
    if (cut_ != nullptr && cut_->name.by == key) cut_ = nullptr;  // its parts wait for the time
    if (loaded_ != nullptr && loaded_->name.by == key) loaded_ = nullptr;
  }
  // Not here: applying a step that this ends may take long.
  const CopyPlace place{gone.name, gone.incarnation};
  for (const PartRef& part : parts()) {
    post_or_run(context_.executor.get(), [part, key, place] {
      part->worker_gone(key);
      part->server_gone(place);
    });
  }
}

void PsService::on_shutdown(const Status& why) {
  std::map<uint64_t, std::weak_ptr<ClientPart>> clients;
  Status closed;
  {
    MutexLock lock(&mutex_);
    closed_ = why.ok() ? make_error(ErrorKind::kState, "the worker has shut down") : why;
    closed = closed_;
    clients = std::exchange(clients_, {});
  }
  Keeper* keeper = nullptr;
  {
    MutexLock lock(&mutex_);
    keeper = keeper_.get();
  }
  if (keeper != nullptr) keeper->stop();
  std::unique_ptr<Thread> files_thread;
  {
    MutexLock lock(&mutex_);
    files_thread = std::move(files_thread_);
  }
  if (files_thread != nullptr) files_thread->join();
  stop_serving();
  for (const auto& [id, weak] : clients) {
    if (const auto part = weak.lock()) part->close(closed);
  }
}

void PsService::add_client(uint64_t client, const std::shared_ptr<ClientPart>& part) {
  Status closed;
  {
    MutexLock lock(&mutex_);
    closed = closed_;
    if (closed.ok()) clients_.emplace(client, part);
  }
  if (!closed.ok()) part->close(closed);
}
void PsService::remove_client(uint64_t client) {
  MutexLock lock(&mutex_);
  clients_.erase(client);
}

}  // namespace weft::ps::internal
