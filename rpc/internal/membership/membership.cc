#include "weft/rpc/internal/membership/membership.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "weft/common/internal/utf8.h"
#include "weft/proto/rpc.pb.h"
#include "weft/rpc/internal/membership/membership_values.h"
#include "weft/store/delegating_store.h"

namespace weft::internal {
namespace {

void put_pairs(const DevicePairs& pairs, google::protobuf::RepeatedField<uint32_t>* out) {
  for (const auto& [from, to] : pairs) {
    out->Add(from);
    out->Add(to);
  }
}

void put_devices(const MemberDevices& devices, v1::DeviceRecord* out) {
  out->set_count(static_cast<uint32_t>(devices.count));
  out->mutable_used()->Add(devices.used.begin(), devices.used.end());
  for (const auto& [to, pairs] : devices.maps) {
    v1::DeviceMapRecord* map = out->add_maps();
    map->set_to(to);
    put_pairs(pairs, map->mutable_pairs());
  }
}

// Takes whatever a record holds: a device that does not exist is found when maps are checked.
std::shared_ptr<const MemberDevices> take_devices(const v1::DeviceRecord& record) {
  auto out = std::make_shared<MemberDevices>();
  out->count = static_cast<int>(std::min<uint32_t>(record.count(), kMostDevices));
  out->used.assign(record.used().begin(), record.used().end());
  std::sort(out->used.begin(), out->used.end());
  for (const v1::DeviceMapRecord& map : record.maps()) {
    DevicePairs& pairs = out->maps[map.to()];
    for (int i = 0; i + 1 < map.pairs_size(); i += 2)
      pairs.emplace_back(map.pairs(i), map.pairs(i + 1));
  }
  return out;
}

bool is_text(const v1::MemberRecord& record) {
  return is_line_of_text(record.name()) && is_line_of_text(record.address()) &&
         is_line_of_text(record.host()) &&
         std::all_of(record.methods().begin(), record.methods().end(), is_line_of_text) &&
         std::all_of(record.devices().maps().begin(), record.devices().maps().end(),
                     [](const v1::DeviceMapRecord& map) { return is_line_of_text(map.to()); });
}

std::shared_ptr<Store> client_of(const std::shared_ptr<Store>& store) {
  auto* forkable = dynamic_cast<ForkableStore*>(store.get());
  return forkable == nullptr ? store : forkable->new_client();
}

}  // namespace

Status abort_error(std::string_view reason) {
  const bool invalid = reason.rfind(kInvalidAbort, 0) == 0;
  if (invalid) reason.remove_prefix(sizeof kInvalidAbort - 1);
  return make_error(invalid ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kAlreadyExists,
                    ErrorKind::kInvalidArgument, reason);
}

std::string hex(uint64_t incarnation) {
  return absl::StrCat(absl::Hex(incarnation, absl::kZeroPad16));
}

std::optional<Member> read_member(const std::string& bytes) {
  v1::MemberRecord record;
  if (!record.ParseFromString(bytes) || !is_text(record)) return std::nullopt;
  Member member;
  member.info = WorkerInfo{record.name(), record.id(), record.incarnation()};
  member.address = record.address();
  member.methods.assign(record.methods().begin(), record.methods().end());
  member.host = record.host();
  member.pid = record.pid();
  if (record.has_devices()) member.devices = take_devices(record.devices());
  return member;
}

Membership::Membership(MembershipOptions options)
    : options_(std::move(options)),
      store_(client_of(options_.store)),
      interruptible_(store_ != options_.store),
      incarnation_(hex(options_.incarnation)),
      changed_(options_.runtime.get()),
      list_(std::make_shared<MemberList>()) {}

Membership::~Membership() { stop(); }

std::string Membership::key(std::string_view name) const {
  return options_.prefix + std::string(name);
}

MemberListRef Membership::list() const {
  MutexLock lock(&mutex_);
  return list_;
}

bool Membership::wait_list_change(const MemberListRef& seen, absl::Time deadline) {
  MutexLock lock(&mutex_);
  while (list_ == seen && aborted_.ok() && !stopping_) {
    if (!changed_.wait_until(&mutex_, deadline).ok()) return list_ != seen;
  }
  return true;
}

Status Membership::bump_version(absl::Duration timeout) {
  return store_->add(key("version"), 1, timeout).status();
}

absl::Duration Membership::patience() const {
  return interruptible_ ? options_.lease : std::min(options_.lease, kUninterrupted);
}

bool Membership::stopping() const {
  MutexLock lock(&mutex_);
  return stopping_;
}

StatusOr<uint32_t> Membership::claim(absl::Time deadline) {
  Store& store = *store_;
  const auto left = [&] { return deadline - options_.runtime->now(); };
  const std::string mode = dynamic() ? "dynamic" : absl::StrCat("static ", options_.world_size);
  WEFT_ASSIGN_OR_RETURN(const std::string actual, store.compare_set(key("mode"), "", mode, left()));
  if (actual != mode) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("worker '", options_.name, "' wants to join a ", mode,
                     " group, but the group at ", store.describe(), " is ", actual,
                     " (\"static N\" has a world size, \"dynamic\" has none; all workers of a "
                     "job must agree)"));
  }
  WEFT_RETURN_IF_ERROR(store.set(key(absl::StrCat("beat/", incarnation_)), "0", left()));
  thread_ = options_.runtime->spawn("weft-members", [this] { run(); });

  uint32_t id = 0;
  if (dynamic()) {
    WEFT_ASSIGN_OR_RETURN(const int64_t next, store.add(key("next_id"), 1, left()));
    id = static_cast<uint32_t>(next - 1);
  } else {
    id = *options_.rank;
    WEFT_RETURN_IF_ERROR(make_claim({Claim::Of::kRank, key(absl::StrCat("rank/", id)),
                                     absl::StrCat(incarnation_, " ", options_.name)},
                                    deadline));
  }
  const std::string value = absl::StrCat(id, " ", incarnation_);
  WEFT_RETURN_IF_ERROR(
      make_claim({Claim::Of::kName, key(absl::StrCat("name/", options_.name)), value}, deadline));
  MutexLock lock(&mutex_);
  name_value_ = value;
  return id;
}

