#ifndef WEFT_PS_TABLE_H_
#define WEFT_PS_TABLE_H_

// What a table of a parameter server is: kind, shape, update rule, first values, consistency. Value
// types; any thread.
//
//   ps::TableDefinition weights = ps::dense({64, 10}, ps::rule<optim::Adam>({.lr = 1e-2}));
//   weights.init = ps::Init::uniform(-0.1, 0.1, /*seed=*/1);
//   weights.consistency = ps::Consistency::ssp(/*bound=*/3, /*clients=*/4);
//   ps::TableDefinition words = ps::sparse(64, ps::rule<optim::RowWiseAdagrad>({.lr = 0.05}));

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "c10/core/ScalarType.h"
#include "weft/common/api.h"
#include "weft/dist_optim/optim.h"
#include "weft/dist_optim/update_rule.h"

namespace weft::ps {

enum class TableKind : uint8_t {
  kDense = 1,   // one tensor
  kSparse = 2,  // rows by keys of 64 bits, made when they are first pushed to
};

enum class Mode : uint8_t {
  kAsp = 1,    // pushes are applied as they come, pulls never wait
  kBsp = 2,    // what all clients push in a step is applied at once, when the last has finished it
  kSsp = 3,    // as ASP, but a pull waits for clients that are more than `bound` steps behind
  kBatch = 4,  // a step ends with the first `bound` clients' pushes; later ones are dropped
};

struct Consistency {
  Mode mode = Mode::kAsp;  // which of them
  uint64_t bound = 0;
  // BSP, SSP: no step ends before so many clients are there. Later each that is there counts.
  uint32_t clients = 0;

  static Consistency asp() { return {}; }                                        // asynchronous
  static Consistency bsp(uint32_t clients) { return {Mode::kBsp, 0, clients}; }  // synchronous
  static Consistency ssp(uint64_t bound, uint32_t clients) { return {Mode::kSsp, bound, clients}; }
  static Consistency batch(uint64_t most, uint32_t clients) {  // the first `most` pushes of a step
    return {Mode::kBatch, most, clients};
  }
  friend bool operator==(const Consistency&, const Consistency&) = default;
};

// What an element is before the first push. A pure function of these fields, the table's name, the
// element (or key) and the column, so that results do not depend on how many servers there are.
struct Init {
  enum class Kind : uint8_t { kZeros = 1, kConstant = 2, kUniform = 3 };  // which function
  Kind kind = Kind::kZeros;
  double low = 0;   // least value, or the constant
  double high = 0;  // bound of uniform values
  uint64_t seed = 0;

  static Init zeros() { return {}; }                                                 // the default
  static Init constant(double value) { return {Kind::kConstant, value, value, 0}; }  // everywhere
  static Init uniform(double low, double high, uint64_t seed) {
    return {Kind::kUniform, low, high, seed};
  }
  friend bool operator==(const Init&, const Init&) = default;
};

// What happens to a push of new rows to a sparse table that has max_bytes.
enum class Eviction : uint8_t {
  kNone = 0,  // it is refused
  // The rows that were neither pushed to nor pulled for longest lose their place, and with it value and state: a pull
  // gives their first values, and a push begins anew. Not those of the push itself: one with more rows than the table
  // may have is refused.
  kLru = 1,
};

// One of weft::optim, or of the users', with its options.
struct RuleChoice {
  std::string name{};  // "SGD"
  PackedOptions options{};
  friend bool operator==(const RuleChoice&, const RuleChoice&) = default;
};
template <class Tag>
RuleChoice rule(typename Tag::Options options = {}) {
  // A table's state is of all its clients.
  if constexpr (requires { options.own_state; }) options.own_state = false;
  return {std::string(Tag::kName), pack_options<Tag>(options)};
}

// Update rules of users, by which tables may be updated besides those of weft::optim: see dist_optim/user_rule.h.
using UserRules = std::vector<std::shared_ptr<const UpdateRule>>;

struct TableDefinition {
  TableKind kind = TableKind::kDense;
  std::vector<int64_t> shape{};                    // sparse: {length of a row}
  c10::ScalarType dtype = c10::ScalarType::Float;  // or Double
  RuleChoice rule{};
  Init init{};
  Consistency consistency{};
  // Sparse: what the rows may take at each server, with their state and keys; 0: no cap. A push that
  // would go over it is refused, kind resource, and nothing of it is done, but see `eviction`.
  uint64_t max_bytes = 0;
  // Sparse, ASP or SSP: whether rows make room for others. kLru wants max_bytes.
  Eviction eviction = Eviction::kNone;
  // Sparse, ASP or SSP: rows that were neither pushed to nor pulled for so long go when there are pushes; 0: never. Of a
  // resolution of 1 ms.
  absl::Duration ttl{};
  // Sparse: a key has a row from the so-manieth push with it; the gradients before are dropped. Each server counts the keys
  // that were pushed last, as many as fit into an eighth of max_bytes, without a cap 2^20. A server that takes over a part,
  // or restores one, begins to count anew. 0 is 1.
  uint32_t admit_after = 1;
  // 1, or 2: each part lies at two servers. A push is acknowledged when both have it; when one server
  // dies the other goes on, and a third becomes the second copy, if there is one.
  uint32_t copies = 1;
  // One copy: the parts are in the map of the job's store, so that they can move to other servers and their
  // server can drain. Pushes of rows that travel together are then done one by one, as with two copies. With
  // two copies that is so in any case.
  bool movable = false;
  // Dense: the most bytes of a part's values. A table that is larger than this at each server has several
  // parts there, equally many at each; the push of one overlaps the pull of another. 1 element to 4 GiB.
  uint64_t part_bytes = uint64_t{4} << 20;

  friend bool operator==(const TableDefinition&, const TableDefinition&) = default;
};

WEFT_API TableDefinition dense(std::vector<int64_t> shape, RuleChoice rule);
WEFT_API TableDefinition sparse(int64_t row_length, RuleChoice rule);
// "dense [64, 10] Float, SGD(lr=0.1), asp, ...": for messages.
WEFT_API std::string to_string(const TableDefinition& definition);

}  // namespace weft::ps

#endif  // WEFT_PS_TABLE_H_
