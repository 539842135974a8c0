// RREF-9: how many control items each scenario costs when nothing fails; and what the protocol does
// with items that no correct worker sends.

#include "gmock/gmock.h"
#include "weft/tests/rref/desk.h"

namespace weft::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

void expect_empty(Desk& desk) {
  for (int worker : {kOwner, kCreator, kThird}) {
    EXPECT_EQ(desk[worker].counts(), RRefProtocol::Counts()) << desk[worker].state();
  }
}

// --- Messages per scenario: each also pays one delete per user handle that is dropped ---

TEST(RRefMessages, RREF_9_CreateCostsNothingWhenTheFunctionEndsFirst) {
  Desk desk;
  const Creation c = desk.made();
  EXPECT_EQ(desk.sent, 0);
  desk.drop(kCreator, Desk::handle(c));
  desk.pass_all();
  EXPECT_EQ(desk.sent, 1);
  expect_empty(desk);
}

TEST(RRefMessages, RREF_9_AHandleThatIsDroppedEarlyCostsOneDeleteToo) {
  Desk desk;
  const Creation c = desk.remote();
  desk.drop(kCreator, Desk::handle(c));
  desk.create(c);
  desk.on(kOwner, [&](auto& p, Effects& out) { p.flush_known(c.rref, out); });
  desk.pass_all();
  desk.end(c);
  desk.creation_ended(c, CallEnd::kDelivered);
  desk.pass_all();
  EXPECT_EQ(desk.sent, 2);  // known, delete
  EXPECT_EQ(desk[kCreator].counts(), RRefProtocol::Counts());
}

TEST(RRefMessages, RREF_9_CreateCostsOneWhenTheFunctionRunsForLong) {
  Desk desk;
  const Creation c = desk.remote();
  desk.create(c);
  desk.on(kOwner, [&](auto& p, Effects& out) { p.flush_known(c.rref, out); });
  desk.pass_all();
  desk.end(c);
  desk.creation_ended(c, CallEnd::kDelivered);
  EXPECT_EQ(desk.sent, 1);
}

TEST(RRefMessages, RREF_9_OwnerToUserCostsNothing) {
  Desk desk;
  const Handle local = desk[kOwner].create_local(false);
  const Carrier carrier = desk.share(kOwner, local, kThird);
  desk.receive(kThird, kOwner, carrier);
  desk[kThird].answered(Desk::key(kOwner), carrier.number);
  desk.carrier_ended(kOwner, kThird, carrier, CallEnd::kDelivered);
  EXPECT_EQ(desk.sent, 0);
  desk.drop(kThird, carrier.forks[0]);
  desk.drop(kOwner, local);
  desk.pass_all();
  EXPECT_EQ(desk.sent, 1);
  expect_empty(desk);
}

TEST(RRefMessages, RREF_9_UserToOwnerCostsAtMostOneAccept) {
  for (bool runs_for_long : {false, true}) {
    Desk desk;
    const Creation c = desk.made();
    const Carrier carrier = desk.share(kCreator, Desk::handle(c), kOwner);
    desk.receive(kOwner, kCreator, carrier);
    if (runs_for_long) {
      desk.on(kOwner, [&](auto& p, Effects& out) {
        p.flush_accept(Desk::key(kCreator), carrier.number, out);
      });
      desk.pass_all();
    }
    desk[kOwner].answered(Desk::key(kCreator), carrier.number);
    desk.carrier_ended(kCreator, kOwner, carrier, CallEnd::kDelivered);
    EXPECT_EQ(desk.sent, runs_for_long ? 1 : 0);
    desk.drop(kOwner, Handle{c.rref, ForkId(), Desk::key(kOwner)});
    desk.drop(kCreator, Desk::handle(c));
    desk.pass_all();
    EXPECT_EQ(desk.sent, runs_for_long ? 2 : 1);
    expect_empty(desk);
  }
}

