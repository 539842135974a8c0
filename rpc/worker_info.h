#ifndef WEFT_RPC_WORKER_INFO_H_
#define WEFT_RPC_WORKER_INFO_H_

// WorkerInfo: who a worker is. Destination: how a call names its callee.

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "weft/common/api.h"

namespace weft {

// (name, id, incarnation): the incarnation is 64 random bits drawn each time a worker of that name
// starts, so a message meant for the one before is refused. Compares and hashes by all three. May
// be sent as an argument or a result.
struct WorkerInfo {
  std::string name;
  uint32_t id = 0;
  uint64_t incarnation = 0;

  friend bool operator==(const WorkerInfo& a, const WorkerInfo& b) {
    return a.id == b.id && a.incarnation == b.incarnation && a.name == b.name;
  }
  friend bool operator!=(const WorkerInfo& a, const WorkerInfo& b) { return !(a == b); }
  friend bool operator<(const WorkerInfo& a, const WorkerInfo& b) {
    if (a.id != b.id) return a.id < b.id;
    if (a.incarnation != b.incarnation) return a.incarnation < b.incarnation;
    return a.name < b.name;
  }
  template <class H>
  friend H AbslHashValue(H h, const WorkerInfo& info) {
    return H::combine(std::move(h), info.name, info.id, info.incarnation);
  }
};

// A worker by name, by id (any integer type but bool), or by WorkerInfo; the last refuses another
// incarnation of the same name.
class Destination {
 public:
  Destination(const char* name) : name_(name) {}         // NOLINT: implicit by design
  Destination(std::string_view name) : name_(name) {}    // NOLINT
  Destination(const std::string& name) : name_(name) {}  // NOLINT
  Destination(const WorkerInfo& info)                    // NOLINT
      : name_(info.name), id_(info.id), incarnation_(info.incarnation), form_(Form::kInfo) {}
  template <class I, std::enable_if_t<std::is_integral_v<I> && !std::is_same_v<I, bool>, int> = 0>
  Destination(I id) : id_(static_cast<int64_t>(id)), form_(Form::kId) {}  // NOLINT

  bool by_id() const { return form_ == Form::kId; }
  bool by_info() const { return form_ == Form::kInfo; }
  const std::string& name() const { return name_; }
  int64_t id() const { return id_; }
  uint64_t incarnation() const { return incarnation_; }

 private:
  enum class Form { kName, kId, kInfo };
  std::string name_;
  int64_t id_ = 0;
  uint64_t incarnation_ = 0;
  Form form_ = Form::kName;
};

}  // namespace weft

#endif  // WEFT_RPC_WORKER_INFO_H_
