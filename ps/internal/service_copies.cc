// What a server does for tables of two copies.

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "weft/common/call_scope.h"
#include "weft/common/trace.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/rest.h"
#include "weft/ps/internal/service.h"
#include "weft/rpc/spi/service_worker.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kStoreTime = absl::Seconds(5);
constexpr absl::Duration kStoreAgain = absl::Milliseconds(200);
// A map changes with each death of a server, and not more often.
constexpr int kClaims = 8;
constexpr absl::Duration kDrainAgain = absl::Milliseconds(20);

// An image for one that is to be the backup, which was given up before in the same epoch: its log had stopped.
bool takes_place_of(const CopyRequest& image, const PartReport& there) {
  if (image.next.empty() || there.map.epoch != image.map.epoch || !there.joins) return false;
  return there.role == ReplicaProtocol::Role::kGone || there.position < image.position;
}

std::string key_of_map(const PartIdentity& identity) {
  return absl::StrCat(identity.table, "/", identity.index);
}

}  // namespace

StatusOr<Keeper*> PsService::keeper() {
  MutexLock lock(&mutex_);
  if (!closed_.ok()) return closed_;
  if (keeper_ == nullptr) {
    std::shared_ptr<Store> store = service_store(worker(), "ps");
    if (store == nullptr) return make_error(ErrorKind::kState, "the worker is gone");
    keeper_ =
        std::make_unique<Keeper>(context_.runtime, std::move(store), [weak = weak_from_this()] {
          if (const auto self = weak.lock()) self->tick();
        });
  }
  return keeper_.get();
}

void PsService::tick() {
  const std::vector<PartRef> all = parts();
  const bool alone = std::any_of(all.begin(), all.end(), [](const PartRef& part) {
    const PartReport report = part->report();
    return report.role == ReplicaProtocol::Role::kOwner && report.map.epoch != 0 &&
           report.map.backup.empty();
  });
  if (alone) (void)read_joined(kStoreTime);  // others(); without the store they are those of before
  for (const PartRef& part : all) part->tick();
}

bool PsService::is_gone(const std::string& server) const {
  return error_kind(worker().try_get_worker_info(server).status()) == ErrorKind::kPeerLost;
}

bool PsService::makes(const OpenRequest& request) const {
  const size_t count = request.servers.size();
  const size_t home = home_of(request.index, part_count(*request.definition, count), count);
  for (size_t i = 0; i < count; ++i) {
    const std::string& server = request.servers[(home + i) % count];
    if (server == worker().name()) return true;
    // One that has not joined yet may come; a wrong verdict costs the place, since the map is claimed by
    // compare_set.
    if (!in_map(*request.definition) || !is_gone(server)) return false;
  }
  return false;
}

StatusOr<RangeMap> PsService::claim(const OpenRequest& request) {
  WEFT_ASSIGN_OR_RETURN(Keeper * keeper, this->keeper());
  const RangeMap mine{1, self(), {}, false};
  const std::string key = absl::StrCat(request.name, "/", request.index);
  const StatusOr<std::string> now = keeper->store().compare_set(key, "", encode(mine), kStoreTime);
  if (!now.ok()) return annotate(now.status(), absl::StrCat("map of table '", request.name, "'"));
  return decode_map(*now);
}

StatusOr<RangeMap> PsService::claim_anew(const PartIdentity& identity) {
  WEFT_ASSIGN_OR_RETURN(Keeper * keeper, this->keeper());
  std::string expected;
  for (int i = 0; i < kClaims; ++i) {
    RangeMap mine{1, self(), {}, false};
    if (!expected.empty()) {
      WEFT_ASSIGN_OR_RETURN(const RangeMap there, decode_map(expected));
      mine.epoch = there.epoch + 1;
    }
    const StatusOr<std::string> now =
        keeper->store().compare_set(key_of_map(identity), expected, encode(mine), kStoreTime);
    if (!now.ok()) return annotate(now.status(), absl::StrCat("map of '", identity.table, "'"));
    if (*now == encode(mine)) return mine;
    expected = *now;
  }
  return make_error(ErrorKind::kUnavailable,
                    absl::StrCat("the map of table '", identity.table, "', part ", identity.index,
                                 " changes all the time"));
}

