// One worker in a process of its own.
//
//   integration_worker play [--dynamic] [--ask-address] [--files N] [--signal-at KEY SIGNAL]
//     joins as its environment says, prints "joined NAME ID INCARNATION ADDRESS", then obeys lines
//     of standard input, each answered by one line ("ok ..." or "error KIND ..."), until that ends.
//     --ask-address: prints "listening ADDRESS" first and reads the address to tell the others.
//     --files: so many descriptors may be open, and the process cannot change that.
//     --signal-at: sends itself the signal when it is about to write a key with KEY in it.
//   integration_worker meet [REST_S]
//     joins, passes a barrier, calls all others at once, rests for so many seconds, leaves, and says
//     how long each took: what the start-up tests run in numbers.

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "weft/common/config.h"
#include "weft/store/delegating_store.h"
#include "weft/tests/integration/answer.h"
#include "weft/tests/integration/counters.h"
#include "weft/tests/integration/crowd.h"
#include "weft/tests/integration/hogwild_player.h"
#include "weft/tests/integration/shelf.h"
#include "weft/tests/integration/stage.h"
#include "weft/tests/testing/forwarding_transport.h"
#include "weft/weft.h"

namespace weft::integration {
namespace {

struct Arguments {
  std::string mode;
  bool dynamic = false;
  bool ask_address = false;
  rlim_t files = 0;
  std::string signal_at;
  int signal = 0;
  int rest_s = 0;
};

// Ends or stops this process at one exact step of a protocol.
class SignallingStore : public DelegatingStore {
 public:
  SignallingStore(std::shared_ptr<Store> inner, std::string at, int signal)
      : DelegatingStore(std::move(inner)), at_(std::move(at)), signal_(signal) {}
  Status set(std::string_view key, std::string_view value, Timeout timeout = {}) override {
    if (key.find(at_) != std::string_view::npos) ::kill(::getpid(), signal_);
    return inner()->set(key, value, timeout);
  }

 private:
  const std::string at_;
  const int signal_;
};

// Tells the others another address than its own: that of a relay, or of another worker.
class RelayedTransport : public testing::ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  StatusOr<std::string> listen(const ListenOptions& options,
                               std::shared_ptr<Acceptor> acceptor) override {
    WEFT_ASSIGN_OR_RETURN(const std::string own,
                          ForwardingTransport::listen(options, std::move(acceptor)));
    std::cout << "listening " << own << std::endl;
    std::string told;
    if (!std::getline(std::cin, told)) {
      return make_error(ErrorKind::kInvalidArgument, "nobody said which address to tell");
    }
    return told;
  }
};

class Player {
 public:
  Player(Stage* stage, Shelf* shelf, const std::shared_ptr<Runtime>& runtime, Worker worker)
      : stage_(*stage),
        shelf_(*shelf),
        worker_(std::move(worker)),
        counters_(runtime),
        hogwild_(runtime),
        crowd_(stage, runtime) {
    subscription_ = worker_.subscribe([this](const MembershipChange& change) {
      static constexpr const char* kNames[] = {"joined", "left", "died"};
      MutexLock lock(&mutex_);
      events_.push_back(
          absl::StrCat(kNames[static_cast<int>(change.kind)], ":", change.worker.name));
    });
  }

  int run() {
    std::cout << "joined " << worker_.name() << " " << worker_.id() << " "
              << worker_.info().incarnation << " " << worker_.address() << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
      std::istringstream words(line);
      std::string verb;
      words >> verb;
      if (verb == "exit") return 0;
      std::string reply;
      try {
        reply = obey(verb, words);
      } catch (const Error& e) {
        reply = answer(e.status());
      }
      std::cout << reply << std::endl;
    }
    return 0;
  }

 private:
  using Waiter = std::function<std::string(Timeout)>;

