// Runs: small pushes of rows that travel as one request, and are applied as one where that comes to the same.

#include <limits>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "torch/types.h"
#include "weft/ps/internal/batch_wire.h"
#include "weft/ps/internal/part.h"
#include "weft/tests/ps/fixture.h"

namespace weft::testing {
namespace {

using ps::internal::Batch;
using ps::internal::BatchedRequest;
using ps::internal::BatchedResult;
using ps::internal::Part;
using ps::internal::PushKind;
using ps::internal::Reply;
using ps::internal::Request;
using ps::internal::Results;

// A push of these keys.
BatchedRequest push_of_rows(uint64_t number, const at::Tensor& keys, const at::Tensor& rows) {
  BatchedRequest out;
  out.request.part = 1;
  out.request.client = 1;
  out.request.push.emplace();
  out.request.push->number = number;
  out.request.push->floor = 1;
  out.tensors = {keys, rows};
  return out;
}
BatchedRequest push_of_row(uint64_t number, int64_t key, double value = 1) {
  return push_of_rows(number, keys_of({key}), torch::full({1, 2}, value));
}
Batch in_runs(const std::vector<BatchedRequest>& requests) {
  std::vector<const BatchedRequest*> all;
  for (const BatchedRequest& one : requests) all.push_back(&one);
  return ps::internal::in_runs(all);
}
size_t tensors_of(const Batch& batch) {
  size_t count = 0;
  for (const BatchedRequest& one : batch) count += one.tensors.size();
  return count;
}

TEST(PsRuns, AThousandSmallPushesTravelWithTwoTensors) {
  std::vector<BatchedRequest> requests;
  for (uint64_t i = 1; i <= 1000; ++i) {
    requests.push_back(push_of_row(3 * i, static_cast<int64_t>(i), static_cast<double>(i)));
    requests.back().request.push->floor = i;
  }
  const Batch batch = in_runs(requests);
  ASSERT_EQ(batch.size(), 1U);
  EXPECT_EQ(tensors_of(batch), 2U);
  const std::string bytes = encode(batch);
  EXPECT_LE(bytes.size(), 3200U) << "three bytes for each";
  const auto read = ps::internal::decode_batch(bytes, batch[0].tensors);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->at(0).run.size(), 1000U);
  for (size_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(read->at(0).run[i].number, 3 * (i + 1));
    EXPECT_EQ(read->at(0).run[i].floor, i + 1);
    EXPECT_EQ(read->at(0).run[i].keys, 1U);
  }
  EXPECT_TRUE(torch::equal(batch[0].tensors[0], torch::arange(1, 1001)));
  EXPECT_TRUE(
      torch::equal(batch[0].tensors[1],
                   torch::arange(1, 1001, torch::kFloat32).reshape({1000, 1}).expand({1000, 2})));
}

TEST(PsRuns, OnlyNeighboursThatDifferInNothingElseAreJoined) {
  const auto parts_of = [](const std::function<void(BatchedRequest*)>& change) {
    std::vector<BatchedRequest> requests = {push_of_row(2, 7), push_of_row(3, 8)};
    requests[0].request.push->floor = 2;
    requests[1].request.push->floor = 2;
    change(&requests[1]);
    return in_runs(requests).size();
  };
  EXPECT_EQ(parts_of([](BatchedRequest*) {}), 1U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.part = 2; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.client = 2; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.epoch = 2; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.enter = 0; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.advance = 1; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.leave = true; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.pull.emplace(); }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.push->number = 2; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.push->floor = 1; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.push->clock = 1; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.push->version = 1; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.push->rate = 0.5; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->request.push->kind = PushKind::kAssign; }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->tensors[1] = torch::ones({1, 3}); }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->tensors[1] = r->tensors[1].to(at::kDouble); }), 2U);
  EXPECT_EQ(parts_of([](BatchedRequest* r) { r->tensors.pop_back(); }), 2U);
}

