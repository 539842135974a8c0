#ifndef WEFT_PS_LAYERS_H_
#define WEFT_PS_LAYERS_H_

// Layers whose parameters lie in tables: forward() pulls, step() pushes the gradients.
//
//   weft::ps::Embedding words(client.open_table("words", weft::ps::sparse(64, rule)));
//   weft::ps::Linear head(client.open_table("head", weft::ps::Linear::definition(64, 10, rule)), 64, 10);
//   at::Tensor loss = nll(head.forward(words.forward(ids).mean(1)), labels);
//   loss.backward();                                    // or context.backward({loss})
//   auto pushed = {words.step(), head.step()};          // or step(context)
//
// What a forward has pulled is a leaf of the autograd graph: rows, each distinct id once; for Linear weight
// and bias. The gradients of all forwards since the last step travel as one push, in which the rows of an
// id add up. After a step gradients that a backward still brings to older leaves are not pushed. In
// no-grad mode forward() keeps nothing.
//
// step_in_backward() lets the push of a step leave within the backward, as soon as that has the gradients of
// this layer, while it goes on for others:
//
//   words.step_in_backward();
//   head.step_in_backward();
//   loss.backward();                                    // head's push leaves before words' gradient is there
//   for (const auto& pushed : {words.step(), head.step()}) pushed.wait();
//
// Errors: forward() throws weft::Error: invalid_argument, ids that are not integers; state, a step whose push
// has left within a backward is not ended; what a pull can end with. step()'s future has what a push can end with; the gradients are gone then, since some part may have
// taken them already.
// Threads: a layer is for one thread at a time.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/ps/client.h"

namespace weft {

class DistAutogradContext;

namespace ps {
namespace internal {
class BackwardPush;
class LeafGradients;
}  // namespace internal

// Where a layer computes, and how long it waits for its table.
struct LayerOptions {
  // Where leaves, results and gradients are.
  c10::Device device{c10::DeviceType::CPU};
  // For a pull. Default: the worker's rpc_timeout.
  Timeout deadline{};
};

// How a step pushes.
struct StepOptions {
  // This ends a step of the client, in this layer's table: see Consistency.
  bool advance = true;
  // Instead of the rule's own learning rate.
  std::optional<double> rate{};
  // As PushOptions::max_norm.
  std::optional<double> max_norm{};
  // Embedding, EmbeddingBag: rows that this push changes and that were pulled ahead by prefetch() are
  // pulled once more, with the push.
  bool refresh = false;
  // As PushOptions::position.
  std::string position{};
  // Default: the worker's rpc_timeout.
  Timeout deadline{};
};

// What all layers have: a table, and a step that pushes to it.
class WEFT_API Layer {
 public:
  virtual ~Layer();
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  // The table that it was made with.
  const Table& table() const { return table_; }
  // Pushes what `.grad` of the leaves has. Nothing to push: the step ends all the same.
  Future<PushResult> step(const StepOptions& options = {});
  // Pushes what the context has for the leaves.
  Future<PushResult> step(const DistAutogradContext& context, const StepOptions& options = {});
  // The push of this step leaves within the backward, local or of a context, that brings the last gradient
  // of the leaves of all forwards since the last step. It is of that backward alone: one that fails later has
  // pushed all the same, and gradients that another one adds are not pushed. step() then ends the step and
  // has that push's future. A step of which some leaf got no gradient, or one a second before the others had
  // one, is pushed by step() as ever, with these options in any case. Until that backward has ended the layer
  // is used by it.
  void step_in_backward(const StepOptions& options = {});
  // Forgets leaves and their gradients, what was pulled ahead, and a step_in_backward().
  void drop();

 protected:
  // What is waited for next is waited for in the middle of a step: its transport's thread is not to take the
  // core from the computation between two waits.
  void expect_computation() const;
  // For classes derived from it, which check that the table is one of theirs, and whose destructor calls
  // end_in_backward(), as push() uses their members.
  Layer(Table table, const LayerOptions& options);
  // Takes back a step_in_backward(); waits for a push that a backward on another thread is making.
  void end_in_backward();
  // Pushes the gradients of all leaves, and forgets the leaves.
  virtual Future<PushResult> push(const internal::LeafGradients& gradients,
                                  const StepOptions& options) = 0;
  virtual void forget() = 0;
  virtual std::vector<at::Tensor> leaves() const = 0;
  // To be called for each leaf that is made.
  void watch(const at::Tensor& leaf) const;
  // Throws weft::Error, kind state: the push of this step has left, so it has no more forwards.
  void check_open() const;

  const Table table_;           // what it pulls from and pushes to
  const LayerOptions options_;  // as given

