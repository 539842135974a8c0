#include "weft/tests/integration/job.h"

#include <poll.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "weft/common/runtime.h"
#include "weft/store/file_store.h"

namespace weft::integration {
namespace {

constexpr char kJobId[] = "1234abcd";

// What a log says at its end.
std::string tail_of(const std::string& path) {
  const std::string text = read_file(path);
  return text.substr(text.size() > 4000 ? text.size() - 4000 : 0);
}

}  // namespace

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::ostream& operator<<(std::ostream& out, const Answer& answer) {
  return out << (answer.ok ? "ok" : "error " + answer.kind) << ": " << answer.text;
}

std::map<std::string, std::string> short_lease() {
  return {{"WEFT_LEASE", "3s"}, {"WEFT_HEARTBEAT_INTERVAL", "300ms"}};
}

bool eventually(const std::function<bool()>& wanted) {
  const auto end = std::chrono::steady_clock::now() + kLimit;
  while (!wanted()) {
    if (std::chrono::steady_clock::now() > end) return false;
    poll(nullptr, 0, 5);  // between two questions, so that the asked one gets the core
  }
  return true;
}

void Player::say(const std::string& line) { process_.write_line(line); }

Answer Player::answer(std::chrono::milliseconds limit) {
  const std::optional<std::string> line = process_.read_line(limit);
  if (!line.has_value()) return {false, "silent", absl::StrCat(name_, " did not answer")};
  if (*line == "ok" || absl::StartsWith(*line, "ok ")) {
    return {true, "", line->size() > 3 ? line->substr(3) : ""};
  }
  const std::vector<std::string> words = absl::StrSplit(*line, absl::MaxSplits(' ', 2));
  if (words[0] != "error" || words.size() != 3) return {false, "odd", *line};
  return {false, words[1], words[2]};
}

Answer Player::joined() {
  const std::optional<std::string> line = process_.read_line();
  if (!line.has_value()) return {false, "silent", absl::StrCat(name_, " did not join")};
  const std::vector<std::string> words = absl::StrSplit(*line, ' ');
  if (words[0] == "joined" && words.size() == 5) {
    identity_ = absl::StrCat(words[1], "/", words[2], "/", words[3]);
    address_ = words[4];
    return {true, "", *line};
  }
  const std::vector<std::string> parts = absl::StrSplit(*line, absl::MaxSplits(' ', 2));
  if (parts[0] != "error" || parts.size() != 3) return {false, "odd", *line};
  return {false, parts[1], parts[2]};
}

Info Player::info() {
  const Answer answer = ask("info");
  EXPECT_TRUE(answer.ok) << name_ << ": " << answer;
  Info out;
  for (absl::string_view pair : absl::StrSplit(answer.text, ' ', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(pair, absl::MaxSplits('=', 1));
    int64_t value = 0;
    if (absl::SimpleAtoi(parts.second, &value)) out[parts.first] = value;
  }
  return out;
}

bool Player::eventually(const std::function<bool(const Info&)>& wanted) {
  Info last;
  bool answers = true;
  const bool reached = integration::eventually([&] {
    last = info();
    answers = !last.empty();
    return !answers || wanted(last);
  });
  if (reached && answers) return true;
  for (const auto& [name, value] : last) std::cerr << name << "=" << value << " ";
  std::cerr << "\n";
  return false;
}

int Player::leave() {
  process_.write_line("exit");
  return process_.wait_exit().value_or(-1);
}

RelayProcess::RelayProcess(const std::string& target)
    : process_({.command = {WEFT_TEST_RELAY, target}}) {
  address_ = process_.read_line().value_or("");
  EXPECT_TRUE(absl::StartsWith(address_, "127.0.0.1:")) << address_;
}

void RelayProcess::tell(const std::string& line) {
  EXPECT_TRUE(process_.write_line(line));
  EXPECT_EQ(process_.read_line().value_or("the relay is gone"), "ok") << line;
}

int RelayProcess::accepted() {
  EXPECT_TRUE(process_.write_line("accepted"));
  int count = -1;
  EXPECT_TRUE(absl::SimpleAtoi(process_.read_line().value_or(""), &count));
  return count;
}

int64_t RelayProcess::passed(int connection, const std::string& direction) {
  EXPECT_TRUE(process_.write_line(absl::StrCat("passed ", connection, " ", direction)));
  int64_t bytes = -1;
  EXPECT_TRUE(absl::SimpleAtoi(process_.read_line().value_or(""), &bytes));
  return bytes;
}

Job::~Job() {
  if (!::testing::Test::HasFailure()) return;
  for (const auto& player : players_) {
    std::cerr << "---- " << player->name() << " logged\n"
              << tail_of(dir_.path(player->name() + ".log"));
  }
}

void Job::host_store() {
  environment["WEFT_STORE"] = absl::StrCat("tcp://127.0.0.1:", store_port_.port());
}

Player& Job::start(PlayerOptions options) {
  ProcessOptions process;
  process.command = {WEFT_TEST_WORKER, "play"};
  if (options.world_size == 0) process.command.push_back("--dynamic");
  process.command.insert(process.command.end(), options.arguments.begin(), options.arguments.end());
  process.environment = {{"WEFT_STORE", store()},
                         {"WEFT_JOB_ID", kJobId},
                         {"WEFT_NAME", options.name},
                         {"WEFT_LOG_LEVEL", "debug"}};
  if (options.world_size > 0) {
    process.environment["RANK"] = absl::StrCat(options.rank);
    process.environment["WORLD_SIZE"] = absl::StrCat(options.world_size);
  }
  for (const auto& from : {environment, options.environment}) {
    for (const auto& [name, value] : from) process.environment[name] = value;
  }
  process.error_file = dir_.path(options.name + ".log");
  players_.push_back(std::make_unique<Player>(process, options.name));
  return *players_.back();
}

void Job::start_group(int size) {
  for (int i = 0; i < size; ++i) {
    start({.name = absl::StrCat("worker", i), .rank = i, .world_size = size});
  }
  for (const auto& player : players_) {
    const Answer joined = player->joined();
    ASSERT_TRUE(joined.ok) << player->name() << ": " << joined;
  }
}

std::unique_ptr<RelayProcess> Job::start_group_with_relay(int size) {
  for (int i = 0; i < size; ++i) {
    PlayerOptions options{.name = absl::StrCat("worker", i), .rank = i, .world_size = size};
    if (i == 1) options.arguments = {"--ask-address"};
    start(options);
  }
  auto relay = relay_for(players_.at(1).get());
  expect_all_joined();
  return relay;
}

std::vector<std::unique_ptr<RelayProcess>> Job::start_group_behind_relays(int size) {
  for (int i = 0; i < size; ++i) {
    start({.name = absl::StrCat("worker", i),
           .rank = i,
           .world_size = size,
           .arguments = {"--ask-address"}});
  }
  std::vector<std::unique_ptr<RelayProcess>> relays;
  for (const auto& player : players_) relays.push_back(relay_for(player.get()));
  expect_all_joined();
  return relays;
}

std::unique_ptr<RelayProcess> Job::relay_for(Player* player) {
  const std::string listening = player->process().read_line().value_or("");
  EXPECT_TRUE(absl::StartsWith(listening, "listening ")) << listening;
  auto relay = std::make_unique<RelayProcess>(listening.substr(listening.find(' ') + 1));
  player->say(relay->address());
  return relay;
}

void Job::expect_all_joined() {
  for (const auto& player : players_) {
    const Answer joined = player->joined();
    EXPECT_TRUE(joined.ok) << player->name() << ": " << joined;
  }
}

std::vector<std::string> Job::keys(const std::string& prefix) {
  const auto store =
      FileStore::open(path("store"), {.run_id = kJobId, .timeout = {}}, make_system_runtime());
  EXPECT_TRUE(store.ok()) << store.status();
  if (!store.ok()) return {};
  const auto keys = (*store)->list_keys(absl::StrCat("weft/", kJobId, "/", prefix));
  EXPECT_TRUE(keys.ok()) << keys.status();
  return keys.ok() ? *keys : std::vector<std::string>();
}

void Job::shut_down() {
  for (const auto& player : players_) player->say("shutdown");
  for (const auto& player : players_) {
    const Answer answer = player->answer();
    EXPECT_TRUE(answer.ok) << player->name() << ": " << answer;
  }
  for (const auto& player : players_) {
    const Info info = player->info();
    for (const char* zero :
         {"calls_pending", "handlers_running", "deadlines", "receive_bytes", "connections"}) {
      const auto it = info.find(zero);
      EXPECT_TRUE(it != info.end() && it->second == 0) << player->name() << ": " << zero;
    }
  }
  // Together: who hosts the store waits for the others to let go of it.
  for (const auto& player : players_) player->say("exit");
  for (const auto& player : players_) EXPECT_EQ(player->leave(), 0) << player->name();
}

void expect_works(Job* job, size_t from, size_t to) {
  const Answer answer =
      (*job)[from].ask(absl::StrCat("call ", (*job)[to].name(), " bump 4711 60000 0"));
  EXPECT_TRUE(answer.ok) << from << " to " << to << ": " << answer;
}

void expect_told_of_death(Player* player, const std::string& who) {
  EXPECT_TRUE(player->eventually([player, &who](const Info&) {
    return player->ask("events").text.find("died:" + who) != std::string::npos;
  })) << player->name();
}

void expect_no_rrefs(Player* player) {
  EXPECT_TRUE(player->eventually([](const Info& info) {
    int64_t left = 0;
    for (const char* name :
         {"rref_owners", "rref_forks", "rref_users", "rref_pending_users", "rref_pending_children",
          "rref_parked_uses", "rref_arrivals", "rref_unacknowledged", "rref_values"}) {
      left += info.at(name);
    }
    return left == 0;
  })) << player->name();
  EXPECT_EQ(player->info().at("rref_faults"), 0) << player->name();
}

}  // namespace weft::integration
