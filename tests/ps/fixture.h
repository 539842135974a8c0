#ifndef WEFT_TESTS_PS_FIXTURE_H_
#define WEFT_TESTS_PS_FIXTURE_H_

// What the tests of parameter servers share: a job of servers and clients, on a transport or in
// simulation.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/ps/client.h"
#include "weft/ps/internal/service.h"
#include "weft/ps/server.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {

// Workers ps0, ps1, ... with a ps::Server, then c0, c1, ... with a ps::Client.
struct PsJob {
  PsJob(int servers, int clients, Net net = Net::kInproc,
        std::shared_ptr<Runtime> runtime = nullptr,
        std::function<void(int index, JoinOptions*)> adjust = {});
  ~PsJob();

  const Worker& server(int i) { return (*cluster)[static_cast<size_t>(i)]; }
  const Worker& worker(int client) {
    return (*cluster)[static_cast<size_t>(client) + servers.size()];
  }
  ps::internal::PartReport report(int server, const std::string& table);

  std::unique_ptr<Cluster> cluster;
  std::vector<std::string> server_names;
  std::vector<std::unique_ptr<ps::Server>> servers;
  std::vector<ps::Client> clients;
};

class PsTest : public ::testing::TestWithParam<Net> {
 protected:
  PsTest();
};

// Runs `body` on a thread of a simulation, which must end well. Gives the hash of its trace.
uint64_t in_simulation(uint64_t seed, const std::function<void(std::shared_ptr<SimRuntime>)>& body);
// Several threads of the runtime, side by side, until all have ended.
void side_by_side(Runtime& runtime, std::vector<std::function<void()>> bodies);

at::Tensor keys_of(const std::vector<int64_t>& keys);
Status ps_error_of(const std::function<void()>& fn);
void expect_ps_error(const Status& s, ErrorKind kind, const std::vector<std::string>& words);

}  // namespace weft::testing

#endif  // WEFT_TESTS_PS_FIXTURE_H_
