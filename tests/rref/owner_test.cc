// The owner's tables of rref/internal/protocol.h, row by row.

#include "gmock/gmock.h"
#include "weft/tests/rref/desk.h"

namespace weft::test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// --- Fork at its owner, unknown ---

TEST(RRefOwnerFork, UnknownCreateStartsTheFunction) {
  Desk desk;
  const Creation c = desk.remote();
  EXPECT_EQ(desk.create(c), CreateVerdict::kStart);
  EXPECT_TRUE(desk[kOwner].counts_fork(c.fork));
}

TEST(RRefOwnerFork, UnknownAbandonMakesTheObjectTheError) {
  Desk desk;
  const Creation c = desk.remote();
  desk.creation_ended(c, CallEnd::kNotDelivered, late());
  EXPECT_THAT(desk.log(), ElementsAre("1: failed"));
  desk.pass(MessageKind::kAbandon);
  EXPECT_TRUE(desk[kOwner].counts_fork(c.fork));
  desk.use(1, kCreator, Use{c.rref, c.fork, c.seq});
  EXPECT_EQ(desk.use_status(1), late());  // RREF-10
  desk.drop(kCreator, Desk::handle(c));
  desk.pass(MessageKind::kDelete);
  EXPECT_EQ(desk[kOwner].counts(), RRefProtocol::Counts());
  EXPECT_EQ(desk[kCreator].counts(), RRefProtocol::Counts());
}

TEST(RRefOwnerFork, UnknownForkOfAKnownObjectIsAccepted) {
  Desk desk;
  const Creation c = desk.made();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.receive(kThird, kCreator, carrier);
  EXPECT_TRUE(desk.pass(MessageKind::kFork).status.ok());
  EXPECT_TRUE(desk[kOwner].counts_fork(carrier.forks[0].fork));
}

TEST(RRefOwnerFork, UnknownForkByTheLivingCreatorIsAcceptedBeforeTheCreation) {
  Desk desk;
  const Creation c = desk.remote();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.receive(kThird, kCreator, carrier);
  EXPECT_TRUE(desk.pass(MessageKind::kFork).status.ok());
  // Its holder drops it before the creation comes: nothing is left, and the creation still counts.
  desk.drop(kThird, carrier.forks[0]);
  desk.pass(MessageKind::kDelete);
  EXPECT_FALSE(desk[kOwner].has_object(c.rref));
  EXPECT_EQ(desk.create(c), CreateVerdict::kStart);
}

TEST(RRefOwnerFork, UnknownForkOfAnObjectThatIsGoneIsRefused) {
  Desk desk;
  const Creation c = desk.made();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.receive(kThird, kCreator, carrier);
  desk.gone(kOwner, kCreator);  // takes the only fork with it
  EXPECT_THAT(desk.log(), ElementsAre("1: confirmed", "0: released"));
  const Desk::Item fork = desk.take(MessageKind::kFork);
  const Reply reply = desk.deliver(fork);
  EXPECT_EQ(error_kind(reply.status), ErrorKind::kState);
  EXPECT_EQ(desk[kOwner].counts().tombstones, 1U);
  desk.acknowledge(fork, reply);
  EXPECT_THAT(desk.log(), ElementsAre("2: lost"));
  desk.pass_all();  // the accept, which no worker is left to receive
  EXPECT_EQ(desk[kThird].counts().users, 0U);
}

TEST(RRefOwnerFork, OwnerSharesAndItsForkIsLiveAtOnce) {
  Desk desk;
  const Handle local = desk[kOwner].create_local(false);
  const Carrier carrier = desk.share(kOwner, local, kThird);
  EXPECT_TRUE(desk[kOwner].counts_fork(carrier.forks[0].fork));
  desk.receive(kThird, kOwner, carrier);
  EXPECT_THAT(desk.log(), ElementsAre("2: ready"));
  EXPECT_TRUE(desk[kThird].confirmed(carrier.forks[0]));
}

TEST(RRefOwnerFork, UnknownDeleteLeavesATombstoneOnlyAboveTheFloor) {
  Desk desk;
  const Creation c = desk.remote();
  desk.drop(kCreator, Desk::handle(c));
  const Desk::Item first = desk.take(MessageKind::kDelete);
  desk.deliver(first);
  EXPECT_EQ(desk[kOwner].counts().tombstones, 1U);

  // Below the floor nothing can revive it.
  Desk settled;
  const Creation made = settled.made();
  settled.drop(kCreator, Desk::handle(made));
  const Desk::Item second = settled.take(MessageKind::kDelete);
  EXPECT_GT(second.message.floors.control, second.message.introduced_by);
  settled.deliver(second);
  settled.deliver(second);  // now it is unknown
  EXPECT_EQ(settled[kOwner].counts().tombstones, 0U);
}

