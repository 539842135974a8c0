// The messages of passes, both ways.

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/dist_autograd/internal/service.h"
#include "weft/rpc/containers.h"

namespace weft::internal {
namespace {

constexpr std::string_view kCloseMethod = "@dist_autograd.close";
constexpr std::string_view kDoneMethod = "@dist_autograd.done";
constexpr std::string_view kAbortMethod = "@dist_autograd.abort";
// A failure is told for so long; a root waits for it for so long before it throws.
constexpr absl::Duration kTellFor = absl::Seconds(5);
constexpr absl::Duration kGrace = absl::Seconds(1);
// After the pass's deadline a participant that has heard nothing ends its part.
constexpr absl::Duration kMargin = absl::Seconds(1);
// Of a pass that says nothing else.
constexpr absl::Duration kDeadline = absl::Seconds(60);

using Gradients = std::vector<std::optional<at::Tensor>>;

}  // namespace

StatusOr<std::string> take_bytes(Payload arguments) {
  Decoder in(std::move(arguments));
  return in.take_bytes();
}

Payload bytes_payload(const std::string& bytes) {
  Payload payload;
  Encoder(&payload).put_bytes(bytes);
  return payload;
}

OnTold replying(ReplyFn reply) {
  return [reply = std::move(reply)](const Status& status) mutable {
    if (status.ok()) {
      reply(bytes_payload(""));
    } else {
      reply(status);
    }
  };
}

// ---- out ---------------------------------------------------------------------------------------

void DistAutogradService::send(const WorkerKey& to, std::string_view method,
                               std::string_view signature, Payload arguments, absl::Duration time,
                               OnBytes done) {
  if (method != kAdvanceMethod) count(method.substr(method.find('.') + 1));
  UntypedCall call;
  call.method = std::string(method);
  call.signature = signature;
  call.arguments = std::move(arguments);
  call.options.deadline = time;
  call.options.retry = Retry::kAtMostOnce;
  // It is no part of the call that happens to be served here, and of no context.
  const ScopeGuard nothing_ambient(nullptr);
  start_call(worker(), info_of(worker(), to), std::move(call),
             [done = std::move(done)](StatusOr<Payload> result) mutable {
               if (!result.ok()) return done(result.status());
               done(take_bytes(*std::move(result)));
             });
}

void DistAutogradService::count(std::string_view kind, int64_t n) {
  MutexLock lock(&mutex_);
  sent_[kind] += n;
}

StatusOr<Payload> pack_advance(AdvanceData data) {
  Gradients gradients;
  for (MessageGradients& one : data.advance.gradients) {
    data.tensors.push_back(static_cast<uint32_t>(one.tensors.size()));
    for (at::Tensor& tensor : one.tensors) {
      gradients.push_back(tensor.defined() ? std::optional<at::Tensor>(std::move(tensor))
                                           : std::nullopt);
    }
  }
  Payload arguments;
  Encoder out(&arguments);
  out.begin_tuple(2);
  out.put_bytes(encode(data));
  out.put(gradients);
  out.end();
  WEFT_RETURN_IF_ERROR(out.status());
  return arguments;
}

StatusOr<AdvanceData> unpack_advance(Payload arguments) {
  Decoder in(std::move(arguments));
  WEFT_ASSIGN_OR_RETURN(const auto taken,
                        (in.take<std::tuple<std::vector<std::byte>, Gradients>>()));
  const auto& [bytes, gradients] = taken;
  WEFT_ASSIGN_OR_RETURN(
      AdvanceData data,
      decode_advance(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size())));
  size_t at = 0;
  for (size_t i = 0; i < data.tensors.size(); ++i) {
    if (data.tensors[i] > gradients.size() - at) break;
    for (uint32_t k = 0; k < data.tensors[i]; ++k) {
      data.advance.gradients[i].tensors.push_back(gradients[at++].value_or(at::Tensor()));
    }
  }
  const size_t named = std::accumulate(data.tensors.begin(), data.tensors.end(), size_t{0});
  if (named == gradients.size()) return data;
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("a message of distributed autograd: ", gradients.size(),
                                 " gradients, but ", named, " are spoken of"));
}

