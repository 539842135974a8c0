#include "weft/rref/rref.h"

#include "absl/strings/str_cat.h"
#include "weft/rpc/spi/device_order.h"
#include "weft/rref/internal/service.h"

namespace weft::internal {
namespace {

Status refers_to_nothing() {
  return make_error(ErrorKind::kState,
                    "an RRef that refers to nothing: it was made without a "
                    "value or a worker, or reset");
}

StatusOr<std::shared_ptr<RRefService>> service_of(const Worker& worker) {
  std::shared_ptr<RRefService> service;
  try {
    service = worker.service<RRefService>();
  } catch (const Error& e) {
    return annotate(e.status(), "an RRef needs a worker");
  }
  if (service != nullptr) return service;
  return make_error(ErrorKind::kState, absl::StrCat("worker '", worker.name(),
                                                    "' has no RRefs: list rref_service() at join"));
}

StatusOr<std::shared_ptr<RRefService>> service_of(const RRefHandleRef& handle) {
  if (handle == nullptr) return refers_to_nothing();
  if (auto service = handle->service()) return service;
  return make_error(ErrorKind::kState,
                    absl::StrCat(handle->text(), ": the worker that held it has shut down"));
}

UntypedCall asking_call(std::string_view method, std::string_view signature,
                        const CallOptions& options) {
  UntypedCall call;
  call.method = std::string(method);
  call.signature = signature;
  call.options = options;
  call.options.retry = Retry::kAtMostOnce;  // it changes nothing, so it may be repeated
  return call;
}

const RRefHandle& checked(const RRefHandleRef& handle) {
  if (handle == nullptr) throw_error(refers_to_nothing());
  return *handle;
}

}  // namespace

StatusOr<RRefHandleRef> start_remote(const Worker& worker, const Destination& to, UntypedCall call,
                                     const CallSite& at) {
  WEFT_ASSIGN_OR_RETURN(const auto service, service_of(worker));
  auto rider = std::make_shared<RRefRider>();
  if (call.rider != nullptr) {  // of a constructor: it keeps the signature
    rider->signature = static_cast<const RRefRider&>(*call.rider).signature;
    call.signature = rider->signature;
  }
  return service->remote(to, std::move(call), std::move(rider), CreationSite{at});
}

StatusOr<RRefHandleRef> start_remote(const RRefHandleRef& on, UntypedCall call) {
  WEFT_ASSIGN_OR_RETURN(const auto service, service_of(on));
  if (Status usable = service->check(*on); !usable.ok()) return annotate(usable, on->text());
  auto rider = std::make_shared<RRefRider>();
  rider->target = on;
  // Default arguments cannot stand behind a pack, so the caller's line is not known.
  CreationSite site{CallSite(),
                    absl::StrCat(call.method, "() over ", to_string(on->handle().rref))};
  return service->remote(on->owner(), std::move(call), std::move(rider), std::move(site));
}

StatusOr<RRefHandleRef> make_local_rref(const Worker& worker, KeptObject value,
                                        const CallSite& at) {
  if (value.object == nullptr) {
    return make_error(ErrorKind::kInvalidArgument, "RRef::local() of a null pointer");
  }
  WEFT_ASSIGN_OR_RETURN(const auto service, service_of(worker));
  try {
    value.after = mark_all_here(worker);
  } catch (...) {
    return annotate(status_from_current_exception(), "RRef::local()");
  }
  return service->make_local(std::move(value), CreationSite{at});
}

StatusOr<UntypedCall> constructor_call(const Worker& worker, const std::type_info& type,
                                       std::string_view arguments) {
  const Library* const library = library_of(worker);
  if (library == nullptr) {
    return make_error(ErrorKind::kState, "this worker has no library any more, it has shut down");
  }
  UntypedCall call;
  WEFT_ASSIGN_OR_RETURN(call.method, library->class_name_of(type));
  auto rider = std::make_shared<RRefRider>();
  rider->signature = absl::StrCat(std::string(arguments), "->", call.method);
  call.signature = rider->signature;
  call.rider = std::move(rider);
  return call;
}

UntypedCall fetch_call(const CallOptions& options) {
  return asking_call(kFetchMethod, kFetchSignature, options);
}

UntypedCall creation_call(const CallOptions& options) {
  return asking_call(kCreationMethod, kCreationSignature, options);
}

CallHandle start_use(const RRefHandleRef& handle, UntypedCall&& call, FutureCore* future,
                     CallDone done) {
  const auto service = service_of(handle);
  if (!service.ok()) {
    done(service.status());
    return CallHandle();
  }
  const Destination owner(handle->owner());
  expect_answer((*service)->worker(), call.method, owner, future);
  return (*service)->start_use(handle, owner, std::move(call), std::move(done));
}

CallHandle start_local_use(const RRefHandleRef& handle, const std::type_info& type,
                           Timeout deadline, absl::AnyInvocable<void(StatusOr<KeptObject>)> done) {
  auto service = service_of(handle);
  if (!service.ok()) {
    done(service.status());
    return CallHandle();
  }
  return (*service)->start_local_use(handle, type, deadline, std::move(done));
}

StatusOr<std::shared_ptr<const Worker>> worker_of(const RRefHandleRef& handle) {
  WEFT_ASSIGN_OR_RETURN(const auto service, service_of(handle));
  return service->context().worker;
}

WorkerInfo owner_info(const RRefHandleRef& handle) { return checked(handle).owner(); }
RRefId id_of(const RRefHandleRef& handle) { return checked(handle).handle().rref; }
bool is_owned_here(const RRefHandleRef& handle) { return checked(handle).is_owner(); }

bool is_confirmed(const RRefHandleRef& handle) {
  if (checked(handle).is_owner()) return true;
  const auto service = handle->service();
  return service != nullptr && service->confirmed(*handle);
}

bool is_ready(const RRefHandleRef& handle) { return checked(handle).ready(); }

void put_rref(Encoder& out, const RRefHandleRef& handle) {
  if (handle == nullptr) return out.fail(annotate(refers_to_nothing(), "an argument"));
  out.put_reference(handle);
}

StatusOr<RRefHandleRef> take_rref(Decoder& in) {
  WEFT_ASSIGN_OR_RETURN(const std::shared_ptr<const Reference> reference, in.take_reference());
  auto handle = std::dynamic_pointer_cast<const RRefHandle>(reference);
  if (handle == nullptr) return in.fail("expected an RRef, found another reference");
  return handle;
}

}  // namespace weft::internal
