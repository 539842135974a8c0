#include "weft/rpc/internal/membership.h"

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
#include "weft/store/delegating_store.h"

namespace weft::internal {
namespace {

constexpr char kFree[] = "free";
constexpr char kSwept[] = "swept ";    // then the incarnation that is about to delete the name
constexpr uint64_t kSweepEvery = 512;  // changes; a worker that comes and goes makes two

// Of an operation that nothing can interrupt (MEM-7).
constexpr absl::Duration kUninterrupted = absl::Seconds(1);

// In a group of so many, changes are looked at once per heartbeat when they keep coming (MEM-6).
constexpr int64_t kPaced = 128;

constexpr char kInvalid[] = "invalid ";

Status abort_error(std::string_view reason) {
  const bool invalid = reason.rfind(kInvalid, 0) == 0;
  if (invalid) reason.remove_prefix(sizeof kInvalid - 1);
  return make_error(invalid ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kAlreadyExists,
                    ErrorKind::kInvalidArgument, reason);
}

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

// Whatever a record holds: a device that nobody has is found when maps are checked.
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
    WEFT_RETURN_IF_ERROR(claim_key(key(absl::StrCat("rank/", id)),
                                   absl::StrCat(incarnation_, " ", options_.name),
                                   absl::StrCat("rank ", id), deadline));
  }
  const std::string value = absl::StrCat(id, " ", incarnation_);
  WEFT_RETURN_IF_ERROR(claim_key(key(absl::StrCat("name/", options_.name)), value,
                                 absl::StrCat("worker name '", options_.name, "'"), deadline));
  MutexLock lock(&mutex_);
  name_value_ = value;
  return id;
}

