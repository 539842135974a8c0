// What an observer sees of a worker as a whole, and the observer's call.

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/launch/core.h"
#include "weft/rpc/internal/observe/inspect_call.h"
#include "weft/rpc/value.h"

namespace weft::internal {

void Core::put_inspection(Inspection* out, bool counters) const {
  Inspection::Table& worker = out->table(
      "worker", {"name", "id", "incarnation", "job", "address", "host", "pid", "members", "state"});
  const MemberListRef members = membership_->list();
  const Member* const self = members->find(self_.id);
  bool leaving = false;
  {
    MutexLock lock(&shutdown_mutex_);
    leaving = shutdown_begun_;
  }
  worker.add({self_.name, int64_t{self_.id},
              absl::StrCat(absl::Hex(self_.incarnation, absl::kZeroPad16)), job_id_, address_,
              self == nullptr ? std::string() : self->host, self == nullptr ? 0 : self->pid,
              static_cast<int64_t>(members->by_id.size()),
              std::string(leaving ? "leaving" : "running")});
  agent_->put_inspection(out);
  for (const auto& service : services_) service->put_inspection(out);
  if (!counters) return;
  Inspection::Table& table = out->table("counters", {"name", "value"});
  for (const auto& [name, value] : debug_info()) table.add({name, value});
}

Payload encode(const InspectRequest& request) {
  Payload out;
  Encoder encoder(&out);
  encoder.put(std::string(request.json ? "json" : "text"));
  encoder.put(request.most_rows);
  encoder.put(request.counters);
  return out;
}

StatusOr<InspectRequest> decode_inspect_request(Payload payload) {
  Decoder in(std::move(payload));
  InspectRequest out;
  WEFT_ASSIGN_OR_RETURN(const std::string format, in.take<std::string>());
  WEFT_ASSIGN_OR_RETURN(out.most_rows, in.take<int64_t>());
  WEFT_ASSIGN_OR_RETURN(out.counters, in.take<bool>());
  if (format != "json" && format != "text") {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat(kInspectMethod, " gives text or json"));
  }
  out.json = format == "json";
  return out;
}

}  // namespace weft::internal
