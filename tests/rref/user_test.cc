// The tables of handles and carriers of rref/internal/protocol.h, row by row.

#include "gmock/gmock.h"
#include "weft/tests/rref/desk.h"

namespace weft::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A child of the creator's fork, arrived at the third worker and not confirmed yet.
struct Pending {
  Desk desk;
  Creation c = desk.made();
  Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  Pending() {
    desk.receive(kThird, kCreator, carrier);
    desk.log();
  }
  const Handle& child() const { return carrier.forks[0]; }
};

// --- Handle at a user ---

TEST(RRefHandle, AnswerConfirmsTheCreator) {
  Desk desk;
  const Creation c = desk.remote();
  desk.create(c);
  desk.end(c);
  EXPECT_FALSE(desk[kCreator].confirmed(Desk::handle(c)));
  desk.creation_ended(c, CallEnd::kDelivered);
  EXPECT_THAT(desk.log(), ElementsAre("1: confirmed"));
  desk.creation_ended(c, CallEnd::kUnknown, late());  // an end ends once
  EXPECT_THAT(desk.log(), IsEmpty());
}

TEST(RRefHandle, PendingChildWaitsForTheOwner) {
  Pending p;
  EXPECT_FALSE(p.desk[kThird].confirmed(p.child()));
  p.desk.pass(MessageKind::kFork);
  EXPECT_THAT(p.desk.log(), ElementsAre("2: ready"));  // RREF-3
  EXPECT_TRUE(p.desk[kThird].confirmed(p.child()));
}

TEST(RRefHandle, PendingChildThatIsRefusedFailsItsArrival) {
  Pending p;
  const Desk::Item fork = p.desk.take(MessageKind::kFork);
  p.desk.acknowledge(fork, Reply{make_error(ErrorKind::kUnimplemented, "no such service"), {}});
  EXPECT_THAT(p.desk.log(), ElementsAre("2: lost"));
  EXPECT_EQ(p.desk[kThird].counts().users, 0U);
  // The parent is told, and nothing goes to the owner for what it never counted.
  p.desk.pass(MessageKind::kAccept);
  EXPECT_THAT(p.desk.items, IsEmpty());
  EXPECT_EQ(p.desk[kCreator].counts().pending_children, 0U);
}

TEST(RRefHandle, RREF_10_AFailedCreationFailsEveryUse) {
  Desk desk;
  const Creation c = desk.remote();
  desk.create(c);
  desk.creation_ended(c, CallEnd::kUnknown, late());
  EXPECT_THAT(desk.log(), ElementsAre("1: failed"));
  EXPECT_EQ(desk[kCreator].check(Desk::handle(c)), late());
  EXPECT_EQ(desk[kCreator].share(Desk::key(kThird), {Desk::handle(c)}, false).status(), late());
  // The owner's word comes too late for its creator.
  desk.on(kOwner, [&](auto& p, Effects& out) { p.flush_known(c.rref, out); });
  desk.pass(MessageKind::kKnown);
  EXPECT_EQ(desk[kCreator].check(Desk::handle(c)), late());
}

TEST(RRefHandle, AFailureAfterKnownNeedsNoAbandonment) {
  Desk desk;
  const Creation c = desk.remote();
  desk.create(c);
  desk.on(kOwner, [&](auto& p, Effects& out) { p.flush_known(c.rref, out); });
  desk.pass(MessageKind::kKnown);
  desk.creation_ended(c, CallEnd::kUnknown, late());
  EXPECT_THAT(desk.items, IsEmpty());
  EXPECT_EQ(desk[kCreator].check(Desk::handle(c)), late());
}

TEST(RRefHandle, RREF_8_TheOwnersDeathFailsAllAndSendsNothing) {
  Pending p;
  p.desk.gone(kThird, kOwner);
  EXPECT_THAT(p.desk.log(), ElementsAre("2: lost"));
  p.desk.pass(MessageKind::kAccept);
  p.desk.gone(kCreator, kOwner);
  EXPECT_THAT(p.desk.log(), ElementsAre("1: failed"));
  const Status lost = p.desk[kCreator].check(Desk::handle(p.c));
  EXPECT_EQ(error_kind(lost), ErrorKind::kPeerLost);
  EXPECT_THAT(std::string(lost.message()), HasSubstr("its owner, worker 0 (000000000000000a)"));
  EXPECT_EQ(error_kind(p.desk[kCreator].remote(Desk::key(kOwner)).status()), ErrorKind::kPeerLost);
  p.desk.items.clear();  // the fork, which has nowhere to go
  p.desk.drop(kCreator, Desk::handle(p.c));
  EXPECT_THAT(p.desk.items, IsEmpty());
  EXPECT_EQ(p.desk[kCreator].counts(), RRefProtocol::Counts());
}

