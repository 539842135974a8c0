#ifndef WEFT_RPC_SPI_DESTINATION_H_
#define WEFT_RPC_SPI_DESTINATION_H_

// Destination: how a call names its callee. A value type.

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "weft/common/worker_info.h"

namespace weft {

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

  bool by_id() const { return form_ == Form::kId; }      // given as a number
  bool by_info() const { return form_ == Form::kInfo; }  // given as a WorkerInfo
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

#endif  // WEFT_RPC_SPI_DESTINATION_H_
