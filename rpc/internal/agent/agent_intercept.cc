// The agent's part in interceptors (rpc/spi/interceptor.h): what rides on calls, at both ends.

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/agent_job.h"
#include "weft/rpc/internal/agent/header.h"

namespace weft::internal {
namespace {

// Lives as long as the agent.
Interceptor* find(const Interceptors& all, std::string_view key) {
  for (const auto& one : all) {
    if (one->key() == key) return one.get();
  }
  return nullptr;
}

std::string shown(std::string_view key) { return absl::CHexEscape(std::string(key.substr(0, 64))); }

Status no_answer_of(std::string_view key) {
  return make_error(ErrorKind::kInternal,
                    absl::StrCat("the interceptor '", std::string(key), "' gave no answer"));
}

// What an interceptor of an answer was asked for: goes on once, and with an error when it is
// dropped.
class Step {
 public:
  Step(std::string_view key, absl::AnyInvocable<void(Status)> next)
      : key_(key), next_(std::move(next)) {}
  Step(Step&&) = default;
  Step& operator=(Step&&) = delete;
  ~Step() {
    if (next_ != nullptr) next_(no_answer_of(key_));
  }
  void operator()(Status status) {
    if (next_ != nullptr) std::exchange(next_, nullptr)(std::move(status));
  }

 private:
  std::string key_;
  absl::AnyInvocable<void(Status)> next_;
};

Status nobody_carries(size_t references) {
  return make_error(ErrorKind::kUnimplemented,
                    absl::StrCat(references,
                                 " RRefs inside, which no service of this worker can send: list "
                                 "rref_service() at join"));
}

}  // namespace

Status Attachments::add(const std::shared_ptr<Interceptor>& from, StatusOr<AttachmentPtr> given) {
  if (!given.ok()) return given.status();
  if (*given == nullptr) return absl::OkStatus();
  const size_t size = from->key().size() + (*given)->bytes().size();
  bytes_ += size;
  entries_.emplace_back(from, *std::move(given));
  if (entries_.size() <= kMaxMetadataEntries) return absl::OkStatus();
  return make_error(
      ErrorKind::kResource,
      absl::StrCat("'", std::string(from->key()), "' attaches ", size, " bytes, which makes ",
                   entries_.size(), " entries of metadata; at most ", kMaxMetadataEntries,
                   " go with a message"));
}

std::shared_ptr<const void> Attachments::on_its_way(std::shared_ptr<const void> held) const {
  for (const auto& [from, attachment] : entries_) {
    auto one = attachment->on_its_way();
    if (one == nullptr) continue;
    held =
        held == nullptr
            ? std::move(one)
            : std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
                  std::move(held), std::move(one));
  }
  return held;
}

void Attachments::end(Delivery delivery, const Status& result) {
  if (ended_.exchange(true)) return;
  for (const auto& [from, attachment] : entries_) attachment->ended(delivery, result);
}

// ---- the caller --------------------------------------------------------------------------------

bool Agent::concerns_interceptors(const UntypedCall& call) const {
  return std::any_of(options_.interceptors.begin(), options_.interceptors.end(),
                     [&call](const auto& one) { return one->concerns(call); });
}

StatusOr<AttachmentsRef> Agent::attach(const WorkerInfo& to, const UntypedCall& call) const {
  auto attachments = std::make_shared<Attachments>();
  for (const auto& one : options_.interceptors) {
    // Where there is one, it is why this was called.
    if (options_.interceptors.size() > 1 && !one->concerns(call)) continue;
    const Status added = attachments->add(one, one->attach(to, call));
    if (added.ok()) continue;
    attachments->end(Delivery::kNotDelivered, added);
    return added;
  }
  return attachments;
}

CallHandle Agent::start_intercepted(const Destination& to, UntypedCall&& call, CallDone done) {
  StatusOr<WorkerInfo> info = absl::UnknownError("");
  if (to.by_info() && call.arguments.references.empty()) {
    // Whether it is there still, issue() will see.
    info = WorkerInfo{to.name(), static_cast<uint32_t>(to.id()), to.incarnation()};
  } else {
    MutexLock lock(&mutex_);
    StatusOr<const Member*> member = members_->resolve(to);
    info = member.ok() ? StatusOr<WorkerInfo>((*member)->info) : member.status();
  }
  StatusOr<AttachmentsRef> attachments =
      info.ok() ? attach(*info, call) : StatusOr<AttachmentsRef>(info.status());
  if (!attachments.ok()) {
    done(annotate(attachments.status(), absl::StrCat("rpc '", call.method, "'")));
    return CallHandle();
  }
  // This incarnation and no other: what was attached is meant for it.
  const Destination there(*info);
  call.arguments.references.clear();
  StatusOr<std::shared_ptr<CallSpec>> spec = make_spec(std::move(call), &there);
  if (!spec.ok()) {
    (*attachments)->end(Delivery::kNotDelivered, spec.status());
    done(spec.status());
    return CallHandle();
  }
  if (!(*attachments)->empty()) {
    (*spec)->message->riding = (*attachments)->bytes();
    (*spec)->attachments = *std::move(attachments);
  }
  return issue(there, *spec, std::move(done));
}