  std::string obey(const std::string& verb, std::istringstream& words) {
    std::string a;
    if (verb == "call") return begin(words)(kInfinite);
    if (verb == "start") {
      words >> a;
      waiters_[a] = begin(words);
      return "ok";
    }
    if (verb == "wait") {
      words >> a;
      return waiters_.at(a)(kInfinite);
    }
    if (verb == "ps") return counters_.obey(worker_, words);
    if (verb == "hogwild") return hogwild_.obey(worker_, words);
    if (verb == "rref") {
      words >> a;
      return shelf_.begin(worker_, a, words)(kInfinite);
    }
    if (verb == "rref_start") {
      std::string name;
      words >> name >> a;
      waiters_[name] = shelf_.begin(worker_, a, words);
      return "ok";
    }
    if (verb == "many") return many(words);
    if (verb == "ring") return ring(words);
    if (verb == "bulk") return bulk(words);
    if (verb == "send") return send(words);
    if (verb == "crowd") {
      int count = 0;
      words >> count >> a;
      return crowd_.gather(count, a);
    }
    if (verb == "crowd_leaves") return crowd_.leave();
    if (verb == "files") return limit_files(words);
    if (verb == "who") {
      words >> a;
      WorkerInfo info = worker_.get_worker_info(destination(a));
      return absl::StrCat("ok ", info.name, "/", info.id, "/", info.incarnation);
    }
    if (verb == "open") {
      int64_t up_to = 0;
      words >> up_to;
      stage_.open(up_to);
      return "ok";
    }
    if (verb == "forget") {
      stage_.forget();
      return "ok";
    }
    if (verb == "info") return info();
    if (verb == "events") {
      MutexLock lock(&mutex_);
      return absl::StrCat("ok ", absl::StrJoin(events_, " "));
    }
    if (verb == "barrier") {
      barrier(worker_);
      return "ok";
    }
    if (verb == "shutdown") return shut_down(words);
    if (verb == "shutdown_by_two_threads") return shut_down_twice();
    return "error unknown " + verb;
  }

  // TO METHOD ID DEADLINE_MS RETRY
  Waiter begin(std::istringstream& words) {
    std::string to, method;
    int64_t id = 0;
    int64_t deadline_ms = 0;
    bool retry = false;
    if (!(words >> to >> method >> id >> deadline_ms >> retry)) {
      return [](Timeout) { return std::string("error usage"); };
    }
    const CallOptions options{.deadline = absl::Milliseconds(deadline_ms),
                              .retry = retry ? Retry::kAtMostOnce : Retry::kNever};
    auto future =
        try_rpc_async(worker_, destination(to), options, method == "hold" ? kHold : kBump, id);
    if (!future.ok()) {
      return [s = future.status()](Timeout) { return answer(s); };
    }
    return [f = *future](Timeout t) { return answer(f.try_wait(t)); };
  }

  // TO COUNT: small calls, 64 under way at once. Answers how many there were.
  std::string many(std::istringstream& words) {
    std::string to;
    int64_t count = 0;
    words >> to >> count;
    const Destination who = destination(to);
    std::vector<Future<int64_t>> window(64);
    for (int64_t i = 0; i < count; ++i) {
      Future<int64_t>& slot = window[static_cast<size_t>(i) % window.size()];
      if (i >= static_cast<int64_t>(window.size())) slot.wait();
      slot = rpc_async(worker_, who, kBump, i % 64);
    }
    for (int64_t i = 0; i < std::min<int64_t>(count, 64); ++i)
      window[static_cast<size_t>(i)].wait();
    return absl::StrCat("ok ", count);
  }

  // NAMES,COMMA DEPTH sync|meet|async CHAINS: answers the hops of each chain, which must be equal.
  std::string ring(std::istringstream& words) {
    std::string names, how;
    int64_t depth = 0;
    int64_t chains = 0;
    words >> names >> depth >> how >> chains;
    const std::vector<std::string> ring = absl::StrSplit(names, ',');
    const std::string first = ring[0];
    std::vector<Future<int64_t>> all;
    for (int64_t i = 0; i < chains; ++i) {
      all.push_back(how == "async"
                        ? rpc_async(worker_, first, &ring_async, ring, depth)
                        : rpc_async(worker_, first, &ring_sync, ring, depth, how == "meet"));
    }
    int64_t hops = 0;
    for (auto& f : all) hops += f.wait();
    return absl::StrCat("ok ", hops);
  }

  // TO ELEMENTS: there and back, at most once; answers whether they came back as they went.
  std::string bulk(std::istringstream& words) {
    std::string to;
    int64_t elements = 0;
    words >> to >> elements;
    const at::Tensor x = at::arange(elements);
    const at::Tensor y =
        rpc_sync(worker_, destination(to),
                 {.deadline = absl::Seconds(60), .retry = Retry::kAtMostOnce}, &echo, x);
    return at::equal(x, y) ? "ok equal" : "ok different";
  }

