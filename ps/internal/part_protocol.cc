#include "weft/ps/internal/part_protocol.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace weft::ps::internal {

std::string to_string(const ClientKey& client) {
  return absl::StrCat("client ", client.number, " of ", to_string(client.worker));
}

// ---- clients -----------------------------------------------------------------------------------

StatusOr<uint64_t> PartProtocol::enter(const ClientKey& client, uint64_t clock, PartEffects* out) {
  if (left_.contains(client) || gone_.contains(client.worker)) {
    return make_error(ErrorKind::kState, absl::StrCat(to_string(client), " has left the table"));
  }
  const bool stepped = consistency_.mode == Mode::kBsp;
  // SSP: a client that comes later does not hold up those that are far ahead.
  uint64_t least = stepped ? step_ : 0;
  if (consistency_.mode == Mode::kSsp && started_ && !clients_.contains(client)) {
    least = slowest().value_or(0);
  }
  uint64_t most = step_;
  for (const auto& [key, other] : clients_) most = std::max(most, other.clock);
  if (clock > most && clock - most >= kMostOpen) {
    return make_error(ErrorKind::kProtocol, absl::StrCat(to_string(client), " enters with clock ",
                                                         clock, ", and the others are at ", most));
  }
  // A client that has entered counts, also if it has left or died since: none waits for it.
  if (!clients_.contains(client)) ++entered_;
  Client& entered = clients_[client];
  entered.clock = std::max({entered.clock, clock, least});
  if (entered_ >= consistency_.clients) started_ = true;
  const uint64_t now = entered.clock;
  settle(out);
  return now;
}

Status PartProtocol::advance(const ClientKey& client, uint64_t clock, PartEffects* out) {
  const auto at = clients_.find(client);
  if (at == clients_.end()) {
    return make_error(
        ErrorKind::kState,
        absl::StrCat(to_string(client), " has not entered the table, or has left it"));
  }
  if (clock <= at->second.clock) return absl::OkStatus();
  if (clock - at->second.clock >= kMostOpen) {
    return make_error(ErrorKind::kProtocol, absl::StrCat(to_string(client), " goes from clock ",
                                                         at->second.clock, " to ", clock));
  }
  at->second.clock = clock;
  settle(out);
  return absl::OkStatus();
}

void PartProtocol::leave(const ClientKey& client, PartEffects* out) {
  if (gone_.contains(client.worker)) return;
  left_.insert(client);
  clients_.erase(client);
  settle(out);
}

void PartProtocol::worker_gone(const WorkerKey& worker, PartEffects* out) {
  if (!gone_.insert(worker).second) return;
  const auto first = ClientKey{worker, 0};
  const auto of_worker = [&](auto& container, const auto& key_of_entry) {
    auto at = container.lower_bound(first);
    while (at != container.end() && key_of_entry(*at).worker == worker) at = container.erase(at);
  };
  of_worker(clients_, [](const auto& entry) { return entry.first; });
  of_worker(left_, [](const auto& entry) { return entry; });
  settle(out);
}

uint64_t PartProtocol::clock_of(const ClientKey& client) const {
  const auto at = clients_.find(client);
  return at == clients_.end() ? 0 : at->second.clock;
}

uint64_t PartProtocol::remembered() const {
  uint64_t sum = 0;
  for (const auto& [key, client] : clients_) sum += client.outcomes.size();
  return sum;
}

// ---- pushes ------------------------------------------------------------------------------------

