#include "weft/examples/ps_digits/training.h"

#include <signal.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_format.h"
#include "weft/examples/async_ps/model.h"

namespace ps_digits {
namespace {

using async_ps::Images;
using async_ps::Parameters;
namespace ps = weft::ps;

constexpr int64_t kBatch = 32;
constexpr double kRate = 5e-3;
// The model of async_ps: 64 pixels, 64 hidden units, 10 digits.
const std::vector<std::vector<int64_t>> kShapes = {{64, 64}, {64}, {10, 64}, {10}};

int64_t parameter_count() {
  int64_t sum = 0;
  for (const auto& shape : kShapes) {
    int64_t n = 1;
    for (const int64_t d : shape) n *= d;
    sum += n;
  }
  return sum;
}

// The table's values as the model's tensors, which share its memory.
Parameters as_parameters(const at::Tensor& values) {
  Parameters out;
  int64_t at = 0;
  for (const auto& shape : kShapes) {
    int64_t n = 1;
    for (const int64_t d : shape) n *= d;
    out.push_back(values.narrow(0, at, n).view(shape));
    at += n;
  }
  return out;
}

at::Tensor as_gradient(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& g : gradients) flat.push_back(g.reshape({-1}));
  return at::cat(flat);
}

ps::TableDefinition model_table(const Mode& mode, const Plan& plan) {
  auto out =
      ps::dense({parameter_count()}, ps::rule<weft::optim::AdamW>({.lr = kRate, .beta2 = 0.99}));
  out.init = ps::Init::uniform(-0.25, 0.25, plan.seed);
  out.consistency = mode.consistency;
  out.copies = plan.replicas;
  return out;
}

// The sum of what all trainers give, when all have given it. It is a table, too: a step of BSP ends when
// all have pushed.
at::Tensor sum_of_all(const ps::Client& client, const std::string& name, const Plan& plan,
                      const at::Tensor& mine) {
  auto definition = ps::dense(
      mine.sizes().vec(), ps::rule<weft::optim::SGD>({.lr = static_cast<double>(plan.trainers)}));
  definition.consistency = ps::Consistency::bsp(static_cast<uint32_t>(plan.trainers));
  definition.copies = plan.replicas;
  const ps::Table all = client.open_table(name, definition);
  return all.push_pull(mine.neg(), {.advance = true}).wait();  // a rule subtracts
}

// What trainers tell each other at the end, a row each.
enum Column { kMeanBehind, kMostBehind, kMostLag, kDropped, kPushes, kColumns };

at::Tensor tell_all(const ps::Client& client, const Mode& mode, const Plan& plan,
                    const ps::TableStats& stats) {
  at::Tensor mine = at::zeros({plan.trainers, kColumns});
  const double pushes = static_cast<double>(std::max<uint64_t>(stats.pushes, 1));
  const double row[kColumns] = {
      static_cast<double>(stats.sum_behind) / pushes / static_cast<double>(plan.trainers),
      static_cast<double>(stats.most_behind), static_cast<double>(stats.most_lag),
      static_cast<double>(stats.dropped), static_cast<double>(stats.pushes)};
  for (int64_t c = 0; c < kColumns; ++c) mine[plan.trainer][c] = row[c];
  return sum_of_all(client, "results/" + mode.text, plan, mine);
}

// Batches without end, in a new order each time round.
class Batches {
 public:
  Batches(Images images, uint64_t seed) : images_(std::move(images)), seed_(seed << 20) {}
  Images next() {
    if (at_ + kBatch > static_cast<int64_t>(order_.size())) {
      order_ = async_ps::shuffled(images_.size(), seed_++);
      at_ = 0;
    }
    const std::vector<int64_t> places(order_.begin() + at_, order_.begin() + at_ + kBatch);
    at_ += kBatch;
    return async_ps::select(images_, places);
  }
  void skip(int64_t batches) {
    for (int64_t i = 0; i < batches; ++i) next();
  }

