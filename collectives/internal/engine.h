#ifndef WEFT_COLLECTIVES_INTERNAL_ENGINE_H_
#define WEFT_COLLECTIVES_INTERNAL_ENGINE_H_

// Engine: runs operations on plain memory. This one runs schedules over a Link; a backend that has
// something better for an operation overrides it. One operation at a time: GroupCore sees to that.
//
// Operations with a root begin with a barrier of empty messages, so that what differs between the
// ranks is found before data moves, and by all of them.

#include <cstdint>
#include <memory>
#include <vector>

#include "weft/collectives/algorithm.h"
#include "weft/collectives/internal/algorithm_table.h"
#include "weft/collectives/internal/element.h"
#include "weft/collectives/internal/link.h"
#include "weft/collectives/internal/operation_note.h"
#include "weft/collectives/internal/schedule.h"
#include "weft/collectives/reduce_op.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::internal {

// One operation's place in the order of its group.
struct Turn {
  uint64_t sequence = 0;
  absl::Time deadline;
};

// What the ranks compare of an operation that another library performs.
struct Fingerprint {
  OpKind op = OpKind::kNone;
  ElementType type = ElementType::kNone;
  ReduceOp::Kind reduction = ReduceOp::kSum;
  int root = -1;
  uint64_t count = 0;
};

// By what an all_reduce without an algorithm of its own gets one; equal at all members.
struct AlgorithmChoice {
  Topology topology;
  AlgorithmTable table;  // first of all
};

class Engine;

// Reduces a body into its place while it comes in, as long as each piece is in the caches.
class PieceReducer final : public PieceTaker {
 public:
  PieceReducer(Engine* engine, const Header& mine, int peer, char* at)
      : engine_(engine), mine_(&mine), peer_(peer), at_(at) {}
  void take(uint64_t begin, const char* piece, uint64_t bytes) override;

 private:
  Engine* const engine_;
  const Header* const mine_;
  const int peer_;
  char* const at_;
};

class WEFT_API Engine {
 public:
  Engine(const Membership& member, std::unique_ptr<Link> link, AlgorithmChoice choice = {})
      : member_(member), link_(std::move(link)), choice_(std::move(choice)) {}
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Membership& member() const { return member_; }
  Link& link() { return *link_; }
  OperationNote& note() { return note_; }
  // The part of what this member has sent that went to other hosts. Thread of the operation.
  const Traffic& between_hosts() const { return between_hosts_; }
  void count(const Outgoing& sent);

  virtual Status barrier(const Turn& turn);
  // Rank 0 waits for all and names who is missing; the others wait for it, and longer.
  virtual Status monitored_barrier(const Turn& turn);
  // In place.
  virtual Status all_reduce(const Turn& turn, ElementType type, ReduceOp op, Algorithm algorithm,
                            char* data, uint64_t elements);
  // kAuto: by the table, else by size. So the others that take an algorithm.
  virtual Status broadcast(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                           uint64_t elements, int root);
  // The result at the root; `data` of the others is used up.
  virtual Status reduce(const Turn& turn, ElementType type, ReduceOp op, char* data,
                        uint64_t elements, int root);
  // Own block of `data` is in place.
  virtual Status all_gather(const Turn& turn, ElementType type, Algorithm algorithm, char* data,
                            const Blocks& blocks);
  // `blocks` and `output` at the root only. kBinomialTree: REQUIRES equal blocks; the count of
  // elements is in the fingerprint.
  virtual Status gather(const Turn& turn, ElementType type, Algorithm algorithm, const char* input,
                        uint64_t elements, char* output, const Blocks& blocks, int root);
  // `blocks` and `input` at the root only.
  virtual Status scatter(const Turn& turn, ElementType type, Algorithm algorithm, const char* input,
                         const Blocks& blocks, char* output, uint64_t elements, int root);
  // The result is block `rank` of the reduced inputs. REQUIRES: `output` shares no memory with
  // `input`.
  virtual Status reduce_scatter(const Turn& turn, ElementType type, ReduceOp op,
                                Algorithm algorithm, const char* input, const Blocks& blocks,
                                char* output);
  // kBruck: REQUIRES equal blocks; the count of elements is in the fingerprint.
  virtual Status all_to_all(const Turn& turn, ElementType type, Algorithm algorithm,
                            const char* input, const Blocks& input_blocks, char* output,
                            const Blocks& output_blocks);

  // Every rank has begun this operation; COLL-2.
  Status compare(const Turn& turn, const Fingerprint& mine);

  // The ranks that the operation under way waits for; see Link. Any thread.
  virtual std::vector<int> awaited() { return link_->awaited(); }

  // Memory on which operations copy less; null where there is none.
  virtual StatusOr<std::shared_ptr<char>> allocate(uint64_t bytes) {
    (void)bytes;
    return std::shared_ptr<char>();
  }

 protected:
  Header header(const Turn& turn, OpKind op, ElementType type, uint64_t count) const;
  Header reducing(const Turn& turn, OpKind op, ElementType type, uint64_t count,
                  ReduceOp reduction) const;
  // Every rank has begun this operation.
  virtual Status agree(const Turn& turn, Header mine);
  // What was asked for, else what the table says; kAuto: neither says anything.
  Algorithm asked_or_table(OpKind op, Algorithm algorithm, uint64_t bytes) const;
  Status run(const Turn& turn, const Header& mine, const Schedule& schedule, char* work,
             const char* input);
  Status run_round(const Turn& turn, const Header& mine, const Round& round, char* work,
                   const char* input);
  // Whether step `i`, of elements of `size` bytes, is reduced while it comes in.
  static bool in_pieces(const Round& round, size_t i, uint64_t size);
  void apply(const Header& mine, const Round& round, char* work);
  // One input beside what is at `at`, in the order of the ranks.
  friend class PieceReducer;
  void reduce_one(const Header& mine, int peer, char* at, const char* theirs, uint64_t elements);
  // What a reduction does to this rank's elements before they travel, and after.
  void before_reduce(ElementType type, ReduceOp op, char* data, uint64_t elements) const;
  void after_reduce(ElementType type, ReduceOp op, char* data, uint64_t elements) const;
  char* scratch(uint64_t bytes);

  const Membership member_;
  const std::unique_ptr<Link> link_;
  const AlgorithmChoice choice_;
  OperationNote note_;
  Traffic between_hosts_;

 private:
  std::vector<Outgoing> sends_;
  std::vector<Incoming> receives_;
  std::vector<PieceReducer> reducers_;  // of receives_, as long as these
  std::vector<const void*> inputs_;
  std::unique_ptr<char[]> scratch_;
  uint64_t scratch_bytes_ = 0;
  // The last all_reduce's, which are often the next one's too.
  Schedule last_;
  Algorithm last_algorithm_ = Algorithm::kAuto;
  uint64_t last_elements_ = 0;
};

// By size, number of ranks and topology alone, so that all ranks choose alike.
Algorithm choose_all_reduce(uint64_t bytes, int size, const Topology& topology);
// The other operations whose size all ranks know.
Algorithm choose_algorithm(OpKind op, uint64_t bytes, int size, const Topology& topology);

// Equal for equal lists of sizes.
uint64_t hash_of(const Blocks& blocks);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_ENGINE_H_