PartProtocol::Judgement PartProtocol::judge(const ClientKey& key, const PushHeader& push) {
  const auto refused = [](ErrorKind kind, std::string text) {
    return Judgement{Verdict::kRefused, make_error(kind, text)};
  };
  const auto at = clients_.find(key);
  if (at == clients_.end()) {
    return refused(ErrorKind::kState,
                   absl::StrCat("push ", push.number, " of ", to_string(key),
                                ", which has not entered the table, or has left it"));
  }
  Client& client = at->second;
  if (push.floor > client.floor) {
    client.floor = push.floor;
    client.outcomes.erase(client.outcomes.begin(), client.outcomes.lower_bound(client.floor));
  }
  if (const auto known = client.outcomes.find(push.number); known != client.outcomes.end()) {
    return Judgement{Verdict::kSame, known->second.told, known->second.dropped};
  }
  if (push.number < client.floor) {
    return refused(ErrorKind::kState,
                   absl::StrCat("push ", push.number, " of ", to_string(key),
                                " comes after its client has given up all below ", client.floor));
  }
  if (push.number - client.floor >= kMostOpen) {
    return refused(ErrorKind::kProtocol,
                   absl::StrCat("push ", push.number, " of ", to_string(key), " is ", kMostOpen,
                                " or more above its floor ", client.floor));
  }
  const bool assigns = push.kind == PushKind::kAssign;
  if (assigns || consistency_.mode == Mode::kAsp || consistency_.mode == Mode::kSsp) {
    return Judgement{Verdict::kApply};
  }
  if (consistency_.mode == Mode::kBsp) {
    if (push.clock > client.clock && push.clock - client.clock >= kMostOpen) {
      return refused(ErrorKind::kProtocol,
                     absl::StrCat("push ", push.number, " of ", to_string(key), " for step ",
                                  push.clock, ", and its clock is ", client.clock));
    }
    return Judgement{Verdict::kHold, {}, false, std::max(push.clock, step_)};
  }
  if (push.version > version_) {
    return refused(ErrorKind::kProtocol,
                   absl::StrCat("push ", push.number, " of ", to_string(key), " was computed with ",
                                "version ", push.version, ", and there is only ", version_));
  }
  if (push.version == version_) return Judgement{Verdict::kHold, {}, false, step_};
  client.outcomes.emplace(push.number, Outcome{absl::OkStatus(), true});
  return Judgement{Verdict::kDrop, {}, true};
}

void PartProtocol::commit(const ClientKey& key, const PushHeader& push, const Judgement& judgement,
                          const Status& accepted, uint64_t token, PartEffects* out) {
  clients_[key].outcomes.emplace(push.number, Outcome{accepted, false});
  if (!accepted.ok()) return;
  if (judgement.verdict == Verdict::kApply) {
    ++version_;
    out->push_back(ApplyStep{{token}, 1});
    return;
  }
  held_[judgement.step].emplace(HeldKey{key, push.number}, token);
  ++held_count_;
  settle(out);
}

// ---- steps and pulls ---------------------------------------------------------------------------

std::optional<uint64_t> PartProtocol::slowest() const {
  if (!started_) return std::nullopt;
  std::optional<uint64_t> least;
  for (const auto& [key, client] : clients_)
    least = std::min(least.value_or(client.clock), client.clock);
  return least;
}

// While all clients of the definition take part this is K, since at most the others can be dropped. A job
// that has lost clients, or let them go, does with those that are left.
uint64_t PartProtocol::wanted() const {
  if (!started_) return consistency_.bound;
  uint64_t able = 0;
  for (const auto& [key, client] : clients_) {
    able += client.outcomes.empty() || !client.outcomes.rbegin()->second.dropped ? 1 : 0;
  }
  return std::min(consistency_.bound, std::max<uint64_t>(1, able));
}

// BSP: steps that have ended and have no push change no value. They pass in one go, since a client may
// be any number of them ahead; but not past a pull that waits for one of them, nor past a held push.
void PartProtocol::skip_empty_steps(uint64_t end, PartEffects* out) {
  if (const auto next = held_.lower_bound(step_); next != held_.end()) {
    end = std::min(end, next->first);
  }
  for (const auto& [token, pull] : parked_) {
    if (pull.clock.has_value()) end = std::min(end, *pull.clock);
  }
  out->push_back(ApplyStep{.steps = end - step_});
  version_ += end - step_;
  step_ = end;
}

bool PartProtocol::close_step(PartEffects* out) {
  const auto held = held_.find(step_);
  std::set<ClientKey> contributors;
  if (held != held_.end()) {
    for (const auto& [key, token] : held->second) contributors.insert(key.first);
  }
  uint64_t divisor = 0;
  if (consistency_.mode == Mode::kBsp) {
    const std::optional<uint64_t> least = slowest();
    if (!least.has_value() || *least <= step_) return false;
    if (held == held_.end()) {
      skip_empty_steps(*least, out);
      return true;
    }
    for (const auto& [key, client] : clients_) contributors.insert(key);
    divisor = contributors.size();
  } else {
    if (contributors.size() < wanted()) return false;
    divisor = contributors.size();
  }
  ApplyStep step{{}, divisor};
  for (const auto& [key, token] : held->second) step.tokens.push_back(token);
  held_count_ -= held->second.size();
  held_.erase(held);
  ++step_;
  ++version_;
  out->push_back(std::move(step));
  return true;
}

