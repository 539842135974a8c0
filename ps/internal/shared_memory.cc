#include "weft/ps/internal/shared_memory.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/ps/internal/ask.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/service.h"
#include "weft/rpc/plain_tensor.h"
#include "weft/transport/local_socket.h"

namespace weft::ps {
namespace internal {
namespace {

using weft::internal::accept_local;
using weft::internal::connect_local;
using weft::internal::listen_local;
using weft::internal::LocalMessage;
using weft::internal::MemoryFile;
using weft::internal::peer_user;
using weft::internal::random_bytes;
using weft::internal::receive_local;
using weft::internal::send_local;
using weft::internal::UniqueFd;

constexpr absl::Duration kShareTime = absl::Seconds(60);
constexpr absl::Duration kShareAskTime = absl::Seconds(10);
constexpr absl::Duration kShareAgain = absl::Milliseconds(20);
constexpr int kShareBacklog = 4;

std::string the_parameter(const std::string& name) {
  return absl::StrCat("share_memory: parameter '", name, "'");
}

Status bad_parameter(const std::string& name, std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat(the_parameter(name), " ", std::string(why)));
}

Status check_parameter(const NamedParameter& one, const SharedMemories& memories) {
  const at::Tensor& t = one.tensor;
  WEFT_RETURN_IF_ERROR(check_updated_in_place(the_parameter(one.name), t));
  if (!is_plain(t)) return bad_parameter(one.name, "is not contiguous");
  if (t.storage().nbytes() != t.nbytes()) {
    return bad_parameter(
        one.name, absl::StrCat("is a view of ", t.nbytes(), " bytes of ", t.storage().nbytes(),
                               ", which others may see, too"));
  }
  if (memories.has(t.const_data_ptr())) {
    return bad_parameter(one.name, "lies in shared memory already");
  }
  return absl::OkStatus();
}

StatusOr<std::vector<SharedParameter>> check_parameters(
    const std::vector<NamedParameter>& parameters, const SharedMemories& memories) {
  if (parameters.empty()) {
    return make_error(ErrorKind::kInvalidArgument, "share_memory: there are no parameters");
  }
  std::map<const void*, std::string> seen;
  std::vector<SharedParameter> out;
  for (const NamedParameter& one : parameters) {
    WEFT_RETURN_IF_ERROR(check_parameter(one, memories));
    const auto [other, fresh] =
        seen.emplace(one.tensor.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl(), one.name);
    if (!fresh) {
      return bad_parameter(one.name, absl::StrCat("shares its memory with '", other->second, "'"));
    }
    out.push_back({one.name, one.tensor.scalar_type(), one.tensor.sizes().vec()});
  }
  return out;
}

std::vector<at::Tensor> tensors_in(const std::shared_ptr<MemoryFile>& file,
                                   const std::vector<SharedParameter>& layout,
                                   const SharedLayout& places) {
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < layout.size(); ++i) {
    out.push_back(at::from_blob(
        file->data() + places.offsets[i], layout[i].shape, [file](void*) {},
        at::TensorOptions().dtype(layout[i].dtype)));
  }
  return out;
}

void move_into(const std::vector<NamedParameter>& parameters,
               const std::vector<at::Tensor>& places) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor parameter = parameters[i].tensor;
    parameter.set_data(places[i]);
  }
}

// ---- the owner ---------------------------------------------------------------------------------

Status make_shared(PsService& service, const std::vector<NamedParameter>& parameters,
                   const SharedLayout& places, const std::shared_ptr<SharedRegion>& region) {
  const auto made = [&]() -> StatusOr<std::shared_ptr<MemoryFile>> {
    WEFT_ASSIGN_OR_RETURN(std::shared_ptr<MemoryFile> file, MemoryFile::make(places.total));
    WEFT_RETURN_IF_ERROR(file->populate(0, places.total));
    return file;
  }();
  if (!made.ok()) {
    return annotate(made.status(),
                    absl::StrCat("share_memory: '", region->name, "', ", places.total, " bytes"));
  }
  region->file = *made;
  const std::vector<at::Tensor> moved = tensors_in(*made, region->layout, places);
  {
    const at::AutoGradMode no_grad(false);
    for (size_t i = 0; i < moved.size(); ++i) moved[i].copy_(parameters[i].tensor);
  }
  WEFT_RETURN_IF_ERROR(service.shared().offer(service.worker().name(), region));
  move_into(parameters, moved);
  return absl::OkStatus();
}

// ---- the asking side -----------------------------------------------------------------------------

// The owner has not come, has not shared it, or has not heard of the question.
bool may_share_later(ErrorKind kind) {
  return kind == ErrorKind::kNotFound || kind == ErrorKind::kDeadline ||
         kind == ErrorKind::kNotDelivered || kind == ErrorKind::kMaybeExecuted;
}