TEST(PsRuns, AnswersThatCountUpTravelAsOne) {
  Results results;
  const auto answer = [](uint64_t version, uint64_t behind) {
    Reply out;
    out.answer.version = version;
    out.answer.behind = behind;
    out.answer.clock = 4;
    return out;
  };
  for (uint64_t i = 0; i < 500; ++i) ps::internal::add({answer(7 + i, i)}, &results);
  ps::internal::add({answer(507, 500), 99}, &results);
  ps::internal::add({make_error(ErrorKind::kResource, "full")}, &results);
  ps::internal::add({answer(607, 600)}, &results);
  ps::internal::add({answer(608, 600)}, &results);
  ps::internal::add({Reply{answer(609, 601).answer, {torch::ones({1})}}}, &results);
  const auto read = ps::internal::decode_results(encode(results), {torch::ones({1})});
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), 5U);
  EXPECT_EQ(read->at(0).more, 599U);
  const auto last = ps::internal::answer_after(read->at(0).said->answer, 599);
  EXPECT_EQ(last.version, 606U);
  EXPECT_EQ(last.behind, 599U);
  EXPECT_EQ(last.clock, 4U);
  for (size_t i = 1; i < 5; ++i) EXPECT_EQ(read->at(i).more, 0U);
}

// Counts how often values are updated.
class CountingData final : public ps::internal::PartData {
 public:
  CountingData(std::unique_ptr<PartData> data, int* applies)
      : data_(std::move(data)), applies_(applies) {}
  size_t push_tensors() const override { return data_->push_tensors(); }
  size_t pull_tensors() const override { return data_->pull_tensors(); }
  bool joins() const override { return data_->joins(); }
  std::vector<uint64_t> take_evicted() override { return data_->take_evicted(); }
  Status evict(const std::vector<uint64_t>& keys) override { return data_->evict(keys); }
  StatusOr<ps::internal::Push> accept(const ps::internal::PushHeader& header,
                                      std::vector<at::Tensor> tensors) override {
    return data_->accept(header, std::move(tensors));
  }
  void apply(std::vector<ps::internal::Push> pushes, uint64_t divisor) override {
    ++*applies_;
    data_->apply(std::move(pushes), divisor);
  }
  std::vector<at::Tensor> pack(const ps::internal::Push& push) const override {
    return data_->pack(push);
  }
  StatusOr<at::Tensor> read(const std::vector<at::Tensor>& keys) override {
    return data_->read(keys);
  }
  int64_t rows() const override { return data_->rows(); }
  int64_t bytes() const override { return data_->bytes(); }
  std::shared_ptr<const ps::internal::FrozenData> freeze() override { return data_->freeze(); }
  std::vector<std::string> buffer_names() const override { return data_->buffer_names(); }
  Status load(const std::vector<at::Tensor>& image, const std::function<void()>& between) override {
    return data_->load(image, between);
  }

 private:
  const std::unique_ptr<PartData> data_;
  int* const applies_;
};