// --- Fork at its owner, live ---

TEST(RRefOwnerFork, LiveCreateAndAbandonDoNotStartAgain) {
  Desk desk;
  const Creation c = desk.remote();
  desk.create(c);
  EXPECT_EQ(desk.create(c), CreateVerdict::kRepeated);
  desk.creation_ended(c, CallEnd::kUnknown, late());
  desk.pass(MessageKind::kAbandon);
  EXPECT_EQ(desk[kOwner].counts().forks, 1U);
  desk.end(c);
  desk.use(1, kCreator, Use{c.rref, c.fork, c.seq});
  EXPECT_EQ(desk.use_status(1), Status());  // the value, since the creation was first
}

TEST(RRefOwnerFork, LiveForkIsAcceptedAgain) {
  Desk desk;
  const Creation c = desk.made();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.receive(kThird, kCreator, carrier);
  const Desk::Item fork = desk.take(MessageKind::kFork);
  EXPECT_TRUE(desk.deliver(fork).status.ok());
  EXPECT_TRUE(desk.deliver(fork).status.ok());
  EXPECT_EQ(desk[kOwner].counts().forks, 2U);
}

TEST(RRefOwnerFork, LiveDeleteReleasesTheValueWithTheLastOne) {
  Desk desk;
  const Creation c = desk.made();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.receive(kThird, kCreator, carrier);
  desk.pass(MessageKind::kFork);
  desk[kThird].answered(Desk::key(kCreator), carrier.number);
  desk.carrier_ended(kCreator, kThird, carrier, CallEnd::kDelivered);
  desk.log();
  desk.drop(kCreator, Desk::handle(c));
  desk.pass(MessageKind::kDelete);
  EXPECT_THAT(desk.log(), IsEmpty());
  desk.drop(kThird, carrier.forks[0]);
  desk.pass(MessageKind::kDelete);
  EXPECT_THAT(desk.log(), ElementsAre("0: released"));  // RREF-1
  EXPECT_EQ(desk[kOwner].counts().owners, 0U);
}

TEST(RRefOwnerFork, LiveGoesWhenItsCarrierWasNotDelivered) {
  Desk desk;
  const Handle local = desk[kOwner].create_local(false);
  const Carrier carrier = desk.share(kOwner, local, kThird);
  desk.drop(kOwner, local);
  EXPECT_THAT(desk.log(), IsEmpty());
  desk.carrier_ended(kOwner, kThird, carrier, CallEnd::kNotDelivered);
  EXPECT_THAT(desk.log(), ElementsAre("0: released"));
}

TEST(RRefOwnerFork, LiveGoesWhenAnAuditDoesNotFindIt) {
  Desk desk;
  const Handle local = desk[kOwner].create_local(false);
  const Carrier carrier = desk.share(kOwner, local, kThird);
  desk.drop(kOwner, local);
  desk.carrier_ended(kOwner, kThird, carrier, CallEnd::kUnknown);
  EXPECT_THAT(desk.pass(MessageKind::kAudit).holds, ElementsAre(Holds::kNotHeld));
  EXPECT_THAT(desk.log(), ElementsAre("0: released"));
  desk.receive(kThird, kOwner, carrier);  // RREF-2: too late
  EXPECT_THAT(desk.log(), ElementsAre("2: lost"));
}

TEST(RRefOwnerFork, LiveGoesWithItsHolder) {
  Desk desk;
  desk.made();
  desk.log();
  desk.gone(kOwner, kCreator);
  EXPECT_THAT(desk.log(), ElementsAre("0: released"));  // RREF-8
  EXPECT_EQ(desk[kOwner].counts(), RRefProtocol::Counts());
}

// --- Fork at its owner, tombstone ---