// ---- CopyHost ----------------------------------------------------------------------------------

void PsService::write_map(const std::shared_ptr<Part>& part, const WriteMap& write) {
  const StatusOr<Keeper*> keeper = this->keeper();
  if (!keeper.ok()) return;  // the worker leaves
  Keeper* const k = *keeper;
  k->post([k, part = std::weak_ptr<Part>(part), write, runtime = context_.runtime,
           self = weak_from_this()] {
    const auto at = part.lock();
    if (at == nullptr) return;
    const StatusOr<std::string> now = k->store().compare_set(
        key_of_map(at->identity()), encode(write.expected), encode(write.desired), kStoreTime);
    const StatusOr<RangeMap> map = now.ok() ? decode_map(*now) : now.status();
    if (map.ok()) return at->map_written(*map);
    // The store is away: what was asked may have been done. It is asked again, and says so then.
    k->at(runtime->now() + kStoreAgain, [self, part, write] {
      const auto service = self.lock();
      const auto at = part.lock();
      if (service != nullptr && at != nullptr) service->write_map(at, write);
    });
  });
}

void PsService::read_map(const std::shared_ptr<Part>& part) {
  const StatusOr<Keeper*> keeper = this->keeper();
  if (!keeper.ok()) return;
  Keeper* const k = *keeper;
  k->post([k, part = std::weak_ptr<Part>(part)] {
    const auto at = part.lock();
    if (at == nullptr) return;
    const auto now = k->store().try_get(key_of_map(at->identity()), kStoreTime);
    if (!now.ok() || !now->has_value()) return;  // asked again with the next tick
    if (const StatusOr<RangeMap> map = decode_map(**now); map.ok()) at->map_read(*map);
  });
}

void PsService::send_copy(const CopyPlace& to, CopyRequest request, std::vector<at::Tensor> tensors,
                          absl::Duration deadline, std::function<void(StatusOr<CopyAnswer>)> done) {
  const StatusOr<WorkerInfo> info = worker().try_get_worker_info(to.name);
  if (!info.ok() || info->incarnation != to.incarnation) {
    return done(make_error(ErrorKind::kPeerLost,
                           absl::StrCat("server '", to.name, "' is not there any more")));
  }
  StatusOr<Payload> arguments = pack({encode(request), std::move(tensors)});
  if (!arguments.ok()) return done(arguments.status());
  UntypedCall call;
  call.method = std::string(kCopyMethod);
  call.signature = kCopySignature;
  call.arguments = *std::move(arguments);
  call.options.deadline = deadline;
  call.options.retry = Retry::kAtMostOnce;
  call.options.backpressure = Backpressure::kWait;
  const ScopeGuard nothing_ambient(nullptr);
  start_call(worker(), *info, std::move(call), [done = std::move(done)](StatusOr<Payload> result) {
    if (!result.ok()) return done(result.status());
    const StatusOr<std::string> bytes = unpack_bytes(*std::move(result));
    done(bytes.ok() ? decode_copied(*bytes) : bytes.status());
  });
}

void PsService::later(absl::Time when, Task task) {
  const StatusOr<Keeper*> keeper = this->keeper();
  if (keeper.ok()) (*keeper)->at(when, std::move(task));
}

std::vector<WorkerKey> PsService::gone_workers() const {
  MutexLock lock(&mutex_);
  return {gone_.begin(), gone_.end()};
}