void DistAutogradService::advance(const WorkerKey& to, const PassId& pass, absl::Time deadline,
                                  Advance advance, OnAdvanced done) {
  if (!advance.named.empty()) count("discover");
  if (advance.done) count("done");
  count("gradient", static_cast<int64_t>(advance.gradients.size()));
  AdvanceData data{pass, deadline - runtime().now(), std::move(advance), {}, 0, {}};
  if (const ContextRef context = find(pass.context); context && !data.advance.named.empty()) {
    context->ended_passes(pass.root, &data.ended_below, &data.aborted);
  }
  const absl::Duration remaining = data.remaining;
  StatusOr<Payload> arguments = pack_advance(std::move(data));
  if (!arguments.ok()) return done(arguments.status());
  send(to, kAdvanceMethod, kAdvanceSignature, *std::move(arguments), remaining,
       [done = std::move(done)](const StatusOr<std::string>& bytes) mutable {
         done(bytes.ok() ? decode_advanced(*bytes) : StatusOr<Advanced>(bytes.status()));
       });
}

void DistAutogradService::notice(std::string_view method, const WorkerKey& to, NoticeData data,
                                 absl::Duration time, OnTold done) {
  send(to, method, kBytesSignature, bytes_payload(encode(data)), time,
       [done = std::move(done)](const StatusOr<std::string>& answer) mutable {
         done(answer.status());
       });
}

void DistAutogradService::close(const WorkerKey& to, const PassId& pass, absl::Time deadline,
                                OnTold done) {
  notice(kCloseMethod, to, NoticeData{pass}, deadline - runtime().now(), std::move(done));
}

void DistAutogradService::done(const WorkerKey& to, const PassId& pass, absl::Time deadline,
                               OnTold done) {
  notice(kDoneMethod, to, NoticeData{pass}, deadline - runtime().now(), std::move(done));
}

void DistAutogradService::abort(const WorkerKey& to, const PassId& pass, const Status& why,
                                OnTold done) {
  notice(kAbortMethod, to, NoticeData{pass, why}, kTellFor, std::move(done));
}

std::string DistAutogradService::name_of(const WorkerKey& key) const {
  {
    MutexLock lock(&mutex_);
    if (const auto at = names_.find(key); at != names_.end()) return at->second;
  }
  return info_of(worker(), key).name;
}

// ---- in ----------------------------------------------------------------------------------------

std::vector<Method> DistAutogradService::methods() {
  const auto method = [this](std::string_view name, std::string_view signature, bool inline_ok,
                             auto handle) {
    Method m;
    m.name = std::string(name);
    m.signature = std::string(signature);
    m.inline_ok = inline_ok;
    m.invoke = [weak = weak_from_this(), handle](CallContext& call, const std::shared_ptr<void>&,
                                                 Payload arguments, ReplyFn reply) {
      const auto self = weak.lock();
      if (self == nullptr) return reply(shut_down_error());
      handle(*self, call, std::move(arguments), std::move(reply));
    };
    return m;
  };
  const auto notice = [&method](std::string_view name, bool inline_ok, OnNotice handle) {
    return method(
        name, kBytesSignature, inline_ok,
        [handle](DistAutogradService& self, CallContext& call, Payload arguments, ReplyFn reply) {
          self.on_notice(call, std::move(arguments), std::move(reply), handle);
        });
  };
  using Self = DistAutogradService;
  return {
      method(kAdvanceMethod, kAdvanceSignature, false,
             [](Self& self, CallContext& call, Payload arguments, ReplyFn reply) {
               self.on_advance(call, std::move(arguments), std::move(reply));
             }),
      method(kReleaseMethod, kBytesSignature, false,
             [](Self& self, CallContext& call, Payload arguments, ReplyFn reply) {
               self.on_release(call, std::move(arguments), std::move(reply));
             }),
      method(kNormMethod, kBytesSignature, false,
             [](Self& self, CallContext& call, Payload arguments, ReplyFn reply) {
               self.on_norm(call, std::move(arguments), std::move(reply));
             }),
      method(kScaleMethod, kBytesSignature, false,
             [](Self& self, CallContext& call, Payload arguments, ReplyFn reply) {
               self.on_scale(call, std::move(arguments), std::move(reply));
             }),
      notice(kCloseMethod, false,
             [](BackwardPass& pass, const WorkerKey&, const Status&, OnTold reply) {
               pass.on_close(std::move(reply));
             }),
      notice(kDoneMethod, true,
             [](BackwardPass& pass, const WorkerKey& from, const Status&, OnTold reply) {
               reply(pass.on_done(from));
             }),
      notice(kAbortMethod, false,
             [](BackwardPass& pass, const WorkerKey& from, const Status& why, OnTold reply) {
               pass.on_abort(from, why, std::move(reply));
             }),
  };
}