// One part, and client 1 of one worker, which has entered it.
class OnePart {
 public:
  OnePart(std::shared_ptr<Runtime> runtime, const ps::TableDefinition& definition) {
    auto limits = std::make_shared<ps::internal::ServerLimits>();
    limits->queue_bytes = limits->table_bytes = limits->log_bytes = 1 << 30;
    auto data = ps::internal::make_sparse_data(definition, "e", 1 << 30, runtime).value();
    part_ = std::make_shared<Part>(
        ps::internal::PartIdentity{1, {"ps0", 1}, "e", definition, {"ps0"}, 0},
        std::make_unique<CountingData>(std::move(data), &applies_), std::move(limits), metrics_,
        std::move(runtime));
    BatchedRequest enter;
    enter.request.part = enter.request.client = 1;
    enter.request.enter = 0;
    (void)send({enter});
  }
  // What is said of each request, and of each push of a run.
  std::vector<StatusOr<Reply>> send(Batch batch) {
    size_t count = 0;
    for (const BatchedRequest& one : batch) count += one.size();
    std::vector<StatusOr<Reply>> said(count, make_error(ErrorKind::kInternal, "nothing was said"));
    std::vector<ps::internal::PartCall> calls;
    size_t first = 0;
    for (BatchedRequest& one : batch) {
      const size_t of_it = one.size();
      calls.push_back({std::move(one), [&said, first](size_t place, BatchedResult result) {
                         const auto after = [&](uint32_t i) {
                           return Reply{ps::internal::answer_after(result.said->answer, i), {}};
                         };
                         for (uint32_t i = 1; i <= result.more; ++i) {
                           said[first + place + i] = after(i);
                         }
                         said[first + place] = std::move(result.said);
                       }});
      first += of_it;
    }
    part_->call({WorkerId(3), Incarnation(5)}, std::move(calls), nullptr);
    return said;
  }
  uint64_t digest() {
    uint64_t out = 0;
    part_->digest([&out](uint64_t, uint64_t hash) { out = hash; });
    return out;
  }
  int take_applies() { return std::exchange(applies_, 0); }
  int64_t metric(const std::string& name) {
    return static_cast<int64_t>(metrics_->snapshot().at("weft_ps_" + name + "_total{table=\"e\"}"));
  }
  Part& part() { return *part_; }

 private:
  int applies_ = 0;
  const std::shared_ptr<Metrics> metrics_ = std::make_shared<Metrics>();
  std::shared_ptr<Part> part_;
};

const auto kPlain = ps::rule<optim::SGD>({.lr = 1});

TEST_F(PsTest, PushesOfDifferentKeysAreAppliedAsOne) {
  in_simulation(61, [](const std::shared_ptr<SimRuntime>& sim) {
    OnePart part(sim, ps::sparse(2, kPlain));
    std::vector<BatchedRequest> pushes;
    for (uint64_t i = 1; i <= 1000; ++i) pushes.push_back(push_of_row(i, static_cast<int64_t>(i)));
    auto said = part.send(in_runs(pushes));
    EXPECT_EQ(part.take_applies(), 1);
    for (size_t i = 0; i < 1000; ++i) {
      ASSERT_TRUE(said[i].ok()) << said[i].status();
      EXPECT_EQ(said[i]->answer.version, i + 1);
      EXPECT_EQ(said[i]->answer.behind, i);
    }
    EXPECT_EQ(part.metric("pushes"), 1000);
    said = part.send(in_runs(pushes));
    EXPECT_EQ(part.take_applies(), 0) << "each has come before";
    EXPECT_EQ(part.metric("copies"), 1000);
    EXPECT_TRUE(said[999].ok());
    EXPECT_EQ(part.part().report().version, 1000U);
    EXPECT_EQ(part.part().report().rows, 1000);
    // A key that comes again ends what is one.
    pushes.clear();
    for (uint64_t i = 0; i < 100; ++i) {
      pushes.push_back(push_of_row(1001 + i, static_cast<int64_t>(i % 50)));
    }
    (void)part.send(in_runs(pushes));
    EXPECT_EQ(part.take_applies(), 2);
  });
}

