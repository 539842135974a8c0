// What a server does when a snapshot is cut and written, and what a worker with clients does.

#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "weft/proto/ps_snapshot.pb.h"
#include "weft/ps/internal/service.h"

namespace weft::ps::internal {
namespace {

// A cut or hold that lasts longer is nonsense.
constexpr uint64_t kMostPauseUs = 600'000'000;

Status wrong_cut(std::string_view what) {
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("message about a snapshot: ", std::string(what)));
}
template <class Record>
Status parse_cut(Payload arguments, Record* record) {
  WEFT_ASSIGN_OR_RETURN(const std::string bytes, unpack_bytes(std::move(arguments)));
  if (record->ParseFromString(bytes)) return absl::OkStatus();
  return wrong_cut(absl::StrCat(bytes.size(), " bytes that cannot be parsed"));
}

void say(ReplyFn& reply, const StatusOr<std::string>& what) {
  if (!what.ok()) return reply(what.status());
  reply(pack_bytes(*what));
}

// What several parts say, until the last has: the first error, or all.
template <class T>
class Gather {
 public:
  using Done = std::function<void(StatusOr<std::vector<T>>)>;
  Gather(size_t count, Done done) : said_(count), done_(std::move(done)) {}
  Gather(const Gather&) = delete;
  Gather& operator=(const Gather&) = delete;
  ~Gather() {
    Status first;
    std::vector<T> all;
    for (StatusOr<T>& one : said_) {
      first.Update(one.status());
      if (first.ok()) all.push_back(*std::move(one));
    }
    done_(first.ok() ? StatusOr<std::vector<T>>(std::move(all)) : first);
  }
  // Each once, by one thread, before it lets go of this object.
  void set(size_t i, StatusOr<T> what) { said_[i] = std::move(what); }

 private:
  std::vector<StatusOr<T>> said_;
  const Done done_;
};

}  // namespace

void PsService::on_cut(CallContext& call, Payload arguments, ReplyFn reply) {
  v1::PsCut request;
  if (const Status s = parse_cut(std::move(arguments), &request); !s.ok()) return reply(s);
  if (request.number() == 0 || request.step() < 1 || request.step() > 4) {
    return reply(wrong_cut(absl::StrCat("cut ", request.number(), ", step ", request.step())));
  }
  const CutName cut{key_of(call.caller()), request.number()};
  switch (request.step()) {
    case 1: return begin_cut(cut, request, std::move(reply));
    case 2: return take_cut(cut, request, std::move(reply));
    case 3: return write_cut(cut, request.path(), std::move(reply));
    default: drop_cut(cut); return reply(pack_bytes(""));
  }
}

void PsService::begin_cut(const CutName& cut, const v1::PsCut& request, ReplyFn reply) {
  if (request.pause_us() == 0 || request.pause_us() > kMostPauseUs) {
    return reply(wrong_cut(absl::StrCat("pause of ", request.pause_us(), " us")));
  }
  const std::set<std::string> wanted(request.tables().begin(), request.tables().end());
  const absl::Time now = context_.runtime->now();
  auto fresh = std::make_shared<ServerCut>();
  fresh->name = cut;
  fresh->until = now + absl::Microseconds(static_cast<int64_t>(request.pause_us()));
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok() || limits_ == nullptr) {
      lock.unlock();
      return reply(make_error(absl::StatusCode::kUnavailable, ErrorKind::kState,
                              absl::StrCat("worker '", worker().name(), "' serves no tables")));
    }
    if (cut_ != nullptr && cut_->name != cut && now < cut_->until) {
      lock.unlock();
      return reply(
          make_error(ErrorKind::kUnavailable,
                     absl::StrCat("another snapshot is being cut at '", worker().name(), "'")));
    }
    for (const auto& [name, part] : by_name_) {
      if (!wanted.empty() && !wanted.contains(name.first)) continue;
      if (part->report().role == ReplicaProtocol::Role::kOwner) fresh->parts.push_back(part);
    }
    cut_ = fresh;
  }
  auto respond = std::make_shared<ReplyFn>(std::move(reply));
  const auto all = std::make_shared<Gather<std::vector<ClientKey>>>(
      fresh->parts.size(), [fresh, respond](StatusOr<std::vector<std::vector<ClientKey>>> clients) {
        if (!clients.ok()) return (*respond)(clients.status());
        v1::PsCutDone done;
        for (size_t i = 0; i < fresh->parts.size(); ++i) {
          const PartIdentity& identity = fresh->parts[i]->identity();
          v1::PsCutDone::Part* part = done.add_parts();
          part->set_table(identity.table);
          put(identity.definition, part->mutable_definition());
          for (const std::string& server : identity.servers) part->add_servers(server);
          part->set_index(identity.index);
          for (const ClientKey& client : (*clients)[i]) {
            v1::PsCutDone::Client* one = part->add_clients();
            put(client.worker, one->mutable_worker());
            one->set_number(client.number);
          }
        }
        (*respond)(pack_bytes(done.SerializeAsString()));
      });
  for (size_t i = 0; i < fresh->parts.size(); ++i) {
    fresh->parts[i]->begin_cut(
        cut, fresh->until,
        [all, i](StatusOr<std::vector<ClientKey>> clients) { all->set(i, std::move(clients)); });
  }
}

