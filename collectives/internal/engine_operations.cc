// Operations beside all_reduce and barriers, by schedules.
#include <cstring>

#include "weft/collectives/internal/engine.h"

namespace weft::internal {
namespace {

// From memory whose block i is that of rank (first + i) % ranks to where they lie by rank.
void copy_unrotated(char* to, const char* from, const Blocks& by_rank, int first, uint64_t size) {
  const Blocks rotated = by_rank.rotated(first);
  for (int i = 0; i < by_rank.count(); ++i) {
    const int rank = (first + i) % by_rank.count();
    const uint64_t bytes = by_rank.length(rank) * size;
    if (bytes > 0)
      std::memcpy(to + by_rank.begin(rank) * size, from + rotated.begin(i) * size, bytes);
  }
}

void copy_rotated(char* to, const char* from, const Blocks& by_rank, int first, uint64_t size) {
  const Blocks rotated = by_rank.rotated(first);
  for (int i = 0; i < by_rank.count(); ++i) {
    const int rank = (first + i) % by_rank.count();
    const uint64_t bytes = by_rank.length(rank) * size;
    if (bytes > 0)
      std::memcpy(to + rotated.begin(i) * size, from + by_rank.begin(rank) * size, bytes);
  }
}

std::unique_ptr<char[]> memory_of(uint64_t bytes) {
  return std::unique_ptr<char[]>(new char[bytes]);  // not cleared
}

}  // namespace

Status Engine::broadcast(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                         uint64_t elements, int root) {
  const uint64_t bytes = elements * element_size(type);
  algorithm = asked_or_table(OpKind::kBroadcast, algorithm, bytes);
  if (algorithm == Algorithm::kAuto) {
    algorithm = choose_algorithm(OpKind::kBroadcast, bytes, member_.size, choice_.topology);
  }
  if (algorithm != Algorithm::kScatterAllGather) algorithm = Algorithm::kBinomialTree;
  Header mine = header(turn, OpKind::kBroadcast, type, elements);
  mine.root = root;
  mine.algorithm = static_cast<uint8_t>(algorithm);
  WEFT_RETURN_IF_ERROR(agree(turn, mine));
  return run(turn, mine, broadcast_schedule(member_.rank, member_.size, elements, root, algorithm),
             data, nullptr);
}

Status Engine::reduce(const Turn& turn, ElementType type, ReduceOp op, char* data,
                      uint64_t elements, int root) {
  Header mine = reducing(turn, OpKind::kReduce, type, elements, op);
  mine.root = root;
  WEFT_RETURN_IF_ERROR(agree(turn, mine));
  before_reduce(type, op, data, elements);
  WEFT_RETURN_IF_ERROR(
      run(turn, mine, reduce_schedule(member_.rank, member_.size, elements, root), data, nullptr));
  if (member_.rank == root) after_reduce(type, op, data, elements);
  return absl::OkStatus();
}

Status Engine::all_gather(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                          const Blocks& blocks) {
  const uint64_t size = element_size(type);
  const uint64_t bytes = blocks.total() * size;
  algorithm = asked_or_table(OpKind::kAllGather, algorithm, bytes);
  if (algorithm == Algorithm::kAuto) {
    algorithm = choose_algorithm(OpKind::kAllGather, bytes, member_.size, choice_.topology);
  }
  algorithm = effective_all_gather(algorithm, member_.size);
  Header mine = header(turn, OpKind::kAllGather, type, blocks.total());
  mine.detail = hash_of(blocks);
  mine.algorithm = static_cast<uint8_t>(algorithm);
  const Schedule schedule = all_gather_schedule(member_.rank, member_.size, blocks, algorithm);
  if (algorithm != Algorithm::kBruck) return run(turn, mine, schedule, data, nullptr);
  const std::unique_ptr<char[]> work = memory_of(bytes);
  const uint64_t own = blocks.length(member_.rank) * size;
  if (own > 0) std::memcpy(work.get(), data + blocks.begin(member_.rank) * size, own);
  WEFT_RETURN_IF_ERROR(run(turn, mine, schedule, work.get(), nullptr));
  copy_unrotated(data, work.get(), blocks, member_.rank, size);
  return absl::OkStatus();
}

Status Engine::gather(const Turn& turn, ElementType type, Algorithm algorithm, const char* input,
                      uint64_t elements, char* output, const Blocks& blocks, int root) {
  const bool by_tree = algorithm == Algorithm::kBinomialTree;
  Header mine = header(turn, OpKind::kGather, type, by_tree ? elements : 0);
  mine.root = root;
  mine.algorithm = static_cast<uint8_t>(by_tree ? algorithm : Algorithm::kDirect);
  WEFT_RETURN_IF_ERROR(agree(turn, mine));
  if (!by_tree) {
    return run(turn, mine, gather_schedule(member_.rank, member_.size, blocks, elements, root),
               output, input);
  }
  const uint64_t size = element_size(type);
  const auto held = static_cast<uint64_t>(gathered_blocks(member_.rank, member_.size, root));
  const std::unique_ptr<char[]> work = memory_of(held * elements * size);
  WEFT_RETURN_IF_ERROR(run(turn, mine,
                           tree_gather_schedule(member_.rank, member_.size, elements, root),
                           work.get(), input));
  if (member_.rank == root) copy_unrotated(output, work.get(), blocks, root, size);
  return absl::OkStatus();
}

Status Engine::scatter(const Turn& turn, ElementType type, Algorithm algorithm, const char* input,
                       const Blocks& blocks, char* output, uint64_t elements, int root) {
  const bool by_tree = algorithm == Algorithm::kBinomialTree;
  Header mine = header(turn, OpKind::kScatter, type, by_tree ? elements : 0);
  mine.root = root;
  mine.algorithm = static_cast<uint8_t>(by_tree ? algorithm : Algorithm::kDirect);
  WEFT_RETURN_IF_ERROR(agree(turn, mine));
  if (!by_tree) {
    return run(turn, mine, scatter_schedule(member_.rank, member_.size, blocks, elements, root),
               output, input);
  }
  const uint64_t size = element_size(type);
  const auto held = static_cast<uint64_t>(gathered_blocks(member_.rank, member_.size, root));
  const std::unique_ptr<char[]> work = memory_of(held * elements * size);
  if (member_.rank == root) copy_rotated(work.get(), input, blocks, root, size);
  WEFT_RETURN_IF_ERROR(run(turn, mine,
                           tree_scatter_schedule(member_.rank, member_.size, elements, root),
                           work.get(), nullptr));
  if (elements > 0) std::memcpy(output, work.get(), elements * size);
  return absl::OkStatus();
}

Status Engine::reduce_scatter(const Turn& turn, ElementType type, ReduceOp op, Algorithm algorithm,
                              const char* input, const Blocks& blocks, char* output) {
  const uint64_t size = element_size(type);
  const uint64_t bytes = blocks.total() * size;
  algorithm = asked_or_table(OpKind::kReduceScatter, algorithm, bytes);
  if (algorithm == Algorithm::kAuto) {
    algorithm = choose_algorithm(OpKind::kReduceScatter, bytes, member_.size, choice_.topology);
  }
  algorithm = effective_reduce_scatter(algorithm, member_.size);
  Header mine = reducing(turn, OpKind::kReduceScatter, type, blocks.total(), op);
  mine.detail = hash_of(blocks);
  mine.algorithm = static_cast<uint8_t>(algorithm);
  // The schedule uses up what it works on.
  const std::unique_ptr<char[]> work = memory_of(bytes);
  if (bytes > 0) std::memcpy(work.get(), input, bytes);
  before_reduce(type, op, work.get(), blocks.total());
  WEFT_RETURN_IF_ERROR(run(turn, mine,
                           reduce_scatter_schedule(member_.rank, member_.size, blocks, algorithm),
                           work.get(), nullptr));
  const uint64_t length = blocks.length(member_.rank);
  if (length > 0) {
    std::memcpy(output, work.get() + blocks.begin(member_.rank) * size, length * size);
  }
  after_reduce(type, op, output, length);
  return absl::OkStatus();
}

Status Engine::all_to_all(const Turn& turn, ElementType type, Algorithm algorithm,
                          const char* input, const Blocks& input_blocks, char* output,
                          const Blocks& output_blocks) {
  const bool bruck = algorithm == Algorithm::kBruck;
  Header mine = header(turn, OpKind::kAllToAll, type, bruck ? input_blocks.total() : 0);
  mine.algorithm = static_cast<uint8_t>(bruck ? algorithm : Algorithm::kPairwise);
  if (!bruck) {
    return run(turn, mine,
               all_to_all_schedule(member_.rank, member_.size, input_blocks, output_blocks), output,
               input);
  }
  const uint64_t block = input_blocks.length(0);
  const std::unique_ptr<char[]> work =
      memory_of(bruck_all_to_all_elements(member_.size, block) * element_size(type));
  WEFT_RETURN_IF_ERROR(run(turn, mine, bruck_all_to_all_schedule(member_.rank, member_.size, block),
                           work.get(), input));
  const uint64_t bytes = output_blocks.total() * element_size(type);
  if (bytes > 0) std::memcpy(output, work.get(), bytes);
  return absl::OkStatus();
}

}  // namespace weft::internal