TEST(RRefOwnerFork, TombstoneCreateRunsOnceAndKeepsNoValue) {
  Desk desk;
  const Creation c = desk.remote();
  desk.drop(kCreator, Desk::handle(c));
  const Desk::Item deleted = desk.take(MessageKind::kDelete);
  desk.deliver(deleted);
  EXPECT_EQ(desk.create(c), CreateVerdict::kStart);
  EXPECT_EQ(desk.create(c), CreateVerdict::kRepeated);
  EXPECT_FALSE(desk[kOwner].counts_fork(c.fork));
  desk.end(c);
  EXPECT_THAT(desk.log(), ElementsAre("0: released"));
  EXPECT_EQ(desk.create(c), CreateVerdict::kRepeated);
  desk.deliver(deleted);  // again: nothing
  EXPECT_EQ(desk[kOwner].counts().tombstones, 1U);
}

TEST(RRefOwnerFork, TombstoneAbandonStillReachesOtherHolders) {
  Desk desk;
  const Creation c = desk.remote();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.receive(kThird, kCreator, carrier);
  desk.pass(MessageKind::kFork);
  desk.on(kThird,
          [&](auto& p, Effects& out) { p.flush_accept(Desk::key(kCreator), carrier.number, out); });
  desk.pass(MessageKind::kAccept);
  desk.drop(kCreator, Desk::handle(c));
  desk.pass(MessageKind::kDelete);
  desk.use(1, kThird, desk[kThird].use_of(carrier.forks[0]));
  EXPECT_FALSE(desk.use_status(1).has_value());
  desk.creation_ended(c, CallEnd::kUnknown, late());
  desk.pass(MessageKind::kAbandon);
  EXPECT_EQ(desk.use_status(1), late());
  EXPECT_EQ(desk.create(c), CreateVerdict::kRepeated);
}

TEST(RRefOwnerFork, TombstoneForkIsRefused) {
  Desk desk;
  const Creation c = desk.made();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  // Something older of the third worker's is not settled, so its floor stays below the fork.
  ASSERT_TRUE(desk[kThird].remote(Desk::key(kOwner)).ok());
  desk.receive(kThird, kCreator, carrier);
  const Desk::Item fork = desk.take(MessageKind::kFork);
  desk.acknowledge(fork, desk.deliver(fork));
  desk.drop(kThird, carrier.forks[0]);
  desk.pass(MessageKind::kDelete);
  EXPECT_FALSE(desk.deliver(fork).status.ok());
  EXPECT_FALSE(desk[kOwner].counts_fork(carrier.forks[0].fork));
}

TEST(RRefOwnerFork, TombstoneIsForgottenWhenTheFloorPassesAndThenAllIsIgnored) {
  Desk desk;
  const Creation c = desk.remote();
  desk.drop(kCreator, Desk::handle(c));
  desk.pass(MessageKind::kDelete);
  EXPECT_EQ(desk[kOwner].counts().tombstones, 1U);
  desk.create(c);
  desk.end(c);
  desk.creation_ended(c, CallEnd::kDelivered);
  const Creation next = desk.remote();
  EXPECT_EQ(desk.create(next), CreateVerdict::kStart);
  EXPECT_EQ(desk[kOwner].counts().tombstones, 0U);
  EXPECT_EQ(desk.create(c), CreateVerdict::kRefused);
  EXPECT_FALSE(desk[kOwner].has_object(c.rref));
}

// --- Object at its owner ---

TEST(RRefOwnerObject, AUseThatIsFasterThanTheCreationWaitsForIt) {
  Desk desk;
  const Creation c = desk.remote();
  desk.use(1, kCreator, Use{c.rref, c.fork, c.seq});
  desk.use(2, kCreator, Use{c.rref, c.fork, c.seq});
  EXPECT_EQ(desk[kOwner].counts().parked_uses, 2U);
  desk.on(kOwner, [&](auto& p, Effects& out) { p.cancel_use(2, c.rref, out); });
  desk.create(c);
  EXPECT_FALSE(desk.use_status(1).has_value());
  desk.end(c, make_error(ErrorKind::kUser, "thrown"));
  EXPECT_EQ(desk.use_status(1)->message(), "thrown");
  EXPECT_FALSE(desk.use_status(2).has_value());
  desk.use(3, kCreator, Use{c.rref, c.fork, c.seq});  // ready: at once
  EXPECT_EQ(desk.use_status(3)->message(), "thrown");
}

TEST(RRefOwnerObject, ACancelledUseOfWhatNeverCameLeavesNothing) {
  Desk desk;
  const Creation c = desk.remote();
  desk.use(1, kCreator, Use{c.rref, c.fork, c.seq});
  desk.on(kOwner, [&](auto& p, Effects& out) { p.cancel_use(1, c.rref, out); });
  EXPECT_EQ(desk[kOwner].counts(), RRefProtocol::Counts());
}