std::vector<CopyPlace> PsService::others(const PartIdentity& identity) const {
  std::vector<CopyPlace> out;
  std::vector<std::string> names = identity.servers;
  {
    MutexLock lock(&mutex_);
    for (const std::string& name : joined_) add_name(name, &names);
  }
  add_name(identity.self.name, &names);
  const auto me = std::find(names.begin(), names.end(), identity.self.name);
  const auto from = static_cast<size_t>(me - names.begin());
  for (size_t i = 1; i < names.size(); ++i) {
    const StatusOr<WorkerInfo> info =
        worker().try_get_worker_info(names[(from + i) % names.size()]);
    if (info.ok()) out.push_back({info->name, info->incarnation});
  }
  return out;
}

bool PsService::others_are_gone(const PartIdentity& identity) const {
  return std::all_of(
      identity.servers.begin(), identity.servers.end(),
      [&](const std::string& server) { return server == identity.self.name || is_gone(server); });
}

// ---- drain -------------------------------------------------------------------------------------

Status PsService::drain(absl::Duration deadline) {
  const std::shared_ptr<TraceWriter> trace = trace_of(worker());
  const TraceSpan span(trace.get(), &context_.runtime->clock(), "ps", "drain");
  const absl::Time end = deadline_after(context_.runtime->now(), deadline);
  const auto stop = [this](Status why) {
    draining_ = false;
    return why;
  };
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return closed_;
    if (limits_ == nullptr) return make_error(ErrorKind::kState, "the server has ended");
    if (draining_.exchange(true)) return make_error(ErrorKind::kState, "the server drains already");
  }
  const auto parker = context_.runtime->make_parker();
  for (;;) {
    const bool made = making_.load() == 0;
    const std::map<PartName, PartRef> parts = parts_by_name();
    const auto label = [](const PartName& name) {
      return absl::StrCat("table '", name.first, "', part ", name.second);
    };
    for (const auto& [name, part] : parts) {
      if (in_map(part->identity().definition)) continue;
      return stop(make_error(ErrorKind::kState,
                             absl::StrCat("drain of '", worker().name(), "': ", label(name),
                                          " has one copy and is not movable, so that no other "
                                          "server could take it")));
    }
    std::string left = made ? "" : "a part that is being made";
    for (const auto& [name, part] : parts) {
      if (part->report().role == ReplicaProtocol::Role::kGone) continue;
      if (left.empty()) left = label(name);
      part->drain();
    }
    if (left.empty()) {
      if (write_joined(false).ok()) return absl::OkStatus();
      left = "its name among those that have joined";
    }
    const absl::Time now = context_.runtime->now();
    if (now >= end) {
      return stop(
          make_error(ErrorKind::kDeadline, absl::StrCat("drain of '", worker().name(), "': ", left,
                                                        " is here still; it goes on serving")));
    }
    {
      MutexLock lock(&mutex_);
      if (!closed_.ok() || limits_ == nullptr) {
        return make_error(ErrorKind::kState, "the server has ended while it drained");
      }
    }
    parker->park_until(std::min(end, now + kDrainAgain));
  }
}

// ---- requests ----------------------------------------------------------------------------------

void PsService::on_find(Payload arguments, ReplyFn reply) {
  const StatusOr<std::string> bytes = unpack_bytes(std::move(arguments));
  const StatusOr<FindRequest> request = bytes.ok() ? decode_find(*bytes) : bytes.status();
  if (!request.ok()) return reply(request.status());
  PartRef part;
  {
    MutexLock lock(&mutex_);
    const auto at = by_name_.find({request->name, request->index});
    if (at != by_name_.end()) part = at->second;
  }
  FindAnswer answer;
  if (part != nullptr) {
    const PartReport report = part->report();
    answer.map = report.map;
    answer.copy = report.role != ReplicaProtocol::Role::kGone;
    if (report.role == ReplicaProtocol::Role::kOwner) answer.part = part->identity().id;
    if (report.role == ReplicaProtocol::Role::kBackup && request->suspect) part->suspected();
  }
  reply(pack_bytes(encode(answer)));
}

