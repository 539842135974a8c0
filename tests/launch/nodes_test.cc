// Several nodes: several weftruns on this machine, which meet through a file or over TCP.
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/store/internal/launch/system.h"
#include "weft/tests/launch/harness.h"
#include "weft/tests/launch/place.h"

namespace weft::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void expect_two_nodes_are_one_job(bool tcp) {
  Place place(tcp);
  const std::string script =
      "echo $WEFT_NAME $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE group "
      "$GROUP_RANK/$GROUP_WORLD_SIZE role $ROLE_RANK/$ROLE_WORLD_SIZE; "
      "echo same $WEFT_JOB_ID $WEFT_STORE $MASTER_ADDR:$MASTER_PORT";
  Running first = place.start(0, 2, sh({"--role", "ps:1", "--role", "trainer:1"}, script));
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  Running second = place.start(1, 2, sh({"--role", "trainer:2"}, script));
  Result one = first.finish();
  Result two = second.finish();
  ASSERT_EQ(one.code, 0) << one.err;
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_THAT(one.out, HasSubstr("[ps0] ps0 0/4 local 0/2 group 0/2 role 0/1\n"));
  EXPECT_THAT(one.out, HasSubstr("[trainer0] trainer0 1/4 local 1/2 group 0/2 role 0/3\n"));
  EXPECT_THAT(two.out, HasSubstr("[trainer1] trainer1 2/4 local 0/2 group 1/2 role 1/3\n"));
  EXPECT_THAT(two.out, HasSubstr("[trainer2] trainer2 3/4 local 1/2 group 1/2 role 2/3\n"));
  std::set<std::string> same;
  for (const std::string& line : lines_of(one.out + two.out)) {
    size_t at = line.find("same ");
    if (at != std::string::npos) same.insert(line.substr(at));
  }
  EXPECT_EQ(same.size(), 1u) << one.out << two.out;
  EXPECT_THAT(*same.begin(), HasSubstr("127.0.0.1:")) << "all nodes are one host";
  EXPECT_TRUE(place.empty()) << "something is left at the meeting place";
}

TEST(Launch, TwoNodesAreOneJobByFile) { expect_two_nodes_are_one_job(false); }
TEST(Launch, TwoNodesAreOneJobByTcp) { expect_two_nodes_are_one_job(true); }

TEST(Launch, TwoNodesAreOneJobByEtcd) {
  const std::string program = "/usr/bin/etcd";
  if (access(program.c_str(), X_OK) != 0) GTEST_SKIP() << "etcd is not installed";
  TestDir dir;
  absl::StatusOr<HeldPort> client = hold_port();
  absl::StatusOr<HeldPort> peer = hold_port();
  ASSERT_TRUE(client.ok() && peer.ok());
  const std::string client_url = absl::StrCat("http://127.0.0.1:", client->port);
  const std::string peer_url = absl::StrCat("http://127.0.0.1:", peer->port);
  Running etcd = Running::start({"--data-dir", dir.path("data"), "--listen-client-urls", client_url,
                                 "--advertise-client-urls", client_url, "--listen-peer-urls",
                                 peer_url, "--initial-advertise-peer-urls", peer_url,
                                 "--initial-cluster", absl::StrCat("default=", peer_url)},
                                {.program = program});
  ASSERT_TRUE(etcd.wait_for("ready to serve client requests")) << etcd.err();
  const std::string url = absl::StrCat("etcd://127.0.0.1:", client->port, "/jobs");
  std::vector<Running> nodes;
  for (const char* node : {"0", "1"}) {
    nodes.push_back(Running::start(
        sh({"--nnodes", "2", "--node-rank", node, "--rdzv", absl::StrCat(url, "?allow_insecure=1")},
           "echo up $RANK $WEFT_STORE")));
  }
  for (int node : {0, 1}) {
    Result result = nodes[node].finish();
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr(absl::StrCat("[worker", node, "] up ", node, " ", url, "/")));
    EXPECT_THAT(result.out, HasSubstr("?allow_insecure=1\n"));
  }
}

void expect_failure_ends_all_nodes(bool tcp, int failing) {
  Place place(tcp);
  const std::string script = absl::StrCat("echo up; if [ $GROUP_RANK = ", failing,
                                          " ]; then exit 23; fi; exec sleep 1000");
  Running first = place.start(0, 2, sh({}, script));
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  Running second = place.start(1, 2, sh({}, script));
  Result results[2] = {first.finish(), second.finish()};
  for (int node : {0, 1}) {
    EXPECT_EQ(results[node].code, 23) << results[node].err;
    EXPECT_THAT(results[node].err,
                HasSubstr(absl::StrCat("rank ", failing, " (worker", failing, ", pid ")));
    EXPECT_THAT(results[node].err, HasSubstr(": exit code 23"));
  }
  EXPECT_THAT(results[1 - failing].err, HasSubstr("first failure, on another node"));
  EXPECT_TRUE(place.empty());
}

