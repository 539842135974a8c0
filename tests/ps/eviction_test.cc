// Rows of sparse tables that make room for others, that go when they are not used, and keys that have no row yet.

#include <algorithm>
#include <list>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "torch/types.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/row_order.h"
#include "weft/tests/ps/fixture.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

using ps::Table;
using ps::internal::image_of;
using ps::internal::PartData;
using ps::internal::RowOrder;
using ps::internal::Sightings;

constexpr int64_t kRowBytes = 2 * 4 + 40 + 16;  // two floats, key and steps, order

ps::TableDefinition table_of_rows(int64_t most_rows) {
  auto out = ps::sparse(2, ps::rule<optim::SGD>({.lr = 1}));
  out.max_bytes = static_cast<uint64_t>(most_rows * kRowBytes);
  out.eviction = ps::Eviction::kLru;
  return out;
}

void push_to(const Table& t, const std::vector<int64_t>& keys) {
  t.push_rows(keys_of(keys), -torch::ones({static_cast<int64_t>(keys.size()), 2})).wait();
}
double value_at(const Table& t, int64_t key) {
  return t.pull_rows(keys_of({key})).wait()[0][0].item<double>();
}
int64_t counter_of(PsJob& job, const std::string& name) {
  return static_cast<int64_t>(job.server(0).metrics().snapshot().at(name + "{table=\"e\"}"));
}

TEST(PsRowOrder, EqualsAList) {
  std::mt19937_64 random(1);
  RowOrder order;
  std::list<int64_t> model;            // names, the oldest first
  std::vector<int64_t> names;          // of rows
  std::map<int64_t, int64_t> used_at;  // by name
  for (int64_t now = 0; now < 20'000; ++now) {
    const auto some_row = [&] { return static_cast<uint32_t>(random() % names.size()); };
    const uint64_t what = random() % 4;
    if (names.empty() || (what < 2 && names.size() < 50)) {
      order.add(now);
      names.push_back(now);
      model.push_back(now);
      used_at[now] = now;
    } else if (what == 2) {
      const uint32_t row = some_row();
      order.touch(row, now);
      model.remove(names[row]);
      model.push_back(names[row]);
      used_at[names[row]] = now;
    } else {
      const uint32_t row = some_row();
      order.remove(row);
      model.remove(names[row]);
      names[row] = names.back();
      names.pop_back();
    }
    std::vector<int64_t> got;
    for (uint32_t row = order.oldest(); row != RowOrder::kNone; row = order.newer_than(row)) {
      got.push_back(names[row]);
      ASSERT_EQ(order.used_at(row), used_at[names[row]]);
    }
    ASSERT_EQ(got, std::vector<int64_t>(model.begin(), model.end())) << "after " << now;
  }
}

