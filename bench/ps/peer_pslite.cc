// ps-lite as a peer of the `ps` suite: ./dev bench ps --pslite PROGRAM, where PROGRAM is this file. The build of weft
// does not build it, as it wants ps-lite, which is no dependency. Outside of the tree, with zeromq and protobuf installed:
//
//   cmake -S ps-lite -B ps-lite/build -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_STANDARD=14
//   make -C ps-lite/build pslite
//   c++ -std=c++17 -O2 -I ps-lite/include -I build/include bench/ps/peer_pslite.cc ps-lite/build/libpslite.a
//       -lzmq -lprotobuf -lpthread -o peer_pslite
//
// Rank 0 is the worker, rank 1 the server, rank 2 the scheduler. The server keeps a vector for each key, from which a
// push takes its values times a rate, as SGD does. `--mode local`: over ipc sockets; else over TCP. What may be sent and
// received without a copy is: ZPush, ZPull, and the answer to the pull of one key.
#include <algorithm>
#include <memory>
#include <unordered_map>

#include "ps/ps.h"
#include "weft/bench/line_protocol.h"

namespace weft::bench {
namespace {

constexpr size_t kRows = 1024;
constexpr size_t kColumns = 64;
constexpr size_t kLarge = size_t{64} << 18;  // floats
constexpr float kRate = 0.01F;
constexpr ps::Key kLargeKey = ps::Key{1} << 40;
constexpr ps::Key kSmallKey = kLargeKey + 1;

class Tables {
 public:
  void operator()(const ps::KVMeta& request, const ps::KVPairs<float>& data,
                  ps::KVServer<float>* server) {
    ps::KVPairs<float> answer;
    if (request.push) push(data);
    if (request.pull) {
      answer.keys = data.keys;
      if (data.keys.size() == 1) {
        answer.vals = values_.at(data.keys[0]);
      } else {
        answer.vals.resize(data.keys.size() * values_.at(data.keys[0]).size());
        float* to = answer.vals.data();
        for (const ps::Key key : data.keys) {
          const ps::SArray<float>& from = values_.at(key);
          to = std::copy(from.begin(), from.end(), to);
        }
      }
    }
    server->Response(request, answer);
  }

 private:
  void push(const ps::KVPairs<float>& data) {
    const size_t each = data.vals.size() / data.keys.size();
    const float* from = data.vals.data();
    for (const ps::Key key : data.keys) {
      ps::SArray<float>& to = values_[key];
      if (to.empty()) to.resize(each, 0);
      for (size_t i = 0; i < each; ++i) to[i] -= kRate * from[i];
      from += each;
    }
  }

  std::unordered_map<ps::Key, ps::SArray<float>> values_;
};

class Worker {
 public:
  Worker() : worker_(0, 0) {
    for (size_t i = 0; i < kRows; ++i) row_keys_.push_back(97 * i);
    push(row_keys_, rows_);
    push(large_key_, large_);
    pulled_.resize(kLarge);
  }

  Operations operations() {
    Operations out;
    out.call = [this](std::string_view name) -> std::function<void()> {
      if (name == "push") return [this] { push(small_key_, small_); };
      if (name == "pull") return [this] { pull(row_keys_, &pulled_rows_); };
      if (name == "push64") return [this] { push(large_key_, large_); };
      if (name == "pull64") return [this] { pull(large_key_, &pulled_); };
      throw std::invalid_argument("no call " + std::string(name));
    };
    out.more["few"] = [this](std::istream& in) { return run_few(operations(), in); };
    return out;
  }

 private:
  void push(const ps::SArray<ps::Key>& keys, const ps::SArray<float>& values) {
    worker_.Wait(worker_.ZPush(keys, values));
  }
  void pull(const ps::SArray<ps::Key>& keys, ps::SArray<float>* values) {
    worker_.Wait(worker_.ZPull(keys, values));
  }

  ps::KVWorker<float> worker_;
  ps::SArray<ps::Key> row_keys_;
  const ps::SArray<ps::Key> small_key_ = ps::SArray<ps::Key>(1, kSmallKey);
  const ps::SArray<ps::Key> large_key_ = ps::SArray<ps::Key>(1, kLargeKey);
  const ps::SArray<float> small_ = ps::SArray<float>(2, 1.0F);
  const ps::SArray<float> rows_ = ps::SArray<float>(kRows * kColumns, 1.0F);
  const ps::SArray<float> large_ = ps::SArray<float>(kLarge, 1.0F);
  ps::SArray<float> pulled_rows_ = ps::SArray<float>(kRows * kColumns, 0.0F);
  ps::SArray<float> pulled_;
};

int run(int argc, char** argv) {
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  const char* const roles[] = {"worker", "server", "scheduler"};
  if (rank < 0 || rank > 2) throw std::invalid_argument("there are ranks 0 to 2");
  setenv("DMLC_ROLE", roles[rank], 1);
  setenv("DMLC_NUM_WORKER", "1", 1);
  setenv("DMLC_NUM_SERVER", "1", 1);
  setenv("DMLC_PS_ROOT_URI", "127.0.0.1", 1);
  setenv("DMLC_NODE_HOST", "127.0.0.1", 1);
  setenv("DMLC_PS_ROOT_PORT", option(argc, argv, "--port", "0").c_str(), 1);
  if (option(argc, argv, "--mode", "tcp") == "local") setenv("DMLC_LOCAL", "1", 1);
  // A request that comes before a server has its handler ends the server, so it has that before the others are met.
  std::unique_ptr<ps::KVServer<float>> server;
  ps::StartAsync(0);
  if (rank == 1) {
    server = std::make_unique<ps::KVServer<float>>(0);
    server->set_request_handle(Tables());
  }
  ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup + ps::kServerGroup + ps::kScheduler);
  if (rank == 0) {
    Worker worker;
    const Operations operations = worker.operations();
    serve(&operations);
  } else {
    serve();
  }
  ps::Finalize(0, true);
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("peer_pslite", &weft::bench::run, argc, argv);
}
