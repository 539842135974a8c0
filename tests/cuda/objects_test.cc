// STREAM-6 on GPUs that are made of host memory (fake_runtime.h): objects behind RRefs and names,
// whose kernels come in the order of the calls on them, although each call has streams of its own.

#include <atomic>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "weft/rpc/call.h"
#include "weft/rref/rref.h"
#include "weft/rref/service.h"
#include "weft/tests/cuda/fake_backward.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

constexpr int64_t kObjectSize = 100;
using Read = std::shared_ptr<std::vector<float>>;

// What a kernel of its stream comes to when that is open.
void queue_gate(const OpenFlag& gate) {
  fake_cuda::queue(native(current()), [gate] { return gate->load(); });
}

// Memory that calls write and read, by kernels.
class Board {
 public:
  static std::vector<OpenFlag> flags;
  static Board* last;  // that was made

  explicit Board(int64_t value) : flags_(flags), x_(gpu_full(kObjectSize, 9, 0)) {
    write(value);
    last = this;
  }
  // When the flag of that number is open.
  void write(int64_t value) {
    queue_fill(x_, static_cast<float>(value), flags_.at(static_cast<size_t>(value)));
  }
  void read(int64_t flag) const {
    queue_gate(flags_.at(static_cast<size_t>(flag)));
    const MutexLock lock(&mutex_);
    reads_.push_back(queue_read(x_));
  }
  Read seen(size_t index) const {
    const MutexLock lock(&mutex_);
    return reads_.at(index);
  }

 private:
  const std::vector<OpenFlag> flags_;
  const at::Tensor x_;
  mutable Mutex mutex_;
  mutable std::vector<Read> reads_;
};

std::vector<OpenFlag> Board::flags;
Board* Board::last = nullptr;

class Objects : public ::testing::TestWithParam<Net> {
 protected:
  Objects() {
    for (int i = 0; i < 4; ++i) flags_.push_back(std::make_shared<std::atomic<bool>>(false));
    Library lib("objects");
    Board::flags = flags_;
    lib.class_<Board>("Board")
        .constructor<int64_t>()
        .def("write", &Board::write)
        .def("read", &Board::read);
    lib.def("one", &one);
    // A tensor that a kernel makes late.
    lib.def("late", [gate = flags_[1]](int64_t n) {
      const at::Tensor x = gpu_full(n, 0, 0);
      queue_fill(x, 5, gate);
      return x;
    });
    lib.def("read_of", [this](const RRef<at::Tensor>& x) { read_ = queue_read(*x.local_value()); });
    ClusterOptions options{.net = GetParam(), .library = std::move(lib)};
    options.adjust = [](int, JoinOptions* o) {
      o->devices = {gpu(0), gpu(1)};
      o->device_maps = {{"worker1", {{gpu(0), gpu(0)}}}};
      o->services = {rref_service()};
    };
    cluster_ = std::make_unique<Cluster>(std::move(options));
  }
  Worker& caller() { return (*cluster_)[0]; }
  void open(size_t flag) {
    flags_[flag]->store(true);
    fake_cuda::run_all();
  }
  static std::vector<float> all(float value) { return std::vector<float>(kObjectSize, value); }

  std::vector<OpenFlag> flags_;
  Read read_;
  std::unique_ptr<Cluster> cluster_;
};

using Late = FunctionRef<at::Tensor(int64_t)>;

TEST_P(Objects, STREAM_6_what_is_fetched_is_read_after_the_kernels_that_make_it) {
  const size_t blocking = fake_cuda::blocking_calls();
  const auto late = remote(caller(), 1, Late{"objects.late"}, kObjectSize);
  const size_t copies = fake_cuda::copies();
  auto fetched = late.to_here_async();
  // Each query does an operation of each stream: a copy that waits for nothing would be queued by
  // then. Another call is not held up.
  const size_t queries = fake_cuda::early_queries() + 100;
  eventually([&] { return fake_cuda::early_queries() > queries || fake_cuda::copies() > copies; },
             "the fetch waits");
  EXPECT_EQ(fake_cuda::copies(), copies) << "what is fetched was copied before it was made";
  EXPECT_EQ(rpc_sync(caller(), 1, &one), 1);
  EXPECT_FALSE(fetched.done());
  open(1);
  const Read read = queue_read(fetched.wait());
  fake_cuda::run_all();
  EXPECT_EQ(*read, all(5));
  EXPECT_EQ(fake_cuda::blocking_calls(), blocking) << "somebody waited for a device";
}

TEST_P(Objects, STREAM_6_what_an_owner_uses_itself_too) {
  const auto late = remote(caller(), 1, Late{"objects.late"}, kObjectSize);
  rpc_sync(caller(), 1, FunctionRef<void(const RRef<at::Tensor>&)>{"objects.read_of"}, late);
  fake_cuda::run_all();
  EXPECT_TRUE(read_->empty()) << "the handler's kernel did not wait for those that make the object";
  open(1);
  EXPECT_EQ(*read_, all(5));
}

TEST_P(Objects, STREAM_6_an_object_of_a_thread_that_is_none_of_a_handler) {
  const at::Tensor x = gpu_full(kObjectSize, 0, 0);
  RRef<at::Tensor> mine;
  {
    const c10::StreamGuard elsewhere(fresh());
    queue_fill(x, 3, flags_[1]);
    mine = RRef<at::Tensor>::local((*cluster_)[1], x);
  }
  rpc_sync((*cluster_)[1], 1, FunctionRef<void(const RRef<at::Tensor>&)>{"objects.read_of"}, mine);
  fake_cuda::run_all();
  EXPECT_TRUE(read_->empty());
  open(1);
  EXPECT_EQ(*read_, all(3));
}

TEST_P(Objects, STREAM_6_a_method_comes_after_the_constructor) {
  open(0);
  const auto board = remote<Board>(caller(), 1, 1);
  board.rpc_sync(&Board::read, 0);
  fake_cuda::run_all();
  EXPECT_TRUE(Board::last->seen(0)->empty()) << "the method's kernel did not wait";
  open(1);
  EXPECT_EQ(*Board::last->seen(0), all(1));
}

TEST_P(Objects, STREAM_6_calls_come_one_after_the_other) {
  const auto board = remote<Board>(caller(), 1, 0);
  board.rpc_sync(&Board::write, 1);
  board.rpc_sync(&Board::read, 0);  // const ones wait for the write...
  board.rpc_sync(&Board::read, 3);
  board.rpc_sync(&Board::write, 2);  // ...and it for them
  board.rpc_sync(&Board::read, 0);
  open(0);
  open(2);
  for (const size_t i : {0, 1, 2}) EXPECT_TRUE(Board::last->seen(i)->empty()) << i;
  open(1);
  EXPECT_EQ(*Board::last->seen(0), all(1)) << "const calls do not wait for each other";
  EXPECT_TRUE(Board::last->seen(1)->empty());
  EXPECT_TRUE(Board::last->seen(2)->empty())
      << "the second write did not wait for a read before it";
  open(3);
  EXPECT_EQ(*Board::last->seen(1), all(1));
  EXPECT_EQ(*Board::last->seen(2), all(2));
}

INSTANTIATE_TEST_SUITE_P(Nets, Objects, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
