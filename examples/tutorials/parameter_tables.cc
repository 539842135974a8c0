// Parameter tables: two servers hold parts of a table, two trainers push gradients and pull values.
//   build/bin/weftrun --role ps:2 --role trainer:2 build/bin/tutorial_parameter_tables

#include <iostream>
#include <string>

#include "ATen/TensorOperators.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/weft.h"

constexpr uint32_t kTrainers = 2;
constexpr int kSteps = 150;

at::Tensor input(const async_ps::Images& some) { return some.pixels.to(at::kFloat) / 16; }

// A table of 64 x 10 weights. With BSP the gradients of a step are applied together, when every
// trainer has pushed.
weft::ps::TableDefinition definition() {
  auto weights = weft::ps::dense({64, 10}, weft::ps::rule<weft::optim::Adam>({.lr = 0.05}));
  weights.consistency = weft::ps::Consistency::bsp(kTrainers);
  return weights;
}

bool train(const weft::Worker& worker) {
  const async_ps::Split digits =
      async_ps::split_by_class(async_ps::read_digits(async_ps::default_digits()), 360, /*seed=*/1);
  const size_t number = worker.name() == "trainer0" ? 0 : 1;
  const async_ps::Images share = async_ps::deal(digits.train, kTrainers)[number];

  const weft::ps::Client client(worker, {.servers = {"ps0", "ps1"}});
  const weft::ps::Table table = client.open_table("weights", definition());
  at::Tensor weights = table.pull().wait();
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor leaf = weights.clone().set_requires_grad(true);
    at::cross_entropy_loss(input(share).matmul(leaf), share.labels).backward();
    weights = table.push_pull(leaf.grad(), {.advance = true}).wait();
  }

  const at::Tensor guess = input(digits.test).matmul(weights).argmax(1);
  const auto accuracy = guess.eq(digits.test.labels).to(at::kFloat).mean().item<double>();
  const bool learned = accuracy > 0.9 && table.clock() == kSteps;
  std::cout << "parameter_tables: " << (learned ? "ok" : "not learned")
            << " steps=" << table.clock() << " accuracy=" << accuracy << std::endl;
  return learned;
}

int main() {
  const weft::Worker worker = weft::join();
  if (worker.name() == "ps0" || worker.name() == "ps1") {
    const weft::ps::Server server(worker);
    return worker.shutdown().status.ok() ? 0 : 1;  // when the trainers leave, too
  }
  const bool learned = train(worker);
  return worker.shutdown().status.ok() && learned ? 0 : 1;
}
