// Hogwild: parameters that threads and workers of one host update in place.

#include <sys/resource.h>

#include <csignal>

#include "absl/strings/str_cat.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"
#include "weft/dist_optim/optim.h"
#include "weft/ps/hogwild.h"
#include "weft/ps/internal/shared_memory.h"
#include "weft/tests/ps/fixture.h"

namespace weft::testing {
namespace {

using ps::Hogwild;
using ps::NamedParameter;
using ps::share_memory;
using ps::SharedMemory;
using ps::try_share_memory;
using namespace std::chrono_literals;  // NOLINT

const auto kPlainSgd = ps::rule<optim::SGD>({.lr = 1});

// A gradient of a matrix of `rows` x 16: 1 in this row, and no others.
at::Tensor one_row(int64_t rows, int64_t row) {
  return torch::sparse_coo_tensor(torch::full({1, 1}, row, torch::kLong),
                                  torch::full({1, 16}, -1.0), {rows, 16});
}

TEST_F(PsTest, HogwildWorkersOfAHostHaveOneMemory) {
  PsJob job(1, 3);
  torch::nn::Linear first(5, 3), second(5, 3), third(5, 3);
  const at::Tensor before = first->weight.detach().clone();
  const at::Tensor same_tensor = second->weight;
  const SharedMemory memory = share_memory(job.worker(0), *first, {.name = "net"});
  const SharedMemory there = share_memory(job.worker(1), *second, {.name = "net", .owner = "c0"});
  // Another module of the owner's own process.
  const SharedMemory here = share_memory(job.worker(0), *third, {.name = "net", .owner = "c0"});
  EXPECT_TRUE(torch::equal(first->weight, before));
  for (const auto& net : {second, third}) {
    EXPECT_TRUE(torch::equal(net->weight, first->weight));
    EXPECT_TRUE(torch::equal(net->bias, first->bias));
  }
  EXPECT_TRUE(same_tensor.is_same(second->weight));
  EXPECT_EQ(there.owner(), "c0");
  EXPECT_EQ(there.bytes(), 4096);

  const Hogwild table(memory, kPlainSgd);
  const Hogwild other(there, kPlainSgd);
  second->forward(torch::ones({1, 5})).sum().backward();
  EXPECT_EQ(other.push_grads(), 0);
  EXPECT_EQ(table.push({torch::ones({3, 5}), {}}), 1);
  EXPECT_TRUE(torch::equal(first->weight, before - 1 - 1));
  EXPECT_TRUE(torch::equal(second->weight, first->weight));
  EXPECT_TRUE(torch::equal(third->bias, second->bias));
  EXPECT_EQ(here.updates(), 2);
}

// Whatever the order in which they come: the later one finds the values, the earlier one waits.
TEST_F(PsTest, HogwildWaitsForTheOwner) {
  in_simulation(5, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 2, Net::kInproc, sim);
    torch::nn::Linear first(2, 2), second(2, 2);
    side_by_side(*sim, {[&] {
                          sim->sleep(absl::Seconds(5));
                          const SharedMemory memory = share_memory(job.worker(0), *first);
                          sim->sleep(absl::Seconds(5));
                        },
                        [&] {
                          const SharedMemory memory =
                              share_memory(job.worker(1), *second, {.owner = "c0"});
                          EXPECT_TRUE(torch::equal(first->weight, second->weight));
                        }});
  });
}

TEST_F(PsTest, HogwildLosesNoUpdateOfRowsThatOthersLeaveAlone) {
  constexpr int kThreads = 4;
  constexpr int kPushes = 500;
  PsJob job(1, kThreads);
  std::vector<at::Tensor> matrices;
  std::vector<SharedMemory> memories;
  for (int t = 0; t < kThreads; ++t) {
    matrices.push_back(torch::zeros({kThreads, 16}));
    memories.push_back(
        share_memory(job.worker(t), {{"m", matrices.back()}}, {.owner = t == 0 ? "" : "c0"}));
  }
  std::vector<std::function<void()>> bodies;
  for (int t = 0; t < kThreads; ++t) {
    bodies.push_back([&, t] {
      const Hogwild table(memories[static_cast<size_t>(t)], kPlainSgd);
      for (int i = 0; i < kPushes; ++i) table.push({one_row(kThreads, t)});
    });
  }
  side_by_side(*make_system_runtime(), bodies);
  EXPECT_TRUE(torch::equal(matrices[1], torch::full({kThreads, 16}, double{kPushes})));
  EXPECT_EQ(memories[0].updates(), kThreads * kPushes);
}