TEST(PsSightings, NoKeyIsAdmittedTooEarly) {
  Sightings all(3, 100);
  for (uint64_t key = 0; key < 40; ++key) {
    EXPECT_FALSE(all.see(key));
    EXPECT_FALSE(all.see(key));
    EXPECT_TRUE(all.see(key));
    EXPECT_EQ(all.bytes(), 0);
  }
  // More keys than are counted: those that come again soon are admitted, none at its first or second sight.
  Sightings few(3, 100);
  std::map<uint64_t, int> seen;
  std::mt19937_64 random(2);
  int admitted = 0;
  for (int i = 0; i < 100'000; ++i) {
    const uint64_t key = random() % 2 == 0 ? random() % 10 : 10 + random() % 100'000;
    const int times = ++seen[key];
    if (few.see(key)) {
      EXPECT_GE(times, 3);
      seen[key] = 0;
      admitted += key < 10 ? 1 : 0;
    }
    EXPECT_LE(few.bytes(), 100 * Sightings::kKeyBytes);
  }
  EXPECT_GT(admitted, 10'000) << "of some 16,000";
}

// The rows of a table, each as a table of its own, and the order in which they were used.
class RowsOneByOne {
 public:
  RowsOneByOne(ps::TableDefinition definition, size_t most, std::shared_ptr<Runtime> clock)
      : definition_(std::move(definition)),
        most_(most),
        clock_(std::move(clock)),
        seen_(2, most * (kRowBytes + 4) / 8 / Sightings::kKeyBytes) {}

  at::Tensor read(int64_t key) {
    const auto at = rows_.find(key);
    if (at == rows_.end()) return read_of(*make(), key);
    use(key);
    return read_of(*at->second.alone, key);
  }
  // The keys that went.
  std::vector<uint64_t> push(const std::vector<int64_t>& keys, const at::Tensor& gradients) {
    std::vector<size_t> taken;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (rows_.contains(keys[i]) || seen_.see(static_cast<uint64_t>(keys[i]))) taken.push_back(i);
    }
    size_t fresh = 0;
    for (const size_t i : taken) {
      if (rows_.contains(keys[i])) {
        use(keys[i]);
      } else {
        ++fresh;
      }
    }
    std::vector<uint64_t> gone;
    while (rows_.size() + fresh > most_ + gone.size()) {
      gone.push_back(static_cast<uint64_t>(order_.front()));
      order_.pop_front();
    }
    for (const uint64_t key : gone) rows_.erase(static_cast<int64_t>(key));
    for (const size_t i : taken) {
      const int64_t key = keys[i];
      if (rows_.contains(key)) {
        use(key);
      } else {
        rows_[key] = {make(), order_.insert(order_.end(), key)};
      }
      PartData& alone = *rows_[key].alone;
      std::vector<ps::internal::Push> one;
      one.push_back(
          *alone.accept({}, {keys_of({key}), gradients.narrow(0, static_cast<int64_t>(i), 1)}));
      alone.apply(std::move(one), 1);
    }
    return gone;
  }
  size_t size() const { return rows_.size(); }

 private:
  struct Row {
    std::unique_ptr<PartData> alone{};
    std::list<int64_t>::iterator place{};
  };
  std::unique_ptr<PartData> make() const {
    return *ps::internal::make_sparse_data(definition_, "t", int64_t{1} << 30, clock_);
  }
  static at::Tensor read_of(PartData& data, int64_t key) { return *data.read({keys_of({key})}); }
  void use(int64_t key) { order_.splice(order_.end(), order_, rows_.at(key).place); }

  const ps::TableDefinition definition_;
  const size_t most_;
  const std::shared_ptr<Runtime> clock_;
  Sightings seen_;
  std::map<int64_t, Row> rows_;
  std::list<int64_t> order_;  // the oldest first
};

bool equal_images(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined()) return false;
    if (a[i].defined() && !torch::equal(a[i], b[i])) return false;
  }
  return true;
}

