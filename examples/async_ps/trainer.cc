#include "weft/examples/async_ps/trainer.h"

#include <memory>
#include <utility>
#include <vector>

#include "weft/dist_autograd/context.h"
#include "weft/dist_optim/lr_scheduler.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/examples/async_ps/server.h"
#include "weft/rpc/call.h"
#include "weft/rref/rref.h"

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

void run_split_trainer(const weft::Worker& worker) {
  const Task task = weft::rpc_sync(worker, kServer, weft::on(kInstance, &ParameterServer::enlist));
  if (task.index == 0) {
    const auto first =
        weft::rpc_sync(worker, kServer, weft::on(kInstance, &ParameterServer::first_output));
    weft::rpc_sync(
        worker, kServer, weft::on(kInstance, &ParameterServer::offer_output),
        weft::RRef<Layer>::local(worker, std::make_shared<Layer>(first.at(0), first.at(1), false)));
  }
  const weft::RRef<Layer> hidden =
      weft::rpc_sync(worker, kServer, weft::on(kInstance, &ParameterServer::hidden));
  const weft::RRef<Layer> output =
      weft::rpc_sync(worker, kServer, weft::on(kInstance, &ParameterServer::output));

  std::vector<weft::RRef<at::Tensor>> parameters = hidden.rpc_sync(&Layer::parameters);
  for (auto& one : output.rpc_sync(&Layer::parameters)) parameters.push_back(std::move(one));
  constexpr AdamSettings kAdam;
  weft::DistributedOptimizer<weft::optim::AdamW> optimizer(worker, parameters,
                                                           {.lr = kAdam.rate,
                                                            .beta1 = kAdam.beta1,
                                                            .beta2 = kAdam.beta2,
                                                            .weight_decay = kAdam.weight_decay});
  weft::LambdaLR schedule(optimizer, [&task](int64_t step) {
    return 1 - static_cast<double>(step) / static_cast<double>(task.steps);
  });
  Batches batches(task);
  int64_t version = optimizer.versions().at(0);
  for (int64_t step = 0; step < task.steps; ++step, schedule.step()) {
    const Images batch = batches.next();
    weft::DistAutogradContext context(worker);
    const at::Tensor features = hidden.rpc_sync(&Layer::forward, inputs(batch));
    const at::Tensor loss = loss_of(output.rpc_sync(&Layer::forward, features), batch);
    context.backward({loss});
    const weft::StepReport done = optimizer.step(context);
    const int64_t now = done.owners.at(0).versions.at(0);
    weft::rpc_sync(worker, kServer, weft::on(kInstance, &ParameterServer::report),
                   Report{loss.item<double>(), now - version - 1});
    version = now;
  }
  weft::rpc_sync(worker, kServer, weft::on(kInstance, &ParameterServer::finish));
}

}  // namespace async_ps
