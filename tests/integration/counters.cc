#include "weft/tests/integration/counters.h"

#include <deque>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "weft/ps/internal/service.h"
#include "weft/rpc/safetensors.h"
#include "weft/rpc/worker.h"
#include "weft/tests/integration/answer.h"

namespace weft::integration {
namespace {

constexpr int64_t kKeys = 24;  // rows of each table: every part of it has some

at::Tensor keys() {
  return at::arange(kKeys, at::TensorOptions().dtype(c10::ScalarType::Long)) * 1'000'003;
}

ps::TableDefinition two_copies(ps::TableDefinition table) {
  table.dtype = c10::ScalarType::Double;
  table.copies = 2;
  return table;
}

}  // namespace

std::string Counters::obey(const Worker& worker, std::istream& words) {
  std::string verb;
  words >> verb;
  if (verb == "serve") {
    server_ = std::make_unique<ps::Server>(worker);
    return "ok";
  }
  if (verb == "join") {
    std::vector<std::string> servers;
    for (std::string name; words >> name;) servers.push_back(name);
    const auto owned = server_->try_join(servers);
    return owned.ok() ? absl::StrCat("ok ", *owned) : answer(owned.status());
  }
  if (verb == "drain") {
    const Status drained = server_->try_drain();
    return drained.ok() ? "ok" : answer(drained);
  }
  if (verb == "open") return open(worker, words);
  if (verb == "run") {
    stop_ = false;
    thread_ = runtime_->spawn("counters", [this] {
      const at::Tensor one = this->one();
      while (!stop_) {
        const auto to_dense = dense_->push(one);
        const auto to_sparse = sparse_->push_rows(keys(), one);
        for (const auto* future : {&to_dense, &to_sparse}) {
          const Status said = future->try_wait().status();
          if (failed_.ok()) failed_ = said;
        }
        if (!failed_.ok()) return;
        ++count_;
      }
    });
    return "ok";
  }
  if (verb == "count") return absl::StrCat("ok ", count_.load());
  if (verb == "halt") {
    halt();
    return failed_.ok() ? absl::StrCat("ok ", count_.load()) : answer(failed_);
  }
  if (verb == "many") {
    int64_t rounds = 0;
    words >> rounds;
    return many(rounds);
  }
  if (verb == "overfill") return overfill(worker, words);
  if (verb == "check") return check(words);
  if (verb == "cut") {
    std::string folder;
    words >> folder;
    cut_no_more_ = false;
    cuts_ = given_up_ = 0;
    cutter_ = runtime_->spawn("cutter", [this, folder] {
      while (!cut_no_more_ && odd_.ok()) {
        const Status said = client_->try_snapshot(folder).status();
        const ErrorKind kind = error_kind(said);
        if (said.ok()) {
          ++cuts_;
        } else if (kind == ErrorKind::kUnavailable || kind == ErrorKind::kPeerLost) {
          ++given_up_;
        } else {
          odd_ = said;
        }
      }
    });
    return "ok";
  }
  if (verb == "cuts") return absl::StrCat("ok ", cuts_.load());
  if (verb == "uncut") {
    uncut();
    return odd_.ok() ? absl::StrCat("ok ", cuts_.load(), " ", given_up_) : answer(odd_);
  }
  if (verb == "look") {
    std::string folder;
    words >> folder;
    return look(folder);
  }
  if (verb == "paired") {
    int64_t paired = 0;
    for (const auto& [name, part] : ps::internal::PsService::of(worker)->parts_by_name()) {
      const auto report = part->report();
      const bool owns = report.role == ps::internal::ReplicaProtocol::Role::kOwner;
      paired += owns && report.map.ready ? 1 : 0;
    }
    return absl::StrCat("ok ", paired);
  }
  return "error odd " + verb;
}

std::string Counters::open(const Worker& worker, std::istream& words) {
  std::vector<std::string> servers;
  words >> clients_ >> mine_;
  for (std::string name; words >> name;) servers.push_back(name);
  client_.emplace(worker, ps::ClientOptions{.servers = servers,
                                            .attempt_timeout = std::chrono::milliseconds(1500)});
  const auto rule = ps::rule<optim::SGD>({.lr = 1});
  dense_ = client_->open_table("dense", two_copies(ps::dense({kKeys, clients_}, rule)));
  sparse_ = client_->open_table("sparse", two_copies(ps::sparse(clients_, rule)));
  return "ok";
}

at::Tensor Counters::one() const {
  at::Tensor out = at::zeros({kKeys, clients_}, at::TensorOptions().dtype(c10::ScalarType::Double));
  out.select(1, mine_).fill_(-1);  // a rule subtracts
  return out;
}

std::string Counters::many(int64_t rounds) {
  constexpr size_t kAtOnce = 256;
  constexpr int64_t kPullEvery = 16;
  struct Round {
    Future<ps::PushResult> dense;
    Future<ps::PushResult> sparse;
    std::optional<Future<at::Tensor>> values;
  };
  const at::Tensor one = this->one();
  std::deque<Round> on_way;
  for (int64_t i = 0; i < rounds || !on_way.empty(); ++i) {
    if (i < rounds) {
      on_way.push_back({dense_->push(one), sparse_->push_rows(keys(), one), std::nullopt});
      if (i % kPullEvery == 0) on_way.back().values = sparse_->pull_rows(keys());
      if (on_way.size() < kAtOnce) continue;
    }
    const Round& first = on_way.front();
    first.dense.wait();
    first.sparse.wait();
    if (first.values.has_value()) first.values->wait();
    on_way.pop_front();
    ++count_;
  }
  return "ok";
}

std::string Counters::overfill(const Worker& worker, std::istream& words) {
  constexpr int64_t kRows = 4096;
  constexpr int64_t kRowLength = 64;
  std::string server;
  uint64_t mib = 0;
  uint64_t times = 0;
  words >> server >> mib >> times;
  const ps::Client client(worker, {.servers = {server}});
  auto definition = ps::sparse(kRowLength, ps::rule<optim::SGD>({.lr = 1}));
  definition.max_bytes = mib << 20;
  definition.eviction = ps::Eviction::kLru;
  const ps::Table table = client.open_table(absl::StrCat("capped", mib), definition);
  const at::Tensor ones = at::ones({kRows, kRowLength});
  int64_t key = 0;
  for (uint64_t done = 0; done < times * definition.max_bytes; done += ones.nbytes()) {
    table.push_rows(at::arange(key, key + kRows, at::kLong), ones).wait();
    key += kRows;
  }
  // The last ones are there, and the first ones are not.
  const at::Tensor last = table.pull_rows(at::arange(key - kRows, key, at::kLong)).wait();
  const at::Tensor first = table.pull_rows(at::arange(kRows, at::kLong)).wait();
  if (!last.equal(-ones)) return "error differs the last rows";
  if (!first.equal(at::zeros_like(ones))) return "error differs the first rows";
  return absl::StrCat("ok ", key);
}

std::string Counters::check(std::istream& words) const {
  std::vector<int64_t> wanted;
  for (int64_t n = 0; words >> n;) wanted.push_back(n);
  for (const auto& [name, values] : {std::pair("dense", dense_->pull().wait()),
                                     std::pair("sparse", sparse_->pull_rows(keys()).wait())}) {
    for (int64_t row = 0; row < kKeys; ++row) {
      for (int64_t c = 0; c < clients_; ++c) {
        const double value = values[row][c].item<double>();
        if (value == static_cast<double>(wanted.at(static_cast<size_t>(c)))) continue;
        return absl::StrCat("error differs ", name, ", row ", row, ", client ", c, ": ", value,
                            " instead of ", wanted[static_cast<size_t>(c)]);
      }
    }
  }
  return "ok";
}

std::string Counters::look(const std::string& folder) const {
  Files& files = runtime_->files();
  const std::string path = folder + "/looked_at.safetensors";
  const ps::SnapshotInfo info = ps::export_snapshot(files, folder, path);
  if (!info.refused.empty()) return "error refused " + info.refused;
  const SafetensorsFile file = value_or_throw(SafetensorsFile::open(files, path));
  for (const ps::SnapshotTable& table : info.tables) {
    const at::Tensor values = value_or_throw(file.read(table.name + "/values"));
    for (const ps::SnapshotClient& client : table.clients) {
      const int64_t column =
          std::stoll(client.worker.substr(client.worker.find_first_of("0123456789")));
      const at::Tensor counters = values.select(1, column);
      if ((counters == static_cast<double>(client.pushes)).all().item<bool>()) continue;
      return absl::StrCat("error differs ", table.name, ", client ", column, ": ",
                          counters.min().item<double>(), " to ", counters.max().item<double>(),
                          " instead of ", client.pushes);
    }
  }
  return absl::StrCat("ok ", info.number);
}

void Counters::uncut() {
  cut_no_more_ = true;
  if (cutter_ != nullptr) cutter_->join();
}

void Counters::halt() {
  stop_ = true;
  if (thread_ != nullptr) thread_->join();
}

}  // namespace weft::integration
