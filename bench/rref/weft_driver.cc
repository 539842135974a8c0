// Ours, as a driver of the `rref` suite: what a user's program does, through the public API alone.
// w1 owns the objects, w2 gets references passed on. KIND is tensor (an ATen operator makes it) or
// thing (a constructor of a class of this program). Commands besides those of the line protocol:
//
//   pairs A B BLOCKS SIZE    `lat` of two, in alternating blocks    {"a_us": [...], "b_us": [...]}
//   fetched KIND COUNT       makes, fetches and drops objects, one after another
//   passed KIND COUNT        makes an object, calls a function of w2 with it, which returns, drops
//                            it, and so on
//   kept KIND COUNT WINDOW   makes objects and passes each to w2, WINDOW of them under way; when w2
//                            has all of them, both drop them
//                            each: {"seconds": s, "rate": objects per second, "objects": n,
//                                   "calls": n}
//   counters                 at every rank, what this worker has sent so far
//                                     {"messages": n, "batches": n, "items": n}
//
// Each of the three ends when the owner has no object any more, and that is in the time. `objects`
// and `calls`, those that the program makes, remote() included, are with the warm-up.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/rand.h>

#include <deque>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "weft/bench/line_protocol.h"
#include "weft/common/mutex.h"
#include "weft/rpc/library.h"
#include "weft/rpc/struct.h"
#include "weft/rpc/worker.h"
#include "weft/rref/rref.h"
#include "weft/transport/grpc_transport.h"

namespace weft::bench {
namespace {

constexpr char kOwner[] = "w1";
constexpr char kThird[] = "w2";
constexpr int kWarmUpObjects = 200;

using AddOperator = FunctionRef<at::Tensor(at::Tensor, at::Tensor)>;

// A small object of a user.
struct Thing {
  Thing() = default;
  explicit Thing(int64_t n) : number(n) {}

  int64_t number = 0;
  std::string name = "thing";
};
WEFT_STRUCT(Thing, number, name);

// The same work as a function and as a method, and once more without a hop to the pool.
at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor quick_add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
class Adder {
 public:
  at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
  at::Tensor quick_add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
};

template <class T>
void look(const RRef<T>&) {}

template <class T>
class Shelf {
 public:
  void keep(const RRef<T>& reference) {
    MutexLock lock(&mutex_);
    kept_.push_back(reference);
  }
  void clear() {
    std::vector<RRef<T>> dropped;
    MutexLock lock(&mutex_);
    dropped.swap(kept_);
    lock.unlock();
  }

 private:
  Mutex mutex_;
  std::vector<RRef<T>> kept_ ABSL_GUARDED_BY(mutex_);
};

int64_t owned(CallContext& context) { return context.worker().debug_info()["rref_owners"]; }

template <class T>
constexpr const char* kShelf = std::is_same_v<T, at::Tensor> ? "tensors" : "things";

template <class T>
void put_shelf(Library* lib, const std::string& what) {
  lib->def("look_at_" + what, &look<T>, {.inline_ok = true});
  lib->class_<Shelf<T>>(what + "_shelf")
      .def("keep", &Shelf<T>::keep, {.inline_ok = true})
      .def("clear", &Shelf<T>::clear);
  lib->instance(kShelf<T>, std::make_shared<Shelf<T>>(), {.concurrent = true});
}

Library library() {
  Library lib("bench");
  lib.aten({"aten::add.Tensor"});
  lib.def("add", &add).def("quick_add", &quick_add, {.inline_ok = true});
  lib.class_<Adder>("Adder")
      .constructor<>()
      .def("add", &Adder::add)
      .def("quick_add", &Adder::quick_add, {.inline_ok = true});
  lib.instance("adder", std::make_shared<Adder>());
  lib.class_<Thing>("Thing").constructor<int64_t>();
  lib.def("owned", &owned);
  put_shelf<at::Tensor>(&lib, "tensor");
  put_shelf<Thing>(&lib, "thing");
  return lib;
}

class Caller {
 public:
  explicit Caller(const Worker& worker) : worker_(worker), x_(at::rand({4})) {}

  // The object whose methods are called is made at the first such call.
  std::function<void()> call(std::string_view name) {
    if (name == "add") return [this] { rpc_sync(worker_, kOwner, &add, x_, x_); };
    if (name == "quick_add") return [this] { rpc_sync(worker_, kOwner, &quick_add, x_, x_); };
    if (name == "named") {
      return [this] { rpc_sync(worker_, kOwner, on("adder", &Adder::add), x_, x_); };
    }
    if (name == "quick_named") {
      return [this] { rpc_sync(worker_, kOwner, on("adder", &Adder::quick_add), x_, x_); };
    }
    if (name == "method") {
      return [this, adder = adder()] { adder.rpc_sync(&Adder::add, x_, x_); };
    }
    if (name == "quick_method") {
      return [this, adder = adder()] { adder.rpc_sync(&Adder::quick_add, x_, x_); };
    }
    if (name == "fetched_tensor") return [this] { make<at::Tensor>().to_here(); };
    if (name == "fetched_thing") return [this] { make<Thing>().to_here(); };
    throw std::invalid_argument("unknown function: " + std::string(name));
  }

