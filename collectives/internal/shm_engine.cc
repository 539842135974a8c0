#include "weft/collectives/internal/shm_engine.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "weft/collectives/internal/reduce.h"
#include "weft/collectives/internal/text.h"
#include "weft/transport/stream_copy.h"

namespace weft::internal {
namespace {

// Up to it everyone reduces everything: one barrier instead of two.
constexpr uint64_t kSmallBytes = 16 << 10;
// Registered tensors of two ranks up to it stay in the caches next to the cores, which take each
// line from the other for every write: copies through the slots are faster.
constexpr uint64_t kNearTensor = 1 << 20;
// What is written to a registered tensor at a time.
constexpr uint64_t kPiece = 256 << 10;
// Registered tensors of this size leave no room in the caches for what is written.
constexpr uint64_t kLargeTensor = uint64_t{48} << 20;
constexpr size_t kWords = sizeof(Header) / sizeof(uint64_t);
using Words = std::array<uint64_t, kWords>;

void copy(char* to, const char* from, uint64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

StatusOr<std::unique_ptr<Engine>> ShmEngine::make(const Membership& member, ShmMesh mesh,
                                                  AlgorithmChoice choice,
                                                  std::shared_ptr<Runtime> runtime) {
  auto streams = std::make_unique<ShmStreams>(member, std::move(mesh), runtime);
  ShmStreams* const kept = streams.get();
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<StreamLink> link,
                        make_stream_link(member, std::move(streams), runtime));
  return std::unique_ptr<Engine>(
      new ShmEngine(member, std::move(link), kept, std::move(choice), std::move(runtime)));
}

// The link, which owns the streams, lives as long as the engine.
ShmEngine::ShmEngine(const Membership& member, std::unique_ptr<StreamLink> link,
                     ShmStreams* streams, AlgorithmChoice choice, std::shared_ptr<Runtime> runtime)
    : Engine(member, std::move(link), std::move(choice)),
      stream_(static_cast<StreamLink*>(link_.get())),
      streams_(streams),
      files_(streams->files()),
      runtime_(std::move(runtime)),
      places_(static_cast<size_t>(member.size), 0) {}

void ShmEngine::publish(const Header& mine, uint64_t place) {
  // What goes over the rings says so itself.
  note_.set_algorithm(mine.algorithm != 0
                          ? algorithm_name(mine.algorithm)
                          : algorithm_name(static_cast<uint8_t>(Algorithm::kDirect)));
  ShmHeader& slot = own().page().headers[mine.sequence & 1];
  Words words;
  std::memcpy(words.data(), &mine, sizeof mine);
  // A reader that sees the number sees the rest; no reader looks for this number earlier.
  for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_relaxed);
  slot.place.store(place, std::memory_order_relaxed);
  slot.sequence.store(mine.sequence, std::memory_order_release);
}

Status ShmEngine::check_header(const Header& mine, int peer, bool arrived) {
  const ShmHeader& slot = of(peer).page().headers[mine.sequence & 1];
  const uint64_t sequence = slot.sequence.load(std::memory_order_acquire);
  if (sequence != mine.sequence && !arrived) return absl::OkStatus();
  Words words;
  for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
  const Header theirs = std::bit_cast<Header>(words);
  WEFT_RETURN_IF_ERROR(check_origin(theirs, member_.group, member_.generation, peer));
  Header expected = mine;
  expected.bytes = theirs.bytes;
  if (arrived) places_[static_cast<size_t>(peer)] = slot.place.load(std::memory_order_relaxed);
  return check_expected(theirs, expected, peer);
}

Status ShmEngine::meet(const Turn& turn, const Header& mine, bool first) {
  ++count_;
  own().page().counter.store(count_, std::memory_order_seq_cst);
  for (int peer = 0; peer < member_.size; ++peer) {
    if (peer != member_.rank) streams_->ring(peer);
  }
  int next = 0;  // the first peer that has not come
  WEFT_RETURN_IF_ERROR(stream_->until(
      mine.sequence, turn.deadline,
      [&](bool* moved) -> StatusOr<bool> {
        (void)moved;
        for (; next < member_.size; ++next) {
          if (next == member_.rank) continue;
          if (of(next).page().counter.load(std::memory_order_acquire) >= count_) continue;
          const Status there = stream_->still_there(next, mine.sequence);
          if (!there.ok() && of(next).page().counter.load(std::memory_order_acquire) < count_) {
            return there;
          }
          if (first) {
            for (int peer = next; peer < member_.size; ++peer) {
              if (peer != member_.rank) WEFT_RETURN_IF_ERROR(check_header(mine, peer, false));
            }
          }
          return false;
        }
        return true;
      },
      [](std::vector<pollfd>*) {},
      [&] {
        std::vector<Awaited> awaited;
        for (int peer = 0; peer < member_.size; ++peer) {
          if (peer == member_.rank ||
              of(peer).page().counter.load(std::memory_order_acquire) >= count_) {
            continue;
          }
          awaited.push_back({peer, last_header(peer)});
        }
        return deadline_error(mine, awaited);
      }));
  if (!first) return absl::OkStatus();
  for (int peer = 0; peer < member_.size; ++peer) {
    if (peer != member_.rank) WEFT_RETURN_IF_ERROR(check_header(mine, peer, true));
  }
  return absl::OkStatus();
}

std::vector<int> ShmEngine::awaited() {
  std::vector<int> out = Engine::awaited();
  // At a barrier: the ranks whose counter is behind this rank's.
  const uint64_t here = own().page().counter.load(std::memory_order_acquire);
  for (int peer = 0; peer < member_.size; ++peer) {
    if (of(peer).page().counter.load(std::memory_order_acquire) < here) out.push_back(peer);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

Header ShmEngine::last_header(int peer) const {
  Header out;
  for (const ShmHeader& slot : of(peer).page().headers) {
    const uint64_t sequence = slot.sequence.load(std::memory_order_acquire);
    if (sequence == 0 || sequence < out.sequence) continue;
    Words words;
    for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
    out = std::bit_cast<Header>(words);
  }
  return out;
}

bool ShmEngine::all_registered(uint64_t bytes, uint64_t alignment) {
  const ShmLayout& layout = files_.layout;
  for (const uint64_t place : places_) {
    const bool inside = place >= layout.heap_begin && place % alignment == 0 &&
                        bytes <= layout.total && place <= layout.total - bytes;
    if (!inside) return false;
  }
  return true;
}

Status ShmEngine::agree(const Turn& turn, Header mine) {
  publish(mine, 0);
  return meet(turn, mine, true);
}

Status ShmEngine::barrier(const Turn& turn) {
  return agree(turn, header(turn, OpKind::kBarrier, ElementType::kNone, 0));
}

Status ShmEngine::monitored_barrier(const Turn& turn) {
  publish(header(turn, OpKind::kMonitoredBarrier, ElementType::kNone, 0), 0);
  return Engine::monitored_barrier(turn);
}

void ShmEngine::collect_inputs(uint64_t use, uint64_t offset, const char* own_input) {
  inputs_.clear();
  for (int peer = 0; peer < member_.size; ++peer) {
    inputs_.push_back(of(peer).slot(use) + offset);
  }
  if (own_input != nullptr) inputs_[static_cast<size_t>(member_.rank)] = own_input;
}

void ShmEngine::collect_tensors(uint64_t offset, const char* own_tensor) {
  inputs_.clear();
  for (int peer = 0; peer < member_.size; ++peer) {
    inputs_.push_back(of(peer).at(places_[static_cast<size_t>(peer)]) + offset);
  }
  inputs_[static_cast<size_t>(member_.rank)] = own_tensor + offset;
}

void ShmEngine::reduce_into(const Header& mine, char* out, uint64_t elements, bool streamed) {
  if (elements == 0) return;
  reduce_many(static_cast<ElementType>(mine.type), static_cast<ReduceOp::Kind>(mine.reduction), out,
              inputs_.data(), inputs_.size(), elements, static_cast<uint64_t>(member_.size),
              streamed);
}

void ShmEngine::put(char* to, const char* from, uint64_t bytes) {
  writes_.copy(runtime_->clock(), to, from, bytes);
}

bool ShmEngine::by_schedule(OpKind op, Algorithm* algorithm, uint64_t bytes) const {
  *algorithm = asked_or_table(op, *algorithm, bytes);
  return *algorithm != Algorithm::kAuto && *algorithm != Algorithm::kDirect;
}

Status ShmEngine::all_reduce(const Turn& turn, ElementType type, ReduceOp op, Algorithm algorithm,
                             char* data, uint64_t elements) {
  const uint64_t size = element_size(type);
  const uint64_t bytes = elements * size;
  Header mine = reducing(turn, OpKind::kAllReduce, type, elements, op);
  if (by_schedule(OpKind::kAllReduce, &algorithm, bytes)) {
    algorithm = effective_all_reduce(algorithm, member_.size, choice_.topology);
    mine.algorithm = static_cast<uint8_t>(algorithm);
    WEFT_RETURN_IF_ERROR(agree(turn, mine));
    return Engine::all_reduce(turn, type, op, algorithm, data, elements);
  }
  mine.algorithm = static_cast<uint8_t>(Algorithm::kDirect);
  if (op.kind() == ReduceOp::kPremulSum) multiply(type, data, data, elements, op.factor());
  const uint64_t place = files_.heap->place_of(data, bytes);
  places_[static_cast<size_t>(member_.rank)] = place;
  publish(mine, place);
  if (bytes <= kSmallBytes) return small(turn, mine, data, elements);
  WEFT_RETURN_IF_ERROR(meet(turn, mine, true));
  const bool near = member_.size == 2 && bytes <= kNearTensor;
  if (!near && all_registered(bytes, size)) return registered(turn, mine, data, elements);
  // A rank of two would fetch the other's half: it reduces that itself instead.
  if (member_.size == 2) return reduce_chunks(turn, mine, data, elements, true);
  return staged(turn, mine, data, elements);
}

Status ShmEngine::small(const Turn& turn, const Header& mine, char* data, uint64_t elements) {
  const uint64_t bytes = elements * element_size(static_cast<ElementType>(mine.type));
  const uint64_t use = ++turn_;
  put(own().slot(use), data, bytes);
  WEFT_RETURN_IF_ERROR(meet(turn, mine, true));
  collect_inputs(use, 0, data);
  reduce_into(mine, data, elements);
  return absl::OkStatus();
}

Status ShmEngine::reduce_chunks(const Turn& turn, const Header& mine, char* data, uint64_t elements,
                                bool here) {
  const uint64_t size = element_size(static_cast<ElementType>(mine.type));
  const uint64_t chunk = ShmLayout::kSlot / size;
  for (uint64_t begin = 0; begin < elements; begin += chunk) {
    const uint64_t n = std::min(chunk, elements - begin);
    const uint64_t use = ++turn_;
    char* const at = data + begin * size;
    put(own().slot(use), at, n * size);
    WEFT_RETURN_IF_ERROR(meet(turn, mine, false));
    if (!here) continue;
    collect_inputs(use, 0, at);
    reduce_into(mine, at, n);
  }
  return absl::OkStatus();
}

Status ShmEngine::staged(const Turn& turn, const Header& mine, char* data, uint64_t elements) {
  const uint64_t size = element_size(static_cast<ElementType>(mine.type));
  const uint64_t chunk = ShmLayout::kSlot / size;
  for (uint64_t begin = 0; begin < elements; begin += chunk) {
    const uint64_t n = std::min(chunk, elements - begin);
    const uint64_t use = ++turn_;
    char* const at = data + begin * size;
    put(own().slot(use), at, n * size);
    WEFT_RETURN_IF_ERROR(meet(turn, mine, false));
    const Blocks slices = Blocks::even(n, member_.size);
    collect_inputs(use, slices.begin(member_.rank) * size, nullptr);
    const uint64_t length = slices.length(member_.rank);
    writes_.write(runtime_->clock(), length * size,
                  [&](bool streamed) { reduce_into(mine, own().result(use), length, streamed); });
    WEFT_RETURN_IF_ERROR(meet(turn, mine, false));
    for (int peer = 0; peer < member_.size; ++peer) {
      copy(at + slices.begin(peer) * size, of(peer).result(use), slices.length(peer) * size);
    }
  }
  return absl::OkStatus();
}

Status ShmEngine::registered(const Turn& turn, const Header& mine, char* data, uint64_t elements) {
  const uint64_t size = element_size(static_cast<ElementType>(mine.type));
  const uint64_t bytes = elements * size;
  const Blocks slices = Blocks::even(elements, member_.size);
  const uint64_t mine_begin = slices.begin(member_.rank) * size;
  const uint64_t mine_bytes = slices.length(member_.rank) * size;
  const bool large = bytes >= kLargeTensor;
  for (uint64_t done = 0; done < mine_bytes; done += kPiece) {
    const uint64_t n = std::min(kPiece, mine_bytes - done);
    const auto reduce = [&](bool streamed) {
      collect_tensors(mine_begin + done, data);
      reduce_into(mine, data + mine_begin + done, n / size, streamed);
    };
    large ? reduce(true) : writes_.write(runtime_->clock(), n, reduce);
  }
  WEFT_RETURN_IF_ERROR(meet(turn, mine, false));
  for (int peer = 0; peer < member_.size; ++peer) {
    if (peer == member_.rank) continue;
    const uint64_t begin = slices.begin(peer) * size;
    const char* const from = of(peer).at(places_[static_cast<size_t>(peer)]) + begin;
    const uint64_t length = slices.length(peer) * size;
    large ? copy_streamed(data + begin, from, length) : put(data + begin, from, length);
  }
  // No peer may still read the tensor when the caller writes to it next.
  return meet(turn, mine, false);
}

Status ShmEngine::broadcast(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                            uint64_t elements, int root) {
  const uint64_t bytes = elements * element_size(type);
  if (by_schedule(OpKind::kBroadcast, &algorithm, bytes)) {
    return Engine::broadcast(turn, type, algorithm, data, elements, root);
  }
  Header mine = header(turn, OpKind::kBroadcast, type, elements);
  mine.root = root;
  WEFT_RETURN_IF_ERROR(agree(turn, mine));
  for (uint64_t begin = 0; begin < bytes; begin += ShmLayout::kSlot) {
    const uint64_t n = std::min(ShmLayout::kSlot, bytes - begin);
    const uint64_t use = ++turn_;
    if (member_.rank == root) put(own().slot(use), data + begin, n);
    WEFT_RETURN_IF_ERROR(meet(turn, mine, false));
    if (member_.rank != root) copy(data + begin, of(root).slot(use), n);
  }
  return absl::OkStatus();
}

Status ShmEngine::reduce(const Turn& turn, ElementType type, ReduceOp op, char* data,
                         uint64_t elements, int root) {
  Header mine = reducing(turn, OpKind::kReduce, type, elements, op);
  mine.root = root;
  WEFT_RETURN_IF_ERROR(agree(turn, mine));
  if (op.kind() == ReduceOp::kPremulSum) multiply(type, data, data, elements, op.factor());
  return reduce_chunks(turn, mine, data, elements, member_.rank == root);
}

Status ShmEngine::all_gather(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                             const Blocks& blocks) {
  const uint64_t size = element_size(type);
  Header mine = header(turn, OpKind::kAllGather, type, blocks.total());
  mine.detail = hash_of(blocks);
  if (by_schedule(OpKind::kAllGather, &algorithm, blocks.total() * size)) {
    mine.algorithm = static_cast<uint8_t>(effective_all_gather(algorithm, member_.size));
    WEFT_RETURN_IF_ERROR(agree(turn, mine));
    return Engine::all_gather(turn, type, algorithm, data, blocks);
  }
  WEFT_RETURN_IF_ERROR(agree(turn, mine));
  uint64_t longest = 0;
  for (int r = 0; r < blocks.count(); ++r) longest = std::max(longest, blocks.length(r) * size);
  for (uint64_t begin = 0; begin < longest; begin += ShmLayout::kSlot) {
    const auto part = [&](int r) {
      const uint64_t bytes = blocks.length(r) * size;
      return begin >= bytes ? 0 : std::min(ShmLayout::kSlot, bytes - begin);
    };
    const uint64_t use = ++turn_;
    put(own().slot(use), data + blocks.begin(member_.rank) * size + begin, part(member_.rank));
    WEFT_RETURN_IF_ERROR(meet(turn, mine, false));
    for (int peer = 0; peer < member_.size; ++peer) {
      if (peer == member_.rank) continue;
      copy(data + blocks.begin(peer) * size + begin, of(peer).slot(use), part(peer));
    }
  }
  return absl::OkStatus();
}

Status ShmEngine::reduce_scatter(const Turn& turn, ElementType type, ReduceOp op,
                                 Algorithm algorithm, const char* input, const Blocks& blocks,
                                 char* output) {
  Header mine = reducing(turn, OpKind::kReduceScatter, type, blocks.total(), op);
  mine.detail = hash_of(blocks);
  const uint64_t size = element_size(type);
  const uint64_t bytes = blocks.total() * size;
  if (by_schedule(OpKind::kReduceScatter, &algorithm, bytes)) {
    mine.algorithm = static_cast<uint8_t>(effective_reduce_scatter(algorithm, member_.size));
    WEFT_RETURN_IF_ERROR(agree(turn, mine));
    return Engine::reduce_scatter(turn, type, op, algorithm, input, blocks, output);
  }
  // Elements that are multiplied first cannot be read where they are.
  const bool as_it_is = op.kind() != ReduceOp::kPremulSum;
  const uint64_t place = as_it_is ? files_.heap->place_of(input, bytes) : 0;
  places_[static_cast<size_t>(member_.rank)] = place;
  publish(mine, place);
  WEFT_RETURN_IF_ERROR(meet(turn, mine, true));
  if (!all_registered(bytes, size)) {
    return scatter_staged(turn, mine, op, input, blocks, output);
  }
  collect_tensors(blocks.begin(member_.rank) * size, input);
  // The output is none of the inputs: see reduce.cc.
  const uint64_t length = blocks.length(member_.rank);
  reduce_into(mine, output, length, length * size >= kStreamAbove);
  // No peer may still read the input when the caller writes to it next.
  return meet(turn, mine, false);
}

// In a slot lies a piece for each rank.
Status ShmEngine::scatter_staged(const Turn& turn, const Header& mine, ReduceOp op,
                                 const char* input, const Blocks& blocks, char* output) {
  const auto type = static_cast<ElementType>(mine.type);
  const uint64_t size = element_size(type);
  const bool multiplies = op.kind() == ReduceOp::kPremulSum;
  const uint64_t piece = ShmLayout::kSlot / size / static_cast<uint64_t>(member_.size);
  uint64_t longest = 0;
  for (int r = 0; r < blocks.count(); ++r) longest = std::max(longest, blocks.length(r));
  for (uint64_t done = 0; done < longest; done += piece) {
    const uint64_t use = ++turn_;
    const auto length_of = [&](int rank) {
      const uint64_t length = blocks.length(rank);
      return done >= length ? 0 : std::min(piece, length - done);
    };
    for (int r = 0; r < member_.size; ++r) {
      if (r == member_.rank && !multiplies) continue;
      char* const at = own().slot(use) + static_cast<uint64_t>(r) * piece * size;
      put(at, input + (blocks.begin(r) + done) * size, length_of(r) * size);
      if (multiplies) multiply(type, at, at, length_of(r), op.factor());
    }
    WEFT_RETURN_IF_ERROR(meet(turn, mine, false));
    const uint64_t length = length_of(member_.rank);
    if (length == 0) continue;
    collect_inputs(use, static_cast<uint64_t>(member_.rank) * piece * size,
                   multiplies ? nullptr : input + (blocks.begin(member_.rank) + done) * size);
    reduce_into(mine, output + done * size, length);
  }
  return absl::OkStatus();
}

Status ShmEngine::all_to_all(const Turn& turn, ElementType type, Algorithm algorithm,
                             const char* input, const Blocks& input_blocks, char* output,
                             const Blocks& output_blocks) {
  const bool bruck = algorithm == Algorithm::kBruck;
  Header mine = header(turn, OpKind::kAllToAll, type, bruck ? input_blocks.total() : 0);
  mine.algorithm = static_cast<uint8_t>(bruck ? algorithm : Algorithm::kPairwise);
  WEFT_RETURN_IF_ERROR(agree(turn, mine));
  return Engine::all_to_all(turn, type, algorithm, input, input_blocks, output, output_blocks);
}

StatusOr<std::shared_ptr<char>> ShmEngine::allocate(uint64_t bytes) {
  return files_.heap->allocate(bytes);
}

}  // namespace weft::internal
