// A pass that fails ends everywhere, wherever and however it fails: X11.

#include <thread>

#include "c10/util/Exception.h"
#include "torch/autograd.h"
#include "torch/types.h"
#include "weft/dist_autograd/internal/service.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

// What the backward of act() does before it doubles, by tag.
class Acts {
 public:
  static void set(const std::string& tag, std::function<void()> what) {
    MutexLock lock(&mutex());
    all()[tag] = std::move(what);
  }
  static void clear() {
    MutexLock lock(&mutex());
    all().clear();
  }
  static void run(const std::string& tag) {
    std::function<void()> what;
    {
      MutexLock lock(&mutex());
      const auto at = all().find(tag);
      if (at != all().end()) what = at->second;
    }
    if (what) what();
  }

 private:
  static Mutex& mutex() {
    static Mutex one;
    return one;
  }
  static std::map<std::string, std::function<void()>>& all() {
    static std::map<std::string, std::function<void()>> map;
    return map;
  }
};

class Act : public torch::autograd::Function<Act> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::string& tag) {
    context->saved_data["tag"] = tag;
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& g) {
    Acts::run(context->saved_data["tag"].toStringRef());
    return {g[0] * 2, at::Tensor()};
  }
};

at::Tensor act(const std::string& tag, const at::Tensor& x) { return Act::apply(x, tag); }
at::Tensor chain(CallContext& context, std::vector<std::string> path, const at::Tensor& x) {
  if (path.empty()) return act("end", x);
  const std::string next = path.front();
  path.erase(path.begin());
  return rpc_sync(context.worker(), next, &chain, path, act("middle", x * 2));
}

class DistAbort : public DistAutogradTest {
 protected:
  DistAbort() {
    library_.def("act", &act).def("chain", &chain);
    // A tensor of one context that is used in another.
    library_.def("keep", [this](const at::Tensor& x) {
      MutexLock lock(&mutex_);
      kept_ = x * 1;
      return int64_t{1};
    });
    library_.def("use_kept", [this](const at::Tensor& x) {
      MutexLock lock(&mutex_);
      return x * kept_;
    });
  }
  void TearDown() override {
    Acts::clear();
    MutexLock lock(&mutex_);
    kept_ = at::Tensor();
  }

  static void expect_no_pass(Cluster& c) {
    for (size_t i = 0; i < c.size(); ++i) {
      EXPECT_EQ(counter(c[i], "num_current_backward_passes"), 0) << "worker" << i;
      EXPECT_EQ(counter(c[i], "autograd_leaves"), 0) << "worker" << i;
    }
  }

 private:
  Mutex mutex_;
  at::Tensor kept_ ABSL_GUARDED_BY(mutex_);
};

struct Thrown {
  const char* what;
  std::function<void()> act;
  ErrorKind kind;
};

// At the root, in the middle, at the end; whatever is thrown. Then the fault is gone, and the same
// graph in the same context gives what it gives on one worker: nothing of the failed pass is left.
TEST_P(DistAbort, X11_a_failure_of_any_type_at_any_worker) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const Thrown all[] = {
      {"of the standard", [] { throw std::runtime_error("of the standard"); }, ErrorKind::kUser},
      {"another of it", [] { throw std::out_of_range("another of it"); }, ErrorKind::kUser},
      {"", [] { throw 42; }, ErrorKind::kUser},
      {"no such row", [] { throw Error(make_error(ErrorKind::kNotFound, "no such row")); },
       ErrorKind::kNotFound},
      {"of LibTorch", [] { TORCH_CHECK(false, "of LibTorch"); }, ErrorKind::kUser},
  };
  const std::pair<std::string, std::string> places[] = {
      {"root", "worker0"}, {"middle", "worker1"}, {"end", "worker2"}};
  for (const Thrown& thrown : all) {
    for (const auto& [tag, where] : places) {
      SCOPED_TRACE(tag + ": " + thrown.what);
      DistAutogradContext context((*c)[0]);
      const at::Tensor direct = rpc_sync((*c)[0], "worker2", &mul, x, x);
      const std::vector<std::string> path{"worker2"};
      const at::Tensor y = act("root", rpc_sync((*c)[0], "worker1", &chain, path, x));
      const at::Tensor loss = (direct + y).sum();
      Acts::set(tag, thrown.act);
      const Status failed = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
      expect_error(failed, thrown.kind, {thrown.what, "on worker '" + where + "'"});
      EXPECT_EQ(error_details(failed).origin, where);
      expect_no_pass(*c);
      EXPECT_TRUE(context.gradients().empty());
      Acts::clear();
      context.backward({loss}, {.retain_graph = true});
      expect_equal(context.gradient(x), (2 * x + 16).detach());
      context.release().wait();
    }
  }
  expect_nothing_left(*c);
}