StatusOr<std::shared_ptr<BackwardPass>> DistAutogradService::find_pass(const PassId& id,
                                                                       absl::Time deadline,
                                                                       bool make) {
  const ContextRef context = find(id.context);
  if (context == nullptr) {
    return make_error(
        ErrorKind::kNotFound,
        absl::StrCat("Could not find autograd context with id: ", weft::to_string(id.context),
                     " on worker '", worker().name(), "'"));
  }
  auto pass = context->find(id, deadline, make, shared_from_this());
  if (pass.ok() && make && id.root != self()) watch_pass(deadline + kMargin);
  return pass;
}

void DistAutogradService::on_advance(CallContext& call, Payload arguments, ReplyFn reply) {
  StatusOr<AdvanceData> data = unpack_advance(std::move(arguments));
  if (!data.ok()) return reply(data.status());
  if (const ContextRef context = find(data->pass.context)) {
    context->settle(data->pass.root, std::min(data->ended_below, data->pass.counter),
                    data->aborted);
  }
  const auto pass = find_pass(data->pass, runtime().now() + data->remaining, true);
  if (!pass.ok()) return reply(pass.status());
  (*pass)->on_advance(key_of(call.caller()), std::move(data->advance),
                      [weak = weak_from_this(),
                       reply = std::move(reply)](const StatusOr<Advanced>& answer) mutable {
                        if (!answer.ok()) return reply(answer.status());
                        if (const auto self = weak.lock(); self && answer->done)
                          self->count("done");
                        reply(bytes_payload(encode(*answer)));
                      });
}

void DistAutogradService::on_notice(CallContext& call, Payload arguments, ReplyFn reply,
                                    OnNotice handle) {
  const StatusOr<std::string> bytes = take_bytes(std::move(arguments));
  if (!bytes.ok()) return reply(bytes.status());
  const StatusOr<NoticeData> data = decode_notice(*bytes);
  if (!data.ok()) return reply(data.status());
  const auto pass = find_pass(data->pass, absl::InfiniteFuture(), false);
  if (!pass.ok()) {
    // Whoever does not know it any more has nothing left to do; its root remembers failures.
    const ContextRef context = find(data->pass.context);
    const bool failed = context != nullptr && context->has_failed(data->pass);
    return replying(std::move(reply))(
        failed
            ? make_error(ErrorKind::kCancelled, absl::StrCat(to_string(data->pass), " has failed"))
            : absl::OkStatus());
  }
  handle(**pass, key_of(call.caller()), data->status, replying(std::move(reply)));
}

// ---- the root, and time ------------------------------------------------------------------------

