// Where a part of a table of two copies is, when its owner has moved or does not answer: the servers of
// the table are asked in turn, and one that has the backup takes over when the owner is gone.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/call_scope.h"
#include "weft/ps/internal/table_core.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kAsk = absl::Seconds(2);
constexpr absl::Duration kLookAgain = absl::Milliseconds(30);
// So often nobody has a copy, and no server may have one: there is none.
constexpr int kEmptyRounds = 3;

}  // namespace

bool gave_no_answer(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kDeadline:
    case ErrorKind::kNotDelivered:
    case ErrorKind::kMaybeExecuted:
    case ErrorKind::kUnavailable:
    case ErrorKind::kPeerLost:
    case ErrorKind::kNotFound: return true;
    default: return false;
  }
}

TableCore::TargetRef TableCore::target(size_t part) const {
  MutexLock lock(&mutex_);
  return targets_[part];
}

bool TableCore::may_have_moved(const Status& why) const {
  if (error_kind(why) != ErrorKind::kCancelled) return gave_no_answer(error_kind(why));
  MutexLock lock(&mutex_);
  return closed_.ok();
}

void TableCore::note_names(const RangeMap& map) {
  if (map.epoch == 0) return;
  add_name(map.owner.name, &names_);
  if (!map.backup.empty()) add_name(map.backup.name, &names_);
}

void TableCore::learn(size_t part, const RangeMap& map) {
  MutexLock lock(&mutex_);
  note_names(map);
  if (map.epoch <= targets_[part]->map.epoch) return;
  PartTarget next = *targets_[part];
  if (map.owner.name != next.server.name) return;  // locate() asks for its number
  next.map = map;
  targets_[part] = std::make_shared<const PartTarget>(std::move(next));
}

void TableCore::locate(const OpRef& op, size_t piece, const RangeMap& map) {
  const size_t part = op->pieces[piece].part;
  {
    MutexLock lock(&mutex_);
    if (op->ended) return;
    ++stats_.repeats;
    Search& search = searches_[part];
    search.waiting.emplace_back(op, piece);
    if (search.running) return;
    search.running = true;
    search.asked = 0;
    search.copies = false;
    search.empty_rounds = 0;
    search.asked_store = false;
    // First who is said to have it, or the backup of who does not answer.
    const RangeMap& known = map.epoch != 0 ? map : targets_[part]->map;
    note_names(known);
    const std::string& first =
        map.epoch != 0 || known.backup.empty() ? known.owner.name : known.backup.name;
    const auto at = std::find(names_.begin(), names_.end(), first);
    if (at != names_.end()) search.next = static_cast<size_t>(at - names_.begin());
  }
  ask_next(part);
}

void TableCore::ask_next(size_t part) {
  std::string name;
  {
    MutexLock lock(&mutex_);
    Search& search = searches_[part];
    name = names_[search.next];
    search.next = (search.next + 1) % names_.size();
    ++search.asked;
  }
  const StatusOr<WorkerInfo> info = service_->worker().try_get_worker_info(name);
  if (!info.ok()) return found(part, {}, info.status());
  UntypedCall call;
  call.method = std::string(kFindMethod);
  call.signature = kFindSignature;
  call.arguments = pack_bytes(encode(FindRequest{setup_.name, static_cast<uint32_t>(part), true}));
  call.options.deadline = std::min(kAsk, setup_.attempt);
  call.options.retry = Retry::kAtMostOnce;
  call.options.backpressure = Backpressure::kWait;
  const ScopeGuard nothing_ambient(nullptr);
  start_call(service_->worker(), *info, std::move(call),
             [self = shared_from_this(), part, info = *info](StatusOr<Payload> result) {
               if (!result.ok()) return self->found(part, info, result.status());
               const StatusOr<std::string> bytes = unpack_bytes(*std::move(result));
               self->found(part, info, bytes.ok() ? decode_found(*bytes) : bytes.status());
             });
}

void TableCore::found(size_t part, const WorkerInfo& server, const StatusOr<FindAnswer>& answer) {
  std::vector<std::pair<OpRef, size_t>> waiting;
  bool round_ends = false;
  {
    MutexLock lock(&mutex_);
    Search& search = searches_[part];
    if (answer.ok() && answer->part != 0) {
      const PartTarget& known = *targets_[part];
      if (known.part != answer->part || known.server != server) ++stats_.moves;
      targets_[part] =
          std::make_shared<const PartTarget>(PartTarget{server, answer->part, answer->map});
      waiting = std::exchange(search.waiting, {});
      search.running = false;
    } else {
      if (answer.ok()) note_names(answer->map);
      search.copies |=
          answer.ok() ? answer->copy : error_kind(answer.status()) != ErrorKind::kPeerLost;
      round_ends = search.asked >= names_.size();
    }
  }
  if (waiting.empty()) return round_ends ? search_again(part) : ask_next(part);
  // A little later: who answers so may have lost what it answered a moment ago.
  for (const auto& [op, i] : waiting) {
    later(std::min(op->deadline, service_->context().runtime->now() + kLookAgain),
          [self = shared_from_this(), op = op, i = i] { self->send(op, i); });
  }
}

// A server that has joined may have the part by now, and no server that was asked knows of it.
void TableCore::ask_store(size_t part) {
  service_->read_joined([weak = weak_from_this(), part](const std::vector<std::string>& names) {
    const auto self = weak.lock();
    if (self == nullptr) return;
    {
      MutexLock lock(&self->mutex_);
      for (const std::string& name : names) add_name(name, &self->names_);
    }
    self->ask_next(part);
  });
}

// Everybody was asked. Who has no time left ends; the others wait for the next round.
void TableCore::search_again(size_t part) {
  const absl::Time now = service_->context().runtime->now();
  std::vector<std::pair<OpRef, size_t>> over;
  bool none = false;
  bool goes_on = false;
  {
    MutexLock lock(&mutex_);
    Search& search = searches_[part];
    search.empty_rounds = search.copies ? 0 : search.empty_rounds + 1;
    if (search.empty_rounds >= kEmptyRounds && closed_.ok() &&
        !std::exchange(search.asked_store, true)) {
      search.asked = 0;
      search.empty_rounds = 0;
      lock.unlock();
      return ask_store(part);
    }
    none = search.empty_rounds >= kEmptyRounds || !closed_.ok();
    std::vector<std::pair<OpRef, size_t>> stay;
    for (auto& waits : search.waiting) {
      if (waits.first->ended) continue;
      (none || now >= waits.first->deadline ? over : stay).push_back(std::move(waits));
    }
    search.waiting = std::move(stay);
    search.asked = 0;
    search.copies = false;
    goes_on = !search.waiting.empty();
    search.running = goes_on;
  }
  for (const auto& [op, i] : over) {
    const std::string what = label(*op, i);
    end(op, none ? make_error(ErrorKind::kPeerLost,
                              absl::StrCat(what, ": no copy of the part is left at any server"))
                 : make_error(ErrorKind::kDeadline,
                              absl::StrCat(what, ": no owner of the part was found in its time")));
  }
  if (!goes_on) return;
  later(now + kLookAgain, [self = shared_from_this(), part] { self->ask_next(part); });
}

}  // namespace weft::ps::internal
