// weftrun --tls: what the processes get, and that nothing of it is left.
#include <signal.h>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/runtime.h"
#include "weft/tests/launch/harness.h"
#include "weft/transport/checked_credentials.h"

namespace weft::launch {
namespace {

using ::testing::HasSubstr;

TEST(LaunchTls, AutoGivesEveryProcessACertificateOfItsOwn) {
  TestDir dir;
  TestDir kept;
  const Result result = run(sh({"-q", "--tls", "auto", "--role", "ps:1", "--role", "trainer:1"},
                               absl::StrCat("test $(stat -c %a $(dirname $WEFT_TLS_KEY)) = 700 && "
                                            "test $(stat -c %a $WEFT_TLS_KEY) = 600 && "
                                            "cp -r $(dirname $WEFT_TLS_KEY) ",
                                            kept.path("$WEFT_NAME"),
                                            " && ls $(dirname $WEFT_TLS_KEY) | tr '\\n' ' ' && "
                                            "echo $WEFT_TLS_SHARED_CERTIFICATE $WEFT_TOKEN_FILE")),
                            {.set = {{"TMPDIR", dir.path("")},
                                     // Variables of another job.
                                     {"WEFT_TLS_KEY", "/nowhere"},
                                     {"WEFT_TLS_SHARED_CERTIFICATE", "1"},
                                     {"WEFT_TOKEN_FILE", "/nowhere"}}});
  ASSERT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("ca.pem ps0.key ps0.pem trainer0.key trainer0.pem \n"));
  const std::shared_ptr<Runtime> runtime = make_system_runtime();
  for (const auto& [name, rank] : {std::pair("ps0", 0u), {"trainer0", 1u}}) {
    const std::string folder = kept.path(name) + "/";
    const auto checked = internal::check_credentials({.ca_file = folder + "ca.pem",
                                                      .cert_file = folder + name + ".pem",
                                                      .key_file = folder + name + ".key"},
                                                     *runtime);
    ASSERT_TRUE(checked.ok()) << checked.status();
    EXPECT_EQ(checked->identities, (std::vector<internal::Identity>{{name, rank}}));
  }
  EXPECT_EQ(run({"-q", "ls", "-A", dir.path("")}).out, "") << "left in the temporary directory";
}

TEST(LaunchTls, AutoLeavesNothingHoweverTheJobEnds) {
  TestDir dir;
  RunOptions options{.set = {{"TMPDIR", dir.path("")}}};
  EXPECT_EQ(run(sh({"--tls", "auto", "-n", "2"}, "test -s $WEFT_TLS_KEY; exit 3"), options).code,
            3);
  EXPECT_EQ(run({"-q", "ls", "-A", dir.path("")}).out, "");
  Running running = Running::start(
      sh({"--tls", "auto", "-n", "2"}, "test -s $WEFT_TLS_KEY && echo up; exec sleep 1000"),
      options);
  ASSERT_TRUE(running.wait_for("[worker0] up"));
  const std::vector<int> guards = children_named(running.pid(), "weftrun-guard");
  ASSERT_EQ(guards.size(), 1u);
  const Watched guard(guards[0]);
  running.send(SIGKILL);
  EXPECT_TRUE(guard.ended());
  EXPECT_EQ(running.finish().code, 137);
  EXPECT_EQ(run({"-q", "ls", "-A", dir.path("")}).out, "");
}

TEST(LaunchTls, ADirectoryOfGivenFiles) {
  TestDir dir;
  const std::string make = absl::StrCat("cd ", dir.path(""),
                                        " && touch ca.pem worker0.pem "
                                        "worker0.key worker1.pem token");
  ASSERT_EQ(run(sh({"-q"}, make)).code, 0);
  const auto job = sh({"-n", "2", "--tls", dir.path(".")},
                      "echo $WEFT_TLS_CA $WEFT_TLS_CERT $WEFT_TLS_KEY $WEFT_TOKEN_FILE");
  const Result missing = run(job);
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.err, HasSubstr("worker1.key; each process NAME needs NAME.pem"));
  ASSERT_EQ(run(sh({"-q"}, absl::StrCat("touch ", dir.path("worker1.key")))).code, 0);
  const Result there = run(job);
  EXPECT_EQ(there.code, 0) << there.err;
  for (const char* file : {"ca.pem", "worker0.pem", "worker1.key", "token"}) {
    EXPECT_THAT(there.out, HasSubstr(dir.path(absl::StrCat("./", file))));
  }
}

TEST(LaunchTls, WithoutItTheVariablesOfTheUserStay) {
  const Result result = run(sh({"-q"}, "echo $WEFT_TLS_KEY"), {.set = {{"WEFT_TLS_KEY", "/mine"}}});
  EXPECT_THAT(result.out, HasSubstr("/mine"));
}

TEST(LaunchTls, AutoIsForOneNode) {
  const Result result = run({"--nnodes", "2", "--node-rank", "0", "--rdzv", "tcp://127.0.0.1:1",
                             "--tls", "auto", "true"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("--tls auto is for one node"));
}

}  // namespace
}  // namespace weft::launch