Status Agent::check_carried(const Payload& payload) const {
  return payload.references.empty() ? absl::OkStatus() : nobody_carries(payload.references.size());
}

void Agent::receive_answer(uint64_t call_id, Payload payload, std::shared_ptr<Metadata> metadata) {
  WorkerInfo from;
  std::shared_ptr<Link> link;
  {
    MutexLock lock(&mutex_);
    auto it = pending_.find(call_id);
    if (it != pending_.end()) {
      from = it->second.to;
      it->second.answered = true;
      // The answer is here: what becomes of its connection does not matter to the call any more.
      link = std::move(it->second.link);
      it->second.link = nullptr;
      if (link != nullptr) --link->pending;
    }
  }
  if (link != nullptr) close_if_drained(link);
  if (from.incarnation == 0) return complete(call_id, std::move(payload), false);  // too late
  for (size_t i = 0; i < metadata->size(); ++i) {
    const std::string& key = (*metadata)[i].first;
    const auto same = [&key](const auto& other) { return other.first == key; };
    if (find(options_.interceptors, key) != nullptr &&
        std::count_if(metadata->begin(), metadata->end(), same) == 1) {
      continue;
    }
    return complete(
        call_id,
        make_error(ErrorKind::kProtocol, absl::StrCat("an answer with metadata for '", shown(key),
                                                      "', twice or unasked for")),
        false);
  }
  next_answer_step(call_id, from, std::make_shared<Payload>(std::move(payload)),
                   std::move(metadata), 0);
}

void Agent::next_answer_step(uint64_t call_id, const WorkerInfo& from,
                             const std::shared_ptr<Payload>& payload,
                             const std::shared_ptr<Metadata>& metadata, size_t step) {
  if (step == metadata->size()) return complete(call_id, std::move(*payload), false);
  const auto& [key, value] = (*metadata)[step];
  const std::weak_ptr<Agent> weak = weak_from_this();
  find(options_.interceptors, key)
      ->arrive_answer(from, *payload, value,
                      Step(key, [weak, call_id, from, payload, metadata, step](const Status& s) {
                        const auto self = weak.lock();
                        if (self == nullptr) return;
                        if (!s.ok()) return self->complete(call_id, s, false);
                        self->next_answer_step(call_id, from, payload, metadata, step + 1);
                      }));
}

// ---- the callee --------------------------------------------------------------------------------

void Agent::intercept(const std::shared_ptr<Job>& job) {
  const auto& metadata = job->header->metadata();
  for (const v1::MetadataEntry& entry : metadata) {
    const auto same = [&entry](const auto& other) { return other.key() == entry.key(); };
    if (std::count_if(metadata.begin(), metadata.end(), same) > 1) {
      return reply(job,
                   make_error(ErrorKind::kProtocol, absl::StrCat("a request with metadata for '",
                                                                 shown(entry.key()), "' twice")));
    }
    if (find(options_.interceptors, entry.key()) == nullptr) {
      return reply(
          job,
          make_error(ErrorKind::kUnimplemented,
                     absl::StrCat("worker '", options_.self.name, "' does not run the service of '",
                                  shown(entry.key()), "'; list it among the services at join")));
    }
  }
  job->reach = v1::ErrorHeader::UNKNOWN;
  job->asking = shared_from_this();
  next_step(job);
}

// As Step, of a request. Every method call over a reference has one: it fits into a Proceed as it
// is.
class Agent::RequestStep {
 public:
  explicit RequestStep(std::shared_ptr<Job> job) : job_(std::move(job)) {}
  RequestStep(RequestStep&&) = default;
  RequestStep& operator=(RequestStep&&) = delete;
  ~RequestStep() {
    if (job_ != nullptr) (*this)(no_answer_of(job_->header->metadata(job_->step).key()));
  }
  void operator()(Status status) {
    const std::shared_ptr<Job> job = std::move(job_);
    if (job == nullptr) return;
    if (status.ok()) {
      ++job->step;
      const std::shared_ptr<Agent> agent = job->asking;  // which the last step lets go of
      return agent->next_step(job);
    }
    std::exchange(job->asking, nullptr)->reply(job, std::move(status));
  }