 private:
  const Images images_;
  uint64_t seed_;
  std::vector<int64_t> order_;
  int64_t at_ = 0;
};

int64_t number_after(const std::string& text, const std::string& head, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* const begin = text.data() + head.size();
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(begin, end, value);
  if (error != std::errc() || stopped != end || value < low || value > high) {
    throw std::invalid_argument("--consistency " + head + "N wants a number from " +
                                std::to_string(low) + " to " + std::to_string(high) + ", not '" +
                                text + "'");
  }
  return value;
}

std::string table_name(const Mode& mode) { return "digits/" + mode.text; }

int64_t steps_of(const Plan& plan, const async_ps::Split& split) {
  return plan.epochs * (split.train.size() / plan.trainers / kBatch);
}

void keep(const ps::Client& client, const Plan& plan, const Mode& mode, int64_t step) {
  const auto kept = client.try_snapshot(plan.snapshots, {.tables = {table_name(mode)}});
  if (kept.ok()) {
    absl::PrintF("snapshot %d after step %d\n", kept->number, step);
  } else {  // the one before stays, and the training goes on
    absl::PrintF("no snapshot after step %d: %s\n", step, kept.status().message());
  }
  std::fflush(stdout);
}

void die() { raise(SIGKILL); }

// What all have seen at the end.
Result result_of(const Mode& mode, double seconds, const at::Tensor& all,
                 const Parameters& parameters, const async_ps::Split& split) {
  Result result;
  result.mode = mode.text;
  result.seconds = seconds;
  result.accuracy = async_ps::accuracy(parameters, split.test);
  const auto greatest = [&all](Column c) { return all.select(1, c).max().item<double>(); };
  result.mean_behind = greatest(kMeanBehind);
  result.most_behind = greatest(kMostBehind);
  result.most_lag = greatest(kMostLag);
  result.dropped = all.select(1, kDropped).sum().item<double>();
  result.pushes = all.select(1, kPushes).sum().item<double>();
  return result;
}

// Trainer 0 has the first values, and every trainer updates them where they lie.
Result train_in_memory(const weft::Worker& worker, const ps::Client& client, const Mode& mode,
                       const Plan& plan, const async_ps::Split& split, Batches batches) {
  const Parameters parameters = async_ps::initial_parameters(plan.seed);
  std::vector<ps::NamedParameter> named;
  for (size_t i = 0; i < parameters.size(); ++i) {
    named.push_back({async_ps::parameter_names()[i], parameters[i]});
  }
  const ps::SharedMemory memory = ps::share_memory(
      worker, named, {.name = "digits", .owner = plan.trainer == 0 ? "" : "trainer0"});
  const ps::Hogwild table(memory, ps::rule<weft::optim::AdamW>({.lr = kRate, .beta2 = 0.99}));
  const absl::Time begun = worker.now();
  const int64_t steps = steps_of(plan, split);
  ps::TableStats stats;
  for (int64_t step = 0; step < steps; ++step) {
    const uint64_t seen = table.updates();
    const auto [loss, gradients] = async_ps::loss_and_gradients(parameters, batches.next());
    const double left = 1 - static_cast<double>(step) / static_cast<double>(steps);
    const uint64_t behind = table.push(gradients, kRate * left) - seen;
    ++stats.pushes;
    stats.sum_behind += behind;
    stats.most_behind = std::max(stats.most_behind, behind);
  }
  const at::Tensor all = tell_all(client, mode, plan, stats);
  return result_of(mode, absl::ToDoubleSeconds(worker.now() - begun), all, parameters, split);
}

}  // namespace

weft::Library library() {
  weft::Library out("ps_digits");
  out.def("die", &die);
  return out;
}

Mode parse_mode(const std::string& text, int trainers) {
  const auto n = static_cast<uint32_t>(trainers);
  if (text == "asp") return {text, ps::Consistency::asp()};
  if (text == "bsp") return {text, ps::Consistency::bsp(n)};
  if (text.rfind("ssp:", 0) == 0) {
    const auto bound = static_cast<uint64_t>(number_after(text, "ssp:", 0, 1000));
    return {text, ps::Consistency::ssp(bound, n)};
  }
  if (text.rfind("batch:", 0) == 0) {
    const auto most = static_cast<uint64_t>(number_after(text, "batch:", 1, trainers));
    return {text, ps::Consistency::batch(most, n)};
  }
  if (text == "hogwild") return {.text = text, .hogwild = true};
  throw std::invalid_argument("--consistency wants asp, bsp, ssp:S, batch:K or hogwild, not '" +
                              text + "'");
}

