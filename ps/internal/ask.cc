#include "weft/ps/internal/ask.h"

#include <utility>

#include "weft/common/call_scope.h"
#include "weft/common/future.h"
#include "weft/ps/internal/wire.h"
#include "weft/rpc/untyped_call.h"
#include "weft/rpc/worker.h"

namespace weft::ps::internal {
namespace {

Future<std::string> start_ask(const Worker& worker, std::string_view method,
                              std::string_view signature, const Question& question,
                              absl::Duration deadline) {
  UntypedCall call;
  call.method = std::string(method);
  call.signature = signature;
  call.arguments = pack_bytes(question.bytes);
  call.options.deadline = deadline;
  call.options.retry = Retry::kAtMostOnce;
  const Continuation with = continuation_of(worker);
  Promise<std::string> promise(with.executor);
  promise.state()->set_default_wait(absl::InfiniteDuration());
  promise.state()->set_wait_driver(with.driver);
  Future<std::string> answer = promise.future();
  const ScopeGuard nothing_ambient(nullptr);
  start_call(worker, question.to, std::move(call),
             [promise = std::move(promise)](StatusOr<Payload> result) mutable {
               if (!result.ok()) {
                 promise.try_set(result.status());
               } else {
                 promise.try_set(unpack_bytes(*std::move(result)));
               }
             });
  return answer;
}

}  // namespace

std::vector<StatusOr<std::string>> ask_all(const Worker& worker, std::string_view method,
                                           std::string_view signature,
                                           const std::vector<Question>& questions,
                                           absl::Duration deadline) {
  std::vector<Future<std::string>> asked;
  for (const Question& question : questions) {
    asked.push_back(start_ask(worker, method, signature, question, deadline));
  }
  std::vector<StatusOr<std::string>> out;
  for (Future<std::string>& answer : asked) out.push_back(answer.try_wait());
  return out;
}

StatusOr<std::string> ask_bytes(const Worker& worker, const WorkerInfo& server,
                                std::string_view method, std::string_view signature,
                                const std::string& request, absl::Duration deadline) {
  return start_ask(worker, method, signature, {server, request}, deadline).try_wait();
}

}  // namespace weft::ps::internal