void PsService::take_cut(const CutName& cut, const v1::PsCut& request, ReplyFn reply) {
  std::shared_ptr<ServerCut> open;
  {
    MutexLock lock(&mutex_);
    if (cut_ != nullptr && cut_->name == cut) open = cut_;
  }
  if (open == nullptr) {
    return reply(make_error(ErrorKind::kUnavailable, absl::StrCat("the cut is not open at '",
                                                                  worker().name(), "' any more")));
  }
  std::map<PartName, std::vector<CutNeed>> needs;
  for (const v1::PsCut::Need& need : request.needs()) {
    needs[{need.table(), need.index()}].push_back(
        {{get(need.worker()), need.client()}, need.push(), need.clock()});
  }
  auto respond = std::make_shared<ReplyFn>(std::move(reply));
  const auto all = std::make_shared<Gather<PartCut>>(
      open->parts.size(),
      [self = shared_from_this(), open, respond](StatusOr<std::vector<PartCut>> taken) {
        if (!taken.ok()) return (*respond)(taken.status());
        {
          MutexLock lock(&self->mutex_);
          for (size_t i = 0; i < open->parts.size(); ++i) {
            const PartIdentity& identity = open->parts[i]->identity();
            open->taken.push_back({identity.table, identity.index, std::move((*taken)[i])});
          }
        }
        (*respond)(pack_bytes(""));
      });
  for (size_t i = 0; i < open->parts.size(); ++i) {
    const PartIdentity& identity = open->parts[i]->identity();
    open->parts[i]->take_cut(cut, std::move(needs[{identity.table, identity.index}]),
                             [all, i](StatusOr<PartCut> taken) { all->set(i, std::move(taken)); });
  }
}

void PsService::write_cut(const CutName& cut, const std::string& path, ReplyFn reply) {
  // No other file of this machine is overwritten by a peer.
  const std::string_view name = std::string_view(path).substr(path.rfind('/') + 1);
  if (!name.starts_with(kFilePrefix) || !name.ends_with(kFileSuffix)) {
    return reply(wrong_cut("the name of its file is no snapshot's"));
  }
  constexpr uint32_t kStep = 3;
  if (asked_again(cut, kStep, &reply)) return;
  std::shared_ptr<ServerCut> open;
  {
    MutexLock lock(&mutex_);
    if (cut_ != nullptr && cut_->name == cut && cut_->taken.size() == cut_->parts.size()) {
      open = std::exchange(cut_, nullptr);
    }
  }
  if (open == nullptr) {
    return reply(make_error(ErrorKind::kUnavailable,
                            absl::StrCat("nothing of the cut is left at '", worker().name(), "'")));
  }
  const auto write = [this, open, path]() -> StatusOr<std::string> {
    WEFT_ASSIGN_OR_RETURN(const FileSum sum,
                          write_parts(context_.runtime->files(), path, open->taken));
    v1::PsCutDone done;
    done.set_bytes(sum.bytes);
    done.set_hash(sum.hash);
    return done.SerializeAsString();
  };
  start_files(cut, kStep, write, std::move(reply));
}

