#include "weft/collectives/internal/mpi/engine.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "weft/collectives/internal/mpi/transfer.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

// Bytes of all ranks' elements in one piece.
constexpr uint64_t kMpiPiece = uint64_t{8} << 20;
constexpr const char* kByMpi = "mpi";

uint64_t piece_of(ElementType type, int ranks = 1) {
  return std::max<uint64_t>(1, kMpiPiece / element_size(type) / static_cast<uint64_t>(ranks));
}

// The part of each block that piece `begin` to `begin + count` of the longest one takes along.
struct Parts {
  std::vector<int> counts{};
  std::vector<int> places{};
  int total = 0;

  Parts(const Blocks& blocks, uint64_t begin, uint64_t count) {
    for (int r = 0; r < blocks.count(); ++r) {
      const uint64_t length = blocks.length(r);
      counts.push_back(length > begin ? static_cast<int>(std::min(count, length - begin)) : 0);
      places.push_back(total);
      total += counts.back();
    }
  }
};

uint64_t longest_of(const Blocks& blocks) {
  uint64_t out = 0;
  for (int r = 0; r < blocks.count(); ++r) out = std::max(out, blocks.length(r));
  return out;
}

// memcpy() of nothing may have null pointers here.
void copy_bytes(char* to, const char* from, uint64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

MpiEngine::MpiEngine(std::shared_ptr<MpiLife> life, HostConnection connection)
    : Engine(connection.member, std::move(connection.link), std::move(connection.choice)),
      life_(std::move(life)),
      runtime_(std::move(connection.runtime)),
      parker_(runtime_->make_parker()),
      compares_(connection.compares),
      connect_by_(connection.deadline) {}

MpiEngine::~MpiEngine() {
  if (!keeps_comm_ && comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  life_->leave();
}

Status MpiEngine::connect(const std::vector<int>& ranks) {
  // MPI waits for the members without end: so they first come together here.
  Turn first;
  first.deadline = connect_by_;
  WEFT_RETURN_IF_ERROR(Engine::barrier(first));
  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group members = MPI_GROUP_NULL;
  WEFT_RETURN_IF_ERROR(mpi_status(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group"));
  const int listed = MPI_Group_incl(world, static_cast<int>(ranks.size()), ranks.data(), &members);
  MPI_Group_free(&world);
  WEFT_RETURN_IF_ERROR(mpi_status(listed, "MPI_Group_incl"));
  // Tells groups apart that the same ranks make at once: any number that all members share.
  constexpr uint64_t kTags = 32749;
  const auto tag = static_cast<int>((member_.group ^ member_.generation) % kTags);
  const int made = MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &comm_);
  MPI_Group_free(&members);
  WEFT_RETURN_IF_ERROR(mpi_status(made, "MPI_Comm_create_group"));
  return mpi_status(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

Status MpiEngine::begins(const Turn& turn, OpKind op, ElementType type, uint64_t elements,
                         ReduceOp::Kind reduction, int root) {
  if (compares_) {
    Fingerprint mine;
    mine.op = op;
    mine.type = type;
    mine.reduction = reduction;
    mine.root = root;
    mine.count = elements;
    WEFT_RETURN_IF_ERROR(compare(turn, mine));
  }
  note_.set_algorithm(kByMpi);
  return absl::OkStatus();
}

char* MpiEngine::room(uint64_t bytes) {
  if (bytes > room_bytes_) {
    room_.reset();
    room_.reset(new char[bytes]);  // not cleared
    room_bytes_ = bytes;
  }
  return room_.get();
}

Status MpiEngine::in_pieces(uint64_t elements, uint64_t most,
                            absl::FunctionRef<Status(uint64_t begin, uint64_t count)> piece) const {
  uint64_t begin = 0;
  do {
    const uint64_t count = std::min(most, elements - begin);
    WEFT_RETURN_IF_ERROR(piece(begin, count));
    begin += count;
  } while (begin < elements);
  return absl::OkStatus();
}

Status MpiEngine::await(const Turn& turn, std::string_view call, int begun, MPI_Request* request) {
  WEFT_RETURN_IF_ERROR(mpi_status(begun, call));
  bool done = false;
  const Status waited = until(turn, call, [&]() -> StatusOr<bool> {
    int ended = 0;
    const int tested = MPI_Test(request, &ended, MPI_STATUS_IGNORE);
    done = ended != 0 || tested != MPI_SUCCESS;
    WEFT_RETURN_IF_ERROR(mpi_status(tested, call));
    return done;
  });
  if (!done) {
    keeps_comm_ = true;
    room_bytes_ = 0;
    life_->keep(*request, std::move(room_));
  }
  return waited;
}

Status MpiEngine::until(const Turn& turn, std::string_view call,
                        absl::FunctionRef<StatusOr<bool>()> ended) {
  constexpr int kTestsPerLook = 16;
  constexpr absl::Duration kPatience = absl::Milliseconds(2);
  constexpr absl::Duration kShortest = absl::Microseconds(20);
  constexpr absl::Duration kLongest = absl::Milliseconds(1);
  const absl::Time began = runtime_->now();
  absl::Time now = began;
  for (int tests = 1;; ++tests) {
    WEFT_ASSIGN_OR_RETURN(const bool done, ended());
    if (done) return absl::OkStatus();
    const bool naps = now - began > kPatience;
    if (naps || tests % kTestsPerLook == 0) {
      WEFT_RETURN_IF_ERROR(link_->look(turn.sequence));
      now = runtime_->now();
      if (now >= turn.deadline) {
        return make_error(ErrorKind::kDeadline,
                          cat(call,
                              " has not ended by its deadline; MPI does not say for which "
                              "rank it waits"));
      }
    }
    // MPI works while it is asked. One that waits for long is asked less often, and takes at most a
    // sixteenth longer for it.
    if (naps) {
      parker_->park_until(now + std::clamp((now - began) / 16, kShortest, kLongest));
    } else {
      sched_yield();
    }
  }
}

Status MpiEngine::barrier(const Turn& turn) {
  WEFT_RETURN_IF_ERROR(begins(turn, OpKind::kBarrier, ElementType::kNone, 0));
  MPI_Request request = MPI_REQUEST_NULL;
  const int begun = MPI_Ibarrier(comm_, &request);
  return await(turn, "MPI_Ibarrier", begun, &request);
}

Status MpiEngine::all_reduce(const Turn& turn, ElementType type, ReduceOp op, Algorithm algorithm,
                             char* data, uint64_t elements) {
  if (algorithm != Algorithm::kAuto) {
    return Engine::all_reduce(turn, type, op, algorithm, data, elements);
  }
  WEFT_RETURN_IF_ERROR(begins(turn, OpKind::kAllReduce, type, elements, op.kind()));
  const uint64_t size = element_size(type);
  before_reduce(type, op, data, elements);
  WEFT_RETURN_IF_ERROR(in_pieces(elements, piece_of(type), [&](uint64_t begin, uint64_t count) {
    char* const piece = room(count * size);
    copy_bytes(piece, data + begin * size, count * size);
    MPI_Request request = MPI_REQUEST_NULL;
    const int begun =
        MPI_Iallreduce(MPI_IN_PLACE, piece, static_cast<int>(count), life_->types().of(type),
                       life_->types().of(op.kind()), comm_, &request);
    WEFT_RETURN_IF_ERROR(await(turn, "MPI_Iallreduce", begun, &request));
    copy_bytes(data + begin * size, piece, count * size);
    return absl::OkStatus();
  }));
  after_reduce(type, op, data, elements);
  return absl::OkStatus();
}

Status MpiEngine::broadcast(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                            uint64_t elements, int root) {
  if (algorithm != Algorithm::kAuto) {
    return Engine::broadcast(turn, type, algorithm, data, elements, root);
  }
  WEFT_RETURN_IF_ERROR(begins(turn, OpKind::kBroadcast, type, elements, ReduceOp::kSum, root));
  const uint64_t size = element_size(type);
  return in_pieces(elements, piece_of(type), [&](uint64_t begin, uint64_t count) {
    char* const piece = room(count * size);
    if (member_.rank == root) copy_bytes(piece, data + begin * size, count * size);
    MPI_Request request = MPI_REQUEST_NULL;
    const int begun =
        MPI_Ibcast(piece, static_cast<int>(count), life_->types().of(type), root, comm_, &request);
    WEFT_RETURN_IF_ERROR(await(turn, "MPI_Ibcast", begun, &request));
    if (member_.rank != root) copy_bytes(data + begin * size, piece, count * size);
    return absl::OkStatus();
  });
}

Status MpiEngine::reduce(const Turn& turn, ElementType type, ReduceOp op, char* data,
                         uint64_t elements, int root) {
  WEFT_RETURN_IF_ERROR(begins(turn, OpKind::kReduce, type, elements, op.kind(), root));
  const uint64_t size = element_size(type);
  const bool here = member_.rank == root;
  before_reduce(type, op, data, elements);
  WEFT_RETURN_IF_ERROR(in_pieces(elements, piece_of(type), [&](uint64_t begin, uint64_t count) {
    char* const piece = room(count * size);
    copy_bytes(piece, data + begin * size, count * size);
    MPI_Request request = MPI_REQUEST_NULL;
    const int begun =
        MPI_Ireduce(here ? MPI_IN_PLACE : piece, here ? piece : nullptr, static_cast<int>(count),
                    life_->types().of(type), life_->types().of(op.kind()), root, comm_, &request);
    WEFT_RETURN_IF_ERROR(await(turn, "MPI_Ireduce", begun, &request));
    if (here) copy_bytes(data + begin * size, piece, count * size);
    return absl::OkStatus();
  }));
  if (here) after_reduce(type, op, data, elements);
  return absl::OkStatus();
}

Status MpiEngine::all_gather(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                             const Blocks& blocks) {
  if (algorithm != Algorithm::kAuto) {
    return Engine::all_gather(turn, type, algorithm, data, blocks);
  }
  WEFT_RETURN_IF_ERROR(begins(turn, OpKind::kAllGather, type, blocks.total()));
  const uint64_t size = element_size(type);
  const uint64_t most = piece_of(type, member_.size);
  return in_pieces(longest_of(blocks), most, [&](uint64_t begin, uint64_t count) {
    const Parts parts(blocks, begin, count);
    char* const piece = room(static_cast<uint64_t>(parts.total) * size);
    const auto mine = static_cast<size_t>(member_.rank);
    const auto place = [&](size_t r) {
      return piece + static_cast<uint64_t>(parts.places[r]) * size;
    };
    const auto there = [&](size_t r) {
      return data + (blocks.begin(static_cast<int>(r)) + begin) * size;
    };
    const auto bytes = [&](size_t r) { return static_cast<uint64_t>(parts.counts[r]) * size; };
    copy_bytes(place(mine), there(mine), bytes(mine));
    MPI_Request request = MPI_REQUEST_NULL;
    const int begun =
        MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, piece, parts.counts.data(),
                        parts.places.data(), life_->types().of(type), comm_, &request);
    WEFT_RETURN_IF_ERROR(await(turn, "MPI_Iallgatherv", begun, &request));
    for (size_t r = 0; r < parts.counts.size(); ++r) {
      if (r != mine) copy_bytes(there(r), place(r), bytes(r));
    }
    return absl::OkStatus();
  });
}

Status MpiEngine::reduce_scatter(const Turn& turn, ElementType type, ReduceOp op,
                                 Algorithm algorithm, const char* input, const Blocks& blocks,
                                 char* output) {
  if (algorithm != Algorithm::kAuto) {
    return Engine::reduce_scatter(turn, type, op, algorithm, input, blocks, output);
  }
  WEFT_RETURN_IF_ERROR(begins(turn, OpKind::kReduceScatter, type, blocks.total(), op.kind()));
  const uint64_t size = element_size(type);
  const uint64_t most = piece_of(type, member_.size);
  WEFT_RETURN_IF_ERROR(in_pieces(longest_of(blocks), most, [&](uint64_t begin, uint64_t count) {
    const Parts parts(blocks, begin, count);
    char* const piece = room(static_cast<uint64_t>(parts.total) * size);
    for (size_t r = 0; r < parts.counts.size(); ++r) {
      const char* const from = input + (blocks.begin(static_cast<int>(r)) + begin) * size;
      copy_bytes(piece + static_cast<uint64_t>(parts.places[r]) * size, from,
                 static_cast<uint64_t>(parts.counts[r]) * size);
    }
    before_reduce(type, op, piece, static_cast<uint64_t>(parts.total));
    MPI_Request request = MPI_REQUEST_NULL;
    const int begun =
        MPI_Ireduce_scatter(MPI_IN_PLACE, piece, parts.counts.data(), life_->types().of(type),
                            life_->types().of(op.kind()), comm_, &request);
    WEFT_RETURN_IF_ERROR(await(turn, "MPI_Ireduce_scatter", begun, &request));
    const auto own = static_cast<uint64_t>(parts.counts[static_cast<size_t>(member_.rank)]);
    copy_bytes(output + begin * size, piece, own * size);
    return absl::OkStatus();
  }));
  after_reduce(type, op, output, blocks.length(member_.rank));
  return absl::OkStatus();
}

Status MpiEngine::exchange(const Turn& turn, std::string_view call, Transfers transfers) {
  const Status moved = until(turn, call, [&]() -> StatusOr<bool> {
    bool all = true;
    for (const auto& one : transfers) {
      WEFT_ASSIGN_OR_RETURN(const bool done, one->advance(comm_));
      all = all && done;
    }
    return all;
  });
  for (const auto& one : transfers) {
    if (one->give_up(*life_)) keeps_comm_ = true;
  }
  return moved;
}

void MpiEngine::add(Transfers* all, int peer, bool sends, char* data, uint64_t bytes) const {
  all->push_back(std::make_unique<Transfer>(peer, sends, data, bytes));
}

Status MpiEngine::gather(const Turn& turn, ElementType type, Algorithm algorithm, const char* input,
                         uint64_t elements, char* output, const Blocks& blocks, int root) {
  if (algorithm != Algorithm::kAuto) {
    return Engine::gather(turn, type, algorithm, input, elements, output, blocks, root);
  }
  WEFT_RETURN_IF_ERROR(begins(turn, OpKind::kGather, type, 0, ReduceOp::kSum, root));
  const uint64_t size = element_size(type);
  Transfers transfers;
  if (member_.rank != root) {
    add(&transfers, root, true, const_cast<char*>(input), elements * size);
    return exchange(turn, "gather by MPI_Isend", std::move(transfers));
  }
  copy_bytes(output + blocks.begin(root) * size, input, elements * size);
  for (int r = 0; r < member_.size; ++r) {
    if (r == root) continue;
    add(&transfers, r, false, output + blocks.begin(r) * size, blocks.length(r) * size);
  }
  return exchange(turn, "gather by MPI_Irecv", std::move(transfers));
}

Status MpiEngine::scatter(const Turn& turn, ElementType type, Algorithm algorithm,
                          const char* input, const Blocks& blocks, char* output, uint64_t elements,
                          int root) {
  if (algorithm != Algorithm::kAuto) {
    return Engine::scatter(turn, type, algorithm, input, blocks, output, elements, root);
  }
  WEFT_RETURN_IF_ERROR(begins(turn, OpKind::kScatter, type, 0, ReduceOp::kSum, root));
  const uint64_t size = element_size(type);
  Transfers transfers;
  if (member_.rank != root) {
    add(&transfers, root, false, output, elements * size);
    return exchange(turn, "scatter by MPI_Irecv", std::move(transfers));
  }
  copy_bytes(output, input + blocks.begin(root) * size, elements * size);
  for (int r = 0; r < member_.size; ++r) {
    if (r == root) continue;
    add(&transfers, r, true, const_cast<char*>(input) + blocks.begin(r) * size,
        blocks.length(r) * size);
  }
  return exchange(turn, "scatter by MPI_Isend", std::move(transfers));
}

Status MpiEngine::all_to_all(const Turn& turn, ElementType type, Algorithm algorithm,
                             const char* input, const Blocks& input_blocks, char* output,
                             const Blocks& output_blocks) {
  if (algorithm != Algorithm::kAuto) {
    return Engine::all_to_all(turn, type, algorithm, input, input_blocks, output, output_blocks);
  }
  WEFT_RETURN_IF_ERROR(begins(turn, OpKind::kAllToAll, type, 0));
  const uint64_t size = element_size(type);
  Transfers transfers;
  for (int i = 1; i < member_.size; ++i) {
    const int to = (member_.rank + i) % member_.size;
    const int from = (member_.rank - i + member_.size) % member_.size;
    add(&transfers, to, true, const_cast<char*>(input) + input_blocks.begin(to) * size,
        input_blocks.length(to) * size);
    add(&transfers, from, false, output + output_blocks.begin(from) * size,
        output_blocks.length(from) * size);
  }
  const int own = member_.rank;
  copy_bytes(output + output_blocks.begin(own) * size, input + input_blocks.begin(own) * size,
             std::min(input_blocks.length(own), output_blocks.length(own)) * size);
  return exchange(turn, "all_to_all by MPI_Isend and MPI_Irecv", std::move(transfers));
}

}  // namespace weft::internal