TEST(RRefOwnerObject, AUseWhoseForkIsDeletedEnds) {
  Desk desk;
  const Creation c = desk.remote();
  desk.use(1, kCreator, Use{c.rref, c.fork, c.seq});
  desk.drop(kCreator, Desk::handle(c));
  desk.pass(MessageKind::kDelete);
  EXPECT_EQ(error_kind(*desk.use_status(1)), ErrorKind::kState);
  desk.use(2, kCreator, Use{c.rref, c.fork, c.seq});
  EXPECT_EQ(error_kind(*desk.use_status(2)), ErrorKind::kState);
}

TEST(RRefOwnerObject, AUseWhoseLiveForkIsDeletedEndsAndOthersWait) {
  Desk desk;
  const Creation c = desk.remote();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.create(c);
  desk.receive(kThird, kCreator, carrier);
  desk.pass(MessageKind::kFork);
  desk.use(1, kThird, desk[kThird].use_of(carrier.forks[0]));
  desk.use(2, kCreator, Use{c.rref, c.fork, c.seq});
  desk.drop(kThird, carrier.forks[0]);
  desk.pass(MessageKind::kDelete);
  EXPECT_EQ(error_kind(*desk.use_status(1)), ErrorKind::kState);
  EXPECT_FALSE(desk.use_status(2).has_value());
  desk.end(c);
  EXPECT_EQ(desk.use_status(2), Status());
}

TEST(RRefOwnerObject, TheCreatorsDeathEndsWaitingForItsCreation) {
  Desk desk;
  const Creation c = desk.remote();
  const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
  desk.receive(kThird, kCreator, carrier);
  desk.pass(MessageKind::kFork);
  desk.use(1, kThird, desk[kThird].use_of(carrier.forks[0]));
  desk.gone(kOwner, kCreator);
  EXPECT_EQ(error_kind(*desk.use_status(1)), ErrorKind::kPeerLost);
  EXPECT_EQ(desk.create(c), CreateVerdict::kRefused);
  desk.log();
  desk.drop(kThird, carrier.forks[0]);
  desk.pass(MessageKind::kDelete);
  EXPECT_FALSE(desk[kOwner].has_object(c.rref));
  EXPECT_THAT(desk.log(), IsEmpty());  // there was no value to release
}

TEST(RRefOwnerObject, KnownIsSentOnceWhileTheFunctionRuns) {
  Desk desk;
  const Creation c = desk.remote();
  desk.create(c);
  const auto flush = [&](auto& p, Effects& out) { p.flush_known(c.rref, out); };
  desk.on(kOwner, flush);
  desk.on(kOwner, flush);
  EXPECT_EQ(desk.items.size(), 1U);
  desk.pass(MessageKind::kKnown);
  EXPECT_THAT(desk.log(), ElementsAre("1: confirmed"));
  EXPECT_TRUE(desk[kCreator].confirmed(Desk::handle(c)));
  EXPECT_EQ(desk[kCreator].counts().unacknowledged, 0U);  // the creation is settled
  desk.end(c);
  desk.on(kOwner, flush);
  EXPECT_THAT(desk.items, IsEmpty());
}

TEST(RRefOwnerObject, AFunctionThatRunsKeepsTheObject) {
  Desk desk;
  const Creation c = desk.remote();
  desk.create(c);
  desk.drop(kCreator, Desk::handle(c));
  desk.pass(MessageKind::kDelete);
  EXPECT_THAT(desk.log(), IsEmpty());
  desk.end(c);
  EXPECT_THAT(desk.log(), ElementsAre("0: released"));
}

TEST(RRefOwnerObject, ALocalHandleKeepsTheObject) {
  Desk desk;
  const Handle local = desk[kOwner].create_local(true);
  desk.on(kOwner, [&](auto& p, Effects& out) { p.function_ended(local.rref, Status(), out); });
  desk.use(1, kOwner, desk[kOwner].use_of(local));
  EXPECT_EQ(desk.use_status(1), Status());
  EXPECT_THAT(desk.log(), IsEmpty());
  desk.drop(kOwner, local);
  EXPECT_THAT(desk.log(), ElementsAre("0: released"));
  EXPECT_FALSE(desk[kOwner].check(local).ok());
}

}  // namespace
}  // namespace weft::test
