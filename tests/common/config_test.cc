// Settings and launchers.
#include "weft/common/config.h"

#include <cstdlib>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/error.h"
#include "weft/common/launch_info.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string message(const absl::Status& status) { return std::string(status.message()); }

TEST(Config, DefaultsAreThoseOfTheDesign) {
  const auto config = Config::from_environment({});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rpc_timeout, absl::Seconds(60));
  EXPECT_EQ(config->heartbeat_interval, absl::Seconds(1));
  EXPECT_EQ(config->lease, absl::Seconds(15));
  EXPECT_EQ(config->chunk_bytes, 160u << 10);
  EXPECT_EQ(config->inline_bytes, 64u << 10);
  EXPECT_EQ(config->spin, absl::Microseconds(50));
  EXPECT_EQ(config->max_blocked, 4096);
  EXPECT_FALSE(config->allow_insecure);
  EXPECT_FALSE(config->rank.has_value());
}

TEST(Config, ReadsTheEnvironment) {
  const auto config = Config::from_environment({{"WEFT_LEASE", "2m"},
                                                {"WEFT_CHUNK_BYTES", "512KiB"},
                                                {"WEFT_ALLOW_INSECURE", "Yes"},
                                                {"WEFT_LOG_LEVEL", "DEBUG"},
                                                {"WEFT_NAME", "trainer-0"},
                                                {"WEFT_RPC_TIMEOUT", "inf"},
                                                {"WEFT_SPIN", "500us"},
                                                {"WEFT_ROLE", ""},
                                                {"RANK", "3"},
                                                {"WORLD_SIZE", "4"},
                                                {"UNRELATED", "x"}});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->lease, absl::Minutes(2));
  EXPECT_EQ(config->chunk_bytes, 512u << 10);
  EXPECT_TRUE(config->allow_insecure);
  EXPECT_EQ(config->log_level, Severity::kDebug);
  EXPECT_EQ(config->name, "trainer-0");
  EXPECT_EQ(config->rpc_timeout, absl::InfiniteDuration());
  EXPECT_EQ(config->spin, absl::Microseconds(500));
  EXPECT_EQ(config->rank, 3);
}

