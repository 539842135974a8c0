#include "weft/tests/dist_autograd/fixture.h"

#include <thread>

#include "torch/autograd.h"
#include "torch/types.h"
#include "weft/common/mutex.h"

namespace weft::testing {
namespace {

class NoWayBack : public torch::autograd::Function<NoWayBack> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::out_of_range("there is no way back");
  }
};

Mutex slow_mutex;
std::shared_ptr<std::function<void()>> slow_before ABSL_GUARDED_BY(slow_mutex);

class SlowFunction : public torch::autograd::Function<SlowFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& g) {
    std::shared_ptr<std::function<void()>> before;
    {
      MutexLock lock(&slow_mutex);
      before = slow_before;
    }
    if (before != nullptr) (*before)();
    return {g[0] * 2};
  }
};

}  // namespace

at::Tensor mul(const at::Tensor& x, const at::Tensor& y) { return x * y; }
at::Tensor add(const at::Tensor& x, const at::Tensor& y) { return x + y; }
std::vector<at::Tensor> split(const at::Tensor& x, int64_t pieces) { return x.chunk(pieces); }
at::Tensor sum_all(const std::vector<at::Tensor>& list) {
  at::Tensor sum = list.at(0) * 1;
  for (size_t i = 1; i < list.size(); ++i) sum = sum + list[i] * static_cast<double>(i + 1);
  return sum;
}
at::Tensor identity(const at::Tensor& x) { return x; }
std::vector<at::Tensor> same_list(const std::vector<at::Tensor>& list) { return list; }
at::Tensor fail(const at::Tensor&) { throw std::domain_error("on purpose"); }
at::Tensor travel(CallContext& context, std::vector<std::string> path, const at::Tensor& x,
                  const at::Tensor& y) {
  at::Tensor z = x * y;
  if (path.empty()) return z;
  const std::string next = path.front();
  path.erase(path.begin());
  return rpc_sync(context.worker(), next, &travel, path, z, y) * y;
}
at::Tensor no_way_back(const at::Tensor& x) { return NoWayBack::apply(x); }
at::Tensor via_no_way_back(CallContext& context, std::vector<std::string> path,
                           const at::Tensor& x) {
  if (path.empty()) return no_way_back(x);
  const std::string next = path.front();
  path.erase(path.begin());
  return rpc_sync(context.worker(), next, &via_no_way_back, path, x * 3);
}
bool in_context(CallContext& context) {
  return current_autograd_context(context.worker()).has_value();
}

void backward_here(CallContext& context, const at::Tensor& x, const at::Tensor& y) {
  const at::Tensor there = rpc_sync(context.worker(), "worker2", &mul, x, y);
  backward(context.worker(), *current_autograd_context(context.worker()), {there.sum()});
}

SlowWayBack::SlowWayBack(std::function<void()> before) {
  MutexLock lock(&slow_mutex);
  slow_before = std::make_shared<std::function<void()>>(std::move(before));
}
SlowWayBack::~SlowWayBack() {
  MutexLock lock(&slow_mutex);
  slow_before = nullptr;
}
at::Tensor slow_way_back(const at::Tensor& x) { return SlowFunction::apply(x); }

Holder::Holder(const at::Tensor& value) : value_(value.detach().clone().set_requires_grad(true)) {}
at::Tensor Holder::times(const at::Tensor& x) const { return value_ * x; }
std::vector<at::Tensor> Holder::gradient(CallContext& context) const {
  const auto id = current_autograd_context(context.worker());
  if (!id.has_value()) return {};
  for (const auto& one : autograd_gradients(context.worker(), *id)) {
    if (one.leaf.is_same(value_)) return {one.gradient};
  }
  return {};
}

DistAutogradTest::DistAutogradTest() : library_("app") {
  library_.def("mul", &mul)
      .def("add", &add)
      .def("split", &split)
      .def("sum_all", &sum_all)
      .def("identity", &identity)
      .def("same_list", &same_list)
      .def("fail", &fail)
      .def("travel", &travel)
      .def("no_way_back", &no_way_back)
      .def("via_no_way_back", &via_no_way_back)
      .def("slow_way_back", &slow_way_back)
      .def("in_context", &in_context)
      .def("backward_here", &backward_here);
  library_.class_<Holder>("Holder")
      .constructor<const at::Tensor&>()
      .def("times", &Holder::times)
      .def("value", &Holder::value)
      .def("gradient", &Holder::gradient);
}

std::unique_ptr<Cluster> DistAutogradTest::make(AutogradOptions options) {
  ClusterOptions o;
  o.size = options.size;
  o.net = GetParam();
  o.library = library_;
  o.rpc_timeout = options.rpc_timeout;
  o.lease = options.lease;
  o.adjust = [plan = options.plan](int, JoinOptions* join) {
    join->services.push_back(rref_service());
    join->services.push_back(dist_autograd_service());
    if (plan != nullptr) join->transport = faulty_transport(join->transport, plan);
  };
  return std::make_unique<Cluster>(o);
}

at::Tensor DistAutogradTest::leaf(std::vector<double> values) {
  return torch::tensor(values, torch::dtype(torch::kFloat64)).set_requires_grad(true);
}

std::vector<at::Tensor> DistAutogradTest::local(const at::Tensor& loss,
                                                std::vector<at::Tensor> leaves) {
  return torch::autograd::grad({loss}, leaves);
}

void DistAutogradTest::expect_equal(const at::Tensor& got, const at::Tensor& want) {
  ASSERT_TRUE(want.defined());
  ASSERT_TRUE(got.defined());
  EXPECT_TRUE(torch::equal(got, want)) << got << "\n" << want;
}

void DistAutogradTest::expect_nothing_left(Cluster& c) {
  for (size_t i = 0; i < c.size(); ++i) {
    for (const char* name : {"num_autograd_contexts", "num_current_backward_passes",
                             "autograd_sends", "autograd_leaves", "autograd_releases"}) {
      eventually([&] { return counter(c[i], name) == 0; },
                 "worker" + std::to_string(i) + " has " + name);
    }
  }
}

}  // namespace weft::testing
