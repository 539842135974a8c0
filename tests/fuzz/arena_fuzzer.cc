// What a peer says about shared memory: offers by the private socket, with and without a file, and
// the frames that answer them. Whatever comes, no place outside of a file is ever borrowed, nothing
// is lent before the right answer, and no lease of another link ends.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "weft/common/runtime.h"
#include "weft/tests/fuzz/target.h"
#include "weft/transport/internal/arena/link.h"
#include "weft/transport/internal/arena/shared_arena.h"
#include "weft/transport/internal/local/gate.h"

namespace {

namespace in = weft::internal;

constexpr uint64_t kFileBytes = 64 * 1024;
// Least size of a message on a socket, whatever it says.
constexpr size_t kLeastBytes = 16;

class Host final : public in::ArenaLink::Host {
 public:
  void send_arena_frame(weft::FrameKind, std::string header) override {
    require(header.size() < 1024);
  }
  void frees_waiting() override {}
  void lending_settled(bool lends, std::string_view) override { require(!lends); }
};

// Made once.
struct World {
  const std::shared_ptr<weft::Runtime> runtime = weft::make_system_runtime();
  const std::shared_ptr<in::LocalGate> gate = std::make_shared<in::LocalGate>(runtime);
  const std::shared_ptr<in::SharedArena> arena =
      *in::SharedArena::make(uint64_t{4} << 20, weft::make_system_runtime());
  const uint64_t stranger = arena->new_link();
  const std::shared_ptr<Host> host = std::make_shared<Host>();
  in::UniqueFd file;

  World() {
    file = in::UniqueFd(memfd_create("weft-fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    require(ftruncate(file.get(), kFileBytes) == 0);
    require(fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    require(arena->lend(std::string(100, 'x'), stranger).has_value());
  }
  std::shared_ptr<in::ArenaLink> link() {
    // Nothing is read from its socket or sent there: it needs none.
    return std::make_shared<in::ArenaLink>(
        arena, "", std::make_shared<in::LocalSession>(in::UniqueFd(), "ticket"), gate,
        runtime->random());
  }
};

}  // namespace

// Protobuf keeps fields that it does not know: an empty group of two bytes becomes some 60.
const size_t kMostBytesPerByte = 64;

// A row of messages, each a letter, its length (1 byte) and its bytes. 'O' an offer without a file,
// 'F' with one, 'P' an arena_probe, 'R' an arena_free. 'B', offset (8) and length (8): a borrow.
weft::Status fuzz_one(std::string_view rest) {
  static auto* const world = new World();
  const std::shared_ptr<in::ArenaLink> link = world->link();
  weft::Status verdict;
  while (rest.size() >= 2) {
    const char kind = rest[0];
    const size_t n = std::min<size_t>(static_cast<unsigned char>(rest[1]), rest.size() - 2);
    const std::string_view bytes = rest.substr(2, n);
    rest.remove_prefix(2 + n);
    if (kind == 'O' || kind == 'F') {
      in::LocalMessage message;
      message.what = in::LocalMessage::What::kMessage;
      message.bytes = std::string(bytes);
      if (kind == 'F') message.files.emplace_back(dup(world->file.get()));
      const weft::Status heard =
          decoded(kLeastBytes + n, [&] { return link->on_local_message(std::move(message)); });
      note(heard, &verdict);
      if (!heard.ok()) break;
    } else if (kind == 'P') {
      note(decoded(kLeastBytes + n, [&] { return link->on_probe(bytes); }), &verdict);
    } else if (kind == 'R') {
      note(decoded(kLeastBytes + n, [&] { return link->on_free(bytes); }), &verdict);
    } else if (kind == 'B' && n == 16) {
      uint64_t offset = 0;
      uint64_t length = 0;
      for (size_t i = 0; i < 8; ++i) {
        offset |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
        length |= uint64_t{static_cast<unsigned char>(bytes[8 + i])} << (8 * i);
      }
      const auto borrowed = link->borrow({offset, 1}, length);
      note(borrowed.status(), &verdict);
      require(!borrowed.ok() || (offset <= kFileBytes && length <= kFileBytes - offset));
      // Every byte of it is there.
      if (borrowed.ok() && length > 0) borrowed->data[length - 1] = borrowed->data[0];
    } else {
      break;
    }
  }
  // It was never started, so there is no answer that would be right.
  require(!link->lends());
  // An offer that was refused is no error of the connection: it only says why.
  const std::string state = link->describe();
  const bool borrows = state.size() >= 9 && state.compare(state.size() - 9, 9, ", borrows") == 0;
  if (!borrows) note(weft::make_error(weft::ErrorKind::kUnavailable, state), &verdict);
  link->close();
  const in::SharedArena::Counters counters = world->arena->counters();
  require(counters.leases == 1 && counters.blocks == 1);
  return verdict;
}
