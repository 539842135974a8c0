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
constexpr std::string_view kProgressMethod = "@dist_autograd.progress_report";
// A failure is told for so long.
constexpr absl::Duration kTellFor = absl::Seconds(5);

using Gradients = std::vector<std::optional<at::Tensor>>;

// On the thread that sends: what the gradients are made of comes before what it queues from now on.
Status order_here(const MessageGradients& gradients) {
  try {
    use_here(gradients.after, gradients.tensors);
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

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
  // The pass's own end, which says what is waited for, comes before that of its messages.
  call.options.deadline = time + kPassMargin;
  call.options.retry = Retry::kAtMostOnce;
  call.options.backpressure = Backpressure::kWait;
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
  std::vector<DeviceCode> targets;
  bool to_devices = false;
  for (MessageGradients& one : data.advance.gradients) {
    data.tensors.push_back(static_cast<uint32_t>(one.tensors.size()));
    to_devices |= !one.devices.empty() || any_on_device(one.tensors);
    WEFT_RETURN_IF_ERROR(order_here(one));
    for (size_t i = 0; i < one.tensors.size(); ++i) {
      at::Tensor& tensor = one.tensors[i];
      if (tensor.defined()) targets.push_back(i < one.devices.size() ? one.devices[i] : kCpuCode);
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
  if (to_devices) {
    arguments.devices = std::make_shared<PayloadDevices>();
    arguments.devices->targets = std::move(targets);
  }
  return arguments;
}

StatusOr<AdvanceData> unpack_advance(Payload arguments) {
  const GuardRef after = arguments.devices == nullptr ? nullptr : arguments.devices->guard;
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
    data.advance.gradients[i].after = after;
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
  expect_more();
  if (!advance.named.empty()) count("discover");
  if (advance.done) count("done");
  count("gradient", static_cast<int64_t>(advance.gradients.size()));
  // What names something is small, and others wait for all below it.
  if (!advance.named.empty()) {
    return send_advance(to, pass, deadline, std::move(advance), std::move(done));
  }
  queue_out(to, Outgoing{pass, deadline, std::move(advance), std::move(done)});
}

void DistAutogradService::send_advance(const WorkerKey& to, const PassId& pass, absl::Time deadline,
                                       Advance advance, OnAdvanced done) {
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
                               const std::string& outcome, OnTold done) {
  notice(kDoneMethod, to, NoticeData{pass, {}, outcome}, deadline - runtime().now(),
         std::move(done));
}

void DistAutogradService::abort(const WorkerKey& to, const PassId& pass, const Status& why,
                                OnTold done) {
  drop_out(pass);
  notice(kAbortMethod, to, NoticeData{pass, why}, kTellFor, std::move(done));
}

void DistAutogradService::progress(const WorkerKey& to, const PassId& pass, absl::Time deadline,
                                   PassProgress progress, OnTold done) {
  notice(kProgressMethod, to, NoticeData{pass, {}, {}, std::move(progress)},
         deadline - runtime().now(), std::move(done));
}

std::string DistAutogradService::name_of(const WorkerKey& key) const {
  {
    MutexLock lock(&mutex_);
    if (const std::string* name = names_.find(key)) return *name;
  }
  return info_of(worker(), key).name;
}

// ---- in ----------------------------------------------------------------------------------------

std::vector<Method> DistAutogradService::methods() {
  // `at_once`: it is short and runs nothing of the user's.
  const auto method = [this](std::string_view name, std::string_view signature, bool at_once,
                             auto handle) {
    Method m;
    m.name = std::string(name);
    m.signature = std::string(signature);
    m.inline_ok = m.waiting_ok = at_once;
    m.invoke = [weak = weak_from_this(), handle](CallContext& call, const std::shared_ptr<void>&,
                                                 Payload arguments, ReplyFn reply) {
      const auto self = weak.lock();
      if (self == nullptr) return reply(shut_down_error());
      handle(*self, call, std::move(arguments), std::move(reply));
    };
    return m;
  };
  const auto notice = [&method](std::string_view name, bool at_once, OnNotice handle) {
    return method(
        name, kBytesSignature, at_once,
        [handle](DistAutogradService& self, CallContext& call, Payload arguments, ReplyFn reply) {
          self.on_notice(call, std::move(arguments), std::move(reply), handle);
        });
  };
  using Self = DistAutogradService;
  return {
      method(kAdvanceMethod, kAdvanceSignature, true,
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
             [](BackwardPass& pass, const WorkerKey&, const NoticeData&, OnTold reply) {
               pass.on_close(std::move(reply));
             }),
      notice(kDoneMethod, true,
             [](BackwardPass& pass, const WorkerKey& from, const NoticeData& data, OnTold reply) {
               reply(pass.on_done(from, data.outcome));
             }),
      notice(kAbortMethod, false,
             [](BackwardPass& pass, const WorkerKey& from, const NoticeData& data, OnTold reply) {
               pass.on_abort(from, data.status, std::move(reply));
             }),
      notice(kProgressMethod, true,
             [](BackwardPass& pass, const WorkerKey& from, const NoticeData& data, OnTold reply) {
               reply(pass.on_progress(from, data.progress));
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
  if (pass.ok() && make && id.root != self()) watch_pass(deadline + kPassMargin);
  return pass;
}

// On a thread of the transport, or a user's that waits: what the root's own thread waits for is
// left to that, all else goes to the pool.
void DistAutogradService::on_advance(CallContext& call, Payload arguments, ReplyFn reply) {
  expect_more();
  StatusOr<AdvanceData> data = unpack_advance(std::move(arguments));
  if (!data.ok()) return reply(data.status());
  const bool is_root = data->pass.root == self();
  Task task = [self = shared_from_this(), from = key_of(call.caller()), data = *std::move(data),
               reply = std::move(reply)]() mutable {
    self->take_advance(from, std::move(data), std::move(reply));
  };
  if (is_root) {
    task();
  } else {
    context_.executor->post(std::move(task));
  }
}

void DistAutogradService::take_advance(const WorkerKey& from, AdvanceData data, ReplyFn reply) {
  if (const ContextRef context = find(data.pass.context)) {
    context->settle(data.pass.root, std::min(data.ended_below, data.pass.counter), data.aborted);
  }
  const auto pass = find_pass(data.pass, runtime().now() + data.remaining, true);
  if (!pass.ok()) return reply(pass.status());
  OnAdvanced answer = [weak = weak_from_this(),
                       reply = std::move(reply)](const StatusOr<Advanced>& found) mutable {
    if (!found.ok()) return reply(found.status());
    if (const auto self = weak.lock(); self && found->done) self->count("done");
    reply(bytes_payload(encode(*found)));
  };
  if ((*pass)->is_root()) {
    (*pass)->leave_advance(from, std::move(data.advance), std::move(answer));
  } else {
    (*pass)->on_advance(from, std::move(data.advance), std::move(answer));
  }
}

void DistAutogradService::on_notice(CallContext& call, Payload arguments, ReplyFn reply,
                                    OnNotice handle) {
  const StatusOr<std::string> bytes = take_bytes(std::move(arguments));
  if (!bytes.ok()) return reply(bytes.status());
  const StatusOr<NoticeData> data = decode_notice(*bytes);
  if (!data.ok()) return reply(data.status());
  const auto pass = find_pass(data->pass, absl::InfiniteFuture(), false);
  if (!pass.ok()) {
    // A worker that does not know it any more has nothing left to do; its root remembers failures.
    const ContextRef context = find(data->pass.context);
    if (context != nullptr && !data->status.ok() && data->pass.root != self()) {
      context->refuse(data->pass, data->status);
    }
    const bool failed = context != nullptr && context->has_failed(data->pass);
    return replying(std::move(reply))(
        failed
            ? make_error(ErrorKind::kCancelled, absl::StrCat(to_string(data->pass), " has failed"))
            : absl::OkStatus());
  }
  handle(**pass, key_of(call.caller()), *data, replying(std::move(reply)));
}

}  // namespace weft::internal
