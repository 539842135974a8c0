#include "weft/tests/rref/fixture.h"

#include "absl/strings/str_cat.h"

namespace weft::testing {

Future<int64_t> Table::grow_later(CallContext& context, std::string by, int64_t n) {
  const Future<int64_t> sum = rpc_async(context.worker(), by, &add, rows_, n);
  rows_ = co_await sum;
  co_return rows_;
}

int64_t fetch(IntRef x) { return x.to_here(); }
int64_t fetch_both(const IntRef& x, const IntRef& y) { return x.to_here() + y.to_here(); }
int64_t fetch_parcel(const Parcel& parcel) {
  int64_t sum = 0;
  for (const IntRef& x : parcel.list) sum += x.to_here();
  for (const auto& [name, x] : parcel.by_name) sum += x.to_here();
  return parcel.table.has_value() ? sum + parcel.table->rpc_sync(&Table::rows) : sum;
}
bool was_confirmed(const IntRef& x) { return x.confirmed_by_owner(); }
IntRef give_back(IntRef x) { return x; }
IntRef make_here(CallContext& context, int64_t x) { return IntRef::local(context.worker(), x); }
IntRef make_at(CallContext& context, std::string at, int64_t a, int64_t b) {
  return remote(context.worker(), at, &add, a, b);
}
int64_t forward(CallContext& context, std::vector<std::string> path, IntRef x) {
  if (path.empty()) return x.to_here();
  const std::string next = path.front();
  path.erase(path.begin());
  return rpc_sync(context.worker(), next, &forward, path, x);
}
int64_t rows_of(const RRef<Table>& table) { return table.rpc_sync(&Table::rows); }
int64_t local_sum(const IntRef& x, const IntRef& y) { return *x.local_value() + *y.local_value(); }
Future<int64_t> fetch_async(IntRef x) {
  const Future<int64_t> value = x.to_here_async();
  co_return co_await value;
}
int64_t await_creation(IntRef x) {
  x.creation().wait();
  return x.to_here();
}
int64_t x_of(const Point& p) { return p.x; }

RRefLibrary::RRefLibrary(std::shared_ptr<Runtime> runtime)
    : TestLibrary(runtime),
      hold(std::make_shared<Gate>(runtime)),
      second(std::make_shared<Gate>(runtime)) {
  Library own("own");
  own.def("add_one", [](const RRef<at::Tensor>& x) { x.local_value()->add_(1); });
  own.class_<Batch>("Batch").constructor<>().def("add", &Batch::add);
  own.class_<Table>("Table")
      .constructor<int64_t>()
      .constructor<int64_t, std::string>()
      .def("rows", &Table::rows)
      .def("label", &Table::label)
      .def("grow", &Table::grow)
      .def("grow_later", &Table::grow_later)
      .def("point", &Table::point)
      .def("fail", &Table::fail)
      .def("add_of", &Table::add_of);
  own.def("fetch", &fetch)
      .def("fetch_both", &fetch_both)
      .def("fetch_parcel", &fetch_parcel)
      .def("was_confirmed", &was_confirmed)
      .def("give_back", &give_back)
      .def("make_here", &make_here)
      .def("make_at", &make_at)
      .def("forward", &forward)
      .def("rows_of", &rows_of)
      .def("local_sum", &local_sum)
      .def("fetch_async", &fetch_async)
      .def("await_creation", &await_creation)
      .def("x_of", &x_of)
      .def("wait_at_gate",
           [gate = hold] {
             gate->arrive_and_wait();
             return int64_t{7};
           })
      .def("wait_at_second_gate",
           [gate = second] {
             gate->arrive_and_wait();
             return int64_t{8};
           })
      .def("fetch_at_gate", [gate = hold](IntRef x) {
        gate->arrive_and_wait();
        return x.to_here();
      });
  library.merge(own);
}

std::unique_ptr<Cluster> RRefTest::make(RRefClusterOptions options) {
  ClusterOptions o;
  o.size = options.size;
  o.net = GetParam();
  o.library = lib_.library;
  o.dynamic = options.dynamic;
  o.rpc_timeout = options.rpc_timeout;
  o.lease = options.lease;
  o.worker_threads = options.threads;
  o.adjust = [options](int, JoinOptions* j) {
    if (options.plan != nullptr) j->transport = faulty_transport(j->transport, options.plan);
    j->services.push_back(rref_service({.fail_on_leak = options.fail_on_leak}));
    j->log_level = Severity::kError;
  };
  return std::make_unique<Cluster>(std::move(o));
}

void RRefTest::TearDown() { EXPECT_EQ(Table::alive(), 0) << "objects are left"; }

void RRefTest::expect_nothing_left(Cluster& c) {
  for (size_t i = 0; i < c.size(); ++i) {
    expect_nothing_left_at(c[i]);
    EXPECT_EQ(counter(c[i], "rref_faults"), 0) << c[i].name();
  }
}

void RRefTest::expect_nothing_left_at(const Worker& worker) {
  for (const char* name : kRRefCounts) {
    eventually(
        worker, [&] { return counter(worker, name) == 0; },
        absl::StrCat(worker.name(), " has ", name));
  }
}

}  // namespace weft::testing