TEST(Config, ErrorsNameKeyTextAndExpectation) {
  struct Case {
    const char* variable;
    const char* text;
    const char* key;
    const char* expected;
  };
  for (const Case& c :
       {Case{"WEFT_LEASE", "15 sekunden", "'lease'", "500ms"},
        Case{"WEFT_LEASE", "-1s", "'lease'", "500ms"}, Case{"WEFT_LEASE", "15", "'lease'", "500ms"},
        Case{"WEFT_CHUNK_BYTES", "1MB", "'chunk_bytes'", "64KiB"},
        Case{"WEFT_CHUNK_BYTES", "-1", "'chunk_bytes'", "64KiB"},
        Case{"WEFT_CHUNK_BYTES", "99999999999TiB", "'chunk_bytes'", "64KiB"},
        Case{"WEFT_PORT", "http", "'port'", "whole number"},
        Case{"WEFT_PORT", "99999999999999", "'port'", "whole number"},
        Case{"RANK", "-1", "'rank'", "whole number"}, Case{"RANK", "one", "'rank'", "whole number"},
        Case{"WEFT_ALLOW_INSECURE", "maybe", "'allow_insecure'", "true"},
        Case{"WEFT_LOG_LEVEL", "loud", "'log_level'", "warning"}}) {
    const auto config = Config::from_environment({{c.variable, c.text}});
    ASSERT_FALSE(config.ok()) << c.variable << "=" << c.text;
    EXPECT_EQ(error_kind(config.status()), ErrorKind::kInvalidArgument);
    EXPECT_THAT(message(config.status()), AllOf(HasSubstr(c.variable), HasSubstr(c.text),
                                                HasSubstr(c.key), HasSubstr(c.expected)));
  }
  // Odd bytes are printed escaped, and a long text is cut.
  Config config;
  EXPECT_THAT(message(config.set("port", std::string_view("\x01\0\xff", 3))),
              HasSubstr("'\\x01\\x00\\xff'"));
  EXPECT_LT(message(config.set("port", std::string(5000, 'x'))).size(), 300u);
  EXPECT_EQ(config.set("name", std::string_view("a\0b", 3)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(config.port, 0);
}

TEST(Config, SetAndGetByName) {
  Config config;
  EXPECT_TRUE(config.set("max_message_bytes", "2GiB").ok());
  EXPECT_EQ(config.max_message_bytes, uint64_t{2} << 30);
  EXPECT_EQ(*config.get("max_message_bytes"), "2GiB");
  EXPECT_EQ(error_kind(config.set("max_mesage_bytes", "1")), ErrorKind::kNotFound);
  EXPECT_EQ(error_kind(config.get("nothing").status()), ErrorKind::kNotFound);
}

TEST(Config, EveryDefaultIsReadBackFromItsText) {
  std::set<std::string> names;
  std::set<std::string> variables;
  for (const ConfigKey& key : Config::keys()) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name;
    EXPECT_TRUE(variables.insert(key.environment).second) << key.environment;
    EXPECT_FALSE(key.help.empty()) << key.name;
    if (key.default_text.empty()) continue;
    Config config;
    EXPECT_TRUE(config.set(key.name, key.default_text).ok()) << key.name << key.default_text;
    EXPECT_EQ(*config.get(key.name), key.default_text);
  }
  EXPECT_TRUE(variables.count("WEFT_JOB_ID"));
  EXPECT_TRUE(variables.count("MASTER_ADDR"));
}

TEST(Config, HelpListsEveryKey) {
  const std::string help = Config::help_text();
  for (const ConfigKey& key : Config::keys()) {
    EXPECT_THAT(help, AllOf(HasSubstr(key.environment), HasSubstr(key.name), HasSubstr(key.help)));
  }
  EXPECT_THAT(help, HasSubstr("WEFT_LEASE (lease, duration, default 15s)"));
}

TEST(Config, ValidatesWhatBelongsTogether) {
  struct Case {
    Environment environment;
    const char* expected;
  };
  for (const Case& c :
       {Case{{{"WEFT_HEARTBEAT_INTERVAL", "10s"}}, "lease"},
        Case{{{"WEFT_HEARTBEAT_INTERVAL", "0"}}, "heartbeat_interval"},
        Case{{{"WEFT_PORT", "70000"}}, "65535"}, Case{{{"MASTER_PORT", "70000"}}, "65535"},
        Case{{{"WEFT_PORT_RANGE", "5000-4000"}}, "port_range"},
        Case{{{"WEFT_CHUNK_BYTES", "1"}}, "4KiB"},
        Case{{{"WEFT_INLINE_BYTES", "2MiB"}}, "chunk_bytes (160KiB)"},
        Case{{{"WEFT_MAX_MESSAGE_BYTES", "1KiB"}}, "max_message_bytes"},
        Case{{{"WEFT_MAX_BLOCKED", "0"}}, "max_blocked"}}) {
    const auto config = Config::from_environment(c.environment);
    ASSERT_FALSE(config.ok()) << c.expected;
    EXPECT_THAT(message(config.status()), HasSubstr(c.expected));
  }
  EXPECT_TRUE(Config::from_environment({{"WEFT_PORT_RANGE", "4000-4000"}}).ok());
}

TEST(Config, PortRange) {
  EXPECT_EQ(*parse_port_range("20000-20100"), std::make_pair(20000, 20100));
  for (const char* bad : {"", "1", "-", "0-5", "5-", "-5", "5-4", "1-65536", "a-b", "1-2-3"}) {
    EXPECT_FALSE(parse_port_range(bad).ok()) << bad;
  }
}

TEST(Config, MistypedVariablesAreFound) {
  EXPECT_THAT(unknown_variables({{"WEFT_LEASES", "1s"}, {"WEFT_LEASE", "20s"}, {"PATH", "/"}}),
              ElementsAre("WEFT_LEASES"));
}

TEST(Config, ProcessEnvironment) {
  const Environment environment = process_environment();
  const char* path = std::getenv("PATH");
  ASSERT_NE(path, nullptr);
  EXPECT_EQ(environment.at("PATH"), path);
}

absl::StatusOr<LaunchInfo> launched(const Environment& environment) {
  const auto config = Config::from_environment(environment);
  if (!config.ok()) return config.status();
  return launch_info(*config, environment);
}

TEST(LaunchInfo, AloneWithoutALauncher) {
  const auto info = launched({{"HOME", "/"}});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kNone);
  EXPECT_EQ(info->rank, 0);
  EXPECT_EQ(info->world_size, 1);
  EXPECT_TRUE(info->single_node());
}

TEST(LaunchInfo, Weftrun) {
  const auto info = launched({{"RANK", "2"},
                              {"WORLD_SIZE", "3"},
                              {"LOCAL_RANK", "2"},
                              {"LOCAL_WORLD_SIZE", "3"},
                              {"GROUP_RANK", "0"},
                              {"GROUP_WORLD_SIZE", "1"},
                              {"MASTER_ADDR", "127.0.0.1"},
                              {"MASTER_PORT", "2345"},
                              {"WEFT_JOB_ID", "abc"}});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kWeftrun);
  EXPECT_EQ(info->rank, 2);
  EXPECT_EQ(info->local_rank, 2);
  EXPECT_EQ(info->job_key, "abc");
  EXPECT_EQ(info->master_port, 2345);
  EXPECT_TRUE(info->single_node());
  EXPECT_FALSE(info->agent_store);
  EXPECT_EQ(info->restart_count, 0);
}

