#ifndef WEFT_TESTS_RREF_FIXTURE_H_
#define WEFT_TESTS_RREF_FIXTURE_H_

// What the tests of RRefs share: workers that list the service, things to call, and "nothing is
// left" at the end of every test.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "weft/rref/rref.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {

// Counts its living objects.
class Table {
 public:
  explicit Table(int64_t rows) : rows_(rows) {
    if (rows < 0) throw std::invalid_argument("a table of " + std::to_string(rows) + " rows");
    ++alive();
  }
  Table(int64_t rows, std::string label) : rows_(rows), label_(std::move(label)) { ++alive(); }
  Table(const Table& other) : rows_(other.rows_), label_(other.label_) { ++alive(); }
  ~Table() { --alive(); }
  static std::atomic<int>& alive() {
    static std::atomic<int> count{0};
    return count;
  }

  int64_t rows() const { return rows_; }
  std::string label() const { return label_; }
  int64_t grow(int64_t by) { return rows_ += by; }
  Future<int64_t> grow_later(CallContext& context, std::string by, int64_t n);
  Point point(double y) const { return Point{rows_, y, label_}; }
  int64_t fail(std::string what) const { return throw_error(std::move(what)); }
  int64_t add_of(const RRef<int64_t>& other) const { return rows_ + other.to_here(); }

 private:
  int64_t rows_;
  std::string label_;
};

// Answers its calls in pairs: none before the second has come.
class Batch {
 public:
  Future<int64_t> add(int64_t n) {
    waiting_.emplace_back();
    Future<int64_t> future = waiting_.back().future();
    sum_ += n;
    if (waiting_.size() == 2) {
      for (Promise<int64_t>& p : waiting_) p.set_value(sum_);
      waiting_.clear();
    }
    return future;
  }

 private:
  std::vector<Promise<int64_t>> waiting_;
  int64_t sum_ = 0;
};

struct Parcel {
  std::vector<RRef<int64_t>> list{};
  std::map<std::string, RRef<int64_t>> by_name{};
  std::optional<RRef<Table>> table{};
};
WEFT_STRUCT(Parcel, list, by_name, table);

using IntRef = RRef<int64_t>;

inline const FunctionRef<int64_t()> kOwnWaitAtGate{"own.wait_at_gate"};
int64_t fetch(IntRef x);
int64_t fetch_both(const IntRef& x, const IntRef& y);
int64_t fetch_parcel(const Parcel& parcel);
bool was_confirmed(const IntRef& x);
IntRef give_back(IntRef x);
IntRef make_here(CallContext& context, int64_t x);
IntRef make_at(CallContext& context, std::string at, int64_t a, int64_t b);
// Passes it on along `path` and fetches it at the end.
int64_t forward(CallContext& context, std::vector<std::string> path, IntRef x);
int64_t rows_of(const RRef<Table>& table);
int64_t local_sum(const IntRef& x, const IntRef& y);
Future<int64_t> fetch_async(IntRef x);
int64_t await_creation(IntRef x);  // and its value then
int64_t x_of(const Point& p);

struct RRefLibrary : TestLibrary {
  explicit RRefLibrary(std::shared_ptr<Runtime> runtime = make_system_runtime());
  // "own.wait_at_gate" returns 7 when `hold` opens, "own.fetch_at_gate" fetches its argument.
  // "own.wait_at_second_gate" returns 8 when `second` does.
  std::shared_ptr<Gate> hold;
  std::shared_ptr<Gate> second;
};

struct RRefClusterOptions {
  int size = 3;
  Net net = Net::kInproc;
  std::shared_ptr<FaultPlan> plan{};
  bool dynamic = false;
  Timeout rpc_timeout{};
  Timeout lease = std::chrono::seconds(5);
  int threads = 4;
  bool fail_on_leak = true;
};

class RRefTest : public ::testing::TestWithParam<Net> {
 protected:
  // Workers "worker0", ...; `library` is what all of them offer.
  std::unique_ptr<Cluster> make(RRefClusterOptions options = {});
  void TearDown() override;

  // Every count of RRefs is zero at these workers, now or soon; tombstones apart.
  static void expect_nothing_left(Cluster& c);
  static void expect_nothing_left_at(const Worker& worker);

  RRefLibrary lib_;
};

// What debug_info() says of RRefs that is to be zero in the end.
inline const char* const kRRefCounts[] = {"rref_owners",
                                          "rref_forks",
                                          "rref_users",
                                          "rref_pending_users",
                                          "rref_pending_children",
                                          "rref_parked_uses",
                                          "rref_arrivals",
                                          "rref_unacknowledged",
                                          "rref_values"};

}  // namespace weft::testing

#endif  // WEFT_TESTS_RREF_FIXTURE_H_
