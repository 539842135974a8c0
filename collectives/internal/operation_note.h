#ifndef WEFT_COLLECTIVES_INTERNAL_OPERATION_NOTE_H_
#define WEFT_COLLECTIVES_INTERNAL_OPERATION_NOTE_H_

// OperationNote: what the operation under way is, for flight record, timeline and observers.
//
// Threads: begin() and the setters by the thread of the operation; read by any.

#include <atomic>
#include <cstdint>
#include <string_view>

namespace weft::internal {

class OperationNote {
 public:
  void begin() {
    algorithm_.store("", std::memory_order_relaxed);
    bytes_.store(0, std::memory_order_relaxed);
  }
  // A literal. Schedules that an operation runs one after another: the last one counts.
  void set_algorithm(std::string_view name) {
    algorithm_.store(name.data(), std::memory_order_relaxed);
  }
  // Bytes of the tensors at this rank: those of the inputs or of the outputs, what is more.
  void set_bytes(uint64_t bytes) { bytes_.store(bytes, std::memory_order_relaxed); }

  std::string_view algorithm() const { return algorithm_.load(std::memory_order_relaxed); }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<const char*> algorithm_{""};
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_OPERATION_NOTE_H_