TEST(RRefMessages, RREF_9_UserToUserCostsOneForkAndAtMostOneAccept) {
  for (bool runs_for_long : {false, true}) {
    Desk desk;
    const Creation c = desk.made();
    const Carrier carrier = desk.share(kCreator, Desk::handle(c), kThird);
    desk.receive(kThird, kCreator, carrier);
    desk.pass_all();
    if (runs_for_long) {
      desk.on(kThird, [&](auto& p, Effects& out) {
        p.flush_accept(Desk::key(kCreator), carrier.number, out);
      });
      desk.pass_all();
    }
    desk[kThird].answered(Desk::key(kCreator), carrier.number);
    desk.carrier_ended(kCreator, kThird, carrier, CallEnd::kDelivered);
    EXPECT_EQ(desk.sent, runs_for_long ? 2 : 1);
    desk.drop(kThird, carrier.forks[0]);
    desk.drop(kCreator, Desk::handle(c));
    desk.pass_all();
    EXPECT_EQ(desk.sent, runs_for_long ? 4 : 3);
    expect_empty(desk);
  }
}

TEST(RRefMessages, RREF_9_ManyInOneMessageCostOneAccept) {
  Desk desk;
  std::vector<Handle> handles;
  for (int i = 0; i < 10; ++i) handles.push_back(Desk::handle(desk.made()));
  const Carrier carrier = *desk[kCreator].share(Desk::key(kThird), handles, false);
  desk.receive(kThird, kCreator, carrier);
  desk.pass_all();
  desk.on(kThird,
          [&](auto& p, Effects& out) { p.flush_accept(Desk::key(kCreator), carrier.number, out); });
  desk.pass_all();
  EXPECT_EQ(desk.sent, 10 + 1);
}

TEST(RRefMessages, RREF_9_OwnerToItselfCostsNothing) {
  Desk desk;
  const Handle local = desk[kOwner].create_local(false);
  const Carrier carrier = desk.share(kOwner, local, kOwner);
  desk.drop(kOwner, local);
  desk.receive(kOwner, kOwner, carrier);
  EXPECT_THAT(desk.log(), ElementsAre("0: ready"));
  desk[kOwner].answered(Desk::key(kOwner), carrier.number);
  desk.carrier_ended(kOwner, kOwner, carrier, CallEnd::kDelivered);
  EXPECT_EQ(desk[kOwner].counts().forks, 0U);
  desk.drop(kOwner, local);
  EXPECT_THAT(desk.log(), ElementsAre("0: released"));
  EXPECT_EQ(desk.sent, 0);
  expect_empty(desk);
}

TEST(RRefMessages, RREF_9_LocalAndRemoteToItselfCostNothing) {
  Desk desk;
  const Handle handle = desk[kOwner].create_local(true);
  desk.drop(kOwner, handle);
  desk.on(kOwner, [&](auto& p, Effects& out) { p.function_ended(handle.rref, Status(), out); });
  EXPECT_THAT(desk.log(), ElementsAre("0: released"));
  EXPECT_EQ(desk.sent, 0);
  expect_empty(desk);
}

// --- What no correct worker sends: RREF-7 ---

class RRefBadInput : public ::testing::Test {
 protected:
  // From the third worker to the owner, in the name of the creator's object.
  Message item(MessageKind kind) {
    Message m;
    m.kind = kind;
    m.seq = 7;
    m.rref = c_.rref;
    m.fork = c_.fork;
    m.introduced_by = c_.seq;
    m.parent = Desk::key(kCreator);
    m.carrier = 1;
    return m;
  }
  Reply deliver(const Message& m) { return desk_.deliver({kThird, kOwner, m}); }

  Desk desk_;
  const Creation c_ = desk_.made();
};

TEST_F(RRefBadInput, BadInput_a_delete_of_anothers_fork) {
  desk_.log();
  EXPECT_EQ(error_kind(deliver(item(MessageKind::kDelete)).status), ErrorKind::kProtocol);
  EXPECT_TRUE(desk_[kOwner].counts_fork(c_.fork));
  EXPECT_EQ(desk_[kOwner].faults(), 1U);
}

TEST_F(RRefBadInput, BadInput_a_fork_that_another_holds) {
  const Status status = deliver(item(MessageKind::kFork)).status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("another worker has it"));
  EXPECT_EQ(desk_[kOwner].counts().forks, 1U);
}

TEST_F(RRefBadInput, BadInput_an_object_created_or_abandoned_by_another) {
  Creation stolen = c_;
  stolen.seq = 9;
  EXPECT_EQ(desk_[kOwner].create(Desk::key(kThird), stolen), CreateVerdict::kRefused);
  EXPECT_EQ(error_kind(deliver(item(MessageKind::kAbandon)).status), ErrorKind::kProtocol);
  EXPECT_EQ(desk_[kOwner].counts().forks, 1U);
}