TEST(LaunchInfo, ALifeAfterARestart) {
  Environment environment = {
      {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"WEFT_JOB_ID", "abc"}, {"WEFT_RESTART_COUNT", "3"}};
  EXPECT_EQ(launched(environment).value().restart_count, 3);
  environment["WEFT_RESTART_COUNT"] = "-1";
  const auto bad = launched(environment);
  ASSERT_FALSE(bad.ok());
  EXPECT_THAT(bad.status().message(), HasSubstr("WEFT_RESTART_COUNT is '-1'"));
}

TEST(LaunchInfo, Torchrun) {
  const auto info = launched({{"RANK", "1"},
                              {"WORLD_SIZE", "4"},
                              {"LOCAL_RANK", "1"},
                              {"LOCAL_WORLD_SIZE", "2"},
                              {"GROUP_RANK", "0"},
                              {"GROUP_WORLD_SIZE", "2"},
                              {"MASTER_ADDR", "host7"},
                              {"MASTER_PORT", "29400"},
                              {"TORCHELASTIC_RUN_ID", "none"},
                              {"TORCHELASTIC_RESTART_COUNT", "2"},
                              {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kTorchrun);
  EXPECT_EQ(launcher_name(info->launcher), "torchrun");
  EXPECT_TRUE(info->agent_store);
  EXPECT_EQ(info->restart_count, 2);
  EXPECT_EQ(info->node_count, 2);
  EXPECT_FALSE(info->single_node());
  EXPECT_THAT(info->job_key, AllOf(HasSubstr("host7"), HasSubstr("29400")));
}

TEST(LaunchInfo, ByHand) {
  const auto info = launched({{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kByHand);
  EXPECT_FALSE(info->local_known);
  EXPECT_FALSE(info->single_node());
}

TEST(LaunchInfo, APodOfAnIndexedJobOfKubernetes) {
  const auto info = launched({{"JOB_COMPLETION_INDEX", "2"},
                              {"WORLD_SIZE", "3"},
                              {"MASTER_ADDR", "train-0.train"},
                              {"MASTER_PORT", "29500"},
                              {"WEFT_JOB_ID", "5f1c8a52-7f0e-4b8e-9d59-0c6a7b1f2e33"}});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kKubernetes);
  EXPECT_EQ(info->rank, 2);
  EXPECT_EQ(info->world_size, 3);
  EXPECT_EQ(info->local_rank, 0);
  EXPECT_EQ(info->local_world_size, 1);
  EXPECT_EQ(info->node_rank, 2);
  EXPECT_EQ(info->node_count, 3);
  EXPECT_FALSE(info->single_node());
  EXPECT_EQ(info->job_key, "5f1c8a52-7f0e-4b8e-9d59-0c6a7b1f2e33");
  EXPECT_EQ(info->master_addr, "train-0.train");
}

TEST(LaunchInfo, AnIndexWithoutASizeIsAProgramOfItsOwn) {
  const auto info = launched({{"JOB_COMPLETION_INDEX", "2"}});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kNone);
  EXPECT_EQ(info->world_size, 1);
  // A launcher inside the pod has the last word.
  const auto inner = launched({{"JOB_COMPLETION_INDEX", "2"}, {"RANK", "0"}, {"WORLD_SIZE", "1"}});
  ASSERT_TRUE(inner.ok()) << inner.status();
  EXPECT_EQ(inner->launcher, Launcher::kByHand);
}

TEST(LaunchInfo, BadInput_a_kubernetes_index_out_of_range) {
  const auto error = [](const char* index) {
    const auto info = launched({{"JOB_COMPLETION_INDEX", index}, {"WORLD_SIZE", "2"}});
    EXPECT_EQ(error_kind(info.status()), ErrorKind::kInvalidArgument) << index;
    return std::string(message(info.status()));
  };
  EXPECT_THAT(error("2"), HasSubstr("JOB_COMPLETION_INDEX=2 is not below WORLD_SIZE=2"));
  EXPECT_THAT(error("-1"), HasSubstr("JOB_COMPLETION_INDEX is '-1'"));
  EXPECT_THAT(error("x"), HasSubstr("JOB_COMPLETION_INDEX is 'x'"));
  EXPECT_THAT(error("99999999999"), HasSubstr("JOB_COMPLETION_INDEX is '99999999999'"));
}

TEST(LaunchInfo, OpenMpiEvenInsideAnAllocationOfSlurm) {
  const auto info = launched({{"OMPI_COMM_WORLD_RANK", "1"},
                              {"OMPI_COMM_WORLD_SIZE", "3"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                              {"PMIX_NAMESPACE", "12345"},
                              {"SLURM_PROCID", "0"},
                              {"SLURM_STEP_NUM_TASKS", "1"}});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kOpenMpi);
  EXPECT_EQ(info->rank, 1);
  EXPECT_EQ(info->job_key, "ompi-12345");
  EXPECT_TRUE(info->single_node());
}

TEST(LaunchInfo, Slurm) {
  const auto info = launched({{"SLURM_PROCID", "5"},
                              {"SLURM_NTASKS", "7"},
                              {"SLURM_STEP_NUM_TASKS", "7"},
                              {"SLURM_STEP_ID", "0"},
                              {"SLURM_JOB_ID", "99"},
                              {"SLURM_LOCALID", "1"},
                              {"SLURM_NODEID", "2"},
                              {"SLURM_STEP_NUM_NODES", "4"},
                              {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                              {"SLURM_STEP_NODELIST", "n[07-09,12]"}});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kSlurm);
  EXPECT_EQ(info->rank, 5);
  EXPECT_EQ(info->world_size, 7);
  EXPECT_EQ(info->local_rank, 1);
  EXPECT_EQ(info->local_world_size, 2);
  EXPECT_EQ(info->node_count, 4);
  EXPECT_EQ(info->master_addr, "n07");
  EXPECT_EQ(info->job_key, "slurm-99-0");
}

TEST(LaunchInfo, ABatchScriptOfSlurmIsNoStep) {
  const auto info = launched({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "1"}});
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kNone);
  EXPECT_EQ(info->world_size, 1);
}