  Operations operations() {
    Operations operations;
    operations.call = [this](std::string_view name) { return call(name); };
    operations.more["pairs"] = [this](std::istream& in) { return pairs(in); };
    const auto add_lives = [&](const char* name, auto tensors, auto things) {
      operations.more[name] = [this, tensors, things](std::istream& in) {
        std::string kind;
        int64_t count = 0;
        in >> kind >> count;
        if (count < 1 || (kind != "tensor" && kind != "thing")) {
          throw std::invalid_argument("fetched|passed|kept tensor|thing COUNT [WINDOW]");
        }
        int64_t window = 0;
        in >> window;
        const auto run = kind == "tensor" ? tensors : things;
        adder_.reset();  // the owner is to have nothing in the end
        calls_ = 0;
        (this->*run)(kWarmUpObjects, window);
        const auto start = Clock::now();
        (this->*run)(count, window);
        const double seconds = seconds_since(start);
        std::ostringstream out;
        out << "{\"seconds\":" << seconds << ",\"rate\":" << static_cast<double>(count) / seconds
            << ",\"objects\":" << count + kWarmUpObjects << ",\"calls\":" << calls_ << "}";
        return out.str();
      };
    };
    add_lives("fetched", &Caller::fetched<at::Tensor>, &Caller::fetched<Thing>);
    add_lives("passed", &Caller::passed<at::Tensor>, &Caller::passed<Thing>);
    add_lives("kept", &Caller::kept<at::Tensor>, &Caller::kept<Thing>);
    operations.more["counters"] = [this](std::istream&) { return counters(); };
    return operations;
  }

 private:
  template <class T>
  RRef<T> make() {
    ++calls_;
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return remote(worker_, kOwner, operator_, x_, x_);
    } else {
      return remote<T>(worker_, kOwner, calls_);
    }
  }

  RRef<Adder> adder() {
    if (!adder_) adder_ = remote<Adder>(worker_, kOwner);
    return adder_;
  }

  void wait_until_nothing_is_owned() {
    do {
      ++calls_;
    } while (rpc_sync(worker_, kOwner, &owned) != 0);
  }

  template <class T>
  void fetched(int64_t count, int64_t) {
    for (int64_t i = 0; i < count; ++i) make<T>().to_here();
    calls_ += count;
    wait_until_nothing_is_owned();
  }

  template <class T>
  void passed(int64_t count, int64_t) {
    for (int64_t i = 0; i < count; ++i) rpc_sync(worker_, kThird, &look<T>, make<T>());
    calls_ += count;
    wait_until_nothing_is_owned();
  }

  template <class T>
  void kept(int64_t count, int64_t window) {
    if (window < 1) throw std::invalid_argument("kept tensor|thing COUNT WINDOW");
    const auto keep = on(kShelf<T>, &Shelf<T>::keep);
    std::vector<RRef<T>> references;
    std::deque<Future<void>> under_way;
    for (int64_t i = 0; i < count; ++i) {
      if (under_way.size() == static_cast<size_t>(window)) {
        under_way.front().wait();
        under_way.pop_front();
      }
      references.push_back(make<T>());
      under_way.push_back(rpc_async(worker_, kThird, keep, references.back()));
    }
    for (auto& future : under_way) future.wait();
    references.clear();
    rpc_sync(worker_, kThird, on(kShelf<T>, &Shelf<T>::clear));
    calls_ += count + 1;
    wait_until_nothing_is_owned();
  }

  std::string pairs(std::istream& in) {
    std::string names[2];
    int blocks = 0;
    int size = 0;
    if (!(in >> names[0] >> names[1] >> blocks >> size) || blocks < 1 || size < 1) {
      throw std::invalid_argument("pairs A B BLOCKS SIZE");
    }
    const std::function<void()> calls[2] = {call(names[0]), call(names[1])};
    for (const auto& one : calls) {
      for (int i = 0; i < kWarmUpCalls; ++i) one();
    }
    std::vector<double> us[2];
    for (int block = 0; block < blocks; ++block) {
      for (int turn = 0; turn < 2; ++turn) {
        const int which = (block + turn) % 2;
        for (int i = 0; i < size; ++i) us[which].push_back(timed(calls[which]) * 1e6);
      }
    }
    return "{\"a_us\":" + json_array(us[0]) + ",\"b_us\":" + json_array(us[1]) + "}";
  }

  std::string counters() const {
    std::map<std::string, int64_t> now = worker_.debug_info();
    int64_t messages = 0;
    for (const auto& [name, value] : now) {
      if (name.starts_with("lane") && name.ends_with("_frames_sent")) messages += value;
    }
    std::ostringstream out;
    out << "{\"messages\":" << messages << ",\"batches\":" << now["rref_control_batches"]
        << ",\"items\":" << now["rref_control_items"] << "}";
    return out.str();
  }

  const Worker& worker_;
  const AddOperator operator_{"aten::add.Tensor"};
  const at::Tensor x_;
  RRef<Adder> adder_;
  int64_t calls_ = 0;
};

int run(int argc, char** argv) {
  const std::string path = option(argc, argv, "--path", "bench-rref");
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  at::set_num_threads(1);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  Worker worker = Worker::join({
      .name = "w" + std::to_string(rank),
      .rank = rank,
      .world_size = std::stoi(option(argc, argv, "--world", "2")),
      .library = library(),
      .rendezvous = "file://" + path + ".store?run_id=bench",
      .transport =
          grpc_transport({.local_sockets = option(argc, argv, "--transport", "default") != "tcp"}),
      .services = {rref_service({.fail_on_leak = true})},
  });
  {
    Caller caller(worker);
    const Operations operations = caller.operations();
    if (rank == 0) caller.call("add")();
    serve(&operations);
  }
  const ShutdownResult result = worker.shutdown({.deadline = std::chrono::seconds(5)});
  if (!result.status.ok()) throw std::runtime_error(std::string(result.status.message()));
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("weft_rref_driver", weft::bench::run, argc, argv);
}