TEST(Launch, FailureOnNodeZeroEndsTheOthers) { expect_failure_ends_all_nodes(true, 0); }
TEST(Launch, FailureOnAnotherNodeEndsAll) { expect_failure_ends_all_nodes(true, 1); }
TEST(Launch, FailureTravelsThroughAFile) { expect_failure_ends_all_nodes(false, 1); }

TEST(Launch, MissingNodesAreNamed) {
  Place place(false);
  Running second = place.start(2, 4, {"--rdzv-timeout", "60", "true"});
  ASSERT_TRUE(second.wait_for(kThere)) << second.err();
  Result one = place.start(0, 4, {"--rdzv-timeout", "2", "true"}).finish();
  EXPECT_EQ(one.code, 1);
  EXPECT_THAT(one.err, HasSubstr("after 2s nodes 1, 3 of 4 have not come"));
  // Node 2 does not wait for its own minute.
  Result two = second.finish();
  EXPECT_EQ(two.code, 1);
  EXPECT_THAT(two.err, AllOf(HasSubstr("node 0 gave up"), HasSubstr("nodes 1, 3 of 4")));
}

TEST(Launch, NodeZeroThatDoesNotComeIsNamed) {
  Place place(false);
  Result result = place.start(1, 2, {"--rdzv-timeout", "0.2", "true"}).finish();
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("after 200ms node 0 of 2 has not come"));
}

TEST(Launch, NodesThatDisagreeAboutTheirNumberDoNotStart) {
  Place place(false);
  Running first = place.start(0, 2, {"--rdzv-timeout", "30", "true"});
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  Running second = place.start(1, 3, {"--rdzv-timeout", "30", "true"});
  Result one = first.finish();
  EXPECT_EQ(one.code, 1);
  EXPECT_THAT(one.err, HasSubstr("was started with --nnodes 3, node 0 with --nnodes 2"));
  EXPECT_EQ(second.finish().code, 1);
}

TEST(Launch, OccupiedMeetingPlaceIsAnError) {
  Place place(true);
  Running first = place.start(0, 2, {"true"});
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  Result second = place.start(0, 2, {"true"}).finish();
  EXPECT_EQ(second.code, 1);
  EXPECT_THAT(second.err,
              AllOf(HasSubstr("node 0 hosts the meeting place"), HasSubstr(place.url().substr(6))));
}

TEST(Launch, LeftoversOfACrashedJobDoNotCount) {
  Place place(false);
  {
    // Both have said hello to a third that never comes, and are killed.
    Running first = place.start(0, 3, {"true"});
    ASSERT_TRUE(first.wait_for(kThere)) << first.err();
    Running second = place.start(1, 3, {"true"});
    ASSERT_TRUE(second.wait_for(kThere)) << second.err();
  }
  {
    // A job that ran is killed as well.
    Running first = place.start(0, 2, sh({}, "echo up; exec sleep 1000"));
    ASSERT_TRUE(first.wait_for(kThere)) << first.err();
    Running second = place.start(1, 2, sh({}, "echo up; exec sleep 1000"));
    ASSERT_TRUE(first.wait_for("[worker0] up") && second.wait_for("[worker1] up"));
  }
  ASSERT_FALSE(place.empty()) << "a killed job leaves its file, else this tests nothing";
  // The same place again, the other node first: it must wait for the new node 0.
  Running second = place.start(1, 2, sh({}, "echo up $RANK"));
  ASSERT_TRUE(second.wait_for(kThere)) << second.err();
  Running first = place.start(0, 2, sh({"-n", "2"}, "echo up $RANK"));
  Result one = first.finish();
  Result two = second.finish();
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(two.code, 0) << two.err;
  EXPECT_THAT(one.out, HasSubstr("[worker1] up 1"));
  EXPECT_THAT(two.out, HasSubstr("[worker2] up 2"));
}