// An owner, and a copy that is told what went, beside a model.
TEST(PsEviction, PS_4_RowsThatGoAreThoseOfAModelAndTheCopyEqualsItsOwner) {
  const at::AutoGradMode no_grad(false);
  const auto clock = std::make_shared<SimRuntime>(SimOptions{.seed = 1});
  auto definition = ps::sparse(2, ps::rule<optim::RowWiseAdagrad>({.lr = 0.5}));
  definition.init = ps::Init::uniform(-1, 1, 3);
  constexpr size_t kMost = 600;  // more than two chunks
  RowsOneByOne model(definition, kMost, clock);
  definition.max_bytes = kMost * (kRowBytes + 4);
  definition.eviction = ps::Eviction::kLru;
  definition.admit_after = 2;
  const auto make = [&] {
    return *ps::internal::make_sparse_data(definition, "t", int64_t{1} << 30, clock);
  };
  const auto owner = make();
  const auto copy = make();
  copy->follow(true);
  std::shared_ptr<const ps::internal::FrozenData> cut;
  std::vector<at::Tensor> at_the_cut;
  std::mt19937_64 random(7);
  size_t went = 0;
  for (int step = 0; step < 1500; ++step) {
    std::vector<int64_t> keys;
    const size_t count = 1 + random() % 40;
    for (size_t i = 0; i < count; ++i) {
      const auto key = static_cast<int64_t>(random() % 700 + random() % 700);
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
    }
    const auto rows = static_cast<int64_t>(keys.size());
    if (step % 3 == 0) {
      const at::Tensor got = *owner->read({keys_of(keys)});
      for (int64_t i = 0; i < rows; ++i) {
        ASSERT_TRUE(torch::equal(got.narrow(0, i, 1), model.read(keys[static_cast<size_t>(i)])))
            << "step " << step << ", key " << keys[static_cast<size_t>(i)];
      }
    }
    const at::Tensor gradients = torch::rand({rows, 2}) - 0.5;
    StatusOr<ps::internal::Push> push = owner->accept({}, {keys_of(keys), gradients});
    ASSERT_TRUE(push.ok()) << push.status();
    const std::vector<uint64_t> gone = owner->take_evicted();
    ASSERT_EQ(gone, model.push(keys, gradients)) << "step " << step;
    went += gone.size();
    const std::vector<at::Tensor> log = owner->pack(*push);
    const auto apply = [](PartData& data, StatusOr<ps::internal::Push> accepted) {
      std::vector<ps::internal::Push> one;
      one.push_back(*std::move(accepted));
      data.apply(std::move(one), 1);
    };
    apply(*owner, std::move(push));
    ASSERT_TRUE(copy->evict(gone).ok());
    apply(*copy, copy->accept({}, log));
    ASSERT_EQ(static_cast<size_t>(owner->rows()), model.size());
    ASSERT_LE(static_cast<size_t>(owner->rows()), kMost);
    if (step % 100 != 99) continue;
    ASSERT_TRUE(equal_images(image_of(*owner->freeze()), image_of(*copy->freeze()))) << step;
    // What was frozen is not touched by rows that take the place of others.
    if (cut != nullptr) {
      ASSERT_TRUE(equal_images(image_of(*cut), at_the_cut)) << step;
    }
    cut = owner->freeze();
    for (const at::Tensor& t : image_of(*cut)) at_the_cut.push_back(t.defined() ? t.clone() : t);
    at_the_cut.erase(at_the_cut.begin(),
                     at_the_cut.end() - static_cast<int64_t>(image_of(*cut).size()));
  }
  EXPECT_GT(went, 1000U);
  EXPECT_EQ(static_cast<size_t>(owner->rows()), kMost);
  // It goes on from an image as from what it has.
  const auto later = make();
  ASSERT_TRUE(later->load(image_of(*owner->freeze()), nullptr).ok());
  EXPECT_TRUE(equal_images(image_of(*owner->freeze()), image_of(*later->freeze())));
  EXPECT_EQ(error_kind(later->evict({1'000'000})), ErrorKind::kProtocol);
}

TEST_F(PsTest, PS_4_RowsThatWereNotUsedMakeRoom) {
  PsJob job(1, 1);
  auto definition = table_of_rows(4);
  const Table t = job.clients[0].open_table("e", definition);
  push_to(t, {1, 2, 3, 4});
  EXPECT_EQ(value_at(t, 1), 1) << "a pull uses a row, too";
  push_to(t, {2});
  push_to(t, {5});
  EXPECT_EQ(value_at(t, 3), 0);
  EXPECT_EQ(value_at(t, 2), 2);
  push_to(t, {6, 7});
  for (const auto& [key, value] :
       std::map<int64_t, double>{{1, 0}, {2, 2}, {4, 0}, {5, 1}, {6, 1}}) {
    EXPECT_EQ(value_at(t, key), value) << key;
  }
  EXPECT_EQ(job.report(0, "e").rows, 4);
  EXPECT_EQ(counter_of(job, "weft_ps_evicted_total"), 3);
  push_to(t, {3});
  EXPECT_EQ(value_at(t, 3), 1) << "it begins anew";
  // Ten times as many rows as there is room for.
  for (int64_t first = 100; first < 140; first += 4) {
    push_to(t, {first, first + 1, first + 2, first + 3});
    EXPECT_LE(job.report(0, "e").bytes, static_cast<int64_t>(definition.max_bytes));
  }
  EXPECT_EQ(job.report(0, "e").rows, 4);
}

TEST_F(PsTest, BadInput_a_push_of_more_rows_than_there_is_room_for) {
  PsJob job(1, 1);
  const Table t = job.clients[0].open_table("e", table_of_rows(3));
  push_to(t, {1, 2});
  expect_ps_error(ps_error_of([&] {
                    push_to(t, {1, 3, 4, 5});
                  }),
                  ErrorKind::kResource,
                  {"table 'e'", "push of 4 rows", "room for 3", "no row of a push"});
  EXPECT_EQ(value_at(t, 1), 1) << "nothing half applied";
  EXPECT_EQ(value_at(t, 2), 1) << "nothing has gone";
  EXPECT_EQ(job.report(0, "e").rows, 2);
}