TEST(LaunchInfo, PmiBelowSlurmAndSlurmWithPmi) {
  Environment environment = {{"PMI_RANK", "3"},        {"PMI_SIZE", "4"},
                             {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"},
                             {"SLURM_PROCID", "1"},    {"SLURM_STEP_NUM_TASKS", "2"}};
  auto info = launched(environment);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kPmi);
  EXPECT_EQ(info->rank, 3);
  EXPECT_EQ(info->local_world_size, 2);
  environment = {{"PMI_RANK", "1"},      {"PMI_SIZE", "2"},
                 {"SLURM_PROCID", "1"},  {"SLURM_STEP_NUM_TASKS", "2"},
                 {"SLURM_LOCALID", "1"}, {"SLURM_NTASKS_PER_NODE", "2"}};
  info = launched(environment);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->launcher, Launcher::kSlurm);
  EXPECT_EQ(info->local_world_size, 2);
}

TEST(LaunchInfo, ErrorsNameTheVariables) {
  struct Case {
    Environment environment;
    const char* expected;
  };
  for (const Case& c :
       {Case{{{"RANK", "1"}}, "RANK is set but WORLD_SIZE is not"},
        Case{{{"WORLD_SIZE", "2"}}, "WORLD_SIZE is set but RANK is not"},
        Case{{{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK=2 is not below WORLD_SIZE=2"},
        Case{{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE=0"},
        Case{{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}}, "LOCAL_RANK is not"},
        Case{{{"RANK", "x"}, {"WORLD_SIZE", "2"}}, "RANK"},
        Case{{{"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE is not"},
        Case{{{"OMPI_COMM_WORLD_RANK", "0\x01"}, {"OMPI_COMM_WORLD_SIZE", "1"}}, "0\\x01"},
        Case{{{"PMI_SIZE", "2"}}, "PMI_RANK is not"},
        Case{{{"SLURM_PROCID", "9"}, {"SLURM_STEP_NUM_TASKS", "2"}}, "SLURM_PROCID=9"},
        Case{{{"SLURM_STEP_NUM_TASKS", "2"}}, "SLURM_PROCID is not"}}) {
    const auto info = launched(c.environment);
    ASSERT_FALSE(info.ok()) << c.expected;
    EXPECT_EQ(error_kind(info.status()), ErrorKind::kInvalidArgument);
    EXPECT_THAT(message(info.status()), HasSubstr(c.expected));
  }
}

TEST(LaunchInfo, FirstSlurmHost) {
  EXPECT_EQ(first_slurm_host("n1"), "n1");
  EXPECT_EQ(first_slurm_host("n1,n2"), "n1");
  EXPECT_EQ(first_slurm_host("n[07-09,12],m1"), "n07");
  EXPECT_EQ(first_slurm_host("n[3,5]"), "n3");
  EXPECT_EQ(first_slurm_host("n[1-2]-ib,m"), "n1-ib");
  EXPECT_EQ(first_slurm_host("a,b[1-2]"), "a");
  EXPECT_EQ(first_slurm_host(""), "");
  EXPECT_EQ(first_slurm_host("n[1"), "");
  EXPECT_EQ(first_slurm_host("n[1-2]m[3-4]"), "");
}

}  // namespace
}  // namespace weft
