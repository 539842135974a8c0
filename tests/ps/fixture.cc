#include "weft/tests/ps/fixture.h"

#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "torch/types.h"

namespace weft::testing {

PsJob::PsJob(int server_count, int client_count, Net net, std::shared_ptr<Runtime> runtime,
             std::function<void(int index, JoinOptions*)> adjust) {
  ClusterOptions o;
  o.size = server_count + client_count;
  o.net = net;
  o.runtime = std::move(runtime);
  for (int i = 0; i < server_count; ++i) server_names.push_back(absl::StrCat("ps", i));
  o.names = server_names;
  for (int i = 0; i < client_count; ++i) o.names.push_back(absl::StrCat("c", i));
  o.adjust = [adjust = std::move(adjust)](int index, JoinOptions* join) {
    join->services.push_back(ps_service());
    if (adjust != nullptr) adjust(index, join);
  };
  cluster = std::make_unique<Cluster>(std::move(o));
  for (int i = 0; i < server_count; ++i) servers.push_back(std::make_unique<ps::Server>(server(i)));
  for (int i = 0; i < client_count; ++i) {
    clients.emplace_back(worker(i), ps::ClientOptions{.servers = server_names});
  }
}

PsJob::~PsJob() { cluster->shutdown(); }

ps::internal::PartReport PsJob::report(int i, const std::string& table) {
  return ps::internal::PsService::of(server(i))->reports()[table];
}

PsTest::PsTest() { at::set_num_threads(1); }

uint64_t in_simulation(uint64_t seed,
                       const std::function<void(std::shared_ptr<SimRuntime>)>& body) {
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed});
  const Status ended = sim->run([&] { body(sim); });
  EXPECT_TRUE(ended.ok()) << "seed " << seed << ": " << ended;
  return sim->trace_hash();
}

void side_by_side(Runtime& runtime, std::vector<std::function<void()>> bodies) {
  std::vector<std::unique_ptr<Thread>> threads;
  for (auto& body : bodies) threads.push_back(runtime.spawn("client", body));
}

at::Tensor keys_of(const std::vector<int64_t>& keys) { return torch::tensor(keys, torch::kLong); }

Status ps_error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.status();
  }
  return absl::OkStatus();
}

void expect_ps_error(const Status& s, ErrorKind kind, const std::vector<std::string>& words) {
  EXPECT_EQ(error_kind(s), kind) << s;
  for (const std::string& word : words) {
    EXPECT_NE(std::string(s.message()).find(word), std::string::npos) << word << " is not in " << s;
  }
}

}  // namespace weft::testing
