#include "weft/tests/rref/world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::test {

World::World(int workers, const Budget& budget, Bug bug) : budget_(budget), bug_(bug) {
  for (int i = 0; i < workers; ++i) workers_.push_back(Worker{RRefProtocol(key(i)), true, {}, {}});
}

WorkerKey World::key(int worker) {
  return WorkerKey{WorkerId(static_cast<uint32_t>(worker)),
                   Incarnation(static_cast<uint64_t>(0xa + worker))};
}

void World::fail(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

// Neither has been told that the other is dead, and both are alive.
bool World::see_each_other(int a, int b) const { return workers_[a].is_up && workers_[b].is_up; }

void World::push(Packet packet) {
  if (workers_[packet.to].is_up) packets_.push_back(std::move(packet));
}

// --- What users do ---

void World::remote(int from, int to) {
  StatusOr<Creation> creation = protocol(from).remote(key(to));
  if (!creation.ok()) return fail(absl::StrCat("remote: ", creation.status().message()));
  objects_[creation->rref] = Object{to};
  workers_[from].handles.push_back(Held{Handle{creation->rref, creation->fork, key(to)}});
  Call call{from, to, /*is_remote=*/true};
  call.creation = *creation;
  calls_.push_back(call);
  push(Packet{Packet::kCall, from, to, static_cast<int>(calls_.size()) - 1});
}

void World::local(int worker) {
  const Handle handle = protocol(worker).create_local(false);
  objects_[handle.rref] = Object{worker, true, false, false};
  workers_[worker].handles.push_back(Held{handle});
}

void World::share(int from, int handle, int to) {
  const Handle parent = workers_[from].handles[handle].handle;
  StatusOr<Carrier> carrier = protocol(from).share(key(to), {parent}, false);
  if (!carrier.ok()) return fail(absl::StrCat("share: ", carrier.status().message()));
  children_[parent.fork].push_back({to, carrier->forks[0]});
  Call call{from, to, /*is_remote=*/false};
  call.carrier = *carrier;
  calls_.push_back(call);
  push(Packet{Packet::kCall, from, to, static_cast<int>(calls_.size()) - 1});
}

void World::fetch(int from, int handle) {
  Held& held = workers_[from].handles[handle];
  ++held.uses;
  const int owner = static_cast<int>(held.handle.owner.id.value());
  const int index = static_cast<int>(fetches_.size());
  fetches_.push_back(Fetch{from, owner, handle, protocol(from).use_of(held.handle)});
  if (owner != from) return push(Packet{Packet::kFetch, from, owner, index});
  Effects effects;
  use(from, index, effects);
  perform(from, effects);
}

void World::use(int owner, int fetch, Effects& effects) {
  const Fetch& f = fetches_[fetch];
  const std::optional<Status> short_cut = protocol(owner).use_if_ready(key(f.from), f.use);
  protocol(owner).use(static_cast<uint64_t>(fetch), key(f.from), f.use, effects);
  const auto* done = effects.empty() ? nullptr : std::get_if<UseDone>(&effects.back());
  // It returns nothing for what is refused, and for the owner's own uses.
  const bool right = short_cut.has_value()
                         ? done != nullptr && done->status == *short_cut
                         : done == nullptr || !done->status.ok() || f.from == owner;
  if (!right) {
    fail(absl::StrCat("use_if_ready: ", short_cut.has_value() ? "at once" : "nothing", " for ",
                      to_string(f.use.rref), " over ", to_string(f.use.fork)));
  }
}

void World::close_fetch(int fetch) {
  Fetch& f = fetches_[fetch];
  if (!std::exchange(f.is_open, false)) return;
  --workers_[f.from].handles[f.handle].uses;
}

void World::drop(int worker, int handle) {
  Held& held = workers_[worker].handles[handle];
  held.is_there = false;
  Effects effects;
  protocol(worker).drop(held.handle, effects);
  perform(worker, effects);
}

// --- What handlers and functions do ---

void World::end_call(int index, const Status& status, int handle) {
  Call& call = calls_[index];
  call.phase = Call::kOver;
  Effects effects;
  RRefProtocol& callee = protocol(call.to);
  if (call.is_remote) {
    objects_.at(call.creation.rref).running = false;
    callee.function_ended(call.creation.rref, status, effects);
  } else {
    callee.answered(key(call.from), call.carrier.number);
  }
  if (handle >= 0) {
    const Handle parent = workers_[call.to].handles[handle].handle;
    StatusOr<Carrier> carrier = callee.share(key(call.from), {parent}, true);
    if (carrier.ok()) {
      children_[parent.fork].push_back({call.from, carrier->forks[0]});
      call.answer = *carrier;
    } else {
      fail(absl::StrCat("return: ", carrier.status().message()));
    }
  }
  push(Packet{Packet::kAnswer, call.to, call.from, index});
  perform(call.to, effects);
}

void World::flush(int index) {
  Call& call = calls_[index];
  call.was_flushed = true;
  Effects effects;
  if (call.is_remote) {
    protocol(call.to).flush_known(call.creation.rref, effects);
  } else {
    protocol(call.to).flush_accept(key(call.from), call.carrier.number, effects);
  }
  perform(call.to, effects);
}

void World::close_call(int index, CallEnd outcome) {
  Call& call = calls_[index];
  if (!std::exchange(call.is_open, false) || !workers_[call.from].is_up) return;
  Effects effects;
  RRefProtocol& caller = protocol(call.from);
  if (call.is_remote) {
    caller.creation_ended(call.creation.fork, outcome,
                          make_error(ErrorKind::kDeadline, "remote timed out"), effects);
  } else {
    if (bug_ == Bug::kParentGoesEarly && outcome == CallEnd::kUnknown) {
      outcome = CallEnd::kDelivered;
    }
    caller.carrier_ended(key(call.to), call.carrier.number, outcome, effects);
  }
  perform(call.from, effects);
}

// --- The network ---

void World::deliver(Packet packet) {
  Effects effects;
  switch (packet.kind) {
    case Packet::kControl: {
      if (packet.message.kind == MessageKind::kDelete) deleting(packet.to, packet.message);
      Packet answer{Packet::kAcknowledge, packet.to, packet.from};
      answer.message = packet.message;
      answer.reply = protocol(packet.to).deliver(key(packet.from), packet.message, effects);
      if (bug_ == Bug::kRefusalIgnored) answer.reply.status = Status();
      push(std::move(answer));
      break;
    }
    case Packet::kAcknowledge:
      protocol(packet.to).acknowledged(key(packet.from), packet.message.seq, packet.reply, effects);
      break;
    case Packet::kCall: return deliver_call(packet.call);
    case Packet::kAnswer: return deliver_answer(packet);
    case Packet::kFetch: use(packet.to, packet.call, effects); break;
    case Packet::kFetched: return close_fetch(packet.call);
    case Packet::kGone: return learn(packet.to, packet.from);
  }
  perform(packet.to, effects);
}

void World::deliver_call(int index) {
  Call& call = calls_[index];
  Effects effects;
  if (!call.is_remote) {
    call.phase = Call::kArrived;
    protocol(call.to).receive(key(call.from), call.carrier, effects);
    return perform(call.to, effects);
  }
  Object& object = objects_.at(call.creation.rref);
  switch (protocol(call.to).create(key(call.from), call.creation)) {
    case CreateVerdict::kStart:
      if (object.started) fail("RREF-5: a function was started twice");
      object.started = object.running = true;
      call.phase = Call::kRunning;
      break;
    case CreateVerdict::kRepeated: break;
    case CreateVerdict::kRefused: break;
  }
}

void World::deliver_answer(const Packet& packet) {
  Call& call = calls_[packet.call];
  if (!call.is_open) return;  // its caller has given up
  close_call(packet.call, packet.ran ? CallEnd::kDelivered : CallEnd::kUnknown);
  if (call.answer.number == 0) return;
  Effects effects;
  protocol(packet.to).receive(key(packet.from), call.answer, effects);
  perform(packet.to, effects);
}

void World::lose(Packet packet) {
  if (packet.kind == Packet::kFetch) return close_fetch(packet.call);
  if (packet.kind == Packet::kCall) {
    calls_[packet.call].phase = Call::kOver;
    close_call(packet.call, CallEnd::kNotDelivered);
  } else {
    close_call(packet.call, CallEnd::kUnknown);
  }
}

void World::crash(int worker) {
  workers_[worker].is_up = false;
  packets_.erase(std::remove_if(packets_.begin(), packets_.end(),
                                [worker](const Packet& p) { return p.to == worker; }),
                 packets_.end());
  for (int other = 0; other < size(); ++other) {
    if (workers_[other].is_up) push(Packet{Packet::kGone, worker, other});
  }
}

void World::learn(int worker, int dead) {
  workers_[worker].knows_gone.insert(dead);
  Effects effects;
  protocol(worker).worker_gone(key(dead), effects);
  perform(worker, effects);
  for (const Held& held : workers_[worker].handles) {
    if (held.is_there && held.handle.owner == key(dead) &&
        protocol(worker).check(held.handle).ok()) {
      fail("RREF-8: a handle outlives its owner");
    }
  }
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (calls_[i].from == worker && calls_[i].to == dead) {
      close_call(static_cast<int>(i), CallEnd::kUnknown);
    }
  }
  for (size_t i = 0; i < fetches_.size(); ++i) {
    if (fetches_[i].from == worker && fetches_[i].to == dead) close_fetch(static_cast<int>(i));
  }
}

