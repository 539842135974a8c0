#include "weft/rpc/inspect.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "weft/common/byte_budget.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/rpc/internal/agent/header.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/rpc/internal/membership/membership.h"
#include "weft/rpc/internal/observe/inspect_call.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/rpc/value.h"
#include "weft/transport/checked_credentials.h"
#include "weft/transport/grpc_transport.h"

namespace weft {
namespace {

// An answer beyond this is no worker's.
constexpr uint64_t kMostAnswerBytes = uint64_t{256} << 20;
constexpr uint64_t kCallId = 1;

Status annotated(const Status& error, const InspectOptions& options) {
  return annotate(error, absl::StrCat("looking at the worker at ", options.address));
}

// One connection with one call on it. The transport's threads bring events, one thread waits.
class Observer final : public ConnectionHandler, public std::enable_shared_from_this<Observer> {
 public:
  explicit Observer(Runtime* runtime)
      : runtime_(runtime),
        done_(runtime),
        budget_(kMostAnswerBytes, "the worker's answer"),
        assembler_(internal::MessageLimits(), &budget_) {}

  void dialled(StatusOr<std::shared_ptr<Connection>> connection,
               const internal::InspectRequest& request, absl::Time deadline) {
    if (!connection.ok()) return finish(connection.status());
    {
      MutexLock lock(&mutex_);
      connection_ = *connection;
    }
    StatusOr<std::shared_ptr<internal::OutMessage>> message =
        internal::pack(internal::encode(request), internal::TensorMemory::kBorrowed);
    if (!message.ok()) return finish(message.status());
    v1::CallHeader header;
    header.set_call_id(kCallId);
    header.set_method(internal::kInspectMethod);
    header.set_signature_hash(signature_hash(internal::kInspectSignature));
    header.set_remaining_us(
        std::max<int64_t>(1, absl::ToInt64Microseconds(deadline - runtime_->now())));
    const Status sent = internal::send_message(connection->get(), FrameKind::kRequest, &header,
                                               internal::OutMessageRef(*message),
                                               internal::MessageLimits(), 0, &transfers_);
    if (!sent.ok()) finish(sent);
  }

  void on_frame(const FrameView& frame, int) override {
    const Status status = handle(frame);
    if (!status.ok()) finish(status);
  }
  void on_lost(Lost lost) override {
    assembler_.abandon();
    finish(lost.why.ok() ? make_error(ErrorKind::kUnavailable, "it closed the connection")
                         : lost.why);
  }

  StatusOr<Payload> wait(absl::Time deadline) {
    MutexLock lock(&mutex_);
    while (!result_.has_value()) {
      const Status waited = done_.wait_until(&mutex_, deadline);
      if (!waited.ok() && !result_.has_value()) {
        return make_error(ErrorKind::kDeadline, connection_ == nullptr
                                                    ? "it could not be reached within the deadline"
                                                    : "it did not answer within the deadline");
      }
    }
    return *result_;
  }
  std::shared_ptr<Connection> connection() {
    MutexLock lock(&mutex_);
    return connection_;
  }

 private:
  Status handle(const FrameView& frame) {
    switch (frame.kind) {
      case FrameKind::kResponse: {
        v1::ResponseHeader header;
        WEFT_RETURN_IF_ERROR(internal::parse_header(frame, &header));
        return assembler_.begin(
            header.layout(), frame, connection().get(),
            [self = shared_from_this()](StatusOr<Payload> p) { self->finish(std::move(p)); });
      }
      case FrameKind::kError: {
        v1::ErrorHeader header;
        WEFT_RETURN_IF_ERROR(internal::parse_header(frame, &header));
        return assembler_.begin(
            header.layout(), frame, connection().get(),
            [self = shared_from_this(), code = header.code(),
             kind = header.kind()](StatusOr<Payload> p) {
              self->finish(p.ok() ? internal::unpack_error(code, kind, p->body, "the worker")
                                  : p.status());
            });
      }
      case FrameKind::kChunk: return assembler_.on_chunk(frame);
      default: return absl::OkStatus();  // heartbeats; a goodbye is followed by the end
    }
  }

  void finish(StatusOr<Payload> result) {
    {
      MutexLock lock(&mutex_);
      if (result_.has_value()) return;
      result_ = std::move(result);
    }
    done_.notify_all();
  }

