#ifndef WEFT_TESTS_RPC_LIBRARY_H_
#define WEFT_TESTS_RPC_LIBRARY_H_

// What the workers of these tests offer each other.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/condition.h"
#include "weft/common/future.h"
#include "weft/common/mutex.h"
#include "weft/rpc/call.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/library.h"
#include "weft/rpc/struct.h"
#include "weft/rpc/worker.h"
#include "weft/tests/testing/gate.h"

namespace weft::testing {

inline constexpr int64_t kMiB = int64_t{1} << 20;

struct Point {
  int64_t x = 0;
  double y = 0;
  std::string label{};
};
WEFT_STRUCT(Point, x, y, label);

// An object that workers call methods on.
class Counter {
 public:
  Counter() = default;
  explicit Counter(int64_t start) : value_(start) {}
  int64_t add(int64_t n);
  int64_t value() const { return value_; }
  static int64_t twice(int64_t n) { return 2 * n; }
  // Calls itself through `worker`'s peer and back: nests below its own turn.
  int64_t add_around(CallContext& context, std::string via, std::string name, int64_t n);
  int64_t most_at_once() const { return most_at_once_; }

 private:
  int64_t value_ = 0;
  std::atomic<int64_t> inside_{0};
  int64_t most_at_once_ = 0;
};

int64_t add(int64_t a, int64_t b);
double add_double(double a, double b);
at::Tensor add_tensors(at::Tensor a, at::Tensor b);
at::Tensor echo(at::Tensor x);
inline int64_t numel(const at::Tensor& x) { return x.numel(); }
std::vector<at::Tensor> echo_list(std::vector<at::Tensor> x);
using Nested = std::map<std::string, std::vector<std::pair<int64_t, std::optional<std::string>>>>;
Nested echo_nested(Nested x);
Point echo_point(Point p);
std::string echo_string(std::string s);
WorkerInfo echo_info(WorkerInfo info);
void nothing();
std::string who_calls(CallContext& context);
std::string my_name(CallContext& context);
int64_t nested_add(CallContext& context, std::string to, int64_t a, int64_t b);
// Goes `depth` hops along `ring`, synchronously, and returns the number of hops.
int64_t ring_sync(CallContext& context, std::vector<std::string> ring, int64_t depth);
Future<int64_t> ring_async(CallContext& context, std::vector<std::string> ring, int64_t depth);
int64_t throw_error(std::string what);
Future<int64_t> later_add(CallContext& context, std::string to, int64_t a, int64_t b);
Future<int64_t> fan_out(CallContext& context, std::vector<std::string> to, int64_t n);
Future<int64_t> async_raise(std::string text);
double remaining_seconds(CallContext& context);
double nested_remaining_seconds(CallContext& context, std::string to);

// Everything above as "test.*", with `gate` behind "test.wait_at_gate" and a Counter named
// "counter".
struct TestLibrary {
  explicit TestLibrary(std::shared_ptr<Runtime> runtime = make_system_runtime());
  std::shared_ptr<Gate> gate;
  std::shared_ptr<Counter> counter;
  // Handlers that saw their cancellation.
  std::shared_ptr<std::atomic<int>> cancelled;
  Library library{"test"};
};

// Registered as "test.wait_at_gate".
inline const FunctionRef<int64_t(int64_t)> kWaitAtGate{"test.wait_at_gate"};

// A call whose request may take the prompt lane; returns the answer undecoded.
template <class F, class... Args>
StatusOr<Payload> prompt_call(const Worker& from, Destination to, F&& fn, const Args&... args) {
  WEFT_ASSIGN_OR_RETURN(UntypedCall call, internal::make_call(from, CallOptions(), fn, args...));
  call.prompt = true;
  const auto promise = std::make_shared<Promise<Payload>>(executor_of(from));
  Future<Payload> future = promise->future();
  start_call(from, to, std::move(call),
             [promise](StatusOr<Payload> answer) { promise->try_set(std::move(answer)); });
  return future.try_wait();
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_RPC_LIBRARY_H_