void PsService::drop_cut(const CutName& cut) {
  std::shared_ptr<ServerCut> open;
  {
    MutexLock lock(&mutex_);
    if (cut_ != nullptr && cut_->name == cut) open = std::exchange(cut_, nullptr);
  }
  if (open == nullptr) return;
  for (const PartRef& part : open->parts) part->drop_cut(cut);
}

bool PsService::asked_again(const CutName& name, uint32_t step, ReplyFn* reply) {
  std::optional<StatusOr<std::string>> result;
  {
    MutexLock lock(&mutex_);
    if (files_job_ == nullptr || files_job_->name != name || files_job_->step != step) return false;
    result = files_job_->result;
    if (!result.has_value()) files_job_->waiting.push_back(std::move(*reply));
  }
  if (result.has_value()) say(*reply, *result);
  return true;
}

void PsService::start_files(const CutName& name, uint32_t step, FilesWork work, ReplyFn reply) {
  auto job = std::make_shared<FilesJob>();
  job->name = name;
  job->step = step;
  std::unique_ptr<Thread> before;
  Status refused;
  {
    MutexLock lock(&mutex_);
    refused = closed_;
    if (files_job_ != nullptr && !files_job_->result.has_value()) {
      refused =
          make_error(ErrorKind::kUnavailable,
                     absl::StrCat("'", worker().name(), "' reads or writes another snapshot"));
    }
    if (refused.ok()) {
      job->waiting.push_back(std::move(reply));
      files_job_ = job;
      before = std::move(files_thread_);
    }
  }
  if (!refused.ok()) return reply(refused);
  if (before != nullptr) before->join();  // its work has ended
  std::unique_ptr<Thread> thread =
      context_.runtime->spawn("ps.files", [this, job, work = std::move(work)]() mutable {
        const at::AutoGradMode no_grad(false);
        StatusOr<std::string> result = absl::UnknownError("");
        try {
          result = work();
        } catch (...) {  // of LibTorch, for want of memory
          result = status_from_current_exception();
        }
        std::vector<ReplyFn> waiting;
        {
          MutexLock lock(&mutex_);
          job->result = result;
          waiting = std::exchange(job->waiting, {});
        }
        for (ReplyFn& one : waiting) say(one, result);
      });
  {
    MutexLock lock(&mutex_);
    if (closed_.ok()) files_thread_ = std::move(thread);
  }
  // The worker leaves, and does not know of this thread.
  if (thread != nullptr) thread->join();
}

// ---- clients -----------------------------------------------------------------------------------

void PsService::on_hold(CallContext& call, Payload arguments, ReplyFn reply) {
  v1::PsHold request;
  if (const Status s = parse_cut(std::move(arguments), &request); !s.ok()) return reply(s);
  const bool holds = request.step() == 1;
  if (request.number() == 0 || request.step() < 1 || request.step() > 2 ||
      (holds && (request.pause_us() == 0 || request.pause_us() > kMostPauseUs))) {
    return reply(wrong_cut(absl::StrCat("hold ", request.number(), ", step ", request.step())));
  }
  const CutName cut{key_of(call.caller()), request.number()};
  const absl::Time until =
      context_.runtime->now() + absl::Microseconds(static_cast<int64_t>(request.pause_us()));
  v1::PsHeld out;
  out.set_throughout(true);
  for (const uint64_t number : request.clients()) {
    std::shared_ptr<ClientPart> client;
    {
      MutexLock lock(&mutex_);
      if (const auto at = clients_.find(number); at != clients_.end()) client = at->second.lock();
    }
    if (client == nullptr) {  // its last operation, to leave, has ended
      out.set_throughout(false);
      continue;
    }
    if (!holds) {
      if (!client->release(cut)) out.set_throughout(false);
      continue;
    }
    const StatusOr<HeldClient> held = client->hold(cut, until);
    if (!held.ok()) return reply(held.status());
    v1::PsHeld::Client* one = out.add_clients();
    one->set_number(held->number);
    one->set_pushes(held->pushes);
    one->set_clock(held->clock);
    one->set_position(held->position);
    for (const HeldClient::Open& open : held->open) {
      v1::PsHeld::Open* piece = one->add_open();
      piece->set_part(open.part);
      piece->set_push(open.push);
      piece->set_clock(open.clock);
    }
  }
  reply(pack_bytes(out.SerializeAsString()));
}

}  // namespace weft::ps::internal