// One thread alone computes what LibTorch's optimizers do.
TEST_F(PsTest, HogwildOfOneThreadIsTheRuleItself) {
  const at::Tensor start = torch::rand({7, 3});
  const auto run = [&](auto& optimizer, const at::Tensor& expected, const Hogwild& table) {
    for (int step = 0; step < 5; ++step) {
      const at::Tensor gradient = torch::rand({7, 3}) - 0.5;
      expected.mutable_grad() = gradient.clone();
      optimizer.step();
      EXPECT_EQ(table.push({gradient}), step);
    }
  };
  {
    at::Tensor expected = start.clone().requires_grad_(), ours = start.clone().requires_grad_();
    torch::optim::SGD sgd({expected}, torch::optim::SGDOptions(0.1).momentum(0.9));
    run(sgd, expected, Hogwild({ours}, ps::rule<optim::SGD>({.lr = 0.1, .momentum = 0.9})));
    EXPECT_TRUE(torch::allclose(ours, expected, 1e-6, 1e-6));
  }
  {
    at::Tensor expected = start.clone().requires_grad_(), ours = start.clone().requires_grad_();
    torch::optim::AdamW adam({expected}, torch::optim::AdamWOptions(0.1));
    run(adam, expected, Hogwild({ours}, ps::rule<optim::AdamW>({.lr = 0.1})));
    EXPECT_TRUE(torch::allclose(ours, expected, 1e-6, 1e-6));
  }
}

// A rate of its own, and a backward that has read the values before another thread's update.
TEST_F(PsTest, HogwildDoesNotDisturbABackwardUnderWay) {
  const at::Tensor weight = torch::ones({3}).requires_grad_();
  const Hogwild table({weight}, kPlainSgd);
  const at::Tensor loss = (weight * weight).sum();
  table.push({torch::full({3}, 2.0)}, 0.25);
  EXPECT_TRUE(torch::equal(weight, torch::full({3}, 0.5)));
  loss.backward();  // of the values that are there now: no error of a changed version
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({3}, 1.0)));
}

TEST_F(PsTest, HogwildGoesOnWithoutItsOwner) {
  PsJob job(1, 3);
  torch::nn::Linear first(2, 2), second(2, 2), third(2, 2);
  auto memory = std::make_optional(share_memory(job.worker(0), *first));
  const SharedMemory there = share_memory(job.worker(1), *second, {.owner = "c0"});
  memory.reset();
  // It is not shared any more; a worker that has it goes on, and the owner may share another of its name.
  expect_ps_error(
      try_share_memory(job.worker(2), {{"w", third->weight}}, {.owner = "c0", .deadline = 50ms})
          .status(),
      ErrorKind::kDeadline, {"'module'", "'c0'", "it shares nothing"});
  const SharedMemory anew = share_memory(job.worker(0), *third);
  Hogwild(there, kPlainSgd).push({torch::ones({2, 2}), torch::ones({2})});
  EXPECT_TRUE(torch::equal(first->weight, second->weight));
  (void)job.worker(0).shutdown({.graceful = false});
  EXPECT_TRUE(torch::equal(first->bias, second->bias));
  job.cluster->shutdown_all({.graceful = false});
  job.cluster->forget();
}

// ---- bad input ---------------------------------------------------------------------------------

TEST(PsSharedMemories, KeepNothingOfMemoryThatIsGone) {
  ps::internal::SharedMemories memories;
  for (int i = 0; i < 100; ++i) {
    const auto region = std::make_shared<ps::internal::SharedRegion>();
    region->name = absl::StrCat("net", i);
    region->file = value_or_throw(weft::internal::MemoryFile::make(4096));
    ASSERT_TRUE(memories.offer("c0", region).ok());
    EXPECT_TRUE(memories.has(region->file->data()));
    EXPECT_EQ(memories.kept(), 2);
  }
}

Status share_error(const Worker& worker, const std::vector<NamedParameter>& parameters,
                   const ps::ShareOptions& options = {}) {
  return try_share_memory(worker, parameters, options).status();
}

