#ifndef WEFT_PS_INTERNAL_PART_DATA_H_
#define WEFT_PS_INTERNAL_PART_DATA_H_

// PartData: the values of one part, with the rule's state. Dense: a range of a tensor's elements.
// Sparse: rows by key. One thread at a time; grad mode is off.
//
//   DATA-1  a push is accepted whole or refused whole; what was accepted can be applied.
//   DATA-2  values do not depend on the number of servers, nor on the order or repetition of the keys
//           in a push beyond the sum of a key's rows in their order.
//   DATA-3  no value that is not finite is accepted.
//   DATA-4  what goes, and which keys have no row yet, the owner alone decides: a copy that is told of each push and of
//           what went before it has the same rows at the same places.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/dist_optim/update_rule.h"
#include "weft/ps/internal/answer_memory.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/wire.h"
#include "weft/ps/placement.h"

namespace weft::ps::internal {

struct Push {
  PushKind kind = PushKind::kGradient;
  std::optional<double> rate{};
  std::vector<uint64_t> keys{};  // sparse: each once
  at::Tensor values{};           // dense: flat. Sparse: one row for each key
  at::Tensor then{};             // dense, of rules that compensate a delay; undefined: not known
  size_t not_admitted = 0;       // keys that it had besides
  std::vector<uint32_t> rows{};  // sparse: where the keys' rows lay when it was accepted,
  uint64_t places = 0;  // which holds while the rows are at these places (SparseRows::places())
  int64_t bytes() const {
    return static_cast<int64_t>(keys.size() * sizeof(uint64_t) + rows.size() * sizeof(uint32_t) +
                                values.nbytes() + (then.defined() ? then.nbytes() : 0));
  }
};

// The values and the rule's state as they were at one moment, by columns: of a dense part "values",
// "steps" (one number) and the rule's buffers; of a sparse one "keys", "steps", "values" and the rule's,
// a row for each key. Any thread.
class FrozenData {
 public:
  struct Column {
    std::string name{};
    c10::ScalarType dtype = c10::ScalarType::Float;
    std::vector<int64_t> shape{};
  };
  virtual ~FrozenData() = default;
  virtual const std::vector<Column>& columns() const = 0;
  // Calls `put` with the elements of a column, in pieces and in order, until it fails.
  virtual Status write(size_t column, const std::function<Status(std::string_view)>& put) const = 0;
  // The next piece of an image as PartData::load() takes it, which is empty at first; `done`: rows that it has.
  // True: there is more.
  virtual bool copy_image(std::vector<at::Tensor>* image, size_t* done) const = 0;
};
// All of it.
WEFT_API std::vector<at::Tensor> image_of(const FrozenData& data);

class WEFT_API PartData {
 public:
  virtual ~PartData() = default;
  // How many tensors a push and a pull have.
  virtual size_t push_tensors() const = 0;
  virtual size_t pull_tensors() const = 0;
  virtual StatusOr<Push> accept(const PushHeader& header, std::vector<at::Tensor> tensors) = 0;
  // A copy's, of what its owner has accepted: no cap applies, nothing goes, and all keys are admitted.
  virtual void follow(bool follows) { (void)follows; }
  // Keys whose rows have gone since it was asked last, in their order: accept() makes room, also for a push that it then
  // refuses.
  virtual std::vector<uint64_t> take_evicted() { return {}; }
  // What an owner's take_evicted() gave. Kind protocol: there is no such row.
  virtual Status evict(const std::vector<uint64_t>& keys);
  // Pushes of different keys come to the same, bit by bit, as one push and one after the other; so does
  // what accept() does with their keys.
  virtual bool joins() const { return false; }
  // In this order, as one update of their sum over `divisor`; assignments alone. REQUIRES: accepted.
  virtual void apply(std::vector<Push> pushes, uint64_t divisor) = 0;
  // Of a push that was accepted, as accept() takes them.
  virtual std::vector<at::Tensor> pack(const Push& push) const = 0;
  // A copy. `tensors`: as many as pull_tensors(). The rows are used.
  virtual StatusOr<at::Tensor> read(const std::vector<at::Tensor>& tensors) = 0;
  virtual int64_t rows() const = 0;
  virtual int64_t bytes() const = 0;
  // Values and the rule's state, without a copy: what is changed later is copied before its first change.
  virtual std::shared_ptr<const FrozenData> freeze() = 0;
  // Names of the rule's buffers, in the order of an image; "" where the rule has no need of one.
  virtual std::vector<std::string> buffer_names() const = 0;
  // Replaces everything. Some of an image's tensors may be undefined. `between` is called between pieces of it.
  // Kind protocol: it is no image of such a table. Kind resource: no memory.
  virtual Status load(const std::vector<at::Tensor>& image,
                      const std::function<void()>& between) = 0;
};

using RuleRef = std::shared_ptr<const UpdateRule>;
// Kind resource when there is no memory for it. `rule`: the definition's; null: one of weft::optim.
WEFT_API StatusOr<std::unique_ptr<PartData>> make_dense_data(const TableDefinition& definition,
                                                             const std::string& table,
                                                             ElementRange range,
                                                             AnswerMemory memory = {},
                                                             RuleRef rule = nullptr);
WEFT_API StatusOr<std::unique_ptr<PartData>> make_sparse_data(
    const TableDefinition& definition, const std::string& table, int64_t table_bytes,
    std::shared_ptr<Runtime> clock,  // null: where no row goes
    AnswerMemory memory = {}, RuleRef rule = nullptr);

// ---- shared by the two -------------------------------------------------------------------------

// The rule's options, with the push's own rate.
PackedOptions options_with_rate(const UpdateRule& rule, PackedOptions options,
                                const std::optional<double>& rate);
// Kind invalid_argument: the push's own rate is none that the rule may have.
Status check_rate(const UpdateRule& rule, const PackedOptions& options,
                  const std::optional<double>& rate);
// Defined, on the CPU, of the table's type and this shape; `what` is for the message.
Status check_tensor(const at::Tensor& tensor, c10::ScalarType dtype, at::IntArrayRef shape,
                    std::string_view what);
// Error of kind invalid_argument with how many are not finite, and the first's place.
Status check_finite(const at::Tensor& contiguous, int64_t row_length);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_PART_DATA_H_
