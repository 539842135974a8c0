#ifndef WEFT_COLLECTIVES_INTERNAL_SHM_ENGINE_H_
#define WEFT_COLLECTIVES_INTERNAL_SHM_ENGINE_H_

// ShmEngine: operations in shared memory. Each rank puts its elements into its own file, all meet
// at a barrier, and each reads what it needs of the others' files; no rank writes to another's. A
// barrier is a counter in each file, and carries the header of the operation: a rank that meets
// another header fails before it reads data.
//
//   small          put in, barrier, everyone reduces everything
//   pair           two ranks, per chunk: put in, barrier, each reduces the whole chunk
//   staged         per chunk: put in, barrier, reduce one slice each, barrier, copy the slices out
//   registered     tensors that lie in the files (group.empty()): barrier, reduce one slice each,
//                  barrier, copy the slices out, barrier; two ranks with small tensors: pair
//
// Slots and results are used by turns: what was put in at one turn is written over two turns later
// or more, behind a barrier that every rank reached after its last look at it.
//
// What a rank puts into its file the others have read: see shared_writes.h.
//
// Elements are reduced in the order of the ranks and rounded once, whichever way is taken.
// Operations that are not here run over the rings (stream_link.h).

#include <memory>

#include "weft/collectives/internal/engine.h"
#include "weft/collectives/internal/shm_streams.h"
#include "weft/transport/shared_writes.h"

namespace weft::internal {

class ShmEngine : public Engine {
 public:
  static StatusOr<std::unique_ptr<Engine>> make(const Membership& member, ShmMesh mesh,
                                                AlgorithmChoice choice,
                                                std::shared_ptr<Runtime> runtime);

  Status barrier(const Turn& turn) override;
  Status monitored_barrier(const Turn& turn) override;
  Status all_reduce(const Turn& turn, ElementType type, ReduceOp op, Algorithm algorithm,
                    char* data, uint64_t elements) override;
  Status broadcast(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                   uint64_t elements, int root) override;
  Status reduce(const Turn& turn, ElementType type, ReduceOp op, char* data, uint64_t elements,
                int root) override;
  Status all_gather(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                    const Blocks& blocks) override;
  Status reduce_scatter(const Turn& turn, ElementType type, ReduceOp op, Algorithm algorithm,
                        const char* input, const Blocks& blocks, char* output) override;
  Status all_to_all(const Turn& turn, ElementType type, Algorithm algorithm, const char* input,
                    const Blocks& input_blocks, char* output, const Blocks& output_blocks) override;
  StatusOr<std::shared_ptr<char>> allocate(uint64_t bytes) override;
  std::vector<int> awaited() override;

 protected:
  Status agree(const Turn& turn, Header mine) override;

 private:
  ShmEngine(const Membership& member, std::unique_ptr<StreamLink> link, ShmStreams* streams,
            AlgorithmChoice choice, std::shared_ptr<Runtime> runtime);

  // Whether a schedule was asked for, or the table names one, and which. Then all ranks meet first.
  bool by_schedule(OpKind op, Algorithm* algorithm, uint64_t bytes) const;
  // This rank is in `mine`, its tensor at `place` of its file (0: elsewhere).
  void publish(const Header& mine, uint64_t place);
  // Every rank is here. The first one of an operation compares headers.
  Status meet(const Turn& turn, const Header& mine, bool first);
  Status check_header(const Header& mine, int peer, bool arrived);
  Header last_header(int peer) const;
  // Where all tensors lie, when all lie in files.
  bool all_registered(uint64_t bytes, uint64_t alignment);

  Status small(const Turn& turn, const Header& mine, char* data, uint64_t elements);
  // One barrier per chunk; the result where `here` is true.
  Status reduce_chunks(const Turn& turn, const Header& mine, char* data, uint64_t elements,
                       bool here);
  Status staged(const Turn& turn, const Header& mine, char* data, uint64_t elements);
  Status registered(const Turn& turn, const Header& mine, char* data, uint64_t elements);
  Status scatter_staged(const Turn& turn, const Header& mine, ReduceOp op, const char* input,
                        const Blocks& blocks, char* output);
  // Puts what lies at `offset` of every slot into inputs_; of this rank's: `own`, if it is not null.
  void collect_inputs(uint64_t use, uint64_t offset, const char* own);
  // The same of the tensors themselves. REQUIRES: all of them are registered.
  void collect_tensors(uint64_t offset, const char* own_tensor);
  // Reduces `inputs_` in the order of the ranks.
  void reduce_into(const Header& mine, char* out, uint64_t elements, bool streamed = false);
  // Into this rank's file, which the peers read.
  void put(char* to, const char* from, uint64_t bytes);

  ShmFile& of(int rank) const { return *files_.by_rank[static_cast<size_t>(rank)]; }
  ShmFile& own() const { return of(member_.rank); }

  StreamLink* const stream_;
  ShmStreams* const streams_;
  const ShmFiles& files_;
  const std::shared_ptr<Runtime> runtime_;
  SharedWrites writes_;
  uint64_t count_ = 0;  // barriers
  uint64_t turn_ = 0;   // uses of the slots
  std::vector<uint64_t> places_;
  std::vector<const void*> inputs_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_SHM_ENGINE_H_