  Runtime* const runtime_;
  Mutex mutex_;
  Condition done_;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mutex_);
  std::optional<StatusOr<Payload>> result_ ABSL_GUARDED_BY(mutex_);
  ByteBudget budget_;
  internal::Assembler assembler_;
  std::atomic<uint64_t> transfers_{0};
};

// Name, id and whom we want.
StatusOr<Hello> hello_of(const InspectOptions& options, Runtime& runtime) {
  Hello hello;
  hello.observer = true;
  hello.name = options.name;
  hello.lanes = 1;
  hello.id = UINT32_MAX;  // of no member
  if (!options.credentials.empty()) {
    WEFT_ASSIGN_OR_RETURN(const internal::CheckedCredentials checked,
                          internal::check_credentials(options.credentials, runtime));
    for (const internal::Identity& identity : checked.identities) {
      if (!hello.name.empty() && hello.name != identity.name) continue;
      hello.name = identity.name;
      hello.id = identity.rank.value_or(hello.id);
      break;
    }
  }
  if (hello.name.empty()) hello.name = "weft-inspect";
  while (hello.incarnation == 0) hello.incarnation = runtime.random().next();
  if (options.wanted.has_value()) {
    hello.to_id = options.wanted->id;
    hello.to_incarnation = options.wanted->incarnation;
    hello.to_name = options.wanted->name;
  }
  return hello;
}

}  // namespace

StatusOr<std::string> try_inspect(const InspectOptions& options) {
  if (options.address.empty() || options.most_rows < 1 ||
      options.most_rows > internal::kMostInspectRows || options.deadline <= absl::ZeroDuration()) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("inspect: an address is needed, 1 to ", internal::kMostInspectRows,
                     " rows, and a deadline that is not over"));
  }
  const std::shared_ptr<Runtime> runtime =
      options.runtime != nullptr ? options.runtime : make_system_runtime();
  const absl::Time deadline = runtime->now() + options.deadline;
  const StatusOr<Hello> hello = hello_of(options, *runtime);
  if (!hello.ok()) return annotated(hello.status(), options);
  const TransportFactory factory =
      options.transport != nullptr
          ? options.transport
          : grpc_transport({.max_spin = absl::ZeroDuration(), .arena_bytes = 0});
  TransportContext context;
  context.runtime = runtime;
  context.worker_name = hello->name;
  context.credentials = options.credentials;
  StatusOr<std::unique_ptr<Transport>> transport = factory(context);
  if (!transport.ok()) return annotated(transport.status(), options);

  const auto observer = std::make_shared<Observer>(runtime.get());
  const internal::InspectRequest request{options.json, options.most_rows, options.counters};
  (*transport)
      ->connect(options.address, *hello, deadline - options.deadline / 10, observer,
                [observer, request, deadline](StatusOr<std::shared_ptr<Connection>> connection) {
                  observer->dialled(std::move(connection), request, deadline);
                });
  StatusOr<Payload> answer = observer->wait(deadline);
  if (const auto connection = observer->connection()) connection->close(absl::OkStatus());
  (*transport)->shutdown();
  if (!answer.ok()) return annotated(answer.status(), options);
  Decoder in(*std::move(answer));
  StatusOr<std::string> text = in.take<std::string>();
  if (!text.ok()) return annotated(text.status(), options);
  return text;
}

std::string inspect(const InspectOptions& options) { return value_or_throw(try_inspect(options)); }

StatusOr<std::vector<ListedWorker>> list_workers(Store& store, const std::string& job_id,
                                                 absl::Duration timeout) {
  WEFT_ASSIGN_OR_RETURN(
      const std::vector<std::string> keys,
      store.list_keys(job_id.empty() ? "weft/" : absl::StrCat("weft/", job_id, "/member/"),
                      timeout));
  std::vector<ListedWorker> out;
  for (const std::string& key : keys) {
    // "weft/JOB/member/ID.inc"
    const std::vector<std::string> parts = absl::StrSplit(key, '/');
    if (parts.size() != 4 || parts[2] != "member") continue;
    WEFT_ASSIGN_OR_RETURN(const std::optional<std::string> record, store.try_get(key, timeout));
    const std::optional<internal::Member> member =
        record.has_value() ? internal::read_member(*record) : std::nullopt;
    if (!member.has_value()) continue;  // gone meanwhile, or of no worker
    out.push_back({parts[1], member->info, member->address, member->host, member->pid});
  }
  std::sort(out.begin(), out.end(), [](const ListedWorker& a, const ListedWorker& b) {
    return std::tie(a.job_id, a.info) < std::tie(b.job_id, b.info);
  });
  return out;
}

}  // namespace weft
