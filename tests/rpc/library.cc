#include "weft/tests/rpc/library.h"

#include <algorithm>
#include <stdexcept>

#include "ATen/TensorOperators.h"
#include "ATen/ops/ones.h"

namespace weft::testing {

int64_t Counter::add(int64_t n) {
  most_at_once_ = std::max(most_at_once_, ++inside_);
  value_ += n;
  --inside_;
  return value_;
}

int64_t Counter::add_around(CallContext& context, std::string via, std::string name, int64_t n) {
  add(n);
  return rpc_sync(context.worker(), via,
                  FunctionRef<int64_t(std::string, std::string, int64_t)>{"test.add_back"},
                  context.worker().name(), name, n);
}

int64_t add(int64_t a, int64_t b) { return a + b; }
double add_double(double a, double b) { return a + b; }
at::Tensor add_tensors(at::Tensor a, at::Tensor b) { return a + b; }
at::Tensor echo(at::Tensor x) { return x; }
std::vector<at::Tensor> echo_list(std::vector<at::Tensor> x) { return x; }
Nested echo_nested(Nested x) { return x; }
Point echo_point(Point p) { return p; }
std::string echo_string(std::string s) { return s; }
WorkerInfo echo_info(WorkerInfo info) { return info; }
void nothing() {}
std::string who_calls(CallContext& context) { return context.caller().name; }
std::string my_name(CallContext& context) { return context.worker().name(); }

int64_t nested_add(CallContext& context, std::string to, int64_t a, int64_t b) {
  return rpc_sync(context.worker(), to, &add, a, b);
}

int64_t ring_sync(CallContext& context, std::vector<std::string> ring, int64_t depth) {
  if (depth == 0) return 0;
  const std::string next = ring[static_cast<size_t>(depth) % ring.size()];
  return 1 + rpc_sync(context.worker(), next, &ring_sync, ring, depth - 1);
}

Future<int64_t> ring_async(CallContext& context, std::vector<std::string> ring, int64_t depth) {
  if (depth == 0) co_return 0;
  const std::string next = ring[static_cast<size_t>(depth) % ring.size()];
  Future<int64_t> rest = rpc_async(context.worker(), next, &ring_async, ring, depth - 1);
  const int64_t hops = co_await rest;
  co_return hops + 1;
}

int64_t throw_error(std::string what) {
  if (what == "weft") {
    throw Error(absl::StatusCode::kAlreadyExists, "weft text")
        .with_payload(std::string("pay\0load", 8));
  }
  if (what == "invalid_argument") throw std::invalid_argument("bad value");
  if (what == "out_of_range") throw std::out_of_range("too far");
  if (what == "runtime") throw std::runtime_error("it broke");
  if (what == "int") throw 42;
  if (what == "c10") return (at::ones({2, 3}) + at::ones({4, 5})).numel();
  if (what == "odd") throw std::runtime_error("odd \xff\xfe bytes");
  if (what == "nul") throw Error(absl::StatusCode::kInternal, std::string_view("a\0b", 3));
  if (what == "long") throw std::runtime_error(std::string(1 << 20, 'x'));
  return 0;
}

Future<int64_t> later_add(CallContext& context, std::string to, int64_t a, int64_t b) {
  return rpc_async(context.worker(), to, &add, a, b).then([](int64_t sum) { return sum + 1; });
}

Future<int64_t> fan_out(CallContext& context, std::vector<std::string> to, int64_t n) {
  std::vector<Future<int64_t>> sums;
  for (const std::string& name : to) sums.push_back(rpc_async(context.worker(), name, &add, n, 1));
  return when_all(std::move(sums)).then([](const std::vector<int64_t>& all) {
    int64_t total = 0;
    for (int64_t v : all) total += v;
    return total;
  });
}

Future<int64_t> async_raise(std::string text) {
  Promise<int64_t> promise;
  promise.set_error(make_error(absl::StatusCode::kDataLoss, ErrorKind::kUser, text));
  return promise.future();
}

double remaining_seconds(CallContext& context) {
  return absl::ToDoubleSeconds(context.remaining());
}

double nested_remaining_seconds(CallContext& context, std::string to) {
  return rpc_sync(context.worker(), to, {.deadline = std::chrono::hours(1)}, &remaining_seconds);
}

TestLibrary::TestLibrary(std::shared_ptr<Runtime> runtime)
    : gate(std::make_shared<Gate>(runtime)),
      counter(std::make_shared<Counter>(100)),
      cancelled(std::make_shared<std::atomic<int>>(0)) {
  library.def("add", &add, {.inline_ok = true})
      .def("add_double", &add_double)
      .def("add_tensors", &add_tensors)
      .def("echo", &echo)
      .def("echo_list", &echo_list)
      .def("echo_nested", &echo_nested)
      .def("echo_point", &echo_point)
      .def("echo_string", &echo_string)
      .def("echo_info", &echo_info)
      .def("nothing", &nothing)
      .def("who_calls", &who_calls)
      .def("my_name", &my_name)
      .def("nested_add", &nested_add)
      .def("ring_sync", &ring_sync)
      .def("ring_async", &ring_async)
      .def("throw_error", &throw_error)
      .def("later_add", &later_add)
      .def("fan_out", &fan_out)
      .def("async_raise", &async_raise)
      .def("remaining_seconds", &remaining_seconds)
      .def("nested_remaining_seconds", &nested_remaining_seconds);
  library.def("wait_at_gate", [gate = gate](int64_t x) {
    gate->arrive_and_wait();
    return x;
  });
  library.def("wait_for_cancel", [gate = gate, cancelled = cancelled](CallContext& context) {
    Promise<int64_t> promise(executor_of(context.worker()));
    Future<int64_t> future = promise.future();
    context.on_cancel(
        [cancelled, gate, p = std::make_shared<Promise<int64_t>>(std::move(promise))] {
          ++*cancelled;
          gate->open();
          p->try_set(make_error(ErrorKind::kCancelled, "the handler has given up"));
        });
    return future;
  });
  library.def("cancelled_at_its_deadline", [runtime](CallContext& context) -> int64_t {
    const std::unique_ptr<Parker> parker = runtime->make_parker();
    while (context.remaining() > absl::ZeroDuration()) {
      parker->park_until(runtime->now() + context.remaining());
    }
    weft::throw_error(make_error(ErrorKind::kCancelled, "the handler has given up"));
  });
  library.def("add_back", [](CallContext& context, std::string to, std::string name, int64_t n) {
    return rpc_sync(context.worker(), to,
                    on(name, FunctionRef<int64_t(int64_t)>{"test.Counter.add"}), n);
  });
  library.class_<Counter>("Counter")
      .constructor<>()
      .constructor<int64_t>()
      .def("add", &Counter::add)
      .def("value", &Counter::value)
      .def("add_around", &Counter::add_around)
      .def("most_at_once", &Counter::most_at_once)
      .def_static("twice", &Counter::twice);
  library.instance("counter", counter);
  library.aten();
}

}  // namespace weft::testing