Status Membership::make_claim(const Claim& claim, absl::Time deadline) {
  const auto left = [&] { return deadline - options_.runtime->now(); };
  const bool is_name = claim.of == Claim::Of::kName;
  const std::string what = is_name ? absl::StrCat("worker name '", options_.name, "'")
                                   : absl::StrCat("rank ", *options_.rank);
  std::string expected;
  while (true) {
    WEFT_ASSIGN_OR_RETURN(const std::string actual,
                          store_->compare_set(claim.key, expected, claim.value, left()));
    if (actual == claim.value) return absl::OkStatus();
    if (actual.empty() || actual == kFreeClaim) {
      expected = actual;
      continue;
    }
    if (actual.rfind(kSweptClaim, 0) == 0) {
      // Its sweeper deletes it at once; one that stands still for a lease does not any more.
      const absl::Time end = options_.runtime->now() + options_.lease;
      const auto change =
          store_->wait_change(claim.key, actual, std::min(end, deadline) - options_.runtime->now());
      if (change.ok()) {
        expected = change->value_or("");
      } else if (error_kind(change.status()) == ErrorKind::kDeadline && end <= deadline) {
        expected = actual;
      } else {
        return annotate(change.status(), absl::StrCat("waiting until ", what, " is free"));
      }
      continue;
    }
    // "ID INC" of a name, "INC NAME" of a rank.
    const std::vector<std::string> parts = absl::StrSplit(actual, absl::MaxSplits(' ', 1));
    const std::string owner = parts.size() == 2 ? parts[is_name ? 1 : 0] : actual;
    const std::string taken = absl::StrCat(
        what, " is not unique: ",
        is_name ? absl::StrCat("workers ", parts[0], " and ",
                               claim.value.substr(0, claim.value.find(' ')), " share it")
                : absl::StrCat("'", parts.size() == 2 ? parts[1] : actual, "' and '", options_.name,
                               "' both claim it"));
    WEFT_ASSIGN_OR_RETURN(const bool alive, is_alive(owner, deadline));
    if (alive) {
      WEFT_RETURN_IF_ERROR(abort_if_incomplete(taken, deadline));
      return make_error(absl::StatusCode::kAlreadyExists, ErrorKind::kInvalidArgument, taken);
    }
    WEFT_LOG(options_.log, kWarning)
        << what << ": taking over from incarnation " << owner << ", whose lease lapsed";
    // All that a watcher would do (declare_dead): there may be none, and a record that stays would
    // stand for a member that no worker can reach.
    const std::string id = is_name ? parts[0] : absl::StrCat(*options_.rank);
    Store& store = *store_;
    WEFT_RETURN_IF_ERROR(
        store.set(key(absl::StrCat("dead/", owner)), "its successor took its name", left()));
    WEFT_RETURN_IF_ERROR(store.delete_key(key(absl::StrCat("beat/", owner)), left()).status());
    WEFT_RETURN_IF_ERROR(
        store.delete_key(key(absl::StrCat("member/", id, ".", owner)), left()).status());
    expected = actual;
  }
}