StatusOr<PsService::PartRef> PsService::follow(const CopyRequest& request,
                                               std::vector<at::Tensor> tensors) {
  const OpenRequest open{request.name, request.image->definition, request.image->servers,
                         request.index};
  std::shared_ptr<ServerLimits> limits;
  std::shared_ptr<void> until_there;
  uint64_t id = 0;
  bool again = false;
  {
    MutexLock lock(&mutex_);
    WEFT_ASSIGN_OR_RETURN(const PartRef there, find(open));
    const auto seen = epochs_.find({request.name, request.index});
    again = there != nullptr && takes_place_of(request, there->report());
    const bool old = !again && seen != epochs_.end() && request.map.epoch <= seen->second;
    if (old && there != nullptr) return there;
    const CopyPlace& meant = request.next.empty() ? request.map.backup : request.next;
    if (old || meant != self()) {
      return make_error(
          ErrorKind::kState,
          absl::StrCat("image of table '", request.name, "', part ", request.index, " with ",
                       to_string(request.map), ", which '", worker().name(), "' has no use for"));
    }
    if (draining_) {
      return make_error(ErrorKind::kState, absl::StrCat("server '", worker().name(), "' drains"));
    }
    until_there = making();
    limits = limits_;
    id = ++last_part_;
  }
  WEFT_ASSIGN_OR_RETURN(const PartRef made, make_part(open, limits, id, request.map));
  // One thread of the pool at most rests.
  const bool rests = loads_.fetch_add(1) == 0;
  const absl::Cleanup loaded = [this] { loads_.fetch_sub(1); };
  const auto parker = context_.runtime->make_parker();
  absl::Time began = context_.runtime->now();
  absl::Duration rested;
  const auto between = [&] {
    const absl::Time now = context_.runtime->now();
    if (rests) parker->park_until(now + rest_after(now - began, &rested));
    began = context_.runtime->now();
  };
  WEFT_RETURN_IF_ERROR(made->follow(request, std::move(tensors), weak_from_this(), between));
  PartRef before;
  {
    MutexLock lock(&mutex_);
    WEFT_ASSIGN_OR_RETURN(before, find(open));
    uint64_t& epoch = epochs_[{request.name, request.index}];
    if (limits_ != limits) return make_error(ErrorKind::kState, "the server has ended");
    // The same image may have come twice: the first of them to be taken up has the log by now.
    again = before != nullptr && takes_place_of(request, before->report());
    if (request.map.epoch <= epoch && before != nullptr && !again) return before;
    epoch = request.map.epoch;
    by_name_[{request.name, request.index}] = made;
    by_id_.emplace(id, made);
    if (before != nullptr) by_id_.erase(before->identity().id);
  }
  // What it was before, an owner that was cut off or a copy that was given up, learns of it.
  if (before != nullptr) before->map_read(request.map);
  return made;
}

void PsService::on_copy(Payload arguments, ReplyFn reply) {
  auto shared = std::make_shared<ReplyFn>(std::move(reply));
  const auto respond = [shared](const CopyAnswer& answer) {
    (*shared)(pack_bytes(encode(answer)));
  };
  const auto taken = [&]() -> Status {
    WEFT_ASSIGN_OR_RETURN(Parcel parcel, unpack(std::move(arguments)));
    WEFT_ASSIGN_OR_RETURN(CopyRequest request, decode_copy(parcel.bytes, &parcel.tensors));
    PartRef part;
    if (request.image.has_value()) {
      WEFT_ASSIGN_OR_RETURN(part, follow(request, std::move(parcel.tensors)));
    } else {
      MutexLock lock(&mutex_);
      WEFT_ASSIGN_OR_RETURN(part, find({request.name, TableDefinition{}, {}, request.index}));
    }
    if (part == nullptr) {
      return make_error(ErrorKind::kNotFound,
                        absl::StrCat("'", worker().name(), "' has no copy of table '", request.name,
                                     "', part ", request.index));
    }
    part->copy(std::move(request), respond);
    return absl::OkStatus();
  };
  if (const Status s = taken(); !s.ok()) (*shared)(s);
}

}  // namespace weft::ps::internal