// --- Effects ---

void World::perform(int worker, const Effects& effects) {
  for (const Effect& effect : effects) {
    if (const auto* send = std::get_if<SendMessage>(&effect)) {
      const Message& m = send->message;
      ++sent_[static_cast<size_t>(m.kind)];
      const int to = static_cast<int>(send->to.id.value());
      if (!said_.insert({worker, static_cast<int>(m.kind), m.fork, to, m.carrier}).second) {
        fail(absl::StrCat("RREF-9: worker ", worker, " said twice: ", to_string(m)));
      }
      Packet packet{Packet::kControl, worker, static_cast<int>(send->to.id.value())};
      packet.message = send->message;
      if (bug_ == Bug::kDeleteWithoutTombstone && packet.message.kind == MessageKind::kDelete) {
        packet.message.introduced_by = 0;
      }
      push(std::move(packet));
    } else if (const auto* ready = std::get_if<ArrivalReady>(&effect)) {
      arrived(worker, static_cast<int>(ready->from.id.value()), ready->carrier, Status());
    } else if (const auto* lost = std::get_if<ArrivalFailed>(&effect)) {
      arrived(worker, static_cast<int>(lost->from.id.value()), lost->carrier, lost->status);
    } else if (const auto* failed_handle = std::get_if<HandleFailed>(&effect)) {
      failed(worker, failed_handle->handle);
    } else if (const auto* done = std::get_if<UseDone>(&effect)) {
      use_done(worker, *done);
    } else if (const auto* release = std::get_if<ReleaseValue>(&effect)) {
      released(worker, release->rref);
    }
  }
}