void PartProtocol::settle(PartEffects* out) {
  const bool stepped = consistency_.mode == Mode::kBsp || consistency_.mode == Mode::kBatch;
  do {
    for (auto at = parked_.begin(); at != parked_.end();) {
      if (!may_read(at->second)) {
        ++at;
        continue;
      }
      ready(at->first, at->second, out);
      at = parked_.erase(at);
    }
  } while (stepped && close_step(out));
}

bool PartProtocol::may_read(const Parked& pull) const {
  switch (consistency_.mode) {
    case Mode::kAsp: return true;
    case Mode::kBsp: return !pull.clock.has_value() || *pull.clock <= step_;
    case Mode::kSsp: {
      if (!pull.clock.has_value() || *pull.clock <= consistency_.bound) return true;
      const std::optional<uint64_t> least = slowest();
      return least.has_value() && *least >= *pull.clock - consistency_.bound;
    }
    case Mode::kBatch: return pull.at_least <= version_;
  }
  return true;
}

void PartProtocol::ready(uint64_t token, const Parked& pull, PartEffects* out) const {
  PullReady effect{token};
  const std::optional<uint64_t> least = slowest();
  if (pull.clock.has_value() && least.has_value() && *least < *pull.clock) {
    effect.lag = *pull.clock - *least;
  }
  out->push_back(effect);
}

Status PartProtocol::pull(const ClientKey& client, const PullHeader& header, uint64_t token,
                          PartEffects* out) {
  if (header.clock.has_value() && !clients_.contains(client)) {
    return make_error(ErrorKind::kState,
                      absl::StrCat("pull of ", to_string(client),
                                   ", which has not entered the table, or has left it"));
  }
  const Parked pull{header.clock, header.at_least};
  if (may_read(pull)) {
    ready(token, pull, out);
  } else {
    parked_.emplace(token, pull);
  }
  return absl::OkStatus();
}

// ---- cuts --------------------------------------------------------------------------------------

std::vector<ClientKey> PartProtocol::client_keys() const {
  std::vector<ClientKey> out;
  for (const auto& [key, client] : clients_) out.push_back(key);
  return out;
}

bool PartProtocol::has_seen(const ClientKey& key, uint64_t push, uint64_t clock) const {
  const auto at = clients_.find(key);
  if (at == clients_.end()) return true;
  const Client& client = at->second;
  const bool judged = push == 0 || push < client.floor || client.outcomes.contains(push);
  return judged && client.clock >= clock;
}

// ---- copies ------------------------------------------------------------------------------------

std::vector<PartProtocol::ClientView> PartProtocol::client_views() const {
  std::vector<ClientView> out;
  for (const auto& [key, client] : clients_) {
    out.push_back({key, client.clock, client.floor, client.outcomes.size()});
  }
  return out;
}

ProtocolImage PartProtocol::image() const {
  ProtocolImage out;
  for (const auto& [key, client] : clients_) {
    ProtocolImage::Client one{key, client.clock, client.floor, {}};
    for (const auto& [number, outcome] : client.outcomes) {
      one.outcomes.push_back({number, outcome.told, outcome.dropped});
    }
    out.clients.push_back(std::move(one));
  }
  out.left.assign(left_.begin(), left_.end());
  out.gone.assign(gone_.begin(), gone_.end());
  out.entered = entered_;
  out.started = started_;
  out.version = version_;
  out.step = step_;
  for (const auto& [step, pushes] : held_) {
    for (const auto& [key, token] : pushes)
      out.held.push_back({key.first, key.second, step, token});
  }
  return out;
}

void PartProtocol::load(const ProtocolImage& image) {
  for (const ProtocolImage::Client& one : image.clients) {
    Client& client = clients_[one.key];
    client.clock = one.clock;
    client.floor = one.floor;
    for (const auto& o : one.outcomes) client.outcomes[o.number] = Outcome{o.told, o.dropped};
  }
  left_.insert(image.left.begin(), image.left.end());
  gone_.insert(image.gone.begin(), image.gone.end());
  entered_ = image.entered;
  started_ = image.started;
  version_ = image.version;
  step_ = image.step;
  for (const ProtocolImage::Held& held : image.held) {
    held_count_ += held_[held.step].emplace(HeldKey{held.client, held.number}, held.token).second;
  }
}

}  // namespace weft::ps::internal
