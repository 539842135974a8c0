#include "weft/tests/integration/shelf.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/rpc/call.h"
#include "weft/rpc/worker.h"
#include "weft/tests/integration/answer.h"
#include "weft/tests/integration/stage.h"

namespace weft::integration {
namespace {

int64_t number(int64_t x) { return x; }
int64_t fetch(const Shelf::Ref& x) { return x.to_here(); }
Future<int64_t> fetch_later(const Shelf::Ref& x) { return x.to_here_async(); }

const FunctionRef<int64_t(std::string, Shelf::Ref)> kKeep{"shelf.keep"};

std::string cycles(const Worker& worker, const Destination& owner, const Destination& third,
                   int64_t count) {
  constexpr int64_t kWindow = 100;
  for (int64_t begun = 0; begun < count; begun += kWindow) {
    std::vector<Future<int64_t>> under_way;
    for (int64_t i = begun; i < std::min(begun + kWindow, count); ++i) {
      under_way.push_back(
          rpc_async(worker, third, &fetch_later, remote(worker, owner, &number, i)));
    }
    for (size_t i = 0; i < under_way.size(); ++i) {
      const StatusOr<int64_t> value = under_way[i].try_wait();
      if (!value.ok()) return answer(value);
      if (*value != begun + static_cast<int64_t>(i)) return "error internal another's value";
    }
  }
  return absl::StrCat("ok ", count);
}

template <class T>
Shelf::Waiter waiter(Future<T> future) {
  return [f = std::move(future)](Timeout t) { return answer(f.try_wait(t)); };
}

}  // namespace

Shelf::Shelf() {
  library.def("number", &number)
      .def("fetch", &fetch)
      .def("fetch_later", &fetch_later)
      .def("keep", [this](const std::string& name, Ref ref) {
        put(name, std::move(ref));
        return int64_t{1};
      });
}

Shelf::Waiter Shelf::begin(const Worker& worker, const std::string& verb, std::istream& words) {
  std::string name, to, what;
  int64_t value = 0;
  int64_t deadline_ms = 0;
  // Sent again over a new connection: what breaks here is to break RRefs, not calls.
  const auto options = [&deadline_ms] {
    return CallOptions{.deadline = absl::Milliseconds(deadline_ms), .retry = Retry::kAtMostOnce};
  };
  if (verb == "make" && words >> name >> to >> what >> value >> deadline_ms) {
    const Destination owner = destination(to);
    put(name, what == "hold" ? remote(worker, owner, options(), kHold, value)
                             : remote(worker, owner, options(), &number, value));
    return [](Timeout) { return std::string("ok"); };
  }
  if (verb == "get" && words >> name >> deadline_ms) {
    return waiter(find(name).to_here_async(options()));
  }
  if (verb == "lend" && words >> name >> to >> deadline_ms) {
    return waiter(rpc_async(worker, destination(to), options(), &fetch, find(name)));
  }
  if (verb == "keep" && words >> name >> to >> what >> deadline_ms) {
    return waiter(rpc_async(worker, destination(to), options(), kKeep, what, find(name)));
  }
  if (verb == "cycles" && words >> to >> what >> value) {
    return [&worker, owner = destination(to), third = destination(what), value](Timeout) {
      return cycles(worker, owner, third, value);
    };
  }
  if (verb == "drop" && words >> name) {
    const std::string gone = drop(name) ? "ok 1" : "ok 0";
    return [gone](Timeout) { return gone; };
  }
  return [verb](Timeout) { return absl::StrCat("error usage ", verb); };
}

void Shelf::put(const std::string& name, Ref ref) {
  MutexLock lock(&mutex_);
  std::swap(held_[name], ref);
  lock.unlock();  // the end of the one before is a message
}

Shelf::Ref Shelf::find(const std::string& name) const {
  MutexLock lock(&mutex_);
  const auto it = held_.find(name);
  return it == held_.end() ? Ref() : it->second;
}

bool Shelf::drop(const std::string& name) {
  MutexLock lock(&mutex_);
  const auto node = held_.extract(name);
  lock.unlock();
  return !node.empty();
}

}  // namespace weft::integration
