#include "weft/tests/dist_optim/fixture.h"

#include <torch/nn/functional/embedding.h>
#include <torch/types.h>

#include <thread>

#include "absl/strings/match.h"

namespace weft::testing {

Weights::Weights(const at::Tensor& value) : value_(value.clone().set_requires_grad(true)) {}
at::Tensor Weights::forward(const at::Tensor& x) const { return at::matmul(value_, x); }
at::Tensor Weights::rows(const at::Tensor& ids, bool sparse) const {
  return at::embedding(value_, ids, -1, false, sparse);
}
RRef<at::Tensor> Weights::parameter(CallContext& context) {
  return RRef<at::Tensor>::local(context.worker(), value_);
}
at::Tensor Weights::value() const { return value_.detach().clone(); }

DistOptimTest::DistOptimTest() : library_("app") {
  library_.class_<Weights>("Weights")
      .constructor<const at::Tensor&>()
      .def("forward", &Weights::forward)
      .def("rows", &Weights::rows)
      .def("parameter", &Weights::parameter)
      .def("value", &Weights::value)
      .def("has_grad", &Weights::has_grad);
  library_.merge(dist_optim_library());
}

bool CallCount::concerns(const UntypedCall& call) const {
  return !absl::StartsWith(call.method, "@rref") &&
         !absl::StartsWith(call.method, "@dist_autograd");
}
StatusOr<AttachmentPtr> CallCount::attach(const WorkerInfo& to, const UntypedCall& call) {
  MutexLock lock(&mutex_);
  if (concerns(call)) ++calls_[to.id];
  return AttachmentPtr();
}
void CallCount::arrive(IncomingRequest&, std::string_view, Proceed proceed) {
  proceed(absl::OkStatus());
}
int64_t CallCount::to(uint32_t id) const {
  MutexLock lock(&mutex_);
  const auto it = calls_.find(id);
  return it == calls_.end() ? 0 : it->second;
}

OptimCluster DistOptimTest::make(int owners, std::shared_ptr<FaultPlan> plan, Timeout lease) {
  ClusterOptions o;
  o.size = owners + 1;
  o.net = GetParam();
  o.library = library_;
  o.lease = lease;
  const auto calls = std::make_shared<CallCount>();
  o.adjust = [plan, calls](int index, JoinOptions* join) {
    if (index == 0) join->services.push_back([calls](const ServiceContext&) { return calls; });
    join->services.push_back(rref_service());
    join->services.push_back(dist_autograd_service());
    join->services.push_back(dist_optim_service());
    if (plan != nullptr) join->transport = faulty_transport(join->transport, plan);
  };
  OptimCluster c{std::make_unique<Cluster>(o), calls, {}, {}};
  for (int i = 1; i <= owners; ++i) {
    const at::Tensor start = at::linspace(-1, 1, 9, torch::kFloat64).reshape({3, 3}) * i;
    c.weights.push_back(remote<Weights>(c[0], i, start));
    c.parameters.push_back(c.weights.back().rpc_sync(&Weights::parameter));
  }
  return c;
}

at::Tensor DistOptimTest::input() { return torch::tensor({0.5, -2.0, 1.0}, torch::kFloat64); }

at::Tensor DistOptimTest::loss(OptimCluster& c, const at::Tensor& x) {
  at::Tensor y = x;
  for (const RRef<Weights>& w : c.weights) y = w.rpc_sync(&Weights::forward, y);
  return y.sum();
}

std::vector<at::Tensor> DistOptimTest::values(OptimCluster& c) {
  std::vector<at::Tensor> out;
  for (const RRef<Weights>& w : c.weights) out.push_back(w.rpc_sync(&Weights::value));
  return out;
}

void DistOptimTest::expect_equal(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_TRUE(torch::equal(got, want)) << got << "\n" << want;
}
void DistOptimTest::expect_close(const at::Tensor& got, const at::Tensor& want) {
  const double largest = want.abs().max().item<double>();
  EXPECT_LE((got - want).abs().max().item<double>(), 1e-12 * largest) << got << "\n" << want;
}

void DistOptimTest::eventually(const std::function<bool()>& what, const std::string& text) {
  const auto runtime = make_system_runtime();
  const absl::Time end = runtime->now() + absl::Seconds(20);
  while (!what()) {
    ASSERT_LT(runtime->now(), end) << text;
    std::this_thread::yield();
  }
}

Status DistOptimTest::error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.status();
  }
  return absl::OkStatus();
}

void DistOptimTest::expect_error(const Status& s, ErrorKind kind,
                                 const std::vector<std::string>& words) {
  EXPECT_EQ(error_kind(s), kind) << s;
  for (const std::string& word : words) {
    EXPECT_NE(std::string(s.message()).find(word), std::string::npos) << s << "\nlacks " << word;
  }
}

void DistOptimTest::expect_none(Cluster& c, const std::string& name) {
  for (size_t i = 0; i < c.size(); ++i) {
    eventually([&] { return counter(c[i], name) == 0; },
               "worker" + std::to_string(i) + " has " + name);
  }
}

}  // namespace weft::testing
