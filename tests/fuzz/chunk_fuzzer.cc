// Arbitrary headers and chunks at an Assembler: whatever comes, the budget is kept, every message
// that was accepted is delivered or dropped once, and nothing is left when the connection goes.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/common/byte_budget.h"
#include "weft/proto/rpc.pb.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/tests/fuzz/target.h"

namespace {

// The input from its front.
class Input {
 public:
  explicit Input(std::string_view bytes) : rest_(bytes) {}
  bool empty() const { return rest_.empty(); }
  uint64_t number(size_t bytes) {
    uint64_t out = 0;
    const std::string_view in = text(bytes);
    for (size_t i = 0; i < in.size(); ++i) {
      out |= uint64_t{static_cast<unsigned char>(in[i])} << (8 * i);
    }
    return out;
  }
  std::string_view text(size_t bytes) {
    const std::string_view out = rest_.substr(0, bytes);
    rest_.remove_prefix(out.size());
    return out;
  }

 private:
  std::string_view rest_;
};

// Prefix and the least header.
constexpr size_t kFrameBytes = 32;

// Shares some memory, and counts its uses.
class Sharing final : public weft::Connection {
 public:
  static constexpr uint64_t kBytes = 32 * 1024;
  const weft::Hello& peer() const override { return hello_; }
  bool dialled() const override { return true; }
  weft::Status send(weft::Frame, int) override { return absl::OkStatus(); }
  void close(weft::Status) override {}
  std::string describe() const override { return "fuzzer"; }
  weft::StatusOr<weft::Borrowed> borrow(const weft::Placement& placement,
                                        uint64_t length) override {
    if (placement.offset > kBytes || length > kBytes - placement.offset) {
      return weft::make_error(weft::ErrorKind::kProtocol, "outside");
    }
    return weft::Borrowed{memory_.data() + placement.offset, users_};
  }
  bool unused() const { return users_.use_count() == 1; }

 private:
  const weft::Hello hello_{};
  alignas(64) std::array<char, kBytes> memory_ = {};
  const std::shared_ptr<int> users_ = std::make_shared<int>();
};

uint64_t announced(const weft::v1::Layout& layout) {
  uint64_t bytes = 0;
  for (const weft::v1::Segment& segment : layout.segments()) bytes += segment.length();
  return bytes + layout.wide_length();
}

}  // namespace

// An empty segment of two bytes becomes some 70, and what is known of a tensor of four bytes some
// 400.
const size_t kMostBytesPerByte = 128;

// A row of events. 'H', length of a Layout (2 bytes), the Layout, length of the payload (1), the
// payload: a header. 'C', transfer id (1), offset (8), length (2): a chunk; its bytes are zero. 'D',
// the same and its bytes: one of a wide message, whose header is a Layout here. 'P', as 'C': one
// that the transport reads into place, if there is one. 'S': their call is over. Anything else ends the row, as
// does an error.
weft::Status fuzz_one(std::string_view bytes_of_all) {
  namespace in = weft::internal;
  constexpr uint64_t kBudget = 64 * 1024;
  weft::ByteBudget budget(kBudget, "fuzzed");
  in::MessageLimits limits;
  limits.max_message_bytes = 48 * 1024;
  limits.max_parked_bytes = 16 * 1024;
  weft::Status verdict;
  int begun = 0;
  bool refused = false;  // the last one that was told
  int delivered = 0;
  static const std::string zeros(1 << 16, '\0');
  {
    in::Assembler assembler(limits, &budget);
    Sharing connection;
    Input input(bytes_of_all);
    bool alive = true;
    while (alive && !input.empty()) {
      const uint64_t event = input.number(1);
      weft::FrameView frame{weft::FrameKind::kRequest, {}, {}, 0};
      std::vector<std::string_view> pieces(1);
      if (event == 'H') {
        weft::v1::Layout layout;
        const std::string_view bytes = input.text(input.number(2));
        if (!decoded(kFrameBytes + bytes.size(), [&] {
              return layout.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
            })) {
          note(weft::make_error(weft::ErrorKind::kProtocol, "a layout that cannot be read"),
               &verdict);
          break;
        }
        pieces[0] = input.text(input.number(1));
        frame.payload = pieces;
        frame.payload_bytes = pieces[0].size();
        bool told = false;
        refused = false;
        const auto tell = [&, told](weft::StatusOr<weft::Payload> payload) mutable {
          require(!told);
          told = true;
          ++delivered;
          refused = !payload.ok();
          note(payload.status(), &verdict);
        };
        const auto open = [&,
                           tell](std::string_view header) -> weft::StatusOr<in::Assembler::Opened> {
          auto inner = std::make_unique<weft::v1::Layout>();
          if (!inner->ParseFromArray(header.data(), static_cast<int>(header.size()))) {
            return weft::make_error(weft::ErrorKind::kProtocol, "a layout that cannot be read");
          }
          return in::Assembler::Opened{std::move(inner), tell};
        };
        const weft::Status begin = decoded(frame.payload_bytes, [&] {
          return in::is_wide(layout) ? assembler.begin_wide(layout, frame, &connection, open, tell)
                                     : assembler.begin(layout, frame, &connection, tell);
        });
        // Only what was accepted may take the bytes that it announces.
        if (begin.ok() && !refused) Decoding::charged(announced(layout));
        note(begin, &verdict);
        alive = begin.ok();
        if (alive) ++begun;
      } else if (event == 'C' || event == 'D' || event == 'P') {
        std::string header(in::kChunkHeaderBytes, '\0');
        header[0] = static_cast<char>(input.number(1));
        const std::string_view offset = input.text(8);
        header.replace(8, offset.size(), offset);
        const uint64_t length = input.number(2);
        pieces[0] = event == 'D' ? input.text(length) : std::string_view(zeros).substr(0, length);
        frame.kind = weft::FrameKind::kChunk;
        frame.header = header;
        frame.payload = pieces;
        frame.payload_bytes = pieces[0].size();
        const weft::Status taken =
            decoded(kFrameBytes + frame.payload_bytes, [&]() -> weft::Status {
              const weft::ChunkTarget target =
                  event == 'P' ? assembler.chunk_target(header, length) : weft::ChunkTarget{};
              if (target.data == nullptr) return assembler.on_chunk(frame);
              std::memset(target.data, 0, length);
              return assembler.chunk_filled(header, length);
            });
        note(taken, &verdict);
        alive = taken.ok();
      } else if (event == 'S') {
        const auto open = assembler.incomplete();
        require(open.size() <= 1);  // all belong to the same call
        assembler.give_up(
            {{in::Assembler::Purpose(), weft::make_error(weft::ErrorKind::kDeadline, "over")}});
      } else {
        break;
      }
      require(budget.used() <= kBudget);
    }
    const size_t incomplete = assembler.incomplete_for_test();
    assembler.abandon();
    require(assembler.incomplete_for_test() == 0);
    if (incomplete > 0) {
      note(weft::make_error(weft::ErrorKind::kUnavailable, "not complete"), &verdict);
    }
    require(connection.unused());
  }
  require(delivered <= begun + 1);
  require(budget.used() == 0);
  return verdict;
}