TEST(RRefHandle, RREF_4_AParentWaitsForItsChild) {
  Pending p;
  p.desk.drop(kCreator, Desk::handle(p.c));
  EXPECT_EQ(p.desk.items.size(), 1U);  // the fork
  p.desk.pass(MessageKind::kFork);
  EXPECT_THAT(p.desk.items, IsEmpty());
  p.desk.carrier_ended(kCreator, kThird, p.carrier, CallEnd::kDelivered);
  p.desk.pass(MessageKind::kDelete);
  EXPECT_EQ(p.desk[kOwner].counts().forks, 1U);
}

TEST(RRefHandle, DropAllSweepsAndALaterDropIsNothing) {
  Desk desk;
  const Creation a = desk.made();
  const Creation b = desk.made();
  desk.on(kCreator, [](auto& p, Effects& out) { p.drop_all(out); });
  EXPECT_EQ(desk.items.size(), 2U);
  desk.drop(kCreator, Desk::handle(a));
  EXPECT_EQ(desk.items.size(), 2U);
  EXPECT_FALSE(desk[kCreator].check(Desk::handle(b)).ok());
  desk.pass_all();
  EXPECT_EQ(desk[kOwner].counts(), RRefProtocol::Counts());
}

// --- Carrier at its sender ---

TEST(RRefCarrier, AcceptLetsTheParentGo) {
  Pending p;
  p.desk.drop(kCreator, Desk::handle(p.c));
  p.desk.pass(MessageKind::kFork);
  p.desk.on(kThird, [&](auto& q, Effects& out) {
    q.flush_accept(Desk::key(kCreator), p.carrier.number, out);
  });
  const Desk::Item accept = p.desk.take(MessageKind::kAccept);
  p.desk.deliver(accept);
  p.desk.deliver(accept);  // RREF-5
  EXPECT_EQ(p.desk.items.size(), 1U);
  p.desk.pass(MessageKind::kDelete);
  p.desk.carrier_ended(kCreator, kThird, p.carrier, CallEnd::kUnknown);  // settled: no audit
  EXPECT_THAT(p.desk.items, IsEmpty());
}

TEST(RRefCarrier, NotDeliveredLetsTheParentGo) {
  Desk desk;
  const Creation c = desk.made();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.drop(kCreator, Desk::handle(c));
  EXPECT_THAT(desk.items, IsEmpty());
  desk.carrier_ended(kCreator, kThird, carrier, CallEnd::kNotDelivered);
  desk.pass(MessageKind::kDelete);
  EXPECT_EQ(desk[kOwner].counts(), RRefProtocol::Counts());
}

TEST(RRefCarrier, AnAuditFindsWhatIsHeld) {
  Pending p;
  p.desk.pass(MessageKind::kFork);
  p.desk.carrier_ended(kCreator, kThird, p.carrier, CallEnd::kUnknown);
  EXPECT_THAT(p.desk.pass(MessageKind::kAudit).holds, ElementsAre(Holds::kHeld));
  EXPECT_EQ(p.desk[kCreator].counts().pending_children, 0U);
}

TEST(RRefCarrier, AnAuditOfAPendingForkIsFollowedByAccept) {
  Pending p;
  p.desk.carrier_ended(kCreator, kThird, p.carrier, CallEnd::kUnknown);
  EXPECT_THAT(p.desk.pass(MessageKind::kAudit).holds, ElementsAre(Holds::kPending));
  EXPECT_EQ(p.desk[kCreator].counts().pending_children, 1U);
  p.desk.pass(MessageKind::kFork);
  p.desk.pass(MessageKind::kAccept);
  EXPECT_EQ(p.desk[kCreator].counts().pending_children, 0U);
}

TEST(RRefCarrier, AnAuditOfACarrierToComeMakesItVoid) {
  Desk desk;
  const Creation c = desk.made();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.carrier_ended(kCreator, kThird, carrier, CallEnd::kUnknown);
  EXPECT_THAT(desk.pass(MessageKind::kAudit).holds, ElementsAre(Holds::kNotHeld));
  EXPECT_EQ(desk[kThird].counts().tombstones, 1U);
  desk.log();
  desk.receive(kThird, kCreator, carrier);
  EXPECT_THAT(desk.log(), ElementsAre("2: lost"));
  EXPECT_EQ(desk[kThird].counts().users, 0U);
  // The next carrier says that it is settled; then the floor refuses it.
  const Carrier next = desk.share(kCreator, Desk::handle(c), kThird);
  desk.receive(kThird, kCreator, next);
  EXPECT_EQ(desk[kThird].counts().tombstones, 0U);
  desk.receive(kThird, kCreator, carrier);
  EXPECT_THAT(desk.log(), ElementsAre("2: lost"));
}

TEST(RRefCarrier, AnswersAreAuditedOnceEach) {
  Desk desk;
  const Handle local = desk[kOwner].create_local(false);
  const Carrier answer = desk.share(kOwner, local, kThird, /*is_answer=*/true);
  const auto audit = [&](auto& p, Effects& out) {
    p.audit_answers(Desk::key(kThird), p.next_carrier(Desk::key(kThird)), out);
  };
  desk.on(kOwner, [&](auto& p, Effects& out) {
    p.audit_answers(Desk::key(kThird), answer.number, out);  // younger ones may still arrive
  });
  EXPECT_THAT(desk.items, IsEmpty());
  desk.receive(kThird, kOwner, answer);
  desk.on(kOwner, audit);
  desk.on(kOwner, audit);
  EXPECT_EQ(desk.items.size(), 1U);
  EXPECT_THAT(desk.pass(MessageKind::kAudit).holds, ElementsAre(Holds::kHeld));
  desk.on(kOwner, audit);
  EXPECT_THAT(desk.items, IsEmpty());
  EXPECT_EQ(desk[kOwner].counts().pending_children, 0U);
  EXPECT_TRUE(desk[kOwner].counts_fork(answer.forks[0].fork));
}

