#ifndef WEFT_TESTS_DIST_OPTIM_FIXTURE_H_
#define WEFT_TESTS_DIST_OPTIM_FIXTURE_H_

// What the tests of distributed optimizers share: workers that list the services, a class with a
// parameter, and "nothing is left" at the end of every test.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "gtest/gtest.h"
#include "weft/common/mutex.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/service.h"
#include "weft/rpc/call.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/spi/interceptor.h"
#include "weft/rref/rref.h"
#include "weft/tests/testing/cluster.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {

// A matrix, and products with it.
class Weights {
 public:
  explicit Weights(const at::Tensor& value);
  at::Tensor forward(const at::Tensor& x) const;
  // Rows of it; sparse: with a sparse gradient.
  at::Tensor rows(const at::Tensor& ids, bool sparse) const;
  RRef<at::Tensor> parameter(CallContext& context);
  at::Tensor value() const;
  bool has_grad() const { return value_.grad().defined(); }

 private:
  at::Tensor value_;
};

// Counts the calls that its worker makes, by callee, from the thread that makes them. Calls of
// RRefs and of contexts are left out: those of what a test did before may still be on their way.
class CallCount : public Service,
                  public Interceptor,
                  public std::enable_shared_from_this<CallCount> {
 public:
  std::vector<Method> methods() override { return {}; }
  std::shared_ptr<Interceptor> interceptor() override { return shared_from_this(); }
  std::string_view key() const override { return "@call_count"; }
  bool concerns(const UntypedCall& call) const override;
  StatusOr<AttachmentPtr> attach(const WorkerInfo& to, const UntypedCall& call) override;
  void arrive(IncomingRequest& request, std::string_view metadata, Proceed proceed) override;
  // To the worker with this id.
  int64_t to(uint32_t id) const;

 private:
  mutable Mutex mutex_;
  std::map<uint32_t, int64_t> calls_ ABSL_GUARDED_BY(mutex_);
};

struct OptimCluster {
  std::unique_ptr<Cluster> cluster;
  std::shared_ptr<CallCount> calls;            // of worker 0
  std::vector<RRef<Weights>> weights;          // by worker, from 1
  std::vector<RRef<at::Tensor>> parameters{};  // of them
  Worker& operator[](size_t i) { return (*cluster)[i]; }
};

class DistOptimTest : public ::testing::TestWithParam<Net> {
 protected:
  DistOptimTest();
  // Weights of 3x3 at each worker but the first.
  OptimCluster make(int owners = 2, std::shared_ptr<FaultPlan> plan = nullptr,
                    Timeout lease = std::chrono::seconds(5));
  // sum(W2 (W1 x)), or of what there is.
  static at::Tensor loss(OptimCluster& c, const at::Tensor& x);
  static std::vector<at::Tensor> values(OptimCluster& c);
  static at::Tensor input();

  static void expect_equal(const at::Tensor& got, const at::Tensor& want);
  static void expect_close(const at::Tensor& got, const at::Tensor& want);
  static void eventually(const std::function<bool()>& what, const std::string& text);
  static Status error_of(const std::function<void()>& fn);
  static void expect_error(const Status& s, ErrorKind kind, const std::vector<std::string>& words);
  // Expects that the counter `name` is 0 at all workers, now or soon.
  static void expect_none(Cluster& c, const std::string& name);

  Library library_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_DIST_OPTIM_FIXTURE_H_
