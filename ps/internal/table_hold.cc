// A client while a snapshot is cut: it begins no push and ends no step.

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/ps/internal/table_core.h"

namespace weft::ps::internal {

bool TableCore::is_held() {
  if (!hold_.has_value()) return false;
  if (service_->context().runtime->now() < hold_->until) return true;
  hold_.reset();
  return false;
}

StatusOr<HeldClient> TableCore::hold(const CutName& cut, absl::Time until) {
  HeldClient out;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return closed_;
    if (is_held() && hold_->cut != cut) {
      return make_error(ErrorKind::kUnavailable,
                        absl::StrCat("table '", setup_.name, "': another snapshot is being cut"));
    }
    hold_ = Hold{cut, until};
    out.number = client_;
    out.pushes = last_number_;
    out.clock = clock_;
    out.position = position_;
    for (const OpRef& op : running_) {
      if (op == nullptr) continue;
      for (const Piece& piece : op->pieces) {
        if (piece.ended || !(piece.request.push.has_value() || op->ask.advance)) continue;
        out.open.push_back({static_cast<uint32_t>(piece.part),
                            piece.request.push.has_value() ? op->number : 0,
                            piece.request.advance.value_or(0)});
      }
    }
  }
  later(until, [self = shared_from_this()] { self->pump(); });
  return out;
}

bool TableCore::release(const CutName& cut) {
  bool was_held = false;
  {
    MutexLock lock(&mutex_);
    was_held = is_held() && hold_->cut == cut && closed_.ok();
    if (was_held) hold_.reset();
  }
  pump();
  return was_held;
}

}  // namespace weft::ps::internal