 private:
  Future<PushResult> end_step(const internal::LeafGradients& gradients, const StepOptions& options);

  std::shared_ptr<internal::BackwardPush> in_backward_;  // null: step() pushes
  StepOptions in_backward_options_;
};

// What Embedding and EmbeddingBag share. The table is sparse; ids are its keys, int64 or int32, of any
// shape, on any device.
class WEFT_API RowLayer : public Layer {
 public:
  ~RowLayer() override;
  // Begins to pull the rows of `ids`; the next forward() of equal ids takes them, as they were pulled.
  // At most 64 wait; the oldest one makes room.
  void prefetch(const at::Tensor& ids);

 protected:
  RowLayer(Table table, const LayerOptions& options);

  // What a lookup has found.
  struct Found {
    at::Tensor rows{};    // the leaf
    at::Tensor places{};  // of each id in it, in the shape of the ids
  };
  // The rows of these ids: those that were pulled ahead for them, or pulled now.
  Found find(const at::Tensor& ids);

 private:
  // Ids, each distinct one once, in the order in which they come first.
  struct Distinct {
    at::Tensor keys{};
    at::Tensor places{};
  };
  // Rows that were pulled once more: row from[i] of `rows` is row to[i] of a lookup.
  struct Newer {
    Future<at::Tensor> rows;
    at::Tensor from{};
    at::Tensor to{};
  };
  struct Lookup {
    at::Tensor ids{};  // a copy
    Distinct distinct{};
    Future<at::Tensor> rows;
    std::vector<Newer> newer{};
  };
  struct Leaf {
    at::Tensor keys{};
    at::Tensor rows{};
  };

  static Distinct distinct_of(const at::Tensor& ids);
  static at::Tensor rows_of(const Lookup& lookup);
  at::Tensor checked(const at::Tensor& ids) const;
  Future<PushResult> push(const internal::LeafGradients& gradients,
                          const StepOptions& options) override;
  void forget() override;
  std::vector<at::Tensor> leaves() const override;
  // The keys among `pushed` that lookups wait with, and for each of these which of its rows they are.
  at::Tensor ahead(const at::Tensor& pushed, std::vector<Newer>* newer) const;

  std::deque<Lookup> ahead_;
  std::vector<Leaf> leaves_;
};

// Rows by id: ids of shape [...] give [..., length of a row].
class WEFT_API Embedding final : public RowLayer {
 public:
  // Throws weft::Error, kind invalid_argument: the table is not sparse.
  explicit Embedding(Table table, const LayerOptions& options = {});
  at::Tensor forward(const at::Tensor& ids);
};

// What a bag makes of its rows.
enum class Reduce : uint8_t { kSum, kMean, kMax };

// Sums, means or maxima of rows: ids of shape [bags, n], or flat with the place at which each bag begins,
// give [bags, length of a row]. A bag without ids is zeros.
class WEFT_API EmbeddingBag final : public RowLayer {
 public:
  explicit EmbeddingBag(Table table, Reduce reduce = Reduce::kMean,
                        const LayerOptions& options = {});
  at::Tensor forward(const at::Tensor& ids);
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& offsets);

 private:
  const Reduce reduce_;
};

// x W^T + b, both in one dense table. The values are pulled by the first forward() and then with each
// push, so that a step is one round trip; the next forward() waits for it.
class WEFT_API Linear final : public Layer {
 public:
  // With first values as torch::nn::Linear draws them: evenly from -1/sqrt(inputs) to 1/sqrt(inputs).
  static TableDefinition definition(int64_t inputs, int64_t outputs, RuleChoice rule,
                                    bool bias = true, uint64_t seed = 0);
  // Throws weft::Error, kind invalid_argument: the table has another number of elements.
  Linear(Table table, int64_t inputs, int64_t outputs, bool bias = true,
         const LayerOptions& options = {});
  ~Linear() override;
  at::Tensor forward(const at::Tensor& inputs);
  // The leaves; they are pulled when they are not there. `bias` may be undefined.
  const at::Tensor& weight();
  const at::Tensor& bias();

 private:
  void pull();
  Future<PushResult> push(const internal::LeafGradients& gradients,
                          const StepOptions& options) override;
  void forget() override;
  std::vector<at::Tensor> leaves() const override;

  const int64_t inputs_;
  const int64_t outputs_;
  const bool has_bias_;
  at::Tensor weight_;
  at::Tensor bias_;
  std::optional<Future<at::Tensor>> next_;  // values that come with a push
};

}  // namespace ps
}  // namespace weft

#endif  // WEFT_PS_LAYERS_H_