TEST_F(PsTest, BadInput_parameters_that_cannot_be_shared) {
  PsJob job(1, 1);
  const Worker& worker = job.worker(0);
  const auto refuse = [&](std::vector<NamedParameter> parameters,
                          const std::vector<std::string>& words) {
    const at::Tensor good = torch::ones({3});
    const void* const before = good.const_data_ptr();
    parameters.insert(parameters.begin(), {"good", good});
    expect_ps_error(share_error(worker, parameters), ErrorKind::kInvalidArgument, words);
    EXPECT_EQ(good.const_data_ptr(), before);
  };
  expect_ps_error(share_error(worker, {}), ErrorKind::kInvalidArgument, {"no parameters"});
  refuse({{"w", {}}}, {"'w' is undefined"});
  refuse({{"w", one_row(3, 1)}}, {"'w' is sparse"});
  refuse({{"w", torch::ones({3}, torch::kLong)}}, {"'w' is", "not Float or Double"});
  refuse({{"w", torch::ones({3, 2}).t()}}, {"'w' is not contiguous"});
  refuse({{"w", torch::ones({3, 2}).requires_grad_() * 2}}, {"'w' is no leaf"});
  refuse({{"w", torch::ones({3, 2})[1]}}, {"'w' is a view of 8 bytes of 24"});
  const at::Tensor tied = torch::ones({3, 2});
  refuse({{"w", tied}, {"v", tied.view({6})}}, {"'v' shares its memory with 'w'"});
  refuse({{"w", at::_efficientzerotensor({3})}}, {"'w' is not contiguous"});
  expect_ps_error(share_error(worker, {{"w", torch::ones({3})}}, {.name = "a b"}),
                  ErrorKind::kInvalidArgument, {"'a b'"});
  const at::Tensor shared = torch::ones({3});
  const SharedMemory memory = share_memory(worker, {{"w", shared}});
  refuse({{"w", shared}}, {"'w' lies in shared memory already"});
}

TEST_F(PsTest, BadInput_the_same_name_shared_again) {
  PsJob job(1, 1);
  const at::Tensor one = torch::ones({3}), two = torch::zeros({3});
  const void* const before = two.const_data_ptr();
  const SharedMemory memory = share_memory(job.worker(0), {{"w", one}});
  expect_ps_error(share_error(job.worker(0), {{"w", two}}), ErrorKind::kState,
                  {"'c0' shares a 'module' already"});
  EXPECT_EQ(two.const_data_ptr(), before);
}

TEST_F(PsTest, BadInput_another_module_than_the_one_that_is_shared) {
  PsJob job(1, 2);
  const SharedMemory memory =
      share_memory(job.worker(0), {{"a", torch::ones({3})}, {"b", torch::ones({2, 2})}});
  const at::Tensor a = torch::zeros({3}), b = torch::zeros({2, 2});
  const void* const before = a.const_data_ptr();
  const ps::ShareOptions from{.owner = "c0"};
  const auto refuse = [&](const std::vector<NamedParameter>& parameters, const std::string& word) {
    expect_ps_error(share_error(job.worker(1), parameters, from), ErrorKind::kInvalidArgument,
                    {"'module' of 'c0'", word});
    EXPECT_EQ(a.const_data_ptr(), before);
  };
  refuse({{"a", a}}, "there are 2 parameters there and 1 here");
  refuse({{"a", a}, {"c", b}}, "parameter 1 is 'b' Float [2, 2] there and 'c' Float [2, 2] here");
  refuse({{"a", a}, {"b", b.view({4})}}, "'b' Float [4] here");
  refuse({{"a", a}, {"b", b.to(torch::kDouble)}}, "'b' Double [2, 2] here");
  const SharedMemory there = share_memory(job.worker(1), {{"a", a}, {"b", b}}, from);
  EXPECT_TRUE(torch::equal(a, torch::ones({3})));
}

TEST_F(PsTest, BadInput_a_module_that_no_worker_shares) {
  in_simulation(3, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 2, Net::kInproc, sim);
    const SharedMemory memory =
        share_memory(job.worker(0), {{"a", torch::ones({3})}}, {.name = "other"});
    expect_ps_error(share_error(job.worker(1), {{"a", torch::ones({3})}}, {.owner = "c0"}),
                    ErrorKind::kDeadline,
                    {"'module' of 'c0' was not there in 1m", "it shares other"});
    expect_ps_error(share_error(job.worker(1), {{"a", torch::ones({3})}}, {.owner = "c7"}),
                    ErrorKind::kDeadline, {"'c7'"});
    (void)job.worker(0).shutdown({.graceful = false});
    expect_ps_error(
        share_error(job.worker(1), {{"a", torch::ones({3})}}, {.name = "other", .owner = "c0"}),
        ErrorKind::kPeerLost, {"'c0'"});
    job.cluster->shutdown_all({.graceful = false});
    job.cluster->forget();
  });
}