Status DistAutogradService::backward(const ContextRef& context, torch::autograd::edge_list roots,
                                     std::vector<at::Tensor> gradients,
                                     const BackwardOptions& options) {
  const absl::Duration deadline = options.deadline.value_or(kDeadline);
  const absl::Time end = runtime().now() + deadline;
  WEFT_ASSIGN_OR_RETURN(const auto pass, context->begin(end, shared_from_this()));
  watch_pass(absl::InfiniteFuture());
  pass->start(std::move(roots), std::move(gradients), options.retain_graph,
              options.mode == BackwardMode::kFast);
  const Future<void> ended = pass->ended();
  Status status = ended.try_wait(end - runtime().now());
  if (!ended.done()) {
    pass->fail(
        make_error(ErrorKind::kDeadline,
                   absl::StrCat("deadline of ", absl::FormatDuration(deadline), " exceeded by ",
                                to_string(pass->id()), ", which waits for ", pass->waits_for())));
  }
  if (pass->state() == BackwardPass::State::kDone) {
    context->ended(*pass, true);
    return absl::OkStatus();
  }
  status = pass->error();
  context->ended(*pass, pass->told().try_wait(kGrace).ok());
  return status;
}

void DistAutogradService::watch(absl::Time when) {
  MutexLock lock(&mutex_);
  watch_locked(when);
}

void DistAutogradService::watch_pass(absl::Time deadline) {
  const absl::Time now = runtime().now();
  MutexLock lock(&mutex_);
  if (next_look_ == absl::InfiniteFuture()) next_look_ = now + report_stall_after_;
  watch_locked(std::min(deadline, next_look_));
}

void DistAutogradService::report_stalls(absl::Time now) {
  bool running = false;
  for (const ContextRef& context : contexts()) {
    for (const auto& pass : context->passes()) {
      if (pass->state() != BackwardPass::State::kRunning) continue;
      running = true;
      if (!pass->stands_still()) continue;
      {
        MutexLock lock(&mutex_);
        ++stall_reports_;
      }
      WEFT_LOG(worker().log(), kWarning)
          << to_string(pass->id()) << ": nothing has happened here for "
          << absl::FormatDuration(report_stall_after_) << "; it waits for " << pass->waits_for();
    }
  }
  MutexLock lock(&mutex_);
  next_look_ = running ? now + report_stall_after_ : absl::InfiniteFuture();
  watch_locked(next_look_);
}

void DistAutogradService::watch_locked(absl::Time when) {
  if (!closed_.ok() || when >= armed_) return;
  armed_ = when;
  if (timer_ == nullptr) {
    timer_ = context_.runtime->make_timer([weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      Task task = [self] { self->tick(); };
      self->context_.executor->post(std::move(task));
    });
  }
  timer_->arm(when);
}

void DistAutogradService::tick() {
  const absl::Time now = runtime().now();
  std::deque<std::pair<ReleaseRef, WorkerKey>> again;
  absl::Time look;
  {
    MutexLock lock(&mutex_);
    armed_ = absl::InfiniteFuture();
    again.swap(again_);
    look = next_look_;
  }
  for (auto& [release, to] : again) tell_released(release, to);
  absl::Time next = absl::InfiniteFuture();
  for (const ContextRef& context : contexts()) {
    for (const auto& pass : context->passes()) {
      if (pass->is_root()) continue;
      const absl::Time due = pass->deadline() + kMargin;
      if (due > now) {
        next = std::min(next, due);
      } else if (pass->state() != BackwardPass::State::kRunning) {
        pass->ask_root();
      } else {
        pass->fail(make_error(ErrorKind::kDeadline,
                              absl::StrCat("the deadline of ", to_string(pass->id()),
                                           " is over; it waits for ", pass->waits_for())));
      }
    }
  }
  if (next < absl::InfiniteFuture()) watch(next);
  if (look <= now) {
    report_stalls(now);
  } else {
    watch(look);
  }
}

}  // namespace weft::internal
