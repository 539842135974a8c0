#ifndef WEFT_RPC_INTERNAL_AGENT_ATTACHMENTS_H_
#define WEFT_RPC_INTERNAL_AGENT_ATTACHMENTS_H_

// What interceptors attached to one message, and metadata as it came with one.

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "weft/rpc/spi/interceptor.h"

namespace weft::internal {

using Interceptors = std::vector<std::shared_ptr<Interceptor>>;

// (key, value), of an answer that came.
using Metadata = std::vector<std::pair<std::string, std::string>>;

// Built by one thread; then any.
class Attachments {
 public:
  Attachments() = default;
  // Held by everything that may still send the message: when the last holder is gone nothing is
  // sent any more.
  ~Attachments() { end(Delivery::kUnknown, absl::OkStatus()); }
  Attachments(const Attachments&) = delete;
  Attachments& operator=(const Attachments&) = delete;

  // What `from` gave; null is nothing. An error when it refused, or there is more than fits.
  Status add(const std::shared_ptr<Interceptor>& from, StatusOr<AttachmentPtr> given);
  bool empty() const { return entries_.empty(); }
  // Keys and values together.
  size_t bytes() const { return bytes_; }
  template <class Header>
  void put(Header* header) const {
    for (const auto& [from, attachment] : entries_) {
      auto* entry = header->add_metadata();
      const std::string_view key = from->key();
      entry->set_key(key.data(), key.size());
      entry->set_value(attachment->bytes());
    }
  }
  // What is to go with the frames of a large answer beside `held`.
  std::shared_ptr<const void> on_its_way(std::shared_ptr<const void> held) const;
  // INT-1: only the first time counts.
  void end(Delivery delivery, const Status& result);

 private:
  absl::InlinedVector<std::pair<std::shared_ptr<Interceptor>, AttachmentPtr>, 2> entries_;
  size_t bytes_ = 0;
  std::atomic<bool> ended_{false};
};
using AttachmentsRef = std::shared_ptr<Attachments>;

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_ATTACHMENTS_H_