TEST_F(PsTest, BadInput_rows_that_go_of_a_table_that_cannot_have_them) {
  const PsJob job(1, 1);
  const auto refused = [&](auto change, const std::string& words) {
    auto definition = table_of_rows(4);
    change(&definition);
    expect_ps_error(ps_error_of([&] { job.clients[0].open_table("e", definition); }),
                    ErrorKind::kInvalidArgument, {words});
  };
  refused([](auto* d) { d->max_bytes = 0; }, "eviction is kLru, and max_bytes");
  refused([](auto* d) { d->consistency = ps::Consistency::bsp(1); }, "want ASP or SSP");
  refused([](auto* d) { d->ttl = absl::Microseconds(3); }, "ttl is 3us");
  refused([](auto* d) { d->ttl = absl::InfiniteDuration(); }, "ttl is inf");
  auto dense = ps::dense({4}, ps::rule<optim::SGD>({.lr = 1}));
  dense.admit_after = 2;
  expect_ps_error(ps_error_of([&] { job.clients[0].open_table("d", dense); }),
                  ErrorKind::kInvalidArgument, {"of sparse tables only"});
  const Table t = job.clients[0].open_table("e", table_of_rows(4));
  auto other = table_of_rows(4);
  other.ttl = absl::Seconds(5);
  expect_ps_error(ps_error_of([&] { job.clients[0].open_table("e", other); }),
                  ErrorKind::kInvalidArgument, {"ttl is 0 there and 5s here"});
}

TEST_F(PsTest, PS_4_RowsThatAreNotUsedInTimeGo) {
  in_simulation(41, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    auto definition = ps::sparse(2, ps::rule<optim::SGD>({.lr = 1}));
    definition.ttl = absl::Seconds(10);
    const Table t = job.clients[0].open_table("e", definition);
    push_to(t, {1, 2, 3});
    sim->sleep(absl::Seconds(6));
    EXPECT_EQ(value_at(t, 1), 1);
    push_to(t, {3});
    sim->sleep(absl::Seconds(6));
    push_to(t, {4});
    EXPECT_EQ(job.report(0, "e").rows, 3) << "2 has gone";
    EXPECT_EQ(value_at(t, 2), 0);
    EXPECT_EQ(value_at(t, 1), 1);
    EXPECT_EQ(value_at(t, 3), 2);
    EXPECT_EQ(counter_of(job, "weft_ps_evicted_total"), 1);
    // Thousands go by and by.
    std::vector<int64_t> many;
    for (int64_t key = 1000; key < 4000; ++key) many.push_back(key);
    push_to(t, many);
    sim->sleep(absl::Seconds(11));
    int pushes = 0;
    for (; job.report(0, "e").rows > 1 && pushes < 1000; ++pushes) push_to(t, {5});
    EXPECT_GE(pushes, 100);
    EXPECT_LE(pushes, 200);
  });
}

TEST_F(PsTest, PS_4_AKeyHasARowFromTheSoManiethPush) {
  PsJob job(1, 1);
  auto definition = ps::sparse(2, ps::rule<optim::SGD>({.lr = 1}));
  definition.init = ps::Init::constant(10);
  definition.admit_after = 3;
  const Table t = job.clients[0].open_table("e", definition);
  push_to(t, {1, 2});
  push_to(t, {1});
  EXPECT_EQ(value_at(t, 1), 10);
  EXPECT_EQ(job.report(0, "e").rows, 0);
  push_to(t, {2, 1, 3});
  EXPECT_EQ(value_at(t, 1), 11);
  EXPECT_EQ(value_at(t, 2), 10);
  EXPECT_EQ(job.report(0, "e").rows, 1);
  EXPECT_EQ(counter_of(job, "weft_ps_not_admitted_total"), 5);
  push_to(t, {1, 2});
  EXPECT_EQ(value_at(t, 1), 12);
  EXPECT_EQ(value_at(t, 2), 11);
}

// All copies of a part of "w" are equal, and none has more rows than there is room for.
void expect_equal_rows(PsJob& job, int64_t most_rows) {
  std::map<uint32_t, std::vector<uint64_t>> hashes;
  for (int s = 0; s < static_cast<int>(job.servers.size()); ++s) {
    const auto service = ps::internal::PsService::of(job.server(s));
    if (service == nullptr) continue;  // it has died
    for (const auto& [name, part] : service->parts_by_name()) {
      const auto report = part->report();
      if (name.first != "w" || report.role == ps::internal::ReplicaProtocol::Role::kGone) continue;
      EXPECT_LE(report.rows, most_rows);
      part->digest(
          [&, index = name.second](uint64_t, uint64_t hash) { hashes[index].push_back(hash); });
    }
  }
  ASSERT_EQ(hashes.size(), 3U);
  for (const auto& [part, each] : hashes) {
    ASSERT_EQ(each.size(), 2U) << "part " << part;
    EXPECT_EQ(each.front(), each.back()) << "part " << part;
  }
}

