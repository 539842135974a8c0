// Handlers that answer later. Built a second time with g++'s AddressSanitizer, which sees what g++
// does to temporaries of co_await expressions.

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/mm.h"
#include "ATen/ops/ones.h"
#include "weft/rpc/aten_operators.h"
#include "weft/rpc/library.h"
#include "weft/tests/rpc/direct.h"

namespace weft {
namespace {

template <class F>
using Ref = FunctionRef<F>;

TEST(CoroutineHandler, AFutureAnswersWhenItIsDoneAndKeepsWhatItNeeds) {
  Library lib("app");
  Promise<int> gate;
  Future<int> opened = gate.future();
  const auto alive = std::make_shared<int>(0);
  std::weak_ptr<int> watch = alive;
  lib.def("wait", [opened](const std::vector<int>& values) -> Future<int> {
    // The argument is read after the wait: it must still be there.
    const int more = co_await opened;
    int sum = more;
    for (const int v : values) sum += v;
    co_return sum;
  });
  const Method* method = lib.find("app.wait");
  const Worker worker;
  CallContext context(worker, WorkerInfo{}, 1, std::make_shared<CallScope>(), absl::Seconds(1));
  StatusOr<Payload> answer = absl::UnknownError("no reply yet");
  Payload arguments;
  Encoder out(&arguments);
  out.put(std::make_tuple(std::vector<int>{1, 2, 3}));
  method->invoke(context, alive, std::move(arguments), [&](StatusOr<Payload> r) { answer = r; });
  EXPECT_EQ(answer.status().message(), "no reply yet");
  EXPECT_EQ(watch.use_count(), 2) << "the object is kept until the future is done";
  gate.set_value(10);
  EXPECT_EQ(*internal::take_result<int>(std::move(answer)), 16);
  EXPECT_EQ(watch.use_count(), 1);
}

TEST(CoroutineHandler, ErrorsOfAsynchronousHandlers) {
  Library lib("app");
  lib.def("failed", [] { return Future<int>::ready(absl::OutOfRangeError("far")); });
  lib.def("invalid", [] { return Future<int>(); });
  lib.def("threw", []() -> Future<int> {
    throw Error(absl::StatusCode::kAborted, "stop");
    co_return 1;
  });
  lib.def("threw_before", []() -> Future<int> { throw std::invalid_argument("early"); });
  lib.def("torch", []() -> Future<at::Tensor> {
    const at::Tensor t = at::ones({2, 3});
    co_return t.mm(t);
  });
  Direct direct(lib);
  const auto kind_and_code = [](const Status& s) { return std::pair(error_kind(s), s.code()); };
  EXPECT_EQ(kind_and_code(direct.call(Ref<int()>{"app.failed"}).status()),
            std::pair(ErrorKind::kUser, absl::StatusCode::kOutOfRange));
  EXPECT_EQ(error_kind(direct.call(Ref<int()>{"app.invalid"}).status()), ErrorKind::kUser);
  EXPECT_EQ(kind_and_code(direct.call(Ref<int()>{"app.threw"}).status()),
            std::pair(ErrorKind::kUser, absl::StatusCode::kAborted));
  EXPECT_EQ(kind_and_code(direct.call(Ref<int()>{"app.threw_before"}).status()),
            std::pair(ErrorKind::kUser, absl::StatusCode::kInvalidArgument));
  const Status torch = direct.call(Ref<at::Tensor()>{"app.torch"}).status();
  EXPECT_EQ(error_kind(torch), ErrorKind::kUser);
  EXPECT_EQ(torch.message().find("Exception raised from"), std::string::npos) << torch;
  EXPECT_NE(error_details(torch).remote_trace.find("Exception raised from"), std::string::npos);
}

// Common turns what a coroutine throws into a status, and does not know LibTorch.
TEST(CoroutineHandler, TorchErrorsHaveTheSameCodesAsInFunctions) {
  using Code = absl::StatusCode;
  Library lib("app");
  lib.def("raise", [](int which) -> Future<int> {
    TORCH_CHECK(which != 0, "m");
    TORCH_CHECK_INDEX(which != 1, "m");
    TORCH_CHECK_VALUE(which != 2, "m");
    TORCH_CHECK_TYPE(which != 3, "m");
    TORCH_CHECK_LINALG(which != 4, "m");
    TORCH_CHECK_NOT_IMPLEMENTED(which != 5, "m");
    TORCH_CHECK_WITH(OutOfMemoryError, which != 6, "m");
    TORCH_CHECK_WITH(DistNetworkError, which != 7, "m");
    TORCH_CHECK_WITH(DistStoreError, which != 8, "m");
    TORCH_CHECK_WITH(SyntaxError, which != 9, "m");
    TORCH_CHECK_WITH(BufferError, which != 10, "m");
    TORCH_CHECK_WITH(EnforceFiniteError, which != 11, "m");
    TORCH_CHECK_WITH(DistError, which != 12, "m");
    if (which == 13) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "m");
    co_return which;
  });
  Direct direct(lib);
  const std::vector<Code> codes = {
      Code::kUnknown,           Code::kOutOfRange,      Code::kInvalidArgument,
      Code::kInvalidArgument,   Code::kInvalidArgument, Code::kUnimplemented,
      Code::kResourceExhausted, Code::kUnavailable,     Code::kUnavailable,
      Code::kInvalidArgument,   Code::kInvalidArgument, Code::kOutOfRange,
      Code::kUnavailable,       Code::kInternal};
  for (size_t i = 0; i < codes.size(); ++i) {
    const Status s = direct.call(Ref<int(int)>{"app.raise"}, static_cast<int>(i)).status();
    EXPECT_EQ(s.code(), codes[i]) << "row " << i << ": " << s;
    EXPECT_EQ(s.message(), "m") << "row " << i;
    EXPECT_EQ(error_kind(s), ErrorKind::kUser) << "row " << i;
  }
}

// What a call site writes inside co_await: names that own memory, options, a FunctionRef.
template <class F>
Future<size_t> made_here(const Destination& to, const CallOptions& options, const F& f) {
  (void)options;
  return Future<size_t>::ready(to.name().size() + f.name().size());
}

Future<size_t> sum_of_names() {
  const size_t a = co_await made_here("a destination whose name lies on the heap, not inside",
                                      {.deadline = kInfinite},
                                      Ref<int(int)>("app.a_function_whose_name_lies_on_the_heap"));
  const size_t b = co_await made_here(
      std::string("another destination whose name lies on the heap"), CallOptions(),
      on("an object whose name lies on the heap",
         Ref<int(int)>("app.a_method_whose_name_lies_on_the_heap"))
          .method());
  co_return a + b;
}

TEST(CoroutineHandler, TemporariesOfACallAreDestroyedOnce) {
  EXPECT_EQ(sum_of_names().wait(), 53u + 42u + 47u + 40u);
}

}  // namespace
}  // namespace weft
