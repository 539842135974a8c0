// The thread of a Membership: beats, watching, and taking in what has changed.

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "weft/rpc/internal/membership/membership.h"
#include "weft/rpc/internal/membership/membership_values.h"

namespace weft::internal {
namespace {

constexpr uint64_t kSweepEvery = 64;  // changes; a worker that comes and goes makes two
constexpr int kMostSwept = 64;        // keys at a time: two operations for each

// In a group of so many, changes are looked at once per heartbeat when they keep coming (MEM-6).
constexpr int64_t kPaced = 128;

}  // namespace

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
    // MEM-6: no worker needs the list before all have come.
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
  // In this order: a worker that sees the record gone finds the reason. A step that fails is done
  // again by the next watcher, because the record is then still there.
  Status status = store.set(key(absl::StrCat("dead/", incarnation)), reason, patience());
  if (status.ok()) {
    status =
        store
            .compare_set(key(absl::StrCat("name/", member.info.name)),
                         absl::StrCat(member.info.id, " ", incarnation), kFreeClaim, patience())
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

// The members in order of keys, with the records that were not read before, and why others are no
// members any more.
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
  std::vector<MembershipChange> changes;
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
    changes.push_back({MembershipChange::Kind::kJoined, member->info, fresh->version, ""});
    fresh->add(*std::move(member));
  }
  for (const auto& [id, member] : old->by_id) {
    const Member* now_there = fresh->find(id);
    if (now_there != nullptr && now_there->info.incarnation == member.info.incarnation) continue;
    const auto found = listing.dead.find(hex(member.info.incarnation));
    std::optional<std::string> dead;
    if (found != listing.dead.end()) dead = found->second;
    const std::string reason = dead.value_or("");
    changes.push_back(
        {dead.has_value() ? MembershipChange::Kind::kDied : MembershipChange::Kind::kLeft,
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
  for (const MembershipChange& change : changes) {
    if (options_.on_change) options_.on_change(change);
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
  // A worker that stood still for long may find that even the reason has been deleted.
  if (evicted_ || (!dead.has_value() && has_left())) return;
  evicted_ = true;
  if (options_.on_evicted) {
    options_.on_evicted(make_error(
        ErrorKind::kState,
        absl::StrCat("this worker, '", options_.name, "', was declared dead by the others: ",
                     dead.has_value() ? *dead : std::string("its record is gone"))));
  }
  // It may have been renewed once more since, before we knew. What fails here is done by the
  // next worker that claims the name.
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
  int swept = 0;
  for (const std::string& k : reasons) {
    if (kept.count(k.substr(dead.size())) > 0) continue;
    if (++swept > kMostSwept) return absl::OkStatus();  // the next time
    WEFT_RETURN_IF_ERROR(store.delete_key(k, timeout).status());
  }
  const std::string names = key("name/");
  const std::string mine = absl::StrCat(kSweptClaim, incarnation_);
  WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> claims, store.list_keys(names, timeout));
  for (const std::string& k : claims) {
    if (list.find(std::string_view(k).substr(names.size())) != nullptr) continue;
    if (++swept > kMostSwept) break;
    // Taken first, so that no worker claims it between the read and the deletion.
    const absl::Time begin = options_.runtime->now();
    WEFT_ASSIGN_OR_RETURN(const std::string now, store.compare_set(k, kFreeClaim, mine, timeout));
    if (now != mine) continue;
    const absl::Duration left = timeout - (options_.runtime->now() - begin);
    if (left <= absl::ZeroDuration())
      continue;  // another worker may have it already; see claim_key
    WEFT_RETURN_IF_ERROR(store.delete_key(k, left).status());
  }
  return absl::OkStatus();
}

}  // namespace weft::internal