std::vector<int64_t> some_keys(std::mt19937_64& random, size_t count) {
  std::vector<int64_t> keys;
  while (keys.size() < count) {
    const auto key = static_cast<int64_t>(random() % 300);
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
  return keys;
}

// What goes at the owner goes at its backup, and a table of two copies does what one of one copy does.
TEST_F(PsTest, PS_8_CopiesAreEqualWhenRowsGo) {
  in_simulation(42, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(3, 1, Net::kInproc, sim);
    auto definition = table_of_rows(40);
    const Table one = job.clients[0].open_table("one", definition);
    definition.copies = 2;
    const Table two = job.clients[0].open_table("w", definition);
    std::mt19937_64 random(3);
    for (int i = 0; i < 100; ++i) {
      const auto keys = some_keys(random, 12);
      push_to(two, keys);
      push_to(one, keys);
    }
    const at::Tensor all = torch::arange(300);
    const at::Tensor values = one.pull_rows(all).wait();
    EXPECT_GT(values.sum().item<double>(), 0);
    EXPECT_TRUE(torch::equal(two.pull_rows(all).wait(), values));
    sim->sleep(absl::Seconds(5));
    expect_equal_rows(job, 40);
    EXPECT_EQ(job.report(0, "w").rows, 40);
  });
}

// A server dies, drains or stays while two clients push: no push is in twice, and copies are equal at rest.
TEST_F(PsTest, PS_8_CopiesAreEqualWhenRowsGoAndAServerDoes) {
  for (uint64_t seed = 1; seed <= fewer(12U, 3U) && !HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    in_simulation(seed, [seed](const std::shared_ptr<SimRuntime>& sim) {
      PsJob job(4, 2, Net::kInproc, sim);
      auto definition = table_of_rows(30);
      definition.copies = 2;
      definition.ttl = absl::Seconds(seed % 2 == 0 ? 3 : 60);
      if (seed % 3 == 0) {  // and no cap
        definition.admit_after = 2;
        definition.eviction = ps::Eviction::kNone;
        definition.max_bytes = 0;
      }
      const std::vector<std::string> listed(job.server_names.begin(), job.server_names.begin() + 3);
      std::vector<double> pushed(300, 0);
      const auto work = [&](int client) {
        const ps::Client near(job.worker(client), {.servers = listed});
        const Table t = near.open_table("w", definition);
        std::mt19937_64 random(seed * 10 + static_cast<uint64_t>(client));
        for (int i = 0; i < 60; ++i) {
          const auto keys = some_keys(random, 10);
          for (const int64_t key : keys) pushed[static_cast<size_t>(key)] += 1;
          push_to(t, keys);
          if (i % 4 == 0) t.pull_rows(keys_of(some_keys(random, 20))).wait();
          sim->sleep(absl::Milliseconds(static_cast<int64_t>(random() % 100)));
        }
      };
      side_by_side(*sim, {[&] { work(0); }, [&] { work(1); },
                          [&] {
                            sim->sleep(absl::Milliseconds(500 + 100 * static_cast<int64_t>(seed)));
                            if (seed % 3 == 1) (void)job.server(1).shutdown({.graceful = false});
                            if (seed % 3 == 2) job.servers[1]->drain();
                          }});
      sim->sleep(absl::Seconds(40));
      expect_equal_rows(job, seed % 3 == 0 ? 300 : 30);
      const ps::Client near(job.worker(0), {.servers = listed});
      const at::Tensor values = near.open_table("w", {.observer = true})
                                    .pull_rows(torch::arange(300))
                                    .wait()
                                    .select(1, 0);
      for (int64_t key = 0; key < 300; ++key) {
        EXPECT_LE(values[key].item<double>(), pushed[static_cast<size_t>(key)]) << key;
      }
      job.cluster->shutdown_all({.graceful = false});
      job.cluster->forget();
    });
  }
}

}  // namespace
}  // namespace weft::testing