int64_t resume(const ps::Client& client, const Mode& mode, const Plan& plan,
               const async_ps::Split& split, const std::string& folder) {
  at::Tensor steps = at::zeros({plan.trainers});
  if (plan.trainer == 0) {
    const ps::SnapshotInfo info = client.restore(folder, {.tables = {table_name(mode)}});
    if (!info.refused.empty()) absl::PrintF("%s\n", info.refused);
    steps.fill_(steps_of(plan, split));
    for (const ps::SnapshotClient& then : info.tables.at(0).clients) {
      const int64_t trainer = number_after(then.worker, "trainer", 0, plan.trainers - 1);
      // A trainer that had not pushed yet has no position.
      steps[trainer] = then.position.empty() ? 0 : std::stoll(then.position);
    }
    absl::PrintF("goes on from snapshot %d of '%s', after step %d\n", info.number, folder,
                 steps[0].item<int64_t>());
    std::fflush(stdout);
  }
  // The others open the table when this has come: the restore is over then.
  return sum_of_all(client, "resumed/" + mode.text, plan, steps)[plan.trainer].item<int64_t>();
}

Result train(const weft::Worker& worker, const ps::Client& client, const Mode& mode,
             const Plan& plan, const async_ps::Split& split) {
  const Images mine = async_ps::deal(split.train, plan.trainers)[static_cast<size_t>(plan.trainer)];
  Batches batches(mine, plan.seed + static_cast<uint64_t>(plan.trainer));
  if (mode.hogwild) return train_in_memory(worker, client, mode, plan, split, std::move(batches));
  const int64_t steps = steps_of(plan, split);
  batches.skip(plan.first);
  const ps::Table table = client.open_table(table_name(mode), model_table(mode, plan));
  const absl::Time begun = worker.now();
  const bool keeps = plan.trainer == 0 && !plan.snapshots.empty();
  // A trainer that a snapshot lacks has ended: none is written before all are in the table.
  if (!plan.snapshots.empty()) sum_of_all(client, "begun/" + mode.text, plan, at::zeros({1}));
  at::Tensor values = table.pull().wait();
  for (int64_t step = plan.first; step < steps; ++step) {
    const bool another_fifth = step > plan.first && 5 * step / steps > 5 * (step - 1) / steps;
    if (keeps && another_fifth) keep(client, plan, mode, step);
    if (step == steps / 3 && plan.trainer == 0 && !plan.victim.empty()) {
      const weft::Status ended = weft::rpc_async(worker, plan.victim, &die).try_wait();
      if (ended.ok())
        throw std::logic_error(plan.victim + " answered, and should have been killed");
    }
    const auto [loss, gradients] =
        async_ps::loss_and_gradients(as_parameters(values), batches.next());
    const double left = 1 - static_cast<double>(step) / static_cast<double>(steps);
    const ps::PushOptions options{
        .advance = true, .rate = kRate * left, .position = std::to_string(step + 1)};
    values = table.push_pull(as_gradient(gradients), options).wait();
  }
  // A trainer that has no more to push leaves: a batch or a step would wait for it. After
  // tell_all() every trainer has pushed all that it will.
  table.leave().wait();
  const uint64_t moves = table.stats().moves;
  const at::Tensor all = tell_all(client, mode, plan, table.stats());
  if (keeps) {
    keep(client, plan, mode, steps);
    ps::export_snapshot(worker.runtime().files(), plan.snapshots,
                        plan.snapshots + "/digits.safetensors");
  }
  const double seconds = absl::ToDoubleSeconds(worker.now() - begun);
  values = client.open_table(table.name(), {.observer = true}).pull().wait();
  Result result = result_of(mode, seconds, all, as_parameters(values), split);
  result.moves = moves;
  return result;
}

std::string table_of(const std::vector<Result>& results) {
  std::string text =
      "mode       seconds  accuracy  pushes  dropped  mean behind  most behind  most lag\n";
  for (const Result& r : results) {
    absl::StrAppendFormat(&text, "%-9s  %7.2f  %8.4f  %6.0f  %7.0f  %11.2f  %11.0f  %8.0f\n",
                          r.mode, r.seconds, r.accuracy, r.pushes, r.dropped, r.mean_behind,
                          r.most_behind, r.most_lag);
  }
  return text;
}

}  // namespace ps_digits
