// Which steps a World can take, their names, and its state as text.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/tests/rref/world.h"

namespace weft::test {

std::vector<Step> World::steps() const {
  std::vector<Step> all;
  const int packets = static_cast<int>(packets_.size());
  for (int i = 0; i < packets; ++i) {
    const Packet& p = packets_[i];
    all.push_back({Step::kDeliver, i});
    // User calls arrive at most once (CALL-2); a repeated creation is the protocol's to find.
    const bool may_repeat = p.kind == Packet::kControl || p.kind == Packet::kAcknowledge ||
                            (p.kind == Packet::kCall && calls_[p.call].is_remote);
    if (may_repeat && budget_.repeats > 0) all.push_back({Step::kRepeat, i});
    const auto is_copy = [&p](const Packet& other) {
      return other.kind == Packet::kCall && other.call == p.call;
    };
    const bool may_be_lost = p.kind == Packet::kFetch ||
                             (p.kind == Packet::kAnswer && calls_[p.call].is_open) ||
                             (p.kind == Packet::kCall && calls_[p.call].is_open &&
                              calls_[p.call].phase == Call::kFlying &&
                              std::count_if(packets_.begin(), packets_.end(), is_copy) == 1);
    if (may_be_lost && budget_.losses > 0) all.push_back({Step::kLose, i});
  }
  for (int i = 0; i < static_cast<int>(calls_.size()); ++i) {
    const Call& call = calls_[i];
    if (call.is_open && workers_[call.from].is_up && budget_.losses > 0) {
      all.push_back({Step::kGiveUp, i});
    }
    if (!workers_[call.to].is_up) continue;
    if (call.phase == Call::kArrived && budget_.cancels > 0) all.push_back({Step::kCancel, i});
    if (call.phase != Call::kRunning) continue;
    all.push_back({Step::kEnd, i});
    if (call.is_remote && budget_.errors > 0) all.push_back({Step::kEndWithError, i});
    if (!call.was_flushed && budget_.flushes > 0) all.push_back({Step::kFlush, i});
    const Worker& callee = workers_[call.to];
    if (call.is_remote || budget_.returns == 0 || callee.knows_gone.contains(call.from)) continue;
    for (int h = 0; h < static_cast<int>(callee.handles.size()); ++h) {
      const Held& held = callee.handles[h];
      if (held.is_there && callee.protocol.check(held.handle).ok()) {
        all.push_back({Step::kEndWithHandle, i, h});
      }
    }
  }
  for (int i = 0; i < static_cast<int>(fetches_.size()); ++i) {
    const Fetch& f = fetches_[i];
    if (f.is_open && f.from != f.to && workers_[f.from].is_up && budget_.losses > 0) {
      all.push_back({Step::kGiveUpFetch, i});
    }
  }
  const bool may_start = packets < budget_.in_flight;
  for (int a = 0; a < size(); ++a) {
    const Worker& worker = workers_[a];
    if (!worker.is_up) continue;
    const auto may_send_to = [&](int to) {
      return !worker.knows_gone.contains(to) && (a != to || !budget_.roles);
    };
    if (budget_.crashes > 0) all.push_back({Step::kCrash, a});
    if (budget_.leaves > 0 && !worker.handles.empty()) all.push_back({Step::kDropAll, a});
    if (may_start && budget_.locals > 0) all.push_back({Step::kLocal, a});
    for (int b = 0; b < size(); ++b) {
      if (may_start && budget_.remotes > 0 && a != b && may_send_to(b) &&
          (!budget_.roles || (a == 1 && b == 0))) {
        all.push_back({Step::kRemote, a, b});
      }
      if (budget_.audits > 0 && worker.protocol.next_carrier(key(b)) > 1) {
        all.push_back({Step::kAudit, a, b});
      }
    }
    for (int h = 0; h < static_cast<int>(worker.handles.size()); ++h) {
      const Held& held = worker.handles[h];
      if (!held.is_there) continue;
      if (held.uses == 0) all.push_back({Step::kDrop, a, h});
      if (!may_start || !worker.protocol.check(held.handle).ok()) continue;
      if (budget_.fetches > 0) all.push_back({Step::kFetch, a, h});
      for (int to = 0; to < size() && budget_.shares > 0; ++to) {
        if (may_send_to(to)) all.push_back({Step::kShare, a, h, to});
      }
    }
  }
  return all;
}

void World::apply(const Step& step) {
  Effects effects;
  switch (step.kind) {
    case Step::kRemote:
      --budget_.remotes;
      remote(step.a, step.b);
      break;
    case Step::kLocal:
      --budget_.locals;
      local(step.a);
      break;
    case Step::kShare:
      --budget_.shares;
      share(step.a, step.b, step.c);
      break;
    case Step::kFetch:
      --budget_.fetches;
      fetch(step.a, step.b);
      break;
    case Step::kDrop: drop(step.a, step.b); break;
    case Step::kDeliver:
    case Step::kLose: {
      Packet packet = packets_[step.a];
      packets_.erase(packets_.begin() + step.a);
      if (step.kind == Step::kDeliver) {
        deliver(std::move(packet));
      } else {
        --budget_.losses;
        lose(std::move(packet));
      }
      break;
    }
    case Step::kRepeat:
      --budget_.repeats;
      deliver(packets_[step.a]);
      break;
    case Step::kGiveUp:
      --budget_.losses;
      close_call(step.a, CallEnd::kUnknown);
      break;
    case Step::kGiveUpFetch: {
      --budget_.losses;
      // Its caller no longer waits; the owner hears of it, unless the fetch has not arrived.
      const Fetch f = fetches_[step.a];
      close_fetch(step.a);
      if (!workers_[f.to].is_up) break;
      protocol(f.to).cancel_use(static_cast<uint64_t>(step.a), f.use.rref, effects);
      perform(f.to, effects);
      break;
    }
    case Step::kEnd: end_call(step.a, Status(), -1); break;
    case Step::kEndWithError:
      --budget_.errors;
      end_call(step.a, make_error(ErrorKind::kUser, "the function failed"), -1);
      break;
    case Step::kEndWithHandle:
      --budget_.returns;
      end_call(step.a, Status(), step.b);
      break;
    case Step::kFlush:
      --budget_.flushes;
      flush(step.a);
      break;
    case Step::kCancel: {
      --budget_.cancels;
      Call& call = calls_[step.a];
      call.phase = Call::kOver;
      protocol(call.to).cancel_arrival(key(call.from), call.carrier.number);
      Packet answer{Packet::kAnswer, call.to, call.from, step.a};
      answer.ran = false;
      push(std::move(answer));
      break;
    }
    case Step::kAudit:
      --budget_.audits;
      protocol(step.a).audit_answers(key(step.b), protocol(step.a).next_carrier(key(step.b)),
                                     effects);
      perform(step.a, effects);
      break;
    case Step::kCrash:
      --budget_.crashes;
      crash(step.a);
      break;
    case Step::kDropAll:
      --budget_.leaves;
      protocol(step.a).drop_all(effects);
      for (Held& held : workers_[step.a].handles) {
        if (!held.handle.fork.is_zero()) held.is_there = false;
      }
      perform(step.a, effects);
      break;
  }
  for (const auto& [fork, owner] : deleted_) {
    if (protocol(owner).counts_fork(fork)) fail("RREF-2: a deleted fork is counted again");
  }
}

std::string World::describe(const Step& step) const {
  const auto packet = [this, &step] {
    const Packet& p = packets_[step.a];
    const std::string way = absl::StrCat(" from ", p.from, " to ", p.to);
    switch (p.kind) {
      case Packet::kControl: return absl::StrCat(to_string(p.message), way);
      case Packet::kAcknowledge:
        return absl::StrCat("acknowledgement of ", name(p.message.kind), " #", p.message.seq, way);
      case Packet::kCall:
        return absl::StrCat("call ", p.call, calls_[p.call].is_remote ? " (remote)" : " (share)",
                            way);
      case Packet::kAnswer: return absl::StrCat("answer of call ", p.call, way);
      case Packet::kFetch: return absl::StrCat("fetch ", p.call, way);
      case Packet::kFetched: return absl::StrCat("result of fetch ", p.call, way);
      case Packet::kGone: return absl::StrCat("news of the death of ", p.from, " at ", p.to);
    }
    return std::string("?");
  };
  const auto handle = [this, &step] {
    const Handle& h = workers_[step.a].handles[step.b].handle;
    return absl::StrCat(to_string(h.rref), h.fork.is_zero() ? "" : ", " + to_string(h.fork));
  };
  const std::string who = absl::StrCat("worker ", step.a);
  const std::string call = absl::StrCat("call ", step.a);
  switch (step.kind) {
    case Step::kRemote: return absl::StrCat(who, ": remote at ", step.b);
    case Step::kLocal: return who + ": an RRef of its own";
    case Step::kShare: return absl::StrCat(who, " shares ", handle(), " with ", step.c);
    case Step::kFetch: return absl::StrCat(who, " fetches ", handle());
    case Step::kDrop: return absl::StrCat(who, " drops ", handle());
    case Step::kDeliver: return "arrives: " + packet();
    case Step::kRepeat: return "arrives, and will again: " + packet();
    case Step::kLose: return "lost: " + packet();
    case Step::kGiveUp: return call + ": its caller gives up";
    case Step::kGiveUpFetch: return absl::StrCat("fetch ", step.a, ": its caller gives up");
    case Step::kEnd: return call + " ends";
    case Step::kEndWithError: return call + " ends with an error";
    case Step::kEndWithHandle: return absl::StrCat(call, " ends with handle ", step.b);
    case Step::kFlush: return call + " says early that it is known or accepted";
    case Step::kCancel: return call + ": its callee gives up before it starts";
    case Step::kAudit: return absl::StrCat(who, " audits its answers to ", step.b);
    case Step::kCrash: return who + " crashes";
    case Step::kDropAll: return who + " drops everything";
  }
  return "?";
}

std::string World::state() const {
  std::string text;
  for (const Worker& worker : workers_) {
    absl::StrAppend(&text, worker.is_up ? worker.protocol.state() : "down\n");
    for (const Held& held : worker.handles) {
      absl::StrAppend(&text, held.handle.rref.creator.id.value(), ".", held.handle.rref.counter,
                      "/", held.handle.fork.creator.id.value(), ".", held.handle.fork.counter,
                      held.is_there ? "" : "-", held.has_failed ? "!" : "", held.uses, " ");
    }
    absl::StrAppend(&text, " knows ", absl::StrJoin(worker.knows_gone, ","), "\n");
  }
  std::vector<std::string> packets;
  for (const Packet& p : packets_) {
    std::string& line = packets.emplace_back(
        absl::StrCat(static_cast<int>(p.kind), " ", p.from, ">", p.to, " ", p.call, p.ran, " "));
    if (p.kind == Packet::kControl || p.kind == Packet::kAcknowledge) {
      absl::StrAppend(&line, to_string(p.message), " code ",
                      static_cast<int>(p.reply.status.code()));
      for (Holds holds : p.reply.holds) absl::StrAppend(&line, " ", static_cast<int>(holds));
    }
  }
  std::sort(packets.begin(), packets.end());
  absl::StrAppend(&text, absl::StrJoin(packets, "\n"), "\n");
  for (const Call& call : calls_) {
    absl::StrAppend(&text, call.from, call.to, call.is_remote, call.phase, call.is_open,
                    call.was_flushed, "c", call.creation.seq, ",", call.creation.floors.control,
                    ",", call.carrier.number, ",", call.carrier.floors.control, ",",
                    call.carrier.floors.carriers, ",", call.answer.number, ",",
                    call.answer.floors.control, ",", call.answer.floors.carriers, " ");
  }
  for (const Fetch& f : fetches_) {
    absl::StrAppend(&text, f.from, f.to, f.is_open, ",", f.handle, ",", f.use.introduced_by, " ");
  }
  for (const auto& [rref, object] : objects_) {
    absl::StrAppend(&text, object.started, object.running, object.is_released, " ");
  }
  for (const auto& [fork, owner] : deleted_) {
    absl::StrAppend(&text, fork.creator.id.value(), ".", fork.counter, " ");
  }
  const Budget& b = budget_;
  absl::StrAppend(&text, b.remotes, b.locals, b.shares, b.fetches, b.errors, b.returns, b.flushes,
                  b.repeats, b.losses, b.cancels, b.audits, b.crashes, b.leaves);
  return text;
}

}  // namespace weft::test