Status Membership::claim_key(const std::string& claimed, const std::string& value,
                             const std::string& what, absl::Time deadline) {
  const auto left = [&] { return deadline - options_.runtime->now(); };
  std::string expected;
  while (true) {
    WEFT_ASSIGN_OR_RETURN(const std::string actual,
                          store_->compare_set(claimed, expected, value, left()));
    if (actual == value) return absl::OkStatus();
    if (actual.empty() || actual == kFree) {
      expected = actual;
      continue;
    }
    if (actual.rfind(kSwept, 0) == 0) {
      // Its sweeper deletes it at once; one that stands still for a lease does not any more.
      const absl::Time end = options_.runtime->now() + options_.lease;
      const auto change =
          store_->wait_change(claimed, actual, std::min(end, deadline) - options_.runtime->now());
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
    const bool is_name = what.rfind("worker name", 0) == 0;
    const std::string owner = parts.size() == 2 ? parts[is_name ? 1 : 0] : actual;
    const std::string taken =
        absl::StrCat(what, " is not unique: ",
                     is_name ? absl::StrCat("workers ", parts[0], " and ",
                                            value.substr(0, value.find(' ')), " share it")
                             : absl::StrCat("'", parts.size() == 2 ? parts[1] : actual, "' and '",
                                            options_.name, "' both claim it"));
    WEFT_ASSIGN_OR_RETURN(const bool alive, is_alive(owner, deadline));
    if (alive) {
      WEFT_RETURN_IF_ERROR(abort_if_incomplete(taken, deadline));
      return make_error(absl::StatusCode::kAlreadyExists, ErrorKind::kInvalidArgument, taken);
    }
    WEFT_LOG(options_.log, kWarning)
        << what << ": taking over from incarnation " << owner << ", whose lease lapsed";
    // All that a watcher would do (declare_dead): there may be none, and a record that stays would
    // stand for a member that nobody can reach.
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

// Tells those who still wait for the group that it can never be complete. One that is complete, or
// was until somebody died, goes on: the mistake of a latecomer is the latecomer's alone.
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
  WEFT_RETURN_IF_ERROR(store_->set(key("abort"), kInvalid + reason, left()));
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

// The list may be a heartbeat old, and whoever came and left between two looks is in none.
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
    const bool freed = claims.ok() && !claims->empty() && (*claims)[id] == kFree;
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
    keep(store.compare_set(key(absl::StrCat("name/", options_.name)), name_value, kFree, left())
             .status());
  }
  if (status.ok() && !dynamic() && options_.rank.has_value()) {
    keep(store
             .compare_set(key(absl::StrCat("rank/", *options_.rank)),
                          absl::StrCat(incarnation_, " ", options_.name), kFree, left())
             .status());
  }
  if (status.ok())
    keep(store.delete_key(key(absl::StrCat("beat/", incarnation_)), left()).status());
  if (status.ok() && !dynamic() && options_.rank == 0u) {
    // Whoever meets here again gathers anew.
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

void Membership::nap(absl::Duration d) {
  const absl::Time end = options_.runtime->now() + d;
  MutexLock lock(&mutex_);
  while (!stopping_ && changed_.wait_until(&mutex_, end).ok()) {
  }
}

void Membership::rest(absl::Time until) {
  MutexLock lock(&mutex_);
  while (!stopping_ && !hurry_ && changed_.wait_until(&mutex_, until).ok()) {
  }
}

void Membership::run() {
  absl::Time next_beat = options_.runtime->now();
  while (!stopping()) {
    Status status;
    if (options_.runtime->now() >= next_beat) {
      next_beat = options_.runtime->now() + options_.heartbeat;
      status = beat();
      if (status.ok()) status = watch_successors();
    }
    if (status.ok()) status = watch(next_beat);
    if (stopping()) return;
    if (status.ok() != healthy_) {
      healthy_ = status.ok();
      if (!healthy_) WEFT_LOG(options_.log, kWarning) << "the store cannot be used: " << status;
      if (options_.on_store_health) options_.on_store_health(healthy_);
    }
    if (!status.ok()) nap(options_.heartbeat);
  }
}

Status Membership::watch(absl::Time until) {
  Runtime& runtime = *options_.runtime;
  const auto left = [&] {
    const absl::Duration time = std::max(absl::Milliseconds(1), until - runtime.now());
    return interruptible_ ? time : std::min(time, kUninterrupted);
  };
  if (!dynamic() && !full_) {
    // MEM-6: nobody needs to know who has come before all have.
    const Status full = store_->wait({key("full")}, left());
    if (!full.ok() && error_kind(full) != ErrorKind::kDeadline) return full;
    full_ = full.ok();
    WEFT_ASSIGN_OR_RETURN(const auto version, store_->try_get(key("version"), patience()));
    if (version == seen_version_) return absl::OkStatus();
    return refresh(version);
  }
  if (runtime.now() < looked_ + pace_) {
    rest(std::min(looked_ + pace_, until));
    if (runtime.now() >= until || stopping()) return absl::OkStatus();
  }
  absl::Duration wait = left();
  {
    // Leaving raised the version, which wakes this thread; stop() follows soon.
    MutexLock lock(&mutex_);
    if (left_ && !interruptible_) wait = std::min(wait, absl::Milliseconds(5));
  }
  auto version = store_->wait_change(key("version"), seen_version_, wait);
  if (error_kind(version.status()) == ErrorKind::kDeadline) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(version.status());
  // A list of few costs little, and those few may wait for one another.
  const int64_t members = std::min<int64_t>(static_cast<int64_t>(list()->by_id.size()), kPaced);
  const absl::Duration most = options_.heartbeat * members / kPaced;
  const bool often = runtime.now() - looked_ < std::max(4 * pace_, options_.heartbeat / 2);
  pace_ = often ? std::min(std::max(2 * pace_, most / 16), most) : absl::ZeroDuration();
  const Status status = refresh(*version);
  looked_ = runtime.now();
  return status;
}

Status Membership::beat() {
  {
    MutexLock lock(&mutex_);
    // One that was declared dead claims nothing any more, or its successor could not come.
    if (left_ || evicted_) return absl::OkStatus();
  }
  return store_->set(key(absl::StrCat("beat/", incarnation_)), absl::StrCat(++beats_), patience());
}

Status Membership::watch_successors() {
  // MEM-3: the ids above ours, around the end.
  const MemberListRef members = list();
  std::vector<const Member*> ring;
  size_t above = 0;  // where in it the ids above ours begin
  bool here = false;
  for (const auto& [id, member] : members->by_id) {
    if (member.info.incarnation == options_.incarnation) {
      here = true;
      above = ring.size();
    } else {
      ring.push_back(&member);
    }
  }
  if (!here || ring.empty()) return absl::OkStatus();
  std::rotate(ring.begin(), ring.begin() + static_cast<std::ptrdiff_t>(above), ring.end());

  const absl::Duration tick = 2 * options_.heartbeat;
  const size_t width = std::min(watch_width_, ring.size());
  std::vector<std::string> keys;
  for (size_t i = 0; i < width; ++i) {
    keys.push_back(key(absl::StrCat("beat/", hex(ring[i]->info.incarnation))));
  }
  WEFT_ASSIGN_OR_RETURN(const auto beats, store_->multi_get(keys, patience()));
  const absl::Time at = options_.runtime->now();
  std::map<uint64_t, Watched> watched;
  size_t standing = 0;
  for (size_t i = 0; i < width; ++i) {
    const uint64_t incarnation = ring[i]->info.incarnation;
    const std::optional<std::string>& beat = beats[i];
    const auto before = watched_.find(incarnation);
    if (before == watched_.end()) {
      watched[incarnation] = {beat, absl::ZeroDuration(), at};
      continue;
    }
    if (before->second.beat != beat) {
      // Alive, and it watches those behind it.
      watched[incarnation] = {beat, absl::ZeroDuration(), at};
      watch_width_ = i + 1;
      break;
    }
    const absl::Duration stood =
        before->second.stood + std::min(at - before->second.looked, tick);  // MEM-4
    if (stood > options_.lease) {
      declare_dead(*ring[i],
                   absl::StrCat("no sign of life for ", absl::FormatDuration(options_.lease),
                                ", says '", options_.name, "'"));
    } else {
      watched[incarnation] = {beat, stood, at};
    }
    standing += stood > tick ? 1 : 0;
  }
  watched_ = std::move(watched);
  if (standing == width) watch_width_ = 2 * width;
  return absl::OkStatus();
}

void Membership::declare_dead(const Member& member, const std::string& reason) {
  Store& store = *store_;
  const std::string incarnation = hex(member.info.incarnation);
  WEFT_LOG(options_.log, kWarning) << "worker '" << member.info.name << "' (incarnation "
                                   << incarnation << ") is dead: " << reason;
  // In this order: whoever sees the record gone finds out why. A step that fails is done again by
  // the next watcher, because the record is then still there.
  Status status = store.set(key(absl::StrCat("dead/", incarnation)), reason, patience());
  if (status.ok()) {
    status = store
                 .compare_set(key(absl::StrCat("name/", member.info.name)),
                              absl::StrCat(member.info.id, " ", incarnation), kFree, patience())
                 .status();
  }
  if (status.ok()) {
    status = store.delete_key(key(absl::StrCat("beat/", incarnation)), patience()).status();
  }
  if (status.ok()) {
    status =
        store.delete_key(key(absl::StrCat("member/", member.info.id, ".", incarnation)), patience())
            .status();
  }
  if (status.ok()) status = bump_version(patience());
  if (!status.ok()) WEFT_LOG(options_.log, kWarning) << "declaring it dead: " << status;
}

// Who is there, in order of keys; their records where we have not read them before; why others are
// not there any more.
struct Membership::Listing {
  struct Record {
    uint32_t id = 0;
    std::string incarnation;
    std::string key;
    std::optional<std::string> bytes;  // none: known already, or gone again
  };
  std::vector<Record> records;
  std::optional<std::string> abort;
  std::map<std::string, std::string> dead;  // by incarnation
};

Status Membership::read_listing(const MemberList& old, Listing* out) {
  const std::string prefix = key("member/");
  const auto add = [&](std::string record_key, std::optional<std::string> bytes) {
    // "ID.inc": a record we know already need not be read again.
    const std::vector<std::string> parts = absl::StrSplit(record_key.substr(prefix.size()), '.');
    uint32_t id = 0;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &id)) return;
    out->records.push_back({id, parts[1], std::move(record_key), std::move(bytes)});
  };
  if (old.by_id.empty()) {
    WEFT_ASSIGN_OR_RETURN(auto entries, store_->list_entries(prefix, patience()));
    for (StoreEntry& entry : entries) add(std::move(entry.key), std::move(entry.value));
  } else {
    WEFT_ASSIGN_OR_RETURN(auto keys, store_->list_keys(prefix, patience()));
    for (std::string& k : keys) add(std::move(k), std::nullopt);
  }
  std::set<std::string> there;
  std::vector<std::string> wanted;
  std::vector<std::function<void(const std::optional<std::string>&)>> take;
  if (!dynamic()) {
    wanted.push_back(key("abort"));
    take.emplace_back([out](const auto& value) { out->abort = value; });
  }
  for (size_t i = 0; i < out->records.size(); ++i) {
    const Listing::Record& record = out->records[i];
    there.insert(record.incarnation);
    const Member* known = old.find(record.id);
    if (record.bytes.has_value()) continue;
    if (known != nullptr && hex(known->info.incarnation) == record.incarnation) continue;
    wanted.push_back(record.key);
    take.emplace_back([out, i](const auto& value) { out->records[i].bytes = value; });
  }
  for (const auto& [id, member] : old.by_id) {
    const std::string incarnation = hex(member.info.incarnation);
    if (there.count(incarnation) > 0) continue;
    wanted.push_back(key(absl::StrCat("dead/", incarnation)));
    take.emplace_back([out, incarnation](const auto& value) {
      if (value.has_value()) out->dead[incarnation] = *value;
    });
  }
  if (wanted.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const auto values, store_->multi_get(wanted, patience()));
  for (size_t i = 0; i < values.size(); ++i) take[i](values[i]);
  return absl::OkStatus();
}

Status Membership::refresh(const std::optional<std::string>& version) {
  const MemberListRef old = list();
  Listing listing;
  WEFT_RETURN_IF_ERROR(read_listing(*old, &listing));
  seen_version_ = version;  // what could not be read is looked at again
  if (listing.abort.has_value()) {
    MutexLock lock(&mutex_);
    aborted_ = abort_error(*listing.abort);
    changed_.notify_all();
  }
  auto fresh = std::make_shared<MemberList>();
  fresh->generation = old->generation + 1;
  fresh->gone = old->gone;
  fresh->gone_names = old->gone_names;
  fresh->departures = old->departures;
  if (version.has_value() && !absl::SimpleAtoi(*version, &fresh->version)) {
    fresh->version = old->version;
  }
  std::vector<MembershipEvent> events;
  for (const Listing::Record& record : listing.records) {
    const Member* known = old->find(record.id);
    if (known != nullptr && hex(known->info.incarnation) == record.incarnation) {
      fresh->add(*known);
      continue;
    }
    // Gone again: the version has moved on and we will see.
    if (!record.bytes.has_value()) continue;
    std::optional<Member> member = read_member(*record.bytes);
    if (!member.has_value() || member->info.id != record.id ||
        hex(member->info.incarnation) != record.incarnation) {
      WEFT_LOG(options_.log, kError)
          << "the store holds an odd record under " << record.key << ", ignored";
      continue;
    }
    fresh->gone.erase(record.id);
    events.push_back({MembershipEvent::Kind::kJoined, member->info, fresh->version, ""});
    fresh->add(*std::move(member));
  }
  for (const auto& [id, member] : old->by_id) {
    const Member* now_there = fresh->find(id);
    if (now_there != nullptr && now_there->info.incarnation == member.info.incarnation) continue;
    const auto found = listing.dead.find(hex(member.info.incarnation));
    std::optional<std::string> dead;
    if (found != listing.dead.end()) dead = found->second;
    const std::string reason = dead.value_or("");
    events.push_back(
        {dead.has_value() ? MembershipEvent::Kind::kDied : MembershipEvent::Kind::kLeft,
         member.info, fresh->version, reason});
    if (now_there == nullptr) {
      fresh->add_gone(member.info,
                      make_error(ErrorKind::kPeerLost,
                                 absl::StrCat("worker '", member.info.name, "' (id ", id,
                                              ", incarnation ", hex(member.info.incarnation), ") ",
                                              dead.has_value() ? absl::StrCat("is dead: ", reason)
                                                               : std::string("has left"))));
    }
    if (member.info.incarnation == options_.incarnation) tell_if_evicted(dead);
  }
  if (dynamic()) fresh->forget_oldest_gone();
  if (options_.on_list) options_.on_list(fresh);
  {
    MutexLock lock(&mutex_);
    list_ = fresh;
  }
  changed_.notify_all();
  for (const MembershipEvent& event : events) {
    if (options_.on_event) options_.on_event(event);
  }
  if (dynamic() && fresh->version - swept_at_ >= kSweepEvery && !fresh->by_id.empty() &&
      fresh->by_id.begin()->second.info.incarnation == options_.incarnation && !has_left()) {
    swept_at_ = fresh->version;
    const Status swept = sweep(*fresh);
    if (!swept.ok()) WEFT_LOG(options_.log, kWarning) << "sweeping the store: " << swept;
  }
  return absl::OkStatus();
}

void Membership::tell_if_evicted(const std::optional<std::string>& dead) {
  // Who stood still for long may find that not even the reason is there any more.
  if (evicted_ || (!dead.has_value() && has_left())) return;
  evicted_ = true;
  if (options_.on_evicted) {
    options_.on_evicted(make_error(
        ErrorKind::kState,
        absl::StrCat("this worker, '", options_.name, "', was declared dead by the others: ",
                     dead.has_value() ? *dead : std::string("its record is gone"))));
  }
  // It may have been renewed once more since, before we knew. What fails here is done by whoever
  // claims the name.
  const auto deleted =
      store_->delete_key(key(absl::StrCat("beat/", incarnation_)), patience()).status();
  if (!deleted.ok()) WEFT_LOG(options_.log, kWarning) << "leaving a beat behind: " << deleted;
}

bool Membership::has_left() const {
  MutexLock lock(&mutex_);
  return left_;
}

Status Membership::sweep(const MemberList& list) {
  Store& store = *store_;
  const absl::Duration timeout = std::min(options_.lease / 2, patience());
  std::set<std::string> kept;
  for (const auto& [id, member] : list.by_id) kept.insert(hex(member.info.incarnation));
  for (const auto& [id, member] : list.gone) kept.insert(hex(member.info.incarnation));
  const std::string dead = key("dead/");
  WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> reasons, store.list_keys(dead, timeout));
  for (const std::string& k : reasons) {
    if (kept.count(k.substr(dead.size())) > 0) continue;
    WEFT_RETURN_IF_ERROR(store.delete_key(k, timeout).status());
  }
  const std::string names = key("name/");
  const std::string mine = absl::StrCat(kSwept, incarnation_);
  WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> claims, store.list_keys(names, timeout));
  for (const std::string& k : claims) {
    if (list.find(std::string_view(k).substr(names.size())) != nullptr) continue;
    // Taken first, so that nobody claims it between the look and the deletion.
    const absl::Time begin = options_.runtime->now();
    WEFT_ASSIGN_OR_RETURN(const std::string now, store.compare_set(k, kFree, mine, timeout));
    if (now != mine) continue;
    const absl::Duration left = timeout - (options_.runtime->now() - begin);
    if (left <= absl::ZeroDuration()) continue;  // it may be somebody's already; see claim_key
    WEFT_RETURN_IF_ERROR(store.delete_key(k, left).status());
  }
  return absl::OkStatus();
}

}  // namespace weft::internal