TEST_P(DistAbort, X11_two_failures_at_once) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  for (int i = 0; i < 20; ++i) {
    DistAutogradContext context((*c)[0]);
    const at::Tensor one = rpc_sync((*c)[0], "worker1", &act, "one", x);
    const at::Tensor two = rpc_sync((*c)[0], "worker2", &act, "two", x);
    const at::Tensor loss = (one + two).sum();
    // At once; or the second when the root has thrown the first.
    const bool at_once = i % 2 == 0;
    const auto gate = std::make_shared<Gate>(make_system_runtime());
    Acts::set("one", [gate, at_once] {
      if (at_once) gate->arrive_and_wait();
      throw std::runtime_error("the one");
    });
    Acts::set("two", [gate] {
      gate->arrive_and_wait();
      throw std::runtime_error("the two");
    });
    std::thread opener([&] {
      if (!at_once) return;
      gate->wait_arrived(2);
      gate->open();
    });
    const Status failed = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
    opener.join();
    const std::string origin = error_details(failed).origin;
    const bool is_one = origin == "worker1";
    EXPECT_TRUE(is_one || (at_once && origin == "worker2")) << failed;
    expect_error(failed, ErrorKind::kUser, {is_one ? "the one" : "the two"});
    expect_no_pass(*c);
    Acts::clear();
    gate->open();
    context.backward({loss}, {.retain_graph = true});
    expect_equal(context.gradient(x), torch::full({2}, 4.0, torch::kFloat64));
    context.release().wait();
  }
  expect_nothing_left(*c);
}

// The abort was served before the message that names something to that worker.
TEST_P(DistAbort, LIVE_5_an_abort_that_overtakes_what_engages_a_worker) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = rpc_sync((*c)[0], "worker2", &mul, x, x).sum();
    UntypedCall call;
    call.method = "@dist_autograd.abort";
    call.signature = internal::kBytesSignature;
    Encoder(&call.arguments)
        .put_bytes(internal::encode(
            internal::NoticeData{{context.id(), key_of((*c)[0].info()), 1},
                                 make_error(ErrorKind::kUser, "there is no way back")}));
    Promise<void> told;
    start_call((*c)[1], "worker2", std::move(call),
               [&told](StatusOr<Payload> answer) { told.try_set(answer.status()); });
    EXPECT_TRUE(told.future().try_wait().ok());
    const Status failed = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
    expect_error(failed, ErrorKind::kUser, {"there is no way back", "worker2"});
    expect_no_pass(*c);
    context.backward({loss});
    expect_equal(context.gradient(x), (2 * x).detach());
  }
  expect_nothing_left(*c);
}

// What a worker finds while it looks for what the losses depend on.
TEST_P(DistAbort, X11_an_error_during_discovery) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const FunctionRef<int64_t(at::Tensor)> keep{"app.keep"};
  const FunctionRef<at::Tensor(at::Tensor)> use_kept{"app.use_kept"};
  {
    DistAutogradContext first((*c)[0]);
    rpc_sync((*c)[0], "worker2", keep, x);
  }
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor direct = rpc_sync((*c)[0], "worker1", &mul, x, x);
    const at::Tensor odd = rpc_sync((*c)[0], "worker2", use_kept, direct);
    const at::Tensor loss = (direct + odd).sum();
    const Status failed = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
    expect_error(failed, ErrorKind::kInvalidArgument, {"received from", "one context"});
    EXPECT_EQ(error_details(failed).origin, "worker2");
    expect_no_pass(*c);
    context.backward({direct.sum()}, {.retain_graph = true});
    expect_equal(context.gradient(x), (2 * x).detach());
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistAbort, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