// What the owner has sent before it answered.
StatusOr<UniqueFd> take_file(int listener, const std::string& secret) {
  for (;;) {
    const UniqueFd from = accept_local(listener);
    if (!from.valid()) {
      return make_error(ErrorKind::kProtocol, "it says that it has sent the memory, and has not");
    }
    const auto user = peer_user(from.get());
    if (!user.ok() || *user != geteuid()) continue;  // a stranger
    auto message = receive_local(from.get());
    const bool right = message.ok() && message->what == LocalMessage::What::kMessage &&
                       message->bytes == secret && message->files.size() == 1;
    if (right) return std::move(message->files[0]);
  }
}

StatusOr<std::shared_ptr<MemoryFile>> ask_for_file(const Worker& worker, const WorkerInfo& owner,
                                                   const SharedRegion& region, uint64_t total,
                                                   absl::Duration time) {
  Random& random = worker.runtime().random();
  const ShareRequest request{region.name, random_bytes(random, kShareToken),
                             random_bytes(random, kShareToken)};
  WEFT_ASSIGN_OR_RETURN(const UniqueFd listener, listen_local(share_socket_name(request.socket),
                                                              SOCK_SEQPACKET, kShareBacklog));
  WEFT_ASSIGN_OR_RETURN(
      const std::string answer,
      ask_bytes(worker, owner, kShareMethod, kShareSignature, encode(request), time));
  WEFT_ASSIGN_OR_RETURN(const std::vector<SharedParameter> there, decode_shared(answer));
  if (const std::string why = difference(there, region.layout); !why.empty()) {
    return make_error(ErrorKind::kInvalidArgument, why);
  }
  WEFT_ASSIGN_OR_RETURN(UniqueFd file, take_file(listener.get(), request.secret));
  return MemoryFile::adopt(std::move(file), total);
}

Status join_shared(PsService& service, const std::vector<NamedParameter>& parameters,
                   const SharedLayout& places, absl::Duration time, SharedRegion* region) {
  const Worker& worker = service.worker();
  const absl::Time end = deadline_after(worker.now(), time);
  Status why;  // the last that says more than that the time was over
  for (;;) {
    const StatusOr<WorkerInfo> owner = worker.try_get_worker_info(region->owner);
    const absl::Duration left = std::max(absl::ZeroDuration(), end - worker.now());
    auto file = owner.ok() ? ask_for_file(worker, *owner, *region, places.total,
                                          std::min(left, kShareAskTime))
                           : StatusOr<std::shared_ptr<MemoryFile>>(owner.status());
    if (file.ok()) {
      region->file = *std::move(file);
      service.shared().remember(region->file);
      move_into(parameters, tensors_in(region->file, region->layout, places));
      return absl::OkStatus();
    }
    const std::string what =
        absl::StrCat("share_memory: '", region->name, "' of '", region->owner, "'");
    const ErrorKind kind = error_kind(file.status());
    if (!may_share_later(kind)) return annotate(file.status(), what);
    if (why.ok() || kind != ErrorKind::kDeadline) why = file.status();
    if (worker.now() >= end) {
      return make_error(ErrorKind::kDeadline,
                        absl::StrCat(what, " was not there in ", absl::FormatDuration(time), ": ",
                                     why.message()));
    }
    worker.runtime().make_parker()->park_until(std::min(end, worker.now() + kShareAgain));
  }
}

}  // namespace

Status check_updated_in_place(std::string_view what, const at::Tensor& parameter) {
  const auto bad = [what](std::string_view why) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat(std::string(what), " ", std::string(why)));
  };
  const at::Tensor& t = parameter;
  if (!t.defined()) return bad("is undefined");
  if (t.layout() != at::kStrided) return bad("is sparse");
  if (!t.device().is_cpu()) return bad("is not on the CPU");
  if (t.scalar_type() != at::kFloat && t.scalar_type() != at::kDouble) {
    return bad(absl::StrCat("is ", t.toString(), ", and not Float or Double"));
  }
  if (!t.is_leaf()) return bad("is no leaf: it was computed");
  return absl::OkStatus();
}

Status SharedMemories::offer(const std::string& worker,
                             const std::shared_ptr<SharedRegion>& region) {
  MutexLock lock(&mutex_);
  std::erase_if(offered_, [](const auto& one) { return one.second.expired(); });
  std::weak_ptr<SharedRegion>& there = offered_[region->name];
  if (!there.expired()) {
    return make_error(ErrorKind::kState, absl::StrCat("share_memory: '", worker, "' shares a '",
                                                      region->name, "' already"));
  }
  there = region;
  keep(region->file);
  return absl::OkStatus();
}