TEST(RRefCarrier, TheReceiversDeathLetsTheParentGo) {
  Desk desk;
  const Creation c = desk.made();
  desk.share(kCreator, Desk::handle(c), kThird);
  desk.drop(kCreator, Desk::handle(c));
  desk.gone(kCreator, kThird);
  desk.pass(MessageKind::kDelete);
  EXPECT_EQ(desk[kCreator].counts(), RRefProtocol::Counts());
  EXPECT_EQ(error_kind(desk[kCreator].share(Desk::key(kThird), {}, false).status()),
            ErrorKind::kPeerLost);
}

// --- Carrier at its receiver ---

TEST(RRefCarrier, OneFailureFailsTheArrivalAndDropsTheRest) {
  Desk desk;
  const Creation good = desk.made();
  const Creation bad = desk.made();
  Carrier carrier =
      *desk[kCreator].share(Desk::key(kThird), {Desk::handle(good), Desk::handle(bad)}, false);
  desk.receive(kThird, kCreator, carrier);
  desk.log();
  desk.pass(MessageKind::kFork);
  EXPECT_THAT(desk.log(), IsEmpty());
  const Desk::Item second = desk.take(MessageKind::kFork);
  desk.acknowledge(second, Reply{make_error(ErrorKind::kState, "refused"), {}});
  EXPECT_THAT(desk.log(), ElementsAre("2: lost"));
  desk.pass_all();
  EXPECT_EQ(desk[kThird].counts().users, 0U);
  EXPECT_EQ(desk[kOwner].counts().forks, 2U);  // the creator's
}

TEST(RRefCarrier, ACancelledArrivalDropsItsForksWhenTheyAreConfirmed) {
  Pending p;
  EXPECT_TRUE(p.desk[kThird].cancel_arrival(Desk::key(kCreator), p.carrier.number));
  p.desk.pass(MessageKind::kFork);
  EXPECT_THAT(p.desk.log(), IsEmpty());
  p.desk.pass_all();  // accept, delete
  EXPECT_EQ(p.desk[kThird].counts(), RRefProtocol::Counts());
  EXPECT_EQ(p.desk[kCreator].counts().pending_children, 0U);
}

TEST(RRefCarrier, AnArrivalThatIsReadyCannotBeCancelled) {
  Pending p;
  p.desk.pass(MessageKind::kFork);
  EXPECT_FALSE(p.desk[kThird].cancel_arrival(Desk::key(kCreator), p.carrier.number));
  EXPECT_EQ(p.desk[kThird].counts().users, 1U);  // the user's to drop
}

TEST(RRefCarrier, AForkOfAnOlderLifeOfThisWorkerIsLost) {
  Desk desk;
  const Creation c = desk.made();
  Carrier carrier = desk.share(kCreator, Desk::handle(c), kOwner);
  carrier.forks[0].owner.incarnation = Incarnation(0xdead);
  desk.log();
  desk.receive(kOwner, kCreator, carrier);
  EXPECT_THAT(desk.log(), ElementsAre("0: lost"));
}

TEST(RRefCarrier, ACallThatWaitsForTheValueIsParkedAtTheOwner) {
  // Promise pipelining: the handle goes to its owner before the object is known there.
  Desk desk;
  const Creation c = desk.remote();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kOwner);
  desk.receive(kOwner, kCreator, carrier);
  EXPECT_THAT(desk.log(), ElementsAre("0: ready"));
  const Handle here{c.rref, ForkId(), Desk::key(kOwner)};
  desk.use(1, kOwner, desk[kOwner].use_of(here));
  EXPECT_FALSE(desk.use_status(1).has_value());
  desk.create(c);
  desk.end(c);
  EXPECT_EQ(desk.use_status(1), Status());
}

// Workers come and go for ever.
TEST(RRefCarrier, DEF_30_the_last_workers_that_are_gone_are_remembered) {
  Desk desk;
  const auto nth = [](uint64_t i) {
    return WorkerKey{WorkerId(static_cast<uint32_t>(i)), Incarnation(0x1000 + i)};
  };
  for (uint64_t i = 0; i < 5000; ++i) {
    desk.on(kOwner, [&](auto& p, Effects& out) { p.worker_gone(nth(i), out); });
    EXPECT_FALSE(desk[kOwner].remote(nth(i)).ok());
  }
  EXPECT_EQ(desk[kOwner].workers_gone(), GoneWorkers::kMost);
}

}  // namespace
}  // namespace weft::test
