// RRefProtocol::state(): two protocols with the same text behave alike from here on.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "weft/rref/internal/protocol.h"

namespace weft::internal {
namespace {

template <class Map>
auto sorted_keys(const Map& map) {
  std::vector<typename Map::key_type> keys;
  for (const auto& entry : map) keys.push_back(entry.first);
  std::sort(keys.begin(), keys.end());
  return keys;
}

void append(std::string& text, const WorkerKey& key) {
  absl::StrAppend(&text, absl::Hex(key.incarnation.value()));
}

template <class Tag>
void append(std::string& text, const CreatedId<Tag>& id) {
  absl::StrAppend(&text, absl::Hex(id.creator.incarnation.value()), ".", id.counter);
}

void append(std::string& text, const Handle& handle) {
  append(text, handle.rref);
  text += '/';
  append(text, handle.fork);
}

}  // namespace

std::string RRefProtocol::state() const {
  std::string text = absl::StrCat("ids ", last_id_, "\n");
  for (const RRefId& rref : sorted_keys(objects_)) {
    const Object& o = objects_.at(rref);
    text += "object ";
    append(text, rref);
    absl::StrAppend(&text, " created ", o.created, o.has_value, " running ", o.running, " known ",
                    o.known_sent, " code ", static_cast<int>(o.result.code()), " forks ", o.forks,
                    " local ", o.local_handles, " parked");
    for (const Parked& parked : o.parked) {
      absl::StrAppend(&text, " ", parked.token, ":");
      append(text, parked.fork);
    }
    text += '\n';
  }
  for (const ForkId& fork : sorted_keys(forks_)) {
    const Fork& f = forks_.at(fork);
    text += "fork ";
    append(text, Handle{f.rref, fork, self_});
    text += " at ";
    append(text, f.holder);
    absl::StrAppend(&text, " carrier ", f.carrier, "\n");
  }
  for (const ForkId& fork : sorted_keys(users_)) {
    const User& u = users_.at(fork);
    text += "user ";
    append(text, Handle{u.rref, fork, u.owner});
    text += " of ";
    append(text, u.owner);
    absl::StrAppend(&text, " state ", static_cast<int>(u.state), u.is_creator ? " creator" : "",
                    u.at_owner ? " counted" : "", u.ended ? " ended" : "",
                    u.dropped ? " dropped" : "", u.deleted ? " deleted" : "", " children ",
                    u.children, " by #", u.introduced_by, " code ",
                    static_cast<int>(u.failure.code()), " carrier ", u.carrier, "\n");
  }
  for (const auto& [key, arrival] : arrivals_) {
    text += "arrival ";
    append(text, key.first);
    absl::StrAppend(&text, "#", key.second, " pending ", arrival.pending,
                    arrival.is_answer ? " answer" : "", arrival.needs_accept ? " accept" : "",
                    arrival.accept_now ? " now" : "", arrival.cancelled ? " cancelled" : "",
                    " code ", static_cast<int>(arrival.failure.code()));
    for (const Handle& handle : arrival.handles) {
      text += ' ';
      append(text, handle);
    }
    text += '\n';
  }
  for (const auto& [incarnation, p] : peers_) {
    absl::StrAppend(&text, "peer ", absl::Hex(incarnation.value()), " floor ", p.outbox_floor,
                    " theirs ", p.theirs.control, ",", p.theirs.carriers, " out");
    for (const Slot& slot : p.outbox) {
      absl::StrAppend(&text, " ", slot.settled ? "-" : name(slot.kind));
    }
    for (const auto& [number, sent] : p.carriers) {
      absl::StrAppend(&text, " carrier ", number, sent.is_answer ? "a" : "",
                      sent.audited ? "!" : "");
      for (const Made& made : sent.forks) {
        text += made.open ? " +" : " -";
        append(text, made.fork);
        text += '<';
        append(text, made.parent);
      }
    }
    absl::StrAppend(&text, " next ", p.next_carrier, " tombstones");
    for (const auto& [seq, created] : p.tombstones)
      absl::StrAppend(&text, " ", seq, created ? "c" : "");
    text += " void";
    for (uint64_t carrier : p.void_carriers) absl::StrAppend(&text, " ", carrier);
    text += '\n';
  }
  text += "gone";
  for (Incarnation incarnation : gone_.all())
    absl::StrAppend(&text, " ", absl::Hex(incarnation.value()));
  return text += '\n';
}

}  // namespace weft::internal