StatusOr<bool> Membership::is_alive(const std::string& incarnation, absl::Time deadline) {
  const std::string beat = key(absl::StrCat("beat/", incarnation));
  WEFT_ASSIGN_OR_RETURN(const std::optional<std::string> before,
                        store_->try_get(beat, deadline - options_.runtime->now()));
  if (!before.has_value()) return false;  // it left, or was declared dead
  const absl::Time end = options_.runtime->now() + options_.lease;
  const auto change =
      store_->wait_change(beat, before, std::min(end, deadline) - options_.runtime->now());
  if (change.ok()) return change->has_value();
  if (error_kind(change.status()) != ErrorKind::kDeadline) return change.status();
  if (end > deadline) {
    return annotate(change.status(), "waiting to see whether an earlier owner is alive");
  }
  return false;
}

// Tells the workers that still wait for the group that it can never be complete. A group that is
// complete, or was until a worker died, goes on: a latecomer's mistake fails only the latecomer.
Status Membership::abort_if_incomplete(const std::string& reason, absl::Time deadline) {
  if (dynamic()) return absl::OkStatus();
  const auto left = [&] { return deadline - options_.runtime->now(); };
  Store& store = *store_;
  WEFT_ASSIGN_OR_RETURN(const auto here, store.list_keys(key("member/"), left()));
  WEFT_ASSIGN_OR_RETURN(const auto dead, store.list_keys(key("dead/"), left()));
  if (here.size() + dead.size() >= static_cast<size_t>(options_.world_size)) {
    return absl::OkStatus();
  }
  WEFT_RETURN_IF_ERROR(store.set(key("abort"), reason, left()));
  WEFT_RETURN_IF_ERROR(store.set(key("full"), "1", left()));
  return bump_version(left());
}

Status Membership::abort(const std::string& reason, absl::Time deadline) {
  if (dynamic()) return absl::OkStatus();
  const auto left = [&] { return deadline - options_.runtime->now(); };
  WEFT_ASSIGN_OR_RETURN(const auto dead, store_->list_keys(key("dead/"), left()));
  if (!dead.empty()) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(store_->set(key("abort"), kInvalidAbort + reason, left()));
  WEFT_RETURN_IF_ERROR(store_->set(key("full"), "1", left()));
  return bump_version(left());
}

Status Membership::aborted(absl::Time deadline) {
  WEFT_ASSIGN_OR_RETURN(const std::optional<std::string> reason,
                        store_->try_get(key("abort"), deadline - options_.runtime->now()));
  return reason.has_value() ? abort_error(*reason) : absl::OkStatus();
}

Status Membership::publish(const Member& self, absl::Time deadline) {
  v1::MemberRecord record;
  record.set_name(self.info.name);
  record.set_id(self.info.id);
  record.set_incarnation(self.info.incarnation);
  record.set_address(self.address);
  for (const std::string& m : self.methods) record.add_methods(m);
  record.set_host(self.host);
  record.set_pid(self.pid);
  if (self.devices != nullptr) put_devices(*self.devices, record.mutable_devices());
  const std::string record_key = key(absl::StrCat("member/", self.info.id, ".", incarnation_));
  {
    MutexLock lock(&mutex_);
    record_key_ = record_key;
    hurry_ = true;
  }
  const auto left = [&] { return deadline - options_.runtime->now(); };
  WEFT_RETURN_IF_ERROR(store_->set(record_key, record.SerializeAsString(), left()));
  WEFT_RETURN_IF_ERROR(bump_version(left()));
  if (!dynamic()) {
    // Only a hint: some may have left again.
    WEFT_ASSIGN_OR_RETURN(const int64_t came, store_->add(key("came"), 1, left()));
    if (came >= options_.world_size) {
      WEFT_RETURN_IF_ERROR(store_->set(key("full"), "1", left()));
    }
  }
  changed_.notify_all();

  MutexLock lock(&mutex_);
  while (true) {
    if (!aborted_.ok()) return aborted_;
    const MemberListRef list = list_;
    const bool here = list->find(self.info.id) != nullptr &&
                      list->find(self.info.id)->info.incarnation == self.info.incarnation;
    if (here) hurry_ = false;
    size_t ever = list->by_id.size();
    for (const auto& [id, gone] : list->gone) ever += list->find(id) == nullptr ? 1 : 0;
    if (here && (dynamic() || ever >= static_cast<size_t>(options_.world_size)))
      return absl::OkStatus();
    const Status waited = changed_.wait_until(&mutex_, deadline);
    if (waited.ok()) continue;
    if (error_kind(waited) != ErrorKind::kDeadline) return waited;
    lock.unlock();
    return missing_ranks(self.info.name);
  }
}