void World::arrived(int worker, int from, uint64_t carrier, const Status& status) {
  for (size_t i = 0; i < calls_.size(); ++i) {
    Call& call = calls_[i];
    if (call.to == worker && call.from == from && call.carrier.number == carrier) {
      call.phase = status.ok() ? Call::kRunning : Call::kOver;
      if (status.ok()) return take(worker, call.carrier.forks);
      Packet answer{Packet::kAnswer, worker, from, static_cast<int>(i)};
      answer.ran = false;
      return push(std::move(answer));
    }
    if (call.from == worker && call.to == from && call.answer.number == carrier) {
      if (status.ok()) take(worker, call.answer.forks);
      return;
    }
  }
  fail("a carrier is ready that was never sent");
}

void World::take(int worker, const std::vector<Handle>& handles) {
  for (Handle handle : handles) {
    const int owner = static_cast<int>(handle.owner.id.value());
    if (owner == worker) {
      handle.fork = ForkId();
      if (!protocol(owner).has_object(handle.rref)) fail("RREF-3: an own object is not there");
    } else if (see_each_other(owner, worker) && !protocol(owner).counts_fork(handle.fork)) {
      fail(absl::StrCat("RREF-3: a handler got ", to_string(handle.fork),
                        ", which its owner does not count"));
    }
    if (see_each_other(owner, worker) && objects_.at(handle.rref).is_released) {
      fail("RREF-1: a handle to a value that was released");
    }
    workers_[worker].handles.push_back(Held{handle});
  }
}

void World::failed(int worker, const Handle& handle) {
  for (Held& held : workers_[worker].handles) {
    if (held.handle == handle) held.has_failed = true;
  }
  if (protocol(worker).check(handle).ok()) fail("RREF-10: a failed handle can be used");
}

