// weft-inspect and real workers: what it shows, of whom, and to whom.

#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/job.h"
#include "weft/tests/testing/tls_files.h"

namespace weft::integration {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Seen {
  int code = -1;
  std::string out;
  std::string errors;
};
std::ostream& operator<<(std::ostream& out, const Seen& seen) {
  return out << "exit code " << seen.code << "\n" << seen.out << seen.errors;
}

Seen look(std::vector<std::string> arguments, std::map<std::string, std::string> environment = {}) {
  const TempDir dir;
  arguments.insert(arguments.begin(), WEFT_TEST_INSPECT);
  Process process({.command = std::move(arguments),
                   .environment = std::move(environment),
                   .error_file = dir.path("errors")});
  Seen seen;
  seen.out = process.read_all();
  seen.code = process.wait_exit().value_or(-1);
  seen.errors = read_file(dir.path("errors"));
  return seen;
}

TEST(IntegrationInspect, ShowsTheCallsAndRRefsOfARunningWorker) {
  Job job;
  job.start_group(2);
  ASSERT_TRUE(job[0].ask("rref make x worker1 number 3 60000").ok);
  ASSERT_TRUE(job[0].ask("rref get x 60000").ok);
  ASSERT_TRUE(job[0].ask("start held worker1 hold 1 60000 0").ok);
  ASSERT_TRUE(job[1].eventually([](const Info& i) { return i.at("held") == 1; }));

  const Seen caller = look({job[0].address()});
  EXPECT_EQ(caller.code, 0) << caller;
  EXPECT_THAT(caller.out,
              ContainsRegex("worker: 1\n[^\n]*\n  worker0 +0 .* 1234abcd .* running\n"));
  EXPECT_THAT(caller.out, ContainsRegex("serving: 0\npending: 1\n"));
  EXPECT_THAT(caller.out, ContainsRegex("stage\\.hold +worker1 .* sent +[0-9.]+ +[0-9.]+\n"));
  // Where in the program it was made.
  EXPECT_THAT(caller.out,
              ContainsRegex("RRef 0/[^\n]* +'worker1' +'worker0' +[0-9.]+ +shelf\\.cc:[0-9]+\n"));
  EXPECT_THAT(caller.out, Not(HasSubstr("counters:")));

  const Seen callee = look({"--counters", job[1].address()});
  EXPECT_EQ(callee.code, 0) << callee;
  EXPECT_THAT(callee.out, ContainsRegex("serving: 1\n[^\n]*\n  stage\\.hold +worker0 "));
  EXPECT_THAT(callee.out, ContainsRegex("RRef 0/[^\n]* +'worker1' +'worker0' "));
  EXPECT_THAT(callee.out, ContainsRegex("rref_forks +1\n"));

  const Seen json = look({"--json", "--rows", "1", job[1].address()});
  EXPECT_EQ(json.code, 0) << json;
  EXPECT_THAT(json.out, AllOf(HasSubstr("\"serving\": {\"rows\": [\n{\"method\": \"stage.hold\", "
                                        "\"caller\": \"worker0\""),
                              HasSubstr("\"owner\": \"'worker1'\", \"holder\": \"'worker0'\"")));

  // No worker was disturbed, and none has joined.
  ASSERT_TRUE(job[1].ask("open 1").ok);
  EXPECT_EQ(job[0].ask("wait held").text, "1");
  EXPECT_EQ(job.keys("member/").size(), 2u);
  EXPECT_TRUE(job[1].eventually([](const Info& i) { return i.at("observers") == 0; }));
  EXPECT_TRUE(job[0].ask("rref drop x").ok);
  for (size_t i : {0, 1}) expect_no_rrefs(&job[i]);
  job.shut_down();
}

TEST(IntegrationInspect, FindsWorkersByTheStore) {
  Job job;
  job.host_store();
  job.start_group(2);
  const std::string store = job.environment["WEFT_STORE"];
  const Seen list = look({"--store", store});
  EXPECT_EQ(list.code, 0) << list;
  EXPECT_THAT(list.out, AllOf(HasSubstr("workers: 2\n"), HasSubstr(job[0].address()),
                              HasSubstr(job[1].address())));
  const Seen one = look({"--store", store, "worker1"});
  EXPECT_EQ(one.code, 0) << one;
  EXPECT_THAT(one.out, HasSubstr("\n  worker1 "));
  const Seen nobody = look({"--store", store, "worker7"});
  EXPECT_EQ(nobody.code, 1) << nobody;
  EXPECT_THAT(nobody.errors,
              AllOf(HasSubstr("no worker 'worker7'"), HasSubstr("'worker0' of job")));
  job.shut_down();
}

TEST(IntegrationInspect, BadInput_whom_an_observer_does_not_reach) {
  QuietPort refusing;
  const Seen refused = look({absl::StrCat("127.0.0.1:", refusing.port())});
  EXPECT_EQ(refused.code, 1) << refused;
  EXPECT_THAT(refused.errors,
              AllOf(HasSubstr("looking at the worker at 127.0.0.1:"), HasSubstr("dial of")));
  QuietPort silent;
  silent.listen();
  const Seen waited = look({"--timeout", "500ms", absl::StrCat("127.0.0.1:", silent.port())});
  EXPECT_EQ(waited.code, 1) << waited;
  EXPECT_THAT(waited.errors, HasSubstr("deadline")) << waited;
  EXPECT_EQ(look({"not an address"}).code, 1);

  Job job;
  job.start_group(1);
  ASSERT_TRUE(job[0].process().stop());
  const Seen stopped = look({"--timeout", "500ms", job[0].address()});
  EXPECT_EQ(stopped.code, 1) << stopped;
  EXPECT_THAT(stopped.errors, HasSubstr("deadline")) << stopped;
  job[0].process().send_signal(SIGCONT);
  EXPECT_EQ(look({job[0].address()}).code, 0);
  job.shut_down();
}

TEST(IntegrationInspect, BadInput_an_observer_with_the_wrong_credentials) {
  weft::testing::TlsFiles ours;
  weft::testing::TlsFiles theirs;
  const auto variables = [](const Credentials& c) {
    return std::map<std::string, std::string>{
        {"WEFT_TLS_CA", c.ca_file}, {"WEFT_TLS_CERT", c.cert_file}, {"WEFT_TLS_KEY", c.key_file}};
  };
  Job job;
  job.environment = variables(ours.make("worker0"));
  job.start_group(1);
  const std::string address = job[0].address();

  const Seen plain = look({address});
  EXPECT_EQ(plain.code, 1) << plain;
  EXPECT_THAT(plain.errors, HasSubstr("TLS")) << plain;
  const Seen stranger = look({address}, variables(theirs.make("worker0")));
  EXPECT_EQ(stranger.code, 1) << stranger;
  EXPECT_THAT(stranger.errors, HasSubstr("looking at the worker at ")) << stranger;
  EXPECT_THAT(stranger.out, IsEmpty());
  // A certificate for one name, and the name of another worker.
  const Seen other = look({"--name", "worker0", address}, variables(ours.make("guest")));
  EXPECT_EQ(other.code, 1) << other;
  EXPECT_THAT(other.errors, HasSubstr("guest")) << other;
  const Seen missing = look({"--tls", ours.directory(), "--name", "nobody", address});
  EXPECT_EQ(missing.code, 1) << missing;
  EXPECT_THAT(missing.errors, HasSubstr("nobody.pem")) << missing;

  const Seen guest = look({"--tls", ours.directory(), "--name", "guest", address});
  EXPECT_EQ(guest.code, 0) << guest;
  EXPECT_THAT(guest.out, HasSubstr("worker0"));
  job.shut_down();
}

TEST(IntegrationInspect, WrongCommandLines) {
  const std::pair<std::vector<std::string>, const char*> wrong[] = {
      {{}, "which worker?"},
      {{"--jsonn", "a"}, "no option --jsonn"},
      {{"a", "b"}, "one worker at a time"},
      {{"--rows", "0", "a"}, "--rows"},
      {{"--timeout", "soon", "a"}, "--timeout"},
      {{"--timeout"}, "wants a value"},
      {{"--store", "file:///tmp/x"}, "cannot be read from outside"},
      {{"--tls", "x", "a"}, "--name"},
  };
  for (const auto& [arguments, words] : wrong) {
    const Seen seen = look(arguments);
    EXPECT_EQ(seen.code, 2) << words << seen;
    EXPECT_THAT(seen.errors, HasSubstr(words));
    EXPECT_THAT(seen.out, IsEmpty());
  }
  EXPECT_THAT(look({"--help"}).out, HasSubstr("weft-inspect [options] ADDRESS"));
  EXPECT_EQ(look({"--version"}).code, 0);
}

}  // namespace
}  // namespace weft::integration