TEST_F(PsTest, APushOfARunThatIsRefusedTakesNoOtherAlong) {
  in_simulation(62, [](const std::shared_ptr<SimRuntime>& sim) {
    auto definition = ps::sparse(2, kPlain);
    OnePart part(sim, definition);
    std::vector<BatchedRequest> pushes;
    for (uint64_t i = 1; i <= 20; ++i) pushes.push_back(push_of_row(i, static_cast<int64_t>(i)));
    pushes[4].tensors[1] = torch::full({1, 2}, std::numeric_limits<double>::infinity());
    auto said = part.send(in_runs(pushes));
    for (size_t i = 0; i < 20; ++i) EXPECT_EQ(said[i].ok(), i != 4) << i;
    expect_ps_error(said[4].status(), ErrorKind::kInvalidArgument,
                    {"table 'e'", "2 of 2 values", "row 0, column 0"});
    EXPECT_EQ(part.part().report().version, 19U);
    EXPECT_EQ(part.part().report().rows, 19);
    EXPECT_EQ(part.metric("refused"), 1);
    // Rows of another length: all of them, one by one.
    pushes = {push_of_rows(21, keys_of({1}), torch::ones({1, 3})),
              push_of_rows(22, keys_of({2}), torch::ones({1, 3}))};
    said = part.send(in_runs(pushes));
    for (const auto& one : said) EXPECT_EQ(error_kind(one.status()), ErrorKind::kInvalidArgument);
    // This client has not entered.
    pushes = {push_of_row(1, 1), push_of_row(2, 2)};
    for (BatchedRequest& one : pushes) one.request.client = 9;
    said = part.send(in_runs(pushes));
    for (const auto& one : said) EXPECT_EQ(error_kind(one.status()), ErrorKind::kState);
    // Rows for half of them.
    definition.max_bytes = 10 * 48;
    OnePart small(sim, definition);
    pushes.clear();
    for (uint64_t i = 1; i <= 20; ++i) pushes.push_back(push_of_row(i, static_cast<int64_t>(i)));
    said = small.send(in_runs(pushes));
    for (size_t i = 0; i < 20; ++i) EXPECT_EQ(said[i].ok(), i < 10) << i;
    EXPECT_EQ(error_kind(said[10].status()), ErrorKind::kResource);
  });
}