// Where ordinary memory would do for a tensor that is sent, it does not here.
TEST_F(PsTest, BadInput_no_memory_to_share) {
  PsJob job(1, 1);
  const at::Tensor w = torch::ones({1 << 20});
  const void* const before = w.const_data_ptr();
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small = {1 << 20, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status refused = share_error(job.worker(0), {{"w", w}});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  expect_ps_error(refused, ErrorKind::kResource, {"'module', 4198400 bytes", "no memory to share"});
  EXPECT_EQ(w.const_data_ptr(), before);
  const SharedMemory memory = share_memory(job.worker(0), {{"w", w}});
}

TEST_F(PsTest, BadInput_a_worker_of_another_host_that_wants_shared_memory) {
  PsJob job(1, 1);
  const SharedMemory memory = share_memory(job.worker(0), {{"w", torch::ones({3})}});
  auto& shared = ps::internal::PsService::of(job.worker(0))->shared();
  const ps::internal::ShareRequest request{"module", std::string(16, 'a'), std::string(16, 'b')};
  // As it is for a name in another network namespace: none listens there.
  expect_ps_error(shared.answer("c0", "far", encode(request)).status(), ErrorKind::kUnavailable,
                  {"'far' runs on another host than 'c0'"});
  // What is no request.
  expect_ps_error(shared.answer("c0", "far", "\xff").status(), ErrorKind::kProtocol, {});
  for (const ps::internal::ShareRequest& one :
       {ps::internal::ShareRequest{"module", "short", std::string(16, 'b')},
        ps::internal::ShareRequest{"module", std::string(16, 'a'), ""},
        ps::internal::ShareRequest{"", std::string(16, 'a'), std::string(16, 'b')}}) {
    expect_ps_error(shared.answer("c0", "far", encode(one)).status(), ErrorKind::kProtocol, {});
  }
}

TEST_F(PsTest, BadInput_gradients_and_rules_of_hogwild) {
  const auto refuse_rule = [](std::vector<at::Tensor> parameters, const ps::RuleChoice& rule,
                              const std::string& word) {
    expect_ps_error(ps_error_of([&] { Hogwild(parameters, rule); }), ErrorKind::kInvalidArgument,
                    {word});
  };
  refuse_rule({}, kPlainSgd, "no parameters");
  refuse_rule({torch::ones({3})}, {"Sgd", {}}, "'Sgd'");
  refuse_rule({torch::ones({3})}, ps::rule<optim::SGD>({.lr = -1}), "lr");
  refuse_rule({torch::ones({3}), torch::ones({3}, torch::kHalf)}, kPlainSgd, "parameter 1 is");
  refuse_rule({at::Tensor()}, kPlainSgd, "parameter 0 is undefined");
  refuse_rule({one_row(3, 1)}, kPlainSgd, "parameter 0 is sparse");
  refuse_rule({torch::ones({3}).requires_grad_() * 2}, kPlainSgd, "parameter 0 is no leaf");

  const at::Tensor w = torch::zeros({3, 16}), b = torch::zeros({2});
  const Hogwild table({w, b}, kPlainSgd);
  const at::Tensor good = torch::ones({3, 16});
  const auto refuse = [&](const std::vector<at::Tensor>& gradients, const std::string& word,
                          std::optional<double> rate = {}) {
    expect_ps_error(table.try_push(gradients, rate).status(), ErrorKind::kInvalidArgument, {word});
    EXPECT_EQ(w.count_nonzero().item<int64_t>(), 0);
    EXPECT_EQ(table.updates(), 0);
  };
  refuse({good}, "1 gradients for 2 parameters");
  refuse({good, torch::ones({3})}, "parameter 1: its gradient is");
  refuse({good, torch::ones({2}, torch::kDouble)}, "parameter 1");
  refuse({good, torch::full({2}, NAN)}, "parameter 1");
  refuse({one_row(3, 1) * INFINITY, {}}, "parameter 0");
  refuse({good, {}}, "lr", -2.0);
  const Hogwild decayed({torch::zeros({3, 16})}, ps::rule<optim::Adam>({.lr = 1}));
  expect_ps_error(decayed.try_push({one_row(3, 1)}).status(), ErrorKind::kInvalidArgument,
                  {"parameter 0"});
}

}  // namespace
}  // namespace weft::testing