 private:
  std::shared_ptr<Job> job_;
};

void Agent::next_step(const std::shared_ptr<Job>& job) {
  if (job->step == job->header->metadata_size()) {
    const std::shared_ptr<Agent> self = std::move(job->asking);
    job->reach = v1::ErrorHeader::PASSED;
    if (Status found = find_target(job.get()); !found.ok()) return reply(job, found);
    return serve(job);
  }
  const v1::MetadataEntry& entry = job->header->metadata(job->step);
  find(options_.interceptors, entry.key())->arrive(*job, entry.value(), RequestStep(job));
}

Status Agent::find_target(Job* job) const {
  const TargetObject& target = job->target;
  if (target.object == nullptr) return find_instance(job);
  if (job->callee->class_name != target.class_name || !job->header->object().empty()) {
    return make_error(
        ErrorKind::kSignature,
        absl::StrCat("worker '", options_.self.name, "': the object of the RRef is of class '",
                     target.class_name, "', '", job->callee->name, "' is ",
                     job->callee->class_name.empty()
                         ? std::string("not a method")
                         : absl::StrCat("a method of '", job->callee->class_name, "'")));
  }
  job->object = target.object;
  job->object_after = target.after;
  if (target.turns != nullptr) take_place(job, target.turns.get());
  return absl::OkStatus();
}

Status Agent::attach_to_answer(Job* job, const Payload& result) const {
  if (options_.interceptors.empty() ||
      (job->header->metadata_size() == 0 && result.references.empty())) {
    return check_carried(result);
  }
  std::shared_ptr<Attachments> attachments;  // most answers have none
  for (const auto& one : options_.interceptors) {
    StatusOr<AttachmentPtr> given = one->attach_answer(*job, result);
    if (given.ok() && *given == nullptr) continue;
    if (attachments == nullptr) attachments = std::make_shared<Attachments>();
    const Status added = attachments->add(one, std::move(given));
    if (added.ok()) continue;
    attachments->end(Delivery::kNotDelivered, added);
    return added;
  }
  job->attachments = std::move(attachments);
  return absl::OkStatus();
}

void Agent::run_kept(const std::shared_ptr<Job>& job) {
  const Invoker* const invoker = options_.library->invoker_of(*job->callee);
  if (invoker == nullptr) {
    return reply(job, make_error(ErrorKind::kInvalidArgument,
                                 absl::StrCat("'", job->callee->name,
                                              "' is no function of a library: its result cannot "
                                              "be kept here")));
  }
  // Replies once; when it is dropped unused, with an error.
  class Keeper {
   public:
    Keeper(std::shared_ptr<Agent> agent, std::shared_ptr<Job> job)
        : agent_(std::move(agent)), job_(std::move(job)) {}
    Keeper(Keeper&&) = default;
    Keeper& operator=(Keeper&&) = delete;
    ~Keeper() {
      if (job_ != nullptr) {
        (*this)(make_error(
            ErrorKind::kInternal,
            absl::StrCat("the handler of '", job_->callee->name, "' ended without a result")));
      }
    }
    void operator()(StatusOr<KeptObject> result) {
      const std::shared_ptr<Job> job = std::move(job_);
      if (job == nullptr) return;
      if (result.ok()) {
        StatusOr<GuardRef> after = agent_->copier_.mark(job->call->scope());
        if (after.ok()) {
          result->after = *std::move(after);
        } else {
          result = after.status();
        }
      }
      // The error is the object's; the call has done what it should.
      if (job->keep != nullptr) {
        std::exchange(job->keep, nullptr)(
            result.ok() ? std::move(result)
                        : StatusOr<KeptObject>(agent_->told_by_handler(*job, result.status())));
      }
      agent_->reply(job, Payload());
    }

   private:
    std::shared_ptr<Agent> agent_;
    std::shared_ptr<Job> job_;
  };
  (*invoker)(*job->call, job->object, std::move(job->payload),
             Outcome(KeepFn(Keeper(shared_from_this(), job))));
}

}  // namespace weft::internal

namespace weft {

std::shared_ptr<internal::ObjectTurns> make_object_turns() {
  return std::make_shared<internal::ObjectTurns>();
}

}  // namespace weft