// Random runs, in one part as runs and in the other push by push: with copies, values that are not finite, keys that
// come again and floors. Answers, values, the rule's state and what is remembered of clients are equal, bit by bit.
TEST_F(PsTest, RunsComeToTheSameAsPushesOneByOne) {
  const std::vector<ps::RuleChoice> rules = {
      ps::rule<optim::SGD>({.lr = 0.1}),
      ps::rule<optim::SGD>({.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}),
      ps::rule<optim::SGD>({.lr = 0.1, .momentum = 0.9, .nesterov = true, .maximize = true}),
      ps::rule<optim::Adam>({.lr = 0.1, .weight_decay = 0.1, .amsgrad = true}),
      ps::rule<optim::AdamW>({.lr = 0.1}),
      ps::rule<optim::Adagrad>({.lr = 0.1}),
      ps::rule<optim::RowWiseAdagrad>({.lr = 0.1}),
      ps::rule<optim::Adadelta>(),
      ps::rule<optim::RMSprop>({.lr = 0.1}),
      ps::rule<optim::RMSprop>({.lr = 0.1, .momentum = 0.5, .centered = true}),
      ps::rule<optim::Adamax>({.lr = 0.1}),
      ps::rule<optim::Rprop>({.lr = 0.1}),
      ps::rule<optim::SparseAdam>({.lr = 0.1}),
      ps::rule<optim::NAdam>({.lr = 0.1}),
      ps::rule<optim::RAdam>({.lr = 0.1}),
      ps::rule<optim::ASGD>({.lr = 0.1})};
  using ps::Consistency;
  const std::vector<std::pair<int64_t, Consistency>> tables = {
      {1, Consistency::asp()},  {2, Consistency::asp()},      {3, Consistency::ssp(3, 1)},
      {7, Consistency::asp()},  {16, Consistency::asp()},     {33, Consistency::ssp(3, 1)},
      {2, Consistency::bsp(1)}, {3, Consistency::batch(1, 1)}};
  in_simulation(63, [&](const std::shared_ptr<SimRuntime>& sim) {
    std::mt19937_64 random(7);
    int trial = 0;
    for (const ps::RuleChoice& rule : rules) {
      for (const auto& [length, consistency] : tables) {
        SCOPED_TRACE(absl::StrCat(rule.name, ", rows of ", length, ", mode ",
                                  static_cast<int>(consistency.mode)));
        auto definition = ps::sparse(length, rule);
        definition.init = ps::Init::uniform(-1, 1, 5);
        definition.dtype = ++trial % 3 == 0 ? torch::kFloat64 : torch::kFloat32;
        definition.max_bytes = trial % 4 == 0 ? 6000 : 0;
        definition.consistency = consistency;
        const bool steps =
            consistency.mode == ps::Mode::kBsp || consistency.mode == ps::Mode::kBatch;
        const bool goes = trial % 8 == 4 && !steps;
        if (goes) definition.eviction = ps::Eviction::kLru;
        if (trial % 7 == 3) definition.admit_after = 2;
        OnePart runs(sim, definition);
        OnePart alone(sim, definition);
        int applies[2] = {0, 0};
        uint64_t number = 0;
        for (int message = 0; message < 8; ++message) {
          std::vector<BatchedRequest> pushes;
          const uint64_t first = number > 3 && random() % 3 == 0 ? number - 3 : number;
          number = first;
          for (uint64_t i = 0; i < 40; ++i) {
            std::vector<int64_t> keys(random() % 8 == 0 ? random() % 4 : 1);
            for (int64_t& key : keys) key = static_cast<int64_t>(random() % 150);
            const auto count = static_cast<int64_t>(keys.size());
            at::Tensor rows = torch::empty({count, length}, torch::kFloat64);
            for (int64_t e = 0; e < rows.numel(); ++e) {
              rows.mutable_data_ptr<double>()[e] = static_cast<double>(random() % 2001) / 1000 - 1;
            }
            if (random() % 100 == 0) rows.fill_(std::numeric_limits<double>::quiet_NaN());
            number += 1 + random() % 2;
            pushes.push_back(push_of_rows(number, keys_of(keys), rows.to(definition.dtype)));
            // Sometimes above a push that came before it in the run.
            pushes.back().request.push->floor =
                std::max<uint64_t>(i == 0 ? 1 : pushes[i - 1].request.push->floor,
                                   first > 5 && random() % 20 == 0 ? number - 1 : first / 2 + 1);
            pushes.back().request.push->rate =
                message % 4 == 0 ? std::optional<double>(0.5) : std::nullopt;
            pushes.back().request.push->kind =
                message % 5 == 4 ? PushKind::kAssign : PushKind::kGradient;
            pushes.back().request.push->clock = static_cast<uint64_t>(message);
            pushes.back().request.push->version = runs.part().report().version;
          }
          const Batch batch = in_runs(pushes);
          const auto a = runs.send(batch);
          const auto b = alone.send(pushes);
          ASSERT_EQ(a.size(), b.size());
          for (size_t i = 0; i < a.size(); ++i) {
            ASSERT_EQ(a[i].status(), b[i].status()) << i;
            if (!a[i].ok()) continue;
            ASSERT_EQ(encode(a[i]->answer), encode(b[i]->answer)) << i;
          }
          // Steps end, where there are any.
          BatchedRequest advance;
          advance.request.part = advance.request.client = 1;
          advance.request.advance = static_cast<uint64_t>(message) + 1;
          ASSERT_TRUE(runs.send({advance})[0].ok());
          ASSERT_TRUE(alone.send({advance})[0].ok());
          applies[0] += runs.take_applies();
          applies[1] += alone.take_applies();
          ASSERT_EQ(runs.digest(), alone.digest()) << "message " << message;
        }
        for (const char* name :
             {"pushes", "copies", "dropped", "refused", "evicted", "not_admitted"}) {
          EXPECT_EQ(runs.metric(name), alone.metric(name)) << name;
        }
        const bool joins = !steps && !goes && definition.admit_after == 1;
        if (joins && definition.max_bytes == 0) {
          EXPECT_LT(applies[0], applies[1]);
        } else if (!joins) {
          EXPECT_EQ(applies[0], applies[1]);
        }
      }
    }
  });
}

}  // namespace
}  // namespace weft::testing
