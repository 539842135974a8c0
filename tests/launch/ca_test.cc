// weftrun ca: credentials for several nodes, made, renewed, and of a second authority.
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/runtime.h"
#include "weft/tests/launch/harness.h"
#include "weft/tests/launch/place.h"
#include "weft/tools/weftrun/ca.h"
#include "weft/transport/checked_credentials.h"

namespace weft::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

StatusOr<internal::CheckedCredentials> check(const std::string& directory,
                                             const std::string& name) {
  const std::shared_ptr<Runtime> runtime = make_system_runtime();
  return internal::check_credentials({.ca_file = directory + "/ca.pem",
                                      .cert_file = absl::StrCat(directory, "/", name, ".pem"),
                                      .key_file = absl::StrCat(directory, "/", name, ".key")},
                                     *runtime);
}

std::vector<std::string> lines(const CaOptions& options, absl::Time now = absl::Now()) {
  absl::StatusOr<std::vector<std::string>> made = run_ca(options, now);
  EXPECT_TRUE(made.ok()) << made.status();
  return made.ok() ? *std::move(made) : std::vector<std::string>();
}

std::string refusal(const CaOptions& options, absl::Time now = absl::Now()) {
  return std::string(run_ca(options, now).status().message());
}

TEST(LaunchCa, MakesWhatTlsTakesAndTwoNodesMeetWithIt) {
  TestDir dir;
  const std::string tls = dir.path("tls");
  const Result made = run({"ca", tls, "worker:2", "extra"});
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_THAT(lines_of(made.out),
              ElementsAre(StartsWith("ca: made"), StartsWith("worker0: made, valid until 20"),
                          StartsWith("worker1: made"), StartsWith("extra: made"),
                          StartsWith("weftrun: made")));
  for (const char* name : {"worker0", "worker1", "extra", "weftrun"}) {
    const auto checked = check(tls, name);
    ASSERT_TRUE(checked.ok()) << checked.status();
    EXPECT_EQ(checked->identities, (std::vector<internal::Identity>{{name, std::nullopt}}));
  }
  for (const auto& file : std::filesystem::directory_iterator(tls)) {
    EXPECT_EQ(file.status().permissions(),
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write)
        << file.path();
  }
  Place place(true);
  const auto script = sh({"--tls", tls}, "test -s $WEFT_TLS_KEY && echo up $WEFT_NAME");
  Running first = place.start(0, 2, script);
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  const Result second = place.start(1, 2, script).finish();
  EXPECT_EQ(first.finish().code, 0);
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_THAT(second.out, HasSubstr("up worker1"));
}

TEST(LaunchCa, RenewsWhatIsAboutToExpire) {
  TestDir dir;
  const CaOptions all_here{.directory = dir.path("tls")};
  const absl::Time now = absl::Now();
  lines({.directory = all_here.directory, .names = {"ps:1"}}, now);
  const std::string before = read_file(all_here.directory + "/ps0.pem");
  EXPECT_THAT(lines(all_here, now + absl::Hours(24) * 59),
              ElementsAre(StartsWith("ps0: kept"), StartsWith("weftrun: kept")));
  EXPECT_EQ(read_file(all_here.directory + "/ps0.pem"), before);
  EXPECT_THAT(lines(all_here, now + absl::Hours(24) * 61),
              ElementsAre(StartsWith("ps0: renewed"), StartsWith("weftrun: renewed")));
  EXPECT_NE(read_file(all_here.directory + "/ps0.pem"), before);
  // By name, too, and a new one beside it.
  EXPECT_THAT(lines({.directory = all_here.directory, .names = {"ps:2"}, .all = true}),
              ElementsAre(StartsWith("ps0: renewed"), StartsWith("ps1: made"),
                          StartsWith("weftrun: renewed")));
  EXPECT_TRUE(check(all_here.directory, "ps0").ok());
}

TEST(LaunchCa, ASecondAuthorityWhileProcessesRun) {
  TestDir dir;
  const CaOptions here{.directory = dir.path("tls")};
  lines({.directory = here.directory, .names = {"ps:1"}});
  EXPECT_THAT(lines({.directory = here.directory, .new_authority = true}),
              ElementsAre(HasSubstr("copy ca.pem to all nodes")));
  const auto old_certificate = check(here.directory, "ps0");
  EXPECT_TRUE(old_certificate.ok()) << "both are trusted: " << old_certificate.status();
  lines({.directory = here.directory, .all = true});
  const auto new_certificate = check(here.directory, "ps0");
  EXPECT_TRUE(new_certificate.ok()) << new_certificate.status();
}

TEST(LaunchCa, BadInput_ACaThatHasExpiredOrLostItsKey) {
  TestDir dir;
  const CaOptions here{.directory = dir.path("tls")};
  const absl::Time now = absl::Now();
  lines(here, now);
  EXPECT_THAT(refusal(here, now + absl::Hours(24) * 850), HasSubstr("expires on 20"));
  EXPECT_THAT(refusal(here, now + absl::Hours(24) * 901),
              ::testing::AllOf(HasSubstr("has expired on 20"), HasSubstr("--new-authority")));
  const std::string key = here.directory + "/ca.key";
  std::filesystem::rename(key, dir.path("elsewhere"));
  EXPECT_THAT(refusal(here, now), HasSubstr("ca.key is missing"));
  std::filesystem::copy(here.directory + "/weftrun.key", key);
  EXPECT_THAT(refusal(here, now), HasSubstr("the key does not belong to the certificate"));
  EXPECT_THAT(refusal({.directory = dir.path("no/such")}), HasSubstr("cannot make"));
}

TEST(LaunchCa, BadInput_WrongArguments) {
  for (const auto& [args, expected] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{}, "which directory?"},
           {{"d", "worker:0"}, "'worker:0': expected NAME"},
           {{"d", "../x"}, "'../x': a name has"},
           {{"d", "ca"}, "'ca' is the name of the authority's files"},
           {{"d", "--days", "0"}, "--days requires a number from 1 to 3650, got '0'"},
           {{"d", "--days"}, "--days requires a number"},
           {{"d", "--new-authority", "ps0"}, "run it alone"},
           {{"d", "--bits"}, "unknown option '--bits'"}}) {
    std::vector<std::string> all = {"ca"};
    all.insert(all.end(), args.begin(), args.end());
    const Result result = run(all);
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, HasSubstr(expected));
  }
  EXPECT_THAT(run({"ca", "--help"}).out, HasSubstr("--new-authority"));
}

}  // namespace
}  // namespace weft::launch
