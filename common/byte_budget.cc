#include "weft/common/byte_budget.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/error.h"
#include "weft/common/log.h"

namespace weft {

absl::Status ByteBudget::charge(uint64_t bytes) {
  uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    // Written so that no sum can overflow, whatever a peer claims.
    if (bytes > limit_ || used > limit_ - bytes) {
      refused_.fetch_add(1, std::memory_order_relaxed);
      return make_error(ErrorKind::kResource,
                        absl::StrCat("byte budget '", name_, "' is exhausted: ", bytes,
                                     " bytes asked, ", used, " of ", limit_, " used"));
    }
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  if (parent_ != nullptr) {
    if (absl::Status s = parent_->charge(bytes); !s.ok()) {
      used_.fetch_sub(bytes, std::memory_order_relaxed);
      return s;
    }
  }
  uint64_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < used + bytes &&
         !peak_.compare_exchange_weak(peak, used + bytes, std::memory_order_relaxed)) {
  }
  return absl::OkStatus();
}

void ByteBudget::release(uint64_t bytes) {
  const uint64_t before = used_.fetch_sub(bytes, std::memory_order_relaxed);
  WEFT_CHECK(before >= bytes) << "budget '" << name_ << "': " << bytes << " bytes given back, "
                              << before << " were charged";
  if (parent_ != nullptr) parent_->release(bytes);
}

absl::StatusOr<ByteCharge> ByteCharge::make(ByteBudget* budget, uint64_t bytes) {
  WEFT_RETURN_IF_ERROR(budget->charge(bytes));
  return ByteCharge(budget, bytes);
}

ByteCharge& ByteCharge::operator=(ByteCharge&& other) noexcept {
  if (this != &other) {
    reset();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

absl::Status ByteCharge::resize(uint64_t bytes) {
  WEFT_CHECK(budget_ != nullptr) << "resize of a charge without a budget";
  if (bytes > bytes_) {
    WEFT_RETURN_IF_ERROR(budget_->charge(bytes - bytes_));
  } else {
    budget_->release(bytes_ - bytes);
  }
  bytes_ = bytes;
  return absl::OkStatus();
}

void ByteCharge::reset() {
  if (budget_ != nullptr) budget_->release(bytes_);
  budget_ = nullptr;
  bytes_ = 0;
}

}  // namespace weft
