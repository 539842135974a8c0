#ifndef WEFT_TESTS_DIST_AUTOGRAD_FIXTURE_H_
#define WEFT_TESTS_DIST_AUTOGRAD_FIXTURE_H_

// What the tests of distributed autograd share: workers that list the service, functions through
// which gradients flow, and "nothing is left" at the end of every test.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "gtest/gtest.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/rpc/call.h"
#include "weft/rpc/containers.h"
#include "weft/rref/rref.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/gate.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {

at::Tensor mul(const at::Tensor& x, const at::Tensor& y);
at::Tensor add(const at::Tensor& x, const at::Tensor& y);
std::vector<at::Tensor> split(const at::Tensor& x, int64_t pieces);
at::Tensor sum_all(const std::vector<at::Tensor>& list);
at::Tensor identity(const at::Tensor& x);
std::vector<at::Tensor> same_list(const std::vector<at::Tensor>& list);
at::Tensor fail(const at::Tensor& x);
// x * y, passed on along `path` and back, once more multiplied by y at each worker.
at::Tensor travel(CallContext& context, std::vector<std::string> path, const at::Tensor& x,
                  const at::Tensor& y);
// As its result, but its gradient cannot be computed.
at::Tensor no_way_back(const at::Tensor& x);
at::Tensor via_no_way_back(CallContext& context, std::vector<std::string> path,
                           const at::Tensor& x);
bool in_context(CallContext& context);
// A backward of the caller's context, from x * y as worker 2 computes it.
void backward_here(CallContext& context, const at::Tensor& x, const at::Tensor& y);
// Doubles; its backward first does what `before` says, until the guard ends.
class SlowWayBack {
 public:
  explicit SlowWayBack(std::function<void()> before);
  ~SlowWayBack();
};
at::Tensor slow_way_back(const at::Tensor& x);
// Its backward waits until open(), at the latest until the end of this.
class StuckWayBack {
 public:
  ~StuckWayBack() { open(); }
  void wait_reached() { gate_->wait_arrived(1); }
  void open() { gate_->open(); }

 private:
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>(make_system_runtime());
  const SlowWayBack slow_{[gate = gate_] { gate->arrive_and_wait(); }};
};

// A parameter at its owner.
class Holder {
 public:
  explicit Holder(const at::Tensor& value);
  at::Tensor times(const at::Tensor& x) const;
  at::Tensor value() const { return value_; }
  // In the context of the call; undefined is sent as an empty list.
  std::vector<at::Tensor> gradient(CallContext& context) const;

 private:
  at::Tensor value_;
};

struct AutogradOptions {
  int size = 3;
  Timeout rpc_timeout{};
  std::shared_ptr<FaultPlan> plan{};
  Timeout lease = std::chrono::seconds(5);
};

class DistAutogradTest : public ::testing::TestWithParam<Net> {
 protected:
  DistAutogradTest();
  std::unique_ptr<Cluster> make(AutogradOptions options = {});

  static at::Tensor leaf(std::vector<double> values);
  // The gradients of plain backward() of the same sum.
  static std::vector<at::Tensor> local(const at::Tensor& loss, std::vector<at::Tensor> leaves);
  static void expect_equal(const at::Tensor& got, const at::Tensor& want);
  // No context and no pass at any worker, now or soon.
  static void expect_nothing_left(Cluster& c);

  Library library_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_DIST_AUTOGRAD_FIXTURE_H_