// The list may be a heartbeat old, and a worker that came and left between two reads is in none.
Status Membership::missing_ranks(const std::string& name) const {
  const MemberListRef list = this->list();
  std::set<uint32_t> here;
  for (const auto& [id, member] : list->by_id) here.insert(id);
  const std::string prefix = key("member/");
  const absl::Duration timeout = std::min(options_.heartbeat, kUninterrupted);
  const auto keys = store_->list_keys(prefix, timeout);
  if (keys.ok()) {
    here.clear();
    for (const std::string& k : *keys) {
      uint32_t id = 0;
      const size_t dot = k.find('.', prefix.size());
      if (absl::SimpleAtoi(k.substr(prefix.size(), dot - prefix.size()), &id)) here.insert(id);
    }
  }
  std::vector<std::string> ranks;
  for (int r = 0; r < options_.world_size; ++r) ranks.push_back(key(absl::StrCat("rank/", r)));
  StatusOr<std::vector<std::optional<std::string>>> claims =
      std::vector<std::optional<std::string>>();
  if (keys.ok() && !ranks.empty()) claims = store_->multi_get(ranks, timeout);
  std::vector<std::string> missing;
  std::vector<std::string> gone;  // they came, and gave up before us
  for (int r = 0; r < options_.world_size; ++r) {
    const uint32_t id = static_cast<uint32_t>(r);
    if (here.count(id) > 0) continue;
    const bool freed = claims.ok() && !claims->empty() && (*claims)[id] == kFreeClaim;
    (freed || list->gone.count(id) > 0 ? gone : missing).push_back(absl::StrCat(r));
  }
  return make_error(
      ErrorKind::kDeadline,
      absl::StrCat("worker '", name, "' waited for ", options_.world_size, " workers at ",
                   store_->describe(), ", ", here.size() + gone.size(),
                   " came; missing ranks: ", absl::StrJoin(missing, ", "),
                   gone.empty() ? "" : "; came and left again: ", absl::StrJoin(gone, ", ")));
}

void Membership::leave(absl::Time deadline) {
  std::string record_key;
  std::string name_value;
  {
    MutexLock lock(&mutex_);
    if (left_) return;
    left_ = true;
    record_key = record_key_;
    name_value = name_value_;
  }
  const auto left = [&] {
    return std::max(absl::Milliseconds(1), deadline - options_.runtime->now());
  };
  Store& store = *store_;
  Status status;
  const auto keep = [&status](const Status& s) {
    if (status.ok()) status = s;
  };
  // The record first: it is what the others look at. Stop at the first failure: a store that is
  // gone would cost its timeout at every step.
  if (!record_key.empty()) keep(store.delete_key(record_key, left()).status());
  if (status.ok() && !name_value.empty()) {
    keep(
        store.compare_set(key(absl::StrCat("name/", options_.name)), name_value, kFreeClaim, left())
            .status());
  }
  if (status.ok() && !dynamic() && options_.rank.has_value()) {
    keep(store
             .compare_set(key(absl::StrCat("rank/", *options_.rank)),
                          absl::StrCat(incarnation_, " ", options_.name), kFreeClaim, left())
             .status());
  }
  if (status.ok())
    keep(store.delete_key(key(absl::StrCat("beat/", incarnation_)), left()).status());
  if (status.ok() && !dynamic() && options_.rank == 0u) {
    // The next group at this store gathers anew.
    for (const char* hint : {"came", "full"}) {
      if (status.ok()) keep(store.delete_key(key(hint), left()).status());
    }
  }
  if (status.ok()) keep(bump_version(left()));
  if (!status.ok()) {
    WEFT_LOG(options_.log, kWarning) << "leaving without the store: " << status;
  }
}

void Membership::stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (interruptible_) store_->interrupt();  // MEM-7
  if (thread_ != nullptr) thread_->join();
}

}  // namespace weft::internal
