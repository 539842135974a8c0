#include "weft/examples/async_ps/trainer.h"

#include <utility>
#include <vector>

#include "weft/examples/async_ps/server.h"

namespace async_ps {
namespace {

// Batches without end: the images in a new order each time round; a rest that is too small is left
// out.
class Batches {
 public:
  explicit Batches(const Task& task)
      : images_{task.pixels, task.labels}, size_(task.batch_size), seed_(task.seed << 20) {}

  Images next() {
    if (at_ + size_ > static_cast<int64_t>(order_.size())) {
      order_ = shuffled(images_.size(), seed_++);
      at_ = 0;
    }
    const std::vector<int64_t> positions(order_.begin() + at_, order_.begin() + at_ + size_);
    at_ += size_;
    return select(images_, positions);
  }

 private:
  const Images images_;
  const int64_t size_;
  uint64_t seed_;
  std::vector<int64_t> order_;
  int64_t at_ = 0;
};

}  // namespace

void run_trainer(const weft::Worker& worker) {
  const auto pull = [&] {
    return weft::rpc_async(worker, kServer, weft::on(kInstance, &ParameterServer::pull));
  };
  const Task task = weft::rpc_sync(worker, kServer, weft::on(kInstance, &ParameterServer::enlist));
  Batches batches(task);
  weft::Future<Snapshot> next = pull();
  weft::Future<void> last_push;
  for (int64_t step = 0; step < task.steps; ++step) {
    const Snapshot now = std::move(next).wait();
    // Pulling ahead hides the network behind the computation; the price is staleness.
    if (step + 1 < task.steps) next = pull();
    LossAndGradients result = loss_and_gradients(now.parameters, batches.next());
    // At most one push is under way: a trainer that is faster than the server waits for it.
    if (last_push.valid()) last_push.wait();
    last_push = weft::rpc_async(worker, kServer, weft::on(kInstance, &ParameterServer::push),
                                Push{now.version, result.loss, std::move(result.gradients)});
  }
  if (last_push.valid()) last_push.wait();
  weft::rpc_sync(worker, kServer, weft::on(kInstance, &ParameterServer::finish));
}

}  // namespace async_ps
