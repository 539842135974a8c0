#ifndef WEFT_TRANSPORT_INTERNAL_WIRE_HANDSHAKE_H_
#define WEFT_TRANSPORT_INTERNAL_WIRE_HANDSHAKE_H_

// The handshake of a connection, shared by all transports: hello and its answer as bytes, what each
// side checks, and the table in which an acceptor gathers the lanes of a connection. The messages
// are specified in proto/transport.proto. Pure functions; HalfOpenTable is guarded by its owner.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/transport/transport.h"

namespace weft::internal {

inline constexpr uint32_t kMaxLanes = 8;
inline constexpr size_t kMaxNameBytes = 1024;
inline constexpr size_t kMaxJobIdBytes = 256;
inline constexpr size_t kMaxTicketBytes = 64;
inline constexpr size_t kMaxHelloTokenBytes = 1024;
// A frame limit below this could not carry an error back.
inline constexpr uint32_t kMinMaxFrameBytes = 1024;
// A connection whose lanes are not complete after this is forgotten.
inline constexpr absl::Duration kHandshakeTimeout = absl::Seconds(10);
// What close() has queued must be gone by then.
inline constexpr absl::Duration kDrainTimeout = absl::Seconds(5);

// Headers of hello and hello_ack frames.
WEFT_API std::string encode_hello(const Hello& hello, int lane, std::string_view token = {});
// Strict: errors are protocol errors. REQUIRES nothing of the bytes. The token is kept apart from
// the Hello, which is shown to people; null: it is dropped.
WEFT_API StatusOr<Hello> decode_hello(std::string_view header, int lane,
                                      std::string* token = nullptr);
WEFT_API std::string encode_ack(const Hello& ours, int lane);
WEFT_API std::string encode_refusal(const Status& why);
// The acceptor's hello. An acceptor's refusal comes back as the error that it sent (code, kind and
// words), any other fault as a protocol or state error.
WEFT_API StatusOr<Hello> decode_ack(std::string_view header, const Hello& sent, int lane);

// The version that both speak, or an error with both ranges.
WEFT_API StatusOr<uint32_t> common_version(const Hello& theirs, const Hello& ours);

// The dialler's hello, completed: connection id, frame limit and number of lanes where they are
// unset.
WEFT_API StatusOr<Hello> complete_hello(const Hello& hello, size_t max_frame_bytes, Random& random);

// The acceptor's side of one lane's hello: our own for the acknowledgement, or the refusal.
WEFT_API StatusOr<Hello> answer_hello(Acceptor& acceptor, const Hello& theirs,
                                      size_t max_frame_bytes);

// "ps0 (127.0.0.1:4711)"
WEFT_API std::string describe_peer(const Hello& hello, std::string_view address);

// Lanes that have said hello and wait for the others of their connection, those that are made late for one another.
template <class LaneRef>
class HalfOpenTable {
 public:
  struct Entry {
    Hello hello;
    std::string encoded;  // for comparison
    std::map<int, LaneRef> lanes;
  };

  explicit HalfOpenTable(size_t max_lanes) : max_lanes_(max_lanes) {}

  // Puts the lane to the others of its connection. Null: some are missing. Otherwise the entry with
  // all lanes, taken out of the table. Errors: protocol (a lane twice, lanes that contradict each
  // other), resource (the table is full).
  StatusOr<std::unique_ptr<Entry>> add(const Hello& hello, int lane, LaneRef ref) {
    const bool late = lane >= static_cast<int>(hello.lanes);
    const uint32_t together = late ? hello.late_lanes : hello.lanes;
    const Key key{hello.incarnation, hello.connection_id, late};
    std::string encoded = encode_hello(hello, 0);
    auto it = entries_.find(key);
    if (it != entries_.end()) {
      if (it->second->encoded != encoded) {
        return make_error(ErrorKind::kProtocol,
                          absl::StrCat("the lanes of one connection from '", hello.name,
                                       "' say hello in different words"));
      }
      if (it->second->lanes.count(lane) > 0) {
        return make_error(
            ErrorKind::kProtocol,
            absl::StrCat("lane ", lane, " of a connection from '", hello.name, "' is there twice"));
      }
    }
    if (together > 1 && lanes_ >= max_lanes_) {
      return make_error(ErrorKind::kResource,
                        absl::StrCat(lanes_,
                                     " lanes of unfinished connections already wait here, "
                                     "which is the bound: try again later"));
    }
    if (it == entries_.end()) {
      it = entries_.emplace(key, std::make_unique<Entry>()).first;
      it->second->hello = hello;
      it->second->encoded = std::move(encoded);
    }
    it->second->lanes.emplace(lane, std::move(ref));
    ++lanes_;
    if (it->second->lanes.size() < together) return std::unique_ptr<Entry>();
    std::unique_ptr<Entry> entry = std::move(it->second);
    lanes_ -= entry->lanes.size();
    entries_.erase(it);
    return entry;
  }

  // Forgets the connection to which this lane belongs, with all of its lanes, which are returned;
  // null when the lane is not there.
  template <class Lane>
  std::unique_ptr<Entry> remove_lane(const Hello& hello, int lane, const Lane* which) {
    const bool late = lane >= static_cast<int>(hello.lanes);
    auto it = entries_.find(Key{hello.incarnation, hello.connection_id, late});
    if (it == entries_.end()) return nullptr;
    auto at = it->second->lanes.find(lane);
    if (at == it->second->lanes.end() || &*at->second != which) return nullptr;
    std::unique_ptr<Entry> entry = std::move(it->second);
    lanes_ -= entry->lanes.size();
    entries_.erase(it);
    return entry;
  }

  size_t lanes() const { return lanes_; }

 private:
  using Key = std::tuple<uint64_t, uint64_t, bool>;

  const size_t max_lanes_;
  size_t lanes_ = 0;
  std::map<Key, std::unique_ptr<Entry>> entries_;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_WIRE_HANDSHAKE_H_
