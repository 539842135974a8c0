#ifndef WEFT_COMMON_BYTE_BUDGET_H_
#define WEFT_COMMON_BYTE_BUDGET_H_

// ByteBudget: a bound on the bytes that peers can make this process hold (frames being received,
// queues, decoded values). Charged *before* the memory is allocated, so a peer can make a call fail
// but not the process.
//
//   ByteBudget worker(1 << 30, "receive");
//   ByteBudget peer(1 << 28, "receive from ps0", &worker);      // counts in both
//   WEFT_ASSIGN_OR_RETURN(ByteCharge charge, ByteCharge::make(&peer, header.bytes));
//   ... allocate; the charge gives back when it goes ...
//
// Threads: all methods from anywhere, without locks. A budget outlives its children and its
// charges.

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "weft/common/api.h"

namespace weft {

class WEFT_API ByteBudget {
 public:
  static constexpr uint64_t kUnlimited = ~uint64_t{0};  // a limit that nothing reaches

  ByteBudget(uint64_t limit, std::string name, ByteBudget* parent = nullptr)
      : limit_(limit), name_(std::move(name)), parent_(parent) {}
  ByteBudget(const ByteBudget&) = delete;
  ByteBudget& operator=(const ByteBudget&) = delete;

  // Takes `bytes` here and in every ancestor, or nothing anywhere: then an error of kind resource
  // that names the budget that refused, its limit, what is used, and what was asked.
  absl::Status charge(uint64_t bytes);
  // REQUIRES: `bytes` were charged before.
  void release(uint64_t bytes);

  // Whether so many would fit here and in every ancestor if nothing else was there.
  bool may_fit(uint64_t bytes) const {
    return bytes <= limit_ && (parent_ == nullptr || parent_->may_fit(bytes));
  }
  uint64_t limit() const { return limit_; }
  const std::string& name() const { return name_; }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  // The most that was used at once.
  uint64_t peak() const { return peak_.load(std::memory_order_relaxed); }
  // How many charges this budget itself refused.
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  const uint64_t limit_;
  const std::string name_;
  ByteBudget* const parent_;
  std::atomic<uint64_t> used_{0};
  std::atomic<uint64_t> peak_{0};
  std::atomic<uint64_t> refused_{0};
};

// Bytes charged to a budget, given back with this object. One thread at a time.
class WEFT_API ByteCharge {
 public:
  ByteCharge() = default;
  static absl::StatusOr<ByteCharge> make(ByteBudget* budget, uint64_t bytes);
  ~ByteCharge() { reset(); }
  ByteCharge(ByteCharge&& other) noexcept : budget_(other.budget_), bytes_(other.bytes_) {
    other.budget_ = nullptr;
    other.bytes_ = 0;
  }
  ByteCharge& operator=(ByteCharge&& other) noexcept;

  uint64_t bytes() const { return bytes_; }
  // Charges or gives back the difference. On an error nothing has changed. REQUIRES: made by
  // make().
  absl::Status resize(uint64_t bytes);
  // Gives all back now.
  void reset();

 private:
  ByteCharge(ByteBudget* budget, uint64_t bytes) : budget_(budget), bytes_(bytes) {}

  ByteBudget* budget_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace weft

#endif  // WEFT_COMMON_BYTE_BUDGET_H_