TEST_F(RRefBadInput, BadInput_items_about_nothing) {
  Message m = item(MessageKind::kKnown);
  EXPECT_TRUE(deliver(m).status.ok());
  m = item(MessageKind::kAccept);
  EXPECT_TRUE(deliver(m).status.ok());
  m = item(MessageKind::kAudit);
  m.forks = {c_.fork, ForkId()};
  EXPECT_THAT(deliver(m).holds, ElementsAre(Holds::kNotHeld, Holds::kNotHeld));
  for (int kind : {0, 7, 255}) {
    m.kind = static_cast<MessageKind>(kind);
    EXPECT_EQ(error_kind(deliver(m).status), ErrorKind::kProtocol) << kind;
  }
  desk_.acknowledge({kOwner, kThird, m}, Reply());
  desk_.on(kOwner, [&](auto& p, Effects& out) { p.function_ended(RRefId(), Status(), out); });
  desk_.drop(kOwner, Handle{c_.rref, ForkId(), Desk::key(kOwner)});
  EXPECT_TRUE(desk_[kOwner].counts_fork(c_.fork));
}

TEST_F(RRefBadInput, BadInput_a_use_over_no_fork_of_the_caller) {
  desk_.use(1, kThird, Use{c_.rref, c_.fork, c_.seq});
  EXPECT_THAT(std::string(desk_.use_status(1)->message()), HasSubstr("which is not there"));
}

TEST_F(RRefBadInput, BadInput_a_carrier_with_forks_without_ids_or_of_a_lost_object) {
  desk_.log();
  Carrier carrier;
  carrier.number = 1;
  carrier.forks = {Handle{c_.rref, ForkId(), Desk::key(kOwner)}};
  desk_.receive(kOwner, kThird, carrier);
  carrier.number = 2;
  carrier.forks = {Handle{RRefId{Desk::key(kCreator), 99}, c_.fork, Desk::key(kOwner)}};
  desk_.receive(kOwner, kThird, carrier);
  EXPECT_THAT(desk_.log(), ElementsAre("0: lost", "0: lost"));
}

TEST_F(RRefBadInput, BadInput_everything_from_a_dead_worker) {
  desk_.gone(kOwner, kThird);
  desk_.log();
  EXPECT_EQ(error_kind(deliver(item(MessageKind::kDelete)).status), ErrorKind::kPeerLost);
  Carrier carrier;
  carrier.number = 1;
  carrier.forks = {Desk::handle(c_)};
  desk_.receive(kOwner, kThird, carrier);
  EXPECT_THAT(desk_.log(), ElementsAre("0: lost"));
  EXPECT_EQ(desk_[kOwner].counts().forks, 1U);
}

// The delete names another fork than the use that waits for the same creation.
TEST_F(RRefBadInput, BadInput_an_abandon_after_a_delete_of_another_fork) {
  Desk desk;
  const Creation c = desk.remote();
  desk.use(1, kCreator, Use{c.rref, c.fork, c.seq});
  EXPECT_EQ(desk[kOwner].counts().owners, 1U);
  Message m;
  m.kind = MessageKind::kDelete;
  m.seq = c.seq + 1;
  m.rref = c.rref;
  m.fork = ForkId{c.fork.creator, c.fork.counter + 1};
  m.introduced_by = c.seq;
  EXPECT_TRUE(desk.deliver({kCreator, kOwner, m}).status.ok());
  m.kind = MessageKind::kAbandon;
  m.seq = c.seq + 2;
  m.fork = c.fork;
  m.status = late();
  EXPECT_TRUE(desk.deliver({kCreator, kOwner, m}).status.ok());
  EXPECT_EQ(desk.use_status(1), late());
  EXPECT_EQ(desk[kOwner].counts().owners, 0U);
}

TEST_F(RRefBadInput, BadInput_a_reply_that_is_too_short_or_an_error) {
  Desk desk;
  const Handle local = desk[kOwner].create_local(false);
  const Carrier carrier = desk.share(kOwner, local, kThird);
  desk.carrier_ended(kOwner, kThird, carrier, CallEnd::kUnknown);
  const Desk::Item audit = desk.take(MessageKind::kAudit);
  desk.acknowledge(audit, Reply{make_error(ErrorKind::kUnimplemented, "no such service"), {}});
  EXPECT_EQ(desk[kOwner].counts().forks, 0U);
  EXPECT_EQ(desk[kOwner].faults(), 1U);
}

}  // namespace
}  // namespace weft::test
