#include "weft/ps/internal/ask.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "weft/common/call_scope.h"
#include "weft/common/future.h"
#include "weft/ps/internal/wire.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/rpc/worker.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kAskAgain = absl::Milliseconds(100);

bool may_have_been_lost(const Status& why) {
  switch (error_kind(why)) {
    case ErrorKind::kDeadline:
    case ErrorKind::kNotDelivered:
    case ErrorKind::kMaybeExecuted: return true;
    default: return false;
  }
}

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

std::vector<StatusOr<std::string>> ask_all_again(const Worker& worker, std::string_view method,
                                                 std::string_view signature,
                                                 const std::vector<Question>& questions,
                                                 absl::Duration deadline, absl::Duration attempt) {
  const absl::Time end = deadline_after(worker.now(), deadline);
  std::vector<StatusOr<std::string>> out(questions.size());
  std::vector<size_t> open(questions.size());
  std::iota(open.begin(), open.end(), 0);
  for (;;) {
    std::vector<Question> again;
    for (const size_t i : open) again.push_back(questions[i]);
    const absl::Duration left = std::max(absl::ZeroDuration(), end - worker.now());
    auto answers = ask_all(worker, method, signature, again, std::min(left, attempt));
    attempt = std::min(attempt * 2, std::max(attempt, kAskTime));
    std::vector<size_t> unanswered;
    for (size_t i = 0; i < open.size(); ++i) {
      out[open[i]] = std::move(answers[i]);
      if (may_have_been_lost(out[open[i]].status())) unanswered.push_back(open[i]);
    }
    if (unanswered.empty() || worker.now() >= end) return out;
    if (unanswered.size() == open.size()) {  // not at once, when they fail at once
      worker.runtime().make_parker()->park_until(std::min(end, worker.now() + kAskAgain));
    }
    open = std::move(unanswered);
  }
}

StatusOr<std::string> ask_bytes(const Worker& worker, const WorkerInfo& server,
                                std::string_view method, std::string_view signature,
                                const std::string& request, absl::Duration deadline) {
  return start_ask(worker, method, signature, {server, request}, deadline).try_wait();
}

}  // namespace weft::ps::internal