  // NAME TO ELEMENTS DEADLINE_MS: the same, begun; "wait NAME" gives the answer.
  std::string send(std::istringstream& words) {
    std::string name, to;
    int64_t elements = 0;
    int64_t deadline_ms = 0;
    words >> name >> to >> elements >> deadline_ms;
    auto future =
        try_rpc_async(worker_, destination(to), {.deadline = absl::Milliseconds(deadline_ms)},
                      &echo, at::arange(elements));
    if (!future.ok()) return answer(future.status());
    waiters_[name] = [f = *future, elements](Timeout t) {
      const StatusOr<at::Tensor> y = f.try_wait(t);
      if (!y.ok()) return answer(y.status());
      return std::string(at::equal(at::arange(elements), *y) ? "ok equal" : "ok different");
    };
    return "ok";
  }

  // SPARE: so many more descriptors may be opened. -1: as many as at the start.
  std::string limit_files(std::istringstream& words) {
    int64_t spare = 0;
    words >> spare;
    rlimit limit = {};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return "error system getrlimit";
    if (usual_files_ == 0) usual_files_ = limit.rlim_cur;
    // The next ones that are opened get the lowest free numbers.
    std::vector<int> opened;
    for (int64_t i = 0; i <= spare; ++i) opened.push_back(dup(STDIN_FILENO));
    limit.rlim_cur = spare < 0 ? usual_files_ : static_cast<rlim_t>(opened.back());
    for (const int fd : opened) close(fd);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return "error system setrlimit";
    return absl::StrCat("ok ", static_cast<int64_t>(limit.rlim_cur));
  }

  std::string info() {
    std::map<std::string, int64_t> all = worker_.debug_info();
    for (const auto& [name, value] : stage_.counts()) all[name] = value;
    return absl::StrCat("ok ", absl::StrJoin(all, " ", absl::PairFormatter("=")));
  }

  // [DEADLINE_MS]: "ok NAME=OUTCOME,..." or "error KIND NAME=OUTCOME,... MESSAGE".
  static std::string tell(const ShutdownResult& result) {
    static constexpr const char* kNames[] = {"drained", "missing", "aborted"};
    std::vector<std::string> workers;
    for (const auto& entry : result.workers) {
      workers.push_back(
          absl::StrCat(entry.worker.name, "=", kNames[static_cast<int>(entry.outcome)]));
    }
    const std::string list = absl::StrJoin(workers, ",");
    if (result.status.ok()) return absl::StrCat("ok ", list);
    return answer(annotate(result.status, list));
  }
  std::string shut_down(std::istringstream& words) {
    int64_t deadline_ms = 0;
    if (words >> deadline_ms) {
      return tell(worker_.shutdown({.deadline = absl::Milliseconds(deadline_ms)}));
    }
    return tell(worker_.shutdown());
  }
  std::string shut_down_twice() {
    std::string one;
    std::string two;
    {
      const auto runtime = make_system_runtime();
      const auto a = runtime->spawn("one", [this, &one] { one = tell(worker_.shutdown()); });
      const auto b = runtime->spawn("two", [this, &two] { two = tell(worker_.shutdown()); });
    }
    return one == two ? one : absl::StrCat("error different ", one, " and ", two);
  }

  Stage& stage_;
  Shelf& shelf_;
  Mutex mutex_;
  std::vector<std::string> events_ ABSL_GUARDED_BY(mutex_);
  Worker worker_;      // after what its subscriber uses
  Counters counters_;  // before the worker ends
  HogwildPlayer hogwild_;
  Crowd crowd_;
  std::map<std::string, Waiter> waiters_;
  rlim_t usual_files_ = 0;
  Worker::Subscription subscription_;
};

StatusOr<Worker> join_as(const Arguments& arguments, const Stage& stage, const Shelf& shelf,
                         const std::shared_ptr<Runtime>& runtime) {
  JoinOptions options;
  options.library = stage.library;
  options.library.merge(shelf.library);
  options.runtime = runtime;
  options.dynamic = arguments.dynamic;
  if (arguments.ask_address) {
    options.transport =
        [](const TransportContext& context) -> StatusOr<std::unique_ptr<Transport>> {
      WEFT_ASSIGN_OR_RETURN(auto inner, grpc_transport({.same_user = false})(context));
      return std::unique_ptr<Transport>(new RelayedTransport(std::move(inner)));
    };
  }
  if (!arguments.signal_at.empty()) {
    WEFT_ASSIGN_OR_RETURN(const Config config, Config::from_environment(process_environment()));
    const StoreOptions how{.is_server = false, .timeout = {}, .run_id = config.job_id};
    WEFT_ASSIGN_OR_RETURN(auto store, open_store(config.store, how, runtime));
    options.store =
        std::make_shared<SignallingStore>(std::move(store), arguments.signal_at, arguments.signal);
  }
  return try_join(std::move(options));
}