void World::use_done(int worker, const UseDone& done) {
  const int index = static_cast<int>(done.token);
  const Fetch& fetch = fetches_[index];
  const Object& object = objects_.at(done.rref);
  if (done.status.ok()) {
    ++values_;
    if (!object.started || object.running) fail("a use ended before there was a value");
    if (object.is_released) fail("RREF-1: a use after the value was released");
  } else {
    ++errors_;
    const Held& held = workers_[fetch.from].handles[fetch.handle];
    if (error_kind(done.status) == ErrorKind::kState && fetch.is_open && held.is_there &&
        !held.has_failed && workers_[fetch.from].is_up) {
      fail(absl::StrCat("RREF-1: a use over a handle failed: ", done.status.message()));
    }
  }
  if (fetch.from == worker) return close_fetch(index);
  push(Packet{Packet::kFetched, worker, fetch.from, index});
}

void World::released(int worker, const RRefId& rref) {
  Object& object = objects_.at(rref);
  if (std::exchange(object.is_released, true)) fail("RREF-1: a value was released twice");
  if (object.running) fail("RREF-1: a value was released while its function ran");
  for (int holder = 0; holder < size(); ++holder) {
    for (const Held& held : workers_[holder].handles) {
      if (held.handle.rref == rref && held.is_there && !held.has_failed &&
          see_each_other(holder, worker)) {
        fail(absl::StrCat("RREF-1: a value was released while worker ", holder, " can reach it"));
      }
    }
  }
}

void World::deleting(int owner, const Message& message) {
  deleted_.emplace(message.fork, owner);
  for (const auto& [holder, child] : children_[message.fork]) {
    if (see_each_other(holder, owner) && protocol(holder).check(child).ok() &&
        !protocol(holder).confirmed(child)) {
      fail(absl::StrCat("RREF-4: ", to_string(message.fork), " went before its child ",
                        to_string(child.fork), " was confirmed"));
    }
  }
}

// --- Rest ---

bool World::drain_once() {
  if (!packets_.empty()) {
    Packet packet = packets_.front();
    packets_.erase(packets_.begin());
    deliver(std::move(packet));
    return true;
  }
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (calls_[i].phase == Call::kRunning && workers_[calls_[i].to].is_up) {
      end_call(static_cast<int>(i), Status(), -1);
      return true;
    }
  }
  for (int worker = 0; worker < size(); ++worker) {
    for (size_t i = 0; i < workers_[worker].handles.size() && workers_[worker].is_up; ++i) {
      if (workers_[worker].handles[i].is_there && workers_[worker].handles[i].uses == 0) {
        drop(worker, static_cast<int>(i));
        return true;
      }
    }
  }
  for (int worker = 0; worker < size(); ++worker) {
    for (int other = 0; other < size() && workers_[worker].is_up; ++other) {
      Effects effects;
      protocol(worker).audit_answers(key(other), protocol(worker).next_carrier(key(other)),
                                     effects);
      perform(worker, effects);
    }
  }
  return !packets_.empty();
}

void World::drain() {
  for (int steps = 0; violation_.empty() && drain_once(); ++steps) {
    if (steps > 10000) fail("RREF-6: the network does not come to rest");
    for (const auto& [fork, owner] : deleted_) {
      if (protocol(owner).counts_fork(fork)) fail("RREF-2: a deleted fork is counted again");
    }
  }
  if (violation_.empty()) check_rest();
}

void World::check_rest() {
  for (const Fetch& fetch : fetches_) {
    if (fetch.is_open && workers_[fetch.from].is_up) fail("a use was never answered");
  }
  for (const auto& [rref, object] : objects_) {
    if (object.started && !object.is_released && workers_[object.owner].is_up) {
      fail(absl::StrCat("RREF-1: the value of ", to_string(rref), " was never released"));
    }
  }
  // One more object for each pair: then every worker has heard that all before is settled.
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) {
      if (!see_each_other(from, to)) continue;
      if (from != to) {
        remote(from, to);
      } else {
        local(from);
        share(from, static_cast<int>(workers_[from].handles.size()) - 1, from);
      }
      while (violation_.empty() && drain_once()) {
      }
    }
  }
  for (int worker = 0; worker < size(); ++worker) {
    if (!workers_[worker].is_up) continue;
    if (protocol(worker).counts() != RRefProtocol::Counts()) {
      fail(absl::StrCat("RREF-6: something is left on worker ", worker, ":\n",
                        protocol(worker).state()));
    }
    if (protocol(worker).faults() != 0) fail("RREF-7: a correct worker was taken for a faulty one");
  }
}

}  // namespace weft::test
