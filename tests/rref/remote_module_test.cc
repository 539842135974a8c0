// RemoteModule: a torch::nn::Module at another worker. RPC-131 to RPC-137: what PyTorch's
// RemoteModule has.

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "ATen/Functions.h"
#include "weft/rref/remote_module.h"
#include "weft/tests/rref/fixture.h"

namespace weft::testing {
namespace {

// A module that a program writes: parameters in a submodule, a buffer, modes.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t in, int64_t out = 2)
      : layer(register_module("layer", torch::nn::Linear(in, out))),
        steps(register_buffer("steps", at::zeros({1}, at::kLong))) {}
  at::Tensor forward(const at::Tensor& x, bool twice) {
    steps.add_(1);
    const at::Tensor y = layer(x);
    return twice ? y.mul(2) : y;
  }
  int64_t count() const { return steps.item<int64_t>(); }

  torch::nn::Linear layer;
  at::Tensor steps;
};
TORCH_MODULE(Mlp);

// Two calls of meet() end only when both run at a time.
struct MeetingImpl : torch::nn::Module {
  bool meet() { return arrived.arrive_and_wait_for(2); }
  struct Arrivals {
    // False when the others have not come within 20 seconds.
    bool arrive_and_wait_for(int wanted) {
      std::unique_lock<std::mutex> lock(mutex);
      ++count;
      changed.notify_all();
      return changed.wait_for(lock, std::chrono::seconds(20), [&] { return count >= wanted; });
    }
    std::mutex mutex;
    std::condition_variable changed;
    int count = 0;
  } arrived;
};
TORCH_MODULE(Meeting);

at::Tensor apply(const RemoteModule<Mlp>& net, const at::Tensor& x) { return net.forward(x, true); }
RemoteModule<Mlp> pass_on(RemoteModule<Mlp> net) { return net; }
int64_t elements(const std::vector<RRef<at::Tensor>>& parameters) {
  int64_t n = 0;
  for (const auto& p : parameters) n += p.local_value()->numel();
  return n;
}

Library module_library() {
  Library lib("modules");
  module_<Mlp>(lib, "Mlp")
      .constructor<int64_t>()
      .constructor<int64_t, int64_t>()
      .def("forward", &MlpImpl::forward)
      .def("count", &MlpImpl::count);
  module_<torch::nn::Linear>(lib, "Linear")
      .constructor<int64_t, int64_t>()
      .def("forward", &torch::nn::LinearImpl::forward);
  module_<torch::nn::Embedding>(lib, "Embedding")
      .constructor<int64_t, int64_t>()
      .def("forward", &torch::nn::EmbeddingImpl::forward);
  module_<Meeting>(lib, "Meeting", {.concurrent = true})
      .constructor<>()
      .def("meet", &MeetingImpl::meet);
  lib.def("apply", &apply).def("pass_on", &pass_on).def("elements", &elements);
  return lib;
}

void load_into(MlpImpl* module, const StateDict& state) {
  const at::NoGradGuard no_grad;
  for (auto& entry : module->named_parameters()) entry.value().copy_(state.at(entry.key()));
}

class RemoteModuleTest : public RRefTest {
 protected:
  std::unique_ptr<Cluster> make_modules() {
    lib_.library.merge(module_library());
    return make();
  }
};

TEST_P(RemoteModuleTest, DA_57_forward_sync_and_async) {
  auto c = make_modules();
  {
    RemoteModule<Mlp> net((*c)[0], "worker1/cpu", 3);
    EXPECT_EQ(net.owner_name(), "worker1");
    EXPECT_FALSE(net.is_owner());
    EXPECT_TRUE(net);
    const at::Tensor x = at::ones({5, 3});
    const at::Tensor y = net.forward(x, false);
    EXPECT_EQ(y.sizes(), (at::IntArrayRef{5, 2}));
    // As the same module does here.
    MlpImpl local(3);
    load_into(&local, net.state_dict());
    EXPECT_TRUE(at::allclose(local.forward(x, false), y));
    EXPECT_TRUE(at::allclose(net.forward_async(x, true).wait(), y.mul(2)));
    EXPECT_EQ(net.rpc_sync(&MlpImpl::count), 2);
    EXPECT_EQ(net.rpc_async(CallOptions(), &MlpImpl::count).wait(), 2);
    // By rank, with the other constructor, and a module of LibTorch's own.
    EXPECT_EQ(RemoteModule<Mlp>((*c)[0], "rank:2", 3, 7).forward(x, false).size(1), 7);
    RemoteModule<torch::nn::Linear> linear((*c)[0], "worker2", 3, 4);
    EXPECT_EQ(linear.forward(x).size(1), 4);
    EXPECT_EQ(linear.owner_name(), "worker2");
  }
  expect_nothing_left(*c);
}

TEST_P(RemoteModuleTest, a_result_may_stay_with_the_module) {
  auto c = make_modules();
  {
    RemoteModule<Mlp> net((*c)[0], "worker1", 3);
    const at::Tensor x = at::ones({5, 3});
    const RRef<at::Tensor> y = net.remote(&MlpImpl::forward, x, true);
    EXPECT_EQ(y.owner_name(), "worker1");
    EXPECT_TRUE(at::equal(y.to_here(), net.forward(x, true)));
    EXPECT_EQ(net.remote(CallOptions(), &MlpImpl::count).to_here(), 2);
  }
  expect_nothing_left(*c);
}

// With ClassOptions, as of class_().
TEST_P(RemoteModuleTest, a_module_may_take_calls_at_a_time) {
  auto c = make_modules();
  {
    RemoteModule<Meeting> meeting((*c)[0], "worker1");
    Future<bool> first = meeting.rpc_async(&MeetingImpl::meet);
    EXPECT_TRUE(meeting.rpc_sync(&MeetingImpl::meet));
    EXPECT_TRUE(first.wait());
  }
  expect_nothing_left(*c);
}

// LibTorch writes this holder by hand: it is one that TORCH_MODULE did not make.
TEST_P(RemoteModuleTest, holders_that_no_macro_made) {
  auto c = make_modules();
  {
    RemoteModule<torch::nn::Embedding> table((*c)[0], "worker1", 4, 3);
    const at::Tensor weight = table.state_dict().at("weight");
    const at::Tensor rows = at::tensor({3, 1}, at::kLong);
    EXPECT_TRUE(at::equal(table.forward(rows), weight.index_select(0, rows)));
  }
  expect_nothing_left(*c);
}

TEST_P(RemoteModuleTest, RPC_131_remote_parameters) {
  auto c = make_modules();
  {
    const RemoteModule<Mlp> net((*c)[0], "worker1", 3);
    const std::vector<RRef<at::Tensor>> parameters = net.parameters();
    ASSERT_EQ(parameters.size(), 2u);
    for (const auto& p : parameters) EXPECT_EQ(p.owner_name(), "worker1");
    EXPECT_EQ(parameters[0].to_here().sizes(), (at::IntArrayRef{2, 3}));
    EXPECT_EQ(net.parameters(/*recurse=*/false).size(), 0u);
    // They are those of the module, not copies: what is done there to them, it sees.
    EXPECT_EQ(rpc_sync((*c)[0], 1, &elements, parameters), 2 * 3 + 2);
  }
  expect_nothing_left(*c);
}

TEST_P(RemoteModuleTest, state_goes_there_and_back) {
  auto c = make_modules();
  {
    const RemoteModule<Mlp> a((*c)[0], "worker1", 3);
    const RemoteModule<Mlp> b((*c)[0], "worker2", 3);
    const at::Tensor x = at::ones({1, 3});
    a.forward(x, false);
    const StateDict state = a.state_dict();
    ASSERT_EQ(state.size(), 3u);
    EXPECT_EQ(state.at("layer.weight").sizes(), (at::IntArrayRef{2, 3}));
    EXPECT_FALSE(state.at("layer.weight").requires_grad());
    b.load_state_dict(state);
    EXPECT_TRUE(at::equal(b.forward(x, false), a.forward(x, false)));
    EXPECT_EQ(b.rpc_sync(&MlpImpl::count), 2) << "buffers, too";

    StateDict odd = state;
    odd.erase("layer.bias");
    odd["layer.weight"] = at::ones({2, 4});
    odd["other"] = at::ones({1});
    expect_error(
        error_of([&] { b.load_state_dict(odd); }), ErrorKind::kInvalidArgument,
        {"layer.bias is missing", "layer.weight is [2, 4] and must be [2, 3]", "other is unknown"});
    EXPECT_TRUE(at::equal(b.state_dict().at("layer.weight"), state.at("layer.weight")));
    b.load_state_dict({{"layer.bias", at::zeros({2})}}, /*strict=*/false);
    EXPECT_TRUE(at::equal(b.state_dict().at("layer.bias"), at::zeros({2})));
  }
  expect_nothing_left(*c);
}

TEST_P(RemoteModuleTest, RPC_133_train_eval_and_gradients_and_devices) {
  auto c = make_modules();
  {
    const RemoteModule<Mlp> net((*c)[0], "worker1", 3);
    EXPECT_TRUE(net.is_training());
    net.eval();
    EXPECT_FALSE(net.is_training());
    net.train();
    EXPECT_TRUE(net.is_training());
    net.zero_grad();
    net.to("cpu");
    expect_error(error_of([&] { net.to("nonsense"); }), ErrorKind::kUser, {"nonsense"});
    // At its worker it is an ordinary module.
    expect_error(error_of([&] { net.local_value(); }), ErrorKind::kState, {"worker1"});
    const RemoteModule<Mlp> mine((*c)[0], "worker0", 3);
    EXPECT_EQ(mine.local_value()->parameters().size(), 2u);
  }
  expect_nothing_left(*c);
}

TEST_P(RemoteModuleTest, RPC_135_send_remote_module_over_the_wire) {
  auto c = make_modules();
  {
    const RemoteModule<Mlp> net((*c)[0], "worker1", 3);
    const at::Tensor x = at::ones({2, 3});
    const at::Tensor y = net.forward(x, true);
    EXPECT_TRUE(at::equal(rpc_sync((*c)[0], 2, &apply, net, x), y)) << "used by a third worker";
    EXPECT_TRUE(at::equal(rpc_sync((*c)[0], 1, &apply, net, x), y)) << "used where it lives";
    EXPECT_EQ(rpc_sync((*c)[0], 2, &pass_on, net), net);
  }
  expect_nothing_left(*c);
}

TEST_P(RemoteModuleTest, RPC_137_invalid_placements_and_what_else_is_wrong) {
  auto c = make_modules();
  {
    for (const char* bad : {"", "/cpu", "worker1/nonsense", "rank:x/cpu", "rank:-1", "worker1/"}) {
      expect_error(error_of([&] { RemoteModule<Mlp>((*c)[0], bad, 3); }),
                   ErrorKind::kInvalidArgument, {std::string("'") + bad + "'"});
    }
    EXPECT_FALSE(error_of([&] { RemoteModule<Mlp>((*c)[0], "nobody", 3); }).ok());
    const RemoteModule<Mlp> none;
    expect_error(error_of([&] { none.forward(at::ones({1, 3}), true); }), ErrorKind::kState, {});
    // When a constructor fails, each use has the error.
    const RemoteModule<Mlp> failed((*c)[0], "worker1", int64_t{-1});
    EXPECT_FALSE(error_of([&] { failed.forward(at::ones({1, 3}), true); }).ok());
    EXPECT_FALSE(error_of([&] { failed.parameters(); }).ok());
  }
  expect_nothing_left(*c);
}

TEST_P(RemoteModuleTest, RPC_136_create_remote_module_from_module_rref) {
  auto c = make_modules();
  {
    const RemoteModule<Mlp> net((*c)[0], "worker1", 3);
    const RemoteModule<Mlp> same(net.rref());
    const at::Tensor x = at::ones({2, 3});
    EXPECT_TRUE(at::equal(same.forward(x, false), net.forward(x, false)));
    EXPECT_EQ(same, net);
    EXPECT_TRUE(at::equal(rpc_sync((*c)[0], 2, &apply, same, x), net.forward(x, true)));
  }
  expect_nothing_left(*c);
}

// A class that is no module does not compile (tests/compile_fail); one that its worker does not
// know is an error there.
TEST_P(RemoteModuleTest, DA_58_bad_module) {
  lib_.library.merge(module_library());
  const Library plain = RRefLibrary().library;
  ClusterOptions o{.size = 2, .net = GetParam(), .library = lib_.library};
  o.adjust = [&plain](int i, JoinOptions* j) {
    if (i == 1) j->library = plain;
    j->services.push_back(rref_service());
  };
  Cluster c(std::move(o));
  {
    const RemoteModule<Mlp> unknown(c[0], "worker1", 3);
    expect_error(error_of([&] {
                   unknown.forward(at::ones({1, 3}), true);
                 }),
                 ErrorKind::kNotFound, {"modules.Mlp"});
    expect_error(error_of([&] { RemoteModule<Mlp>(c[1], "worker0", 3); }), ErrorKind::kNotFound,
                 {"not registered"});
  }
  expect_nothing_left(c);
}

// What a module has and a remote one cannot have is not there; the compiler says so.
template <class T>
concept HasLocalMethods = requires(T t) {
  t.register_buffer("name", at::Tensor());
}
|| requires(T t) { t.register_parameter("name", at::Tensor()); }
|| requires(T t) { t.named_children(); }
|| requires(T t) {
  t.apply([](torch::nn::Module&) {});
};

TEST_P(RemoteModuleTest, RPC_134_unsupported_methods) {
  static_assert(HasLocalMethods<MlpImpl>);
  static_assert(!HasLocalMethods<RemoteModule<Mlp>>);
  // A method that is not registered is an error at the call.
  auto c = make_modules();
  {
    const RemoteModule<Mlp> net((*c)[0], "worker1", 3);
    expect_error(error_of([&] { net.rpc_sync(&torch::nn::Module::is_training); }),
                 ErrorKind::kNotFound, {});
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, RemoteModuleTest, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