int play(const Arguments& arguments) {
  const rlimit files = {arguments.files, arguments.files};
  if (arguments.files > 0 && setrlimit(RLIMIT_NOFILE, &files) != 0) {
    std::cout << "error system setrlimit" << std::endl;
    return 3;
  }
  const auto runtime = make_system_runtime();
  Stage stage(runtime);
  Shelf shelf;
  StatusOr<Worker> worker = join_as(arguments, stage, shelf, runtime);
  if (!worker.ok()) {
    std::cout << answer(worker.status()) << std::endl;
    return 3;
  }
  return Player(&stage, &shelf, runtime, *std::move(worker)).run();
}

int64_t cpu_ms() {
  rusage used;
  ::getrusage(RUSAGE_SELF, &used);
  const auto ms = [](const timeval& t) { return int64_t{t.tv_sec} * 1000 + t.tv_usec / 1000; };
  return ms(used.ru_utime) + ms(used.ru_stime);
}

int meet(int rest_s) {
  const auto runtime = make_system_runtime();
  Stage stage(runtime);
  std::string took;
  absl::Time from = runtime->now();
  const auto phase = [&](absl::string_view name) {
    const absl::Time to = runtime->now();
    absl::StrAppend(&took, name, "_ms=", absl::ToInt64Milliseconds(to - from), " ");
    from = to;
  };
  const Worker worker = join({.library = stage.library, .runtime = runtime});
  phase("join");
  barrier(worker);
  phase("barrier");
  std::vector<Future<int64_t>> calls;
  for (int to = 0; to < worker.world_size(); ++to) {
    if (to != worker.rank()) calls.push_back(rpc_async(worker, to, kBump, worker.rank()));
  }
  // Each is answered with how often it has run there.
  int64_t runs = 0;
  for (const Future<int64_t>& call : calls) runs += call.wait();
  phase("all_to_all");
  barrier(worker);
  // Behind the barrier every worker has called: each of the others has called us once.
  const int64_t served = stage.counts().at("runs");
  if (rest_s > 0) {
    // What joining leaves to do is done by then.
    ::sleep(2);
    const int64_t before = cpu_ms();
    ::sleep(static_cast<unsigned>(rest_s));
    absl::StrAppend(&took, "rest_cpu_ms=", cpu_ms() - before, " ");
    barrier(worker);
  }
  from = runtime->now();
  const ShutdownResult result = worker.shutdown();
  phase("leave");
  std::cout << "met " << worker.rank() << " runs=" << runs << " served=" << served << " " << took
            << answer(result.status) << std::endl;
  return result.status.ok() ? 0 : 1;
}

bool read_arguments(int argc, char** argv, Arguments* out) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) return false;
  out->mode = words[0];
  for (size_t i = 1; i < words.size(); ++i) {
    if (words[i] == "--dynamic") {
      out->dynamic = true;
    } else if (words[i] == "--ask-address") {
      out->ask_address = true;
    } else if (words[i] == "--files" && i + 1 < words.size()) {
      out->files = static_cast<rlim_t>(std::atoi(words[++i].c_str()));
    } else if (words[i] == "--signal-at" && i + 2 < words.size()) {
      out->signal_at = words[++i];
      out->signal = std::atoi(words[++i].c_str());
    } else if (out->mode != "meet" || i > 1 || !absl::SimpleAtoi(words[i], &out->rest_s)) {
      return false;
    }
  }
  return out->mode == "play" || out->mode == "meet";
}

}  // namespace
}  // namespace weft::integration

int main(int argc, char** argv) {
  weft::integration::Arguments arguments;
  if (!weft::integration::read_arguments(argc, argv, &arguments)) {
    std::cerr << "usage: integration_worker play [--dynamic] [--ask-address] [--files N] "
                 "[--signal-at KEY SIGNAL] | meet [REST_S]\n";
    return 2;
  }
  try {
    return arguments.mode == "play" ? weft::integration::play(arguments)
                                    : weft::integration::meet(arguments.rest_s);
  } catch (const weft::Error& e) {
    std::cerr << "integration_worker: " << e.what() << "\n";
    return 1;
  }
}