void SharedMemories::keep(const std::shared_ptr<MemoryFile>& file) {
  std::erase_if(files_, [](const auto& one) { return one.expired(); });
  files_.push_back(file);
}

void SharedMemories::remember(const std::shared_ptr<MemoryFile>& file) {
  MutexLock lock(&mutex_);
  keep(file);
}

bool SharedMemories::has(const void* address) const {
  const auto* const at = static_cast<const char*>(address);
  MutexLock lock(&mutex_);
  return std::any_of(files_.begin(), files_.end(), [at](const auto& one) {
    const std::shared_ptr<MemoryFile> file = one.lock();
    return file != nullptr && at >= file->data() && at < file->data() + file->size();
  });
}

StatusOr<std::shared_ptr<SharedRegion>> SharedMemories::find(const std::string& worker,
                                                             const std::string& name) const {
  MutexLock lock(&mutex_);
  std::vector<std::string> names;
  for (const auto& [other, weak] : offered_) {
    auto region = weak.lock();
    if (region == nullptr) continue;
    if (other == name) return region;
    if (names.size() < 8) names.push_back(other);
  }
  return make_error(ErrorKind::kNotFound,
                    absl::StrCat("'", worker, "' shares no '", name, "', it shares ",
                                 names.empty() ? "nothing" : absl::StrJoin(names, ", ")));
}

StatusOr<std::string> SharedMemories::answer(const std::string& worker, const std::string& caller,
                                             std::string_view bytes) const {
  WEFT_ASSIGN_OR_RETURN(const ShareRequest request, decode_share(bytes));
  WEFT_ASSIGN_OR_RETURN(const std::shared_ptr<SharedRegion> region, find(worker, request.name));
  const StatusOr<UniqueFd> to = connect_local(share_socket_name(request.socket));
  if (!to.ok()) {
    if (error_kind(to.status()) != ErrorKind::kUnavailable) return to.status();
    return make_error(ErrorKind::kUnavailable,
                      absl::StrCat("'", caller, "' runs on another host than '", worker,
                                   "', or in another network namespace, and memory cannot be "
                                   "shared between them"));
  }
  WEFT_ASSIGN_OR_RETURN(const uid_t user, peer_user(to->get()));
  if (user != geteuid()) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("'", caller, "' runs as another user than '", worker, "'"));
  }
  const int file = region->file->fd();
  WEFT_RETURN_IF_ERROR(send_local(to->get(), request.secret, {&file, 1}));
  return encode(region->layout);
}

void PsService::on_share(CallContext& call, Payload arguments, ReplyFn reply) {
  const StatusOr<std::string> bytes = unpack_bytes(std::move(arguments));
  StatusOr<std::string> said = bytes;
  if (bytes.ok()) said = shared_.answer(worker().name(), call.caller().name, *bytes);
  if (!said.ok()) return reply(said.status());
  reply(pack_bytes(*said));
}

}  // namespace internal

StatusOr<SharedMemory> try_share_memory(const Worker& worker,
                                        const std::vector<NamedParameter>& parameters,
                                        const ShareOptions& options) {
  using internal::SharedRegion;
  const auto service = worker.service<internal::PsService>();
  if (service == nullptr) {
    return make_error(ErrorKind::kState, absl::StrCat("share_memory: worker '", worker.name(),
                                                      "' does not list ps_service()"));
  }
  WEFT_RETURN_IF_ERROR(internal::check_name(options.name));
  auto region = std::make_shared<SharedRegion>();
  region->name = options.name;
  region->owner = options.owner.empty() ? worker.name() : options.owner;
  WEFT_ASSIGN_OR_RETURN(region->layout, internal::check_parameters(parameters, service->shared()));
  WEFT_ASSIGN_OR_RETURN(const internal::SharedLayout places, internal::layout_of(region->layout));
  for (const NamedParameter& one : parameters) region->parameters.push_back(one.tensor);
  if (options.owner.empty()) {
    WEFT_RETURN_IF_ERROR(internal::make_shared(*service, parameters, places, region));
  } else {
    const absl::Duration time = options.deadline.value_or(internal::kShareTime);
    WEFT_RETURN_IF_ERROR(internal::join_shared(*service, parameters, places, time, region.get()));
  }
  return SharedMemory(std::move(region));
}

SharedMemory share_memory(const Worker& worker, const std::vector<NamedParameter>& parameters,
                          const ShareOptions& options) {
  return value_or_throw(try_share_memory(worker, parameters, options));
}

const std::string& SharedMemory::name() const { return region_->name; }
const std::string& SharedMemory::owner() const { return region_->owner; }
int64_t SharedMemory::bytes() const { return static_cast<int64_t>(region_->file->size()); }
uint64_t SharedMemory::updates() const {
  return region_->updates().load(std::memory_order_relaxed);
}

}  // namespace weft::ps
