#ifndef WEFT_TESTS_RPC_DIRECT_H_
#define WEFT_TESTS_RPC_DIRECT_H_

// Calls of a library's methods as the agent makes them, without one. One thread.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "weft/common/error.h"
#include "weft/rpc/call.h"
#include "weft/rpc/library.h"
#include "weft/rpc/worker.h"

namespace weft {

template <class F>
using Ref = FunctionRef<F>;

// Calls a method as the agent would, without one.
class Direct {
 public:
  explicit Direct(const Library& library) : library_(library) {}

  template <class R, class... Params, class... Args>
  StatusOr<internal::Stored<R>> call(const FunctionRef<R(Params...)>& f, const Args&... args) {
    return call_on<R, Params...>(nullptr, f, args...);
  }
  template <class R, class... Params, class... Args>
  StatusOr<internal::Stored<R>> call_on(std::shared_ptr<void> object,
                                        const FunctionRef<R(Params...)>& f, const Args&... args) {
    StatusOr<UntypedCall> call =
        internal::make_call<FunctionRef<R(Params...)>>(worker_, CallOptions(), f, args...);
    if (!call.ok()) return call.status();
    return internal::take_result<R>(run(*std::move(call), std::move(object)));
  }
  StatusOr<Payload> run(UntypedCall call, std::shared_ptr<void> object = nullptr) {
    const StatusOr<const Method*> method =
        library_.find(call.method, signature_hash(call.signature));
    if (!method.ok()) return method.status();
    replies_ = 0;
    StatusOr<Payload> answer = absl::UnknownError("no reply yet");
    (*method)->invoke(context_, object, std::move(call.arguments), [&](StatusOr<Payload> r) {
      ++replies_;
      answer = std::move(r);
    });
    EXPECT_EQ(replies_, 1);
    return answer;
  }

 private:
  const Library& library_;
  const Worker worker_;
  int replies_ = 0;
  CallContext context_{worker_, WorkerInfo{"caller", 1, 2}, 7, std::make_shared<CallScope>(),
                       absl::Seconds(5)};
};

// What registering something is refused with, or "accepted".
template <class F>
std::string refused(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.message();
  }
  return "accepted";
}

}  // namespace weft

#endif  // WEFT_TESTS_RPC_DIRECT_H_