TEST(Launch, JobsWithTheirOwnIdsShareAMeetingPlace) {
  Place place(true);
  // One TCP server; a file would belong to one of them.
  Running first = place.start(0, 2, sh({"--rdzv-id", "blue"}, "echo up"));
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  Result lost = place.start(1, 2, {"--rdzv-id", "red", "--rdzv-timeout", "0.5", "true"}).finish();
  EXPECT_EQ(lost.code, 1);
  EXPECT_THAT(lost.err, HasSubstr("node 0 of 2 has not come"));
  Result second = place.start(1, 2, sh({"--rdzv-id", "blue"}, "echo up")).finish();
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(first.finish().code, 0);
}

TEST(Launch, StopSignalOnOneNodeEndsTheOthers) {
  for (int stopped : {0, 1}) {
    Place place(true);
    Running first = place.start(0, 2, sh({}, "echo up; exec sleep 1000"));
    ASSERT_TRUE(first.wait_for(kThere)) << first.err();
    Running second = place.start(1, 2, sh({}, "echo up; exec sleep 1000"));
    ASSERT_TRUE(first.wait_for("[worker0] up") && second.wait_for("[worker1] up"));
    (stopped == 0 ? first : second).send(SIGTERM);
    Result one = first.finish();
    Result two = second.finish();
    EXPECT_EQ(one.code, 143) << one.err;
    EXPECT_EQ(two.code, 143) << two.err;
    EXPECT_THAT(stopped == 0 ? two.err : one.err, HasSubstr("was stopped by SIGTERM"));
  }
}

TEST(Launch, StopSignalEndsTheWaitForOtherNodes) {
  for (int node : {0, 1}) {
    Place place(false);
    Running running = place.start(node, 2, {"true"});
    ASSERT_TRUE(running.wait_for(kThere)) << running.err();
    running.send(SIGINT);
    Result result = running.finish();
    EXPECT_EQ(result.code, 130);
    EXPECT_THAT(result.err, HasSubstr("stopped by SIGINT while looking for the other nodes"));
  }
}

TEST(Launch, ProgramMissingOnOneNodeEndsTheOthers) {
  Place place(true);
  Running first = place.start(0, 2, {"sleep", "1000"});
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  Result second = place.start(1, 2, {"no-such-program-anywhere"}).finish();
  EXPECT_EQ(second.code, 127);
  Result one = first.finish();
  EXPECT_EQ(one.code, 127);
  EXPECT_THAT(one.err, HasSubstr("node 1 (host "));
  EXPECT_THAT(one.err, HasSubstr("cannot start no-such-program-anywhere"));
}

// A node whose weftrun is killed says nothing any more; its silence is noticed by the lease.
TEST(Launch, NodeThatFallsSilentEndsTheOthers) {
  for (int silent : {0, 1}) {
    Place place(false);
    RunOptions lease{.set = {{"WEFT_LEASE", "2s"}}};
    Running first = place.start(0, 2, sh({"--grace", "1"}, "echo up; exec sleep 1000"), lease);
    ASSERT_TRUE(first.wait_for(kThere)) << first.err();
    Running second = place.start(1, 2, sh({"--grace", "1"}, "echo up; exec sleep 1000"), lease);
    ASSERT_TRUE(first.wait_for("[worker0] up") && second.wait_for("[worker1] up"));
    (silent == 0 ? first : second).send(SIGKILL);
    Result survivor = (silent == 0 ? second : first).finish();
    EXPECT_EQ(survivor.code, 1) << survivor.err;
    EXPECT_THAT(survivor.err, AllOf(HasSubstr(absl::StrCat("node ", silent, " (host ")),
                                    HasSubstr("has given no sign of life for 2s")));
  }
}

TEST(Launch, NodeThatIsDoneLeavesAndTheOthersGoOn) {
  Place place(true);
  // Node 0 hosts the meeting place and is done at once; node 1 goes on until it is told.
  Running first = place.start(0, 2, sh({}, "echo done"));
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  Running second =
      place.start(1, 2, sh({}, "trap 'exit 31' USR1; echo up; while :; do sleep 0.05; done"));
  ASSERT_TRUE(second.wait_for("[worker1] up"));
  ASSERT_TRUE(first.wait_for("[worker0] done"));
  // Node 0 knows that its process has ended when it has reaped it.
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!children_named(first.pid(), "sh").empty() && absl::Now() < end) std::this_thread::yield();
  second.send(SIGUSR1);
  EXPECT_EQ(second.finish().code, 31);
  Result one = first.finish();
  EXPECT_EQ(one.code, 31) << "the job failed, wherever it did";
  EXPECT_THAT(one.err, HasSubstr("after the processes here had ended: rank 1 (worker1"));
}

}  // namespace
}  // namespace weft::launch
