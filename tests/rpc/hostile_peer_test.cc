// A peer that speaks the handshake well and then sends what no correct worker sends: chunks in the
// wrong order, twice, too many, without a header; headers that promise a terabyte or contradict
// themselves. It loses its connection, or its call; no other peer notices.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"
#include "weft/proto/rpc.pb.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/rpc/internal/agent/tensor_meta.h"
#include "weft/rpc/spi/signature.h"
#include "weft/rpc/value.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/fake_devices.h"
#include "weft/tests/testing/gate.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

// What the stranger hears.
class Ear final : public ConnectionHandler {
 public:
  explicit Ear(Runtime* runtime) : runtime_(runtime), changed_(runtime) {}
  void on_frame(const FrameView& frame, int) override {
    MutexLock lock(&mutex_);
    kinds_.push_back(frame.kind);
    changed_.notify_all();
  }
  void on_lost(Lost) override {
    MutexLock lock(&mutex_);
    lost_ = true;
    changed_.notify_all();
  }
  // `n` answers of that kind, heartbeats aside; false when the connection ends or they do not come.
  bool wait_for(FrameKind kind, int n = 1) {
    return wait([&] { return std::count(kinds_.begin(), kinds_.end(), kind) >= n || lost_; }) &&
           !lost();
  }
  bool wait_lost() {
    return wait([this] { return lost_; });
  }
  bool lost() {
    MutexLock lock(&mutex_);
    return lost_;
  }

 private:
  bool wait(const std::function<bool()>& done) {
    const absl::Time limit = runtime_->now() + absl::Seconds(30);
    MutexLock lock(&mutex_);
    while (!done()) {
      if (!changed_.wait_until(&mutex_, limit).ok()) return done();
    }
    return true;
  }

  Runtime* const runtime_;
  Mutex mutex_;
  Condition changed_;
  std::vector<FrameKind> kinds_;
  bool lost_ = false;
};

class HostilePeer : public ::testing::TestWithParam<Net> {
 protected:
  HostilePeer() {
    Library lib("hostile");
    lib.def("add", &add, {.inline_ok = true});
    lib.def("numel", &numel, {.inline_ok = true});
    lib.def("wait_at_gate", [gate = gate_](int64_t x) {
      gate->arrive_and_wait();
      return x;
    });
    ClusterOptions options{.net = GetParam(), .library = std::move(lib)};
    options.adjust = [this](int index, JoinOptions* join) {
      if (index == 0) {
        join->devices = {cuda(0)};
        join->device_backend = devices_;
      }
      // The stranger comes by TCP and shows no ticket.
      if (GetParam() == Net::kGrpc) join->transport = grpc_transport({.same_user = false});
    };
    cluster_ = std::make_unique<Cluster>(options);
    const TransportFactory factory = GetParam() == Net::kInproc
                                         ? inproc_transport(cluster_->network())
                                         : grpc_transport({.local_sockets = false});
    TransportContext context;
    context.runtime = runtime_;
    context.worker_name = "stranger";
    transport_ = std::move(factory(context)).value();
  }
  ~HostilePeer() override { transport_->shutdown(); }

  void dial(bool observer = false) { dial(observer, (*cluster_)[0].job_id()); }
  void dial(bool observer, const std::string& job_id) {
    ear_ = std::make_shared<Ear>(runtime_.get());
    Hello hello;
    hello.job_id = job_id;
    hello.name = "stranger";
    hello.id = 99;
    hello.incarnation = ++incarnation_;
    hello.observer = observer;
    Promise<std::shared_ptr<Connection>> promise;
    Future<std::shared_ptr<Connection>> dialled = promise.future();
    auto shared = std::make_shared<Promise<std::shared_ptr<Connection>>>(std::move(promise));
    transport_->connect(
        (*cluster_)[0].address(), hello, runtime_->now() + absl::Seconds(20), ear_,
        [shared](StatusOr<std::shared_ptr<Connection>> c) { shared->try_set(std::move(c)); });
    connection_ = dialled.wait();
  }

  static constexpr uint64_t kFirst = 1;  // transfer ids
  // A call of numel() with a tensor of `floats`, as one transfer of `announced` bytes.
  v1::CallHeader header(int64_t floats, uint64_t announced, uint64_t transfer = kFirst) {
    internal::TensorMeta meta;
    meta.sizes = {floats};
    meta.nbytes = static_cast<uint64_t>(floats) * 4;
    v1::CallHeader out;
    out.set_call_id(7);
    out.set_method("hostile.numel");
    out.set_signature_hash(signature_hash("(tensor)->int"));
    internal::append_meta(meta, out.mutable_layout()->mutable_tensor_metas());
    out.mutable_layout()->add_segments()->set_length(0);
    v1::Segment* segment = out.mutable_layout()->add_segments();
    segment->set_length(announced);
    segment->set_transfer_id(transfer);
    return out;
  }
  void request(const v1::CallHeader& header) {
    frame(FrameKind::kRequest, header.SerializeAsString());
  }
  void frame(FrameKind kind, std::string header) {
    Frame frame;
    frame.kind = kind;
    frame.header = std::move(header);
    (void)connection_->send(std::move(frame), kBulkLane);
  }
  void chunk(uint64_t transfer, uint64_t offset, size_t bytes) {
    Frame frame;
    frame.kind = FrameKind::kChunk;
    for (int i = 0; i < 8; ++i) frame.header.push_back(static_cast<char>(transfer >> (8 * i)));
    for (int i = 0; i < 8; ++i) frame.header.push_back(static_cast<char>(offset >> (8 * i)));
    const auto owner = std::make_shared<std::string>(bytes, 'x');
    if (bytes > 0) frame.payload.push_back({owner->data(), owner->size(), owner});
    (void)connection_->send(std::move(frame), kBulkLane);
  }
  void expect_nobody_harmed() {
    EXPECT_EQ(rpc_sync((*cluster_)[1], 0, &add, 1, 2), 3);
    EXPECT_EQ((*cluster_)[0].debug_info().at("handlers_running"), 0);
    wait_until("receive_bytes", 0);  // none of a message that will never come
  }
  // What a connection's end changes is seen by the other side a moment later.
  void wait_until(const std::string& name, int64_t value) {
    const absl::Time limit = runtime_->now() + absl::Seconds(30);
    int64_t seen = 0;
    while ((seen = (*cluster_)[0].debug_info().at(name)) != value) {
      ASSERT_LT(runtime_->now(), limit) << name << " stays " << seen << ", not " << value;
      rpc_sync((*cluster_)[1], 0, &add, 1, 2);
    }
  }
  // What `send` sends costs the connection.
  void expect_lost(const std::string& what, const std::function<void()>& send) {
    dial();
    send();
    EXPECT_TRUE(ear_->wait_lost()) << what;
    expect_nobody_harmed();
  }

  const std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>(runtime_);
  std::shared_ptr<FakeDevices> devices_ = std::make_shared<FakeDevices>(1);
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<Ear> ear_;
  std::shared_ptr<Connection> connection_;
  uint64_t incarnation_ = 4711;
};

TEST_P(HostilePeer, ChunksInTheWrongPlaceCostTheConnection) {
  constexpr int64_t kFloats = 256 << 10;
  constexpr uint64_t kBytes = uint64_t{kFloats} * 4;
  constexpr size_t kPart = 128 << 10;
  const auto begun = [&] {
    request(header(kFloats, kBytes));
    chunk(kFirst, 0, kPart);
  };
  expect_lost("a duplicate", [&] { begun(), chunk(kFirst, 0, kPart); });
  expect_lost("a gap", [&] { begun(), chunk(kFirst, 2 * kPart, kPart); });
  expect_lost("out of order", [&] {
    request(header(kFloats, kBytes));
    chunk(kFirst, kPart, kPart);
  });
  expect_lost("beyond the end", [&] {
    request(header(1 << 10, 4 << 10));
    chunk(kFirst, 0, kPart);
  });
  expect_lost("an offset that wraps", [&] { begun(), chunk(kFirst, ~uint64_t{0} - 10, kPart); });
  expect_lost("no bytes", [&] { begun(), chunk(kFirst, kPart, 0); });
  expect_lost("of a transfer that is over", [&] {
    request(header(1 << 10, 4 << 10));
    chunk(kFirst, 0, 4 << 10);
    chunk(kFirst, 0, 4 << 10);
  });
  expect_lost("one transfer announced twice", [&] { begun(), request(header(kFloats, kBytes)); });
  EXPECT_GE((*cluster_)[0].debug_info().at("protocol_errors"), 8);
}

TEST_P(HostilePeer, BadInput_wide_messages_that_contradict_themselves_cost_the_connection) {
  const auto brief = [](uint64_t header_length, uint64_t length, uint64_t transfer = kFirst) {
    v1::CallHeader out;
    out.set_call_id(7);
    v1::Layout* wide = out.mutable_layout();
    wide->set_wide_transfer(transfer);
    wide->set_wide_header_length(header_length);
    wide->set_wide_length(length);
    return out;
  };
  const auto stream = [&](const std::string& bytes) {
    Frame frame;
    frame.kind = FrameKind::kChunk;
    frame.header = internal::encode_chunk_header(kFirst, 0);
    const auto owner = std::make_shared<std::string>(bytes);
    frame.payload.push_back({owner->data(), owner->size(), owner});
    (void)connection_->send(std::move(frame), kBulkLane);
  };
  const auto wide = [&](const v1::CallHeader& whole, const std::string& rest) {
    const std::string bytes = whole.SerializeAsString();
    request(brief(bytes.size(), bytes.size() + rest.size()));
    stream(bytes + rest);
  };
  Payload arguments;
  Encoder(&arguments).put(std::make_tuple(at::zeros({1024})));
  const std::string floats = arguments.body + std::string(4096, '\0');
  v1::CallHeader good = header(1024, 4096);
  good.mutable_layout()->mutable_segments(0)->set_length(arguments.body.size());
  good.mutable_layout()->mutable_segments(1)->clear_transfer_id();
  // As it should be: the call is executed.
  dial();
  wide(good, floats);
  EXPECT_TRUE(ear_->wait_for(FrameKind::kResponse));
  connection_->close(absl::OkStatus());
  const int64_t violations = (*cluster_)[0].debug_info().at("protocol_errors");
  expect_lost("no transfer", [&] { request(brief(10, 20, 0)); });
  expect_lost("no header", [&] { request(brief(0, 20)); });
  expect_lost("less than the header", [&] { request(brief(20, 19)); });
  expect_lost("a header of 2 GiB", [&] { request(brief(uint64_t{1} << 31, uint64_t{1} << 32)); });
  expect_lost("lengths whose sum wraps",
              [&] { request(brief(20, ~uint64_t{0})), chunk(kFirst, 20, 9); });
  expect_lost("segments besides", [&] {
    v1::CallHeader both = brief(20, 40);
    both.mutable_layout()->add_segments();
    request(both);
  });
  expect_lost("announced twice", [&] { request(brief(20, 40)), request(brief(20, 40)); });
  expect_lost("a gap", [&] { request(brief(20, 40)), chunk(kFirst, 1, 4); });
  expect_lost("beyond the end", [&] { request(brief(20, 40)), chunk(kFirst, 0, 41); });
  expect_lost("bytes that are no header", [&] { request(brief(20, 40)), chunk(kFirst, 0, 20); });
  expect_lost("of another call", [&] {
    v1::CallHeader other = good;
    other.set_call_id(8);
    wide(other, floats);
  });
  expect_lost("of another attempt", [&] {
    v1::CallHeader other = good;
    other.set_attempt(1);
    wide(other, floats);
  });
  expect_lost("a transfer inside", [&] {
    v1::CallHeader other = good;
    other.mutable_layout()->mutable_segments(1)->set_transfer_id(kFirst + 1);
    wide(other, floats);
  });
  expect_lost("the same transfer inside", [&] {
    v1::CallHeader other = good;
    other.mutable_layout()->mutable_segments(1)->set_transfer_id(kFirst);
    wide(other, floats);
  });
  expect_lost("a wide one inside", [&] { wide(brief(20, 40), floats); });
  expect_lost("no layout", [&] {
    v1::CallHeader none = good;
    none.clear_layout();
    wide(none, floats);
  });
  expect_lost("bytes that are missing", [&] { wide(good, floats.substr(1)); });
  expect_lost("bytes left over", [&] { wide(good, floats + "x"); });
  expect_lost("100,000 tensors without segments", [&] {
    v1::CallHeader many = good;
    std::string metas;
    for (int i = 0; i < 100'000; ++i) metas += good.layout().tensor_metas();
    many.mutable_layout()->set_tensor_metas(metas);
    wide(many, floats);
  });
  expect_lost("17 entries of metadata", [&] {
    v1::CallHeader many = good;
    for (int i = 0; i < 17; ++i) many.add_metadata();
    wide(many, floats);
  });
  expect_lost("an error that is wide", [&] {
    Frame frame;
    frame.kind = FrameKind::kError;
    v1::ErrorHeader error;
    *error.mutable_layout() = brief(20, 40).layout();
    frame.header = error.SerializeAsString();
    (void)connection_->send(std::move(frame), kBulkLane);
  });
  wait_until("protocol_errors", violations + 21);
  // An observer has none.
  dial(/*observer=*/true);
  request(brief(20, 40));
  EXPECT_TRUE(ear_->wait_lost());
  expect_nobody_harmed();
}

TEST_P(HostilePeer, BadInput_a_wide_message_that_promises_too_much_fails_its_call) {
  // A terabyte, and a header whose meaning would take more than its peer may have.
  for (const auto& [header_length, length] : {std::pair{uint64_t{1} << 20, uint64_t{1} << 40},
                                              std::pair{uint64_t{1} << 30, uint64_t{1} << 30}}) {
    dial();
    v1::CallHeader brief;
    brief.set_call_id(7);
    v1::Layout* wide = brief.mutable_layout();
    wide->set_wide_transfer(kFirst);
    wide->set_wide_header_length(header_length);
    wide->set_wide_length(length);
    const int64_t peak = (*cluster_)[0].debug_info().at("receive_bytes_peak");
    request(brief);
    chunk(kFirst, 0, 128 << 10);
    EXPECT_TRUE(ear_->wait_for(FrameKind::kError));
    EXPECT_EQ((*cluster_)[0].debug_info().at("receive_bytes_peak"), peak);
    expect_nobody_harmed();
    EXPECT_FALSE(ear_->lost());
    connection_->close(absl::OkStatus());
  }
}

TEST_P(HostilePeer, AnObserverMayAskAndNothingElse) {
  const auto of_lane_0 = [this](FrameKind kind, const std::string& header) {
    Frame frame;
    frame.kind = kind;
    frame.header = header;
    (void)connection_->send(std::move(frame), kControlLane);
  };
  v1::CallHeader add_call;
  add_call.set_call_id(7);
  add_call.set_method("hostile.add");
  add_call.set_signature_hash(signature_hash("(int,int)->int"));
  add_call.mutable_layout()->add_segments()->set_length(0);
  // A method of others, and metadata, which services would take for a worker's: both are refused.
  dial(/*observer=*/true);
  of_lane_0(FrameKind::kRequest, add_call.SerializeAsString());
  EXPECT_TRUE(ear_->wait_for(FrameKind::kError));
  add_call.set_method("@weft.inspect");
  add_call.set_signature_hash(signature_hash("(string,int,bool)->string"));
  v1::MetadataEntry* entry = add_call.add_metadata();
  entry->set_key("@rref");
  entry->set_value("x");
  of_lane_0(FrameKind::kRequest, add_call.SerializeAsString());
  EXPECT_TRUE(ear_->wait_for(FrameKind::kError, 2));
  // No arguments.
  add_call.clear_metadata();
  of_lane_0(FrameKind::kRequest, add_call.SerializeAsString());
  EXPECT_TRUE(ear_->wait_for(FrameKind::kError, 3));
  EXPECT_EQ((*cluster_)[0].debug_info().at("observers"), 1);
  EXPECT_EQ((*cluster_)[0].debug_info().at("requests_served"), 0);
  connection_->close(absl::OkStatus());
  // It has no part in the calls of others.
  const int64_t violations = (*cluster_)[0].debug_info().at("protocol_errors");
  v1::ResponseHeader answer;
  answer.set_call_id(1);
  v1::GoodbyeHeader goodbye;
  goodbye.set_reason(v1::GoodbyeHeader::LEAVING);
  const std::pair<FrameKind, std::string> others[] = {
      {FrameKind::kResponse, answer.SerializeAsString()},
      {FrameKind::kError, v1::ErrorHeader().SerializeAsString()},
      {FrameKind::kCancel, v1::CancelHeader().SerializeAsString()},
      {FrameKind::kGoodbye, goodbye.SerializeAsString()}};
  for (const auto& [kind, header] : others) {
    dial(/*observer=*/true);
    of_lane_0(kind, header);
    EXPECT_TRUE(ear_->wait_lost()) << static_cast<int>(kind);
  }
  expect_nobody_harmed();
  wait_until("protocol_errors", violations + 4);
}

TEST_P(HostilePeer, AWorkerOfAnotherJobIsTurnedAway) {
  dial(/*observer=*/true, "");  // which may not know it
  for (const bool observer : {false, true}) {
    for (const char* job : {"another", ""}) {
      if (observer && *job == '\0') continue;
      try {
        dial(observer, job);
        ADD_FAILURE() << "'" << job << "' was let in";
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kPermission) << e.what();
        EXPECT_NE(std::string(e.what()).find("'worker0' belongs to job"), std::string::npos)
            << e.what();
      }
    }
  }
  expect_nobody_harmed();
}

TEST_P(HostilePeer, ObserversAreBounded) {
  std::vector<std::shared_ptr<Connection>> all;
  for (int i = 0; i < 16; ++i) {
    dial(/*observer=*/true);
    all.push_back(connection_);
  }
  wait_until("observers", 16);
  try {
    dial(/*observer=*/true);
    ADD_FAILURE() << "one too many was let in";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kResource) << e.what();
  }
  dial();  // a worker takes the place of no observer
  for (const auto& connection : all) connection->close(absl::OkStatus());
  wait_until("observers", 0);
  dial(/*observer=*/true);
  expect_nobody_harmed();
}

TEST_P(HostilePeer, ChunksWithoutAHeaderAreKeptWithinABound) {
  expect_lost("16 MiB for which no header comes", [&] {
    for (uint64_t i = 0; i < 128; ++i) chunk(100 + i, 0, 128 << 10);
  });
}

TEST_P(HostilePeer, AHeaderThatPromisesATerabyteFailsItsCallAndNothingIsAllocated) {
  dial();
  const uint64_t bytes = uint64_t{1} << 40;
  const int64_t peak = (*cluster_)[0].debug_info().at("receive_bytes_peak");
  request(header(int64_t{1} << 38, bytes));
  // What still comes of it is discarded; the connection lives.
  chunk(kFirst, 0, 128 << 10);
  EXPECT_TRUE(ear_->wait_for(FrameKind::kError));
  EXPECT_EQ((*cluster_)[0].debug_info().at("receive_bytes_peak"), peak);
  expect_nobody_harmed();
  EXPECT_FALSE(ear_->lost());
  connection_->close(absl::OkStatus());
}

TEST_P(HostilePeer, HeadersThatContradictThemselvesCostTheConnection) {
  expect_lost("a segment that is not its tensor's", [&] { request(header(1024, 4095)); });
  expect_lost("a transfer of nothing", [&] { request(header(0, 0)); });
  expect_lost("no segments", [&] {
    v1::CallHeader none = header(1024, 4096);
    none.mutable_layout()->clear_segments();
    request(none);
  });
  expect_lost("a tensor without a segment", [&] {
    v1::CallHeader one = header(1024, 4096);
    one.mutable_layout()->mutable_segments()->RemoveLast();
    request(one);
  });
  expect_lost("sizes whose product overflows", [&] {
    v1::CallHeader odd = header(1024, 4096);
    internal::TensorMeta meta;
    meta.sizes = {int64_t{1} << 40, int64_t{1} << 40};
    odd.mutable_layout()->clear_tensor_metas();
    internal::append_meta(meta, odd.mutable_layout()->mutable_tensor_metas());
    request(odd);
  });
  expect_lost("inline bytes that are missing", [&] {
    v1::CallHeader odd = header(1024, 4096);
    odd.mutable_layout()->mutable_segments(1)->clear_transfer_id();
    request(odd);
  });
  expect_lost("bytes that are no header", [&] {
    Frame frame;
    frame.kind = FrameKind::kRequest;
    frame.header = "\xff\xff\xff\xff";
    (void)connection_->send(std::move(frame), kControlLane);
  });
}

// Refused messages leave a note of the chunks that are still to come. A peer that makes work of
// that is stopped.
TEST_P(HostilePeer, TransfersThatNeverBeginAreBounded) {
  expect_lost("more than 65,536 transfers of refused messages", [&] {
    for (uint64_t i = 0; i < 70'000 && !ear_->lost(); ++i) {
      request(header(int64_t{1} << 38, uint64_t{1} << 40, kFirst + i));
    }
  });
}

TEST_P(HostilePeer, BadInput_a_tensor_for_a_device_that_is_not_there) {
  constexpr uint32_t kFirstDevice = kCudaCode;
  constexpr uint32_t kNoSuch = kCudaCode + 1;
  uint64_t call_id = 100;
  // A call with a tensor for `target`, and a map for the stranger's first device.
  const auto call = [&](uint32_t target, std::vector<uint32_t> map) {
    internal::TensorMeta meta;
    meta.sizes = {2};
    meta.nbytes = 8;
    meta.device = target;
    v1::CallHeader out;
    out.set_call_id(++call_id);
    out.set_method("hostile.numel");
    out.set_signature_hash(signature_hash("(tensor)->int"));
    for (const uint32_t device : map) out.add_device_map(device);
    internal::append_meta(meta, out.mutable_layout()->mutable_tensor_metas());
    Payload payload;
    Encoder arguments(&payload);
    arguments.begin_tuple(1);
    arguments.put(at::Tensor(at::empty({2})));
    arguments.end();
    const auto owner = std::make_shared<std::string>(payload.body + std::string(8, 'x'));
    out.mutable_layout()->add_segments()->set_length(payload.body.size());
    out.mutable_layout()->add_segments()->set_length(8);
    Frame frame;
    frame.kind = FrameKind::kRequest;
    frame.header = out.SerializeAsString();
    frame.payload.push_back({owner->data(), owner->size(), owner});
    (void)connection_->send(std::move(frame), kControlLane);
  };
  dial();
  call(kFirstDevice, {kFirstDevice, kFirstDevice});
  EXPECT_TRUE(ear_->wait_for(FrameKind::kResponse)) << "a device that is there";
  EXPECT_EQ(devices_->counts().to_devices, 1);
  int errors = 0;
  for (const auto& [target, map] : std::vector<std::pair<uint32_t, std::vector<uint32_t>>>{
           {kNoSuch, {kFirstDevice, kFirstDevice}},
           {kFirstDevice, {}},
           {kFirstDevice, {kFirstDevice, 0}},
           {0, {kFirstDevice, kNoSuch}},
           {0, {kFirstDevice, 7}},
           {0, {7, kFirstDevice}}}) {
    call(target, map);
    EXPECT_TRUE(ear_->wait_for(FrameKind::kError, ++errors)) << "case " << errors;
  }
  EXPECT_EQ(devices_->counts().to_devices, 1) << "nothing was copied";
  // The connection is as good as before.
  call(kFirstDevice, {kFirstDevice, kFirstDevice});
  EXPECT_TRUE(ear_->wait_for(FrameKind::kResponse, 2));
  expect_nobody_harmed();
}

// Ids of calls are counted, so a member can guess those of others' calls.
TEST_P(HostilePeer, BadInput_an_answer_to_a_call_of_another_worker_is_dropped) {
  dial();
  const FunctionRef<int64_t(int64_t)> wait_at_gate{"hostile.wait_at_gate"};
  Future<int64_t> call = rpc_async((*cluster_)[0], 1, wait_at_gate, 42);
  gate_->wait_arrived(1);
  constexpr int kGuesses = 64;
  for (uint64_t id = 1; id <= kGuesses; ++id) {
    v1::ResponseHeader answer;
    answer.set_call_id(id);
    answer.mutable_layout()->add_segments()->set_length(0);
    frame(FrameKind::kResponse, answer.SerializeAsString());
    v1::ResponseHeader with_metadata = answer;
    with_metadata.add_metadata()->set_key("x");
    frame(FrameKind::kResponse, with_metadata.SerializeAsString());
    v1::ErrorHeader error;
    error.set_call_id(id);
    error.set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
    error.set_kind(static_cast<uint32_t>(ErrorKind::kResource));
    error.set_reach(v1::ErrorHeader::PASSED);
    error.mutable_layout()->add_segments()->set_length(0);
    frame(FrameKind::kError, error.SerializeAsString());
  }
  // What came before this on the lane has been looked at when it is refused, for it has no arguments.
  v1::CallHeader empty;
  empty.set_call_id(7);
  empty.set_method("hostile.add");
  empty.set_signature_hash(signature_hash("(int,int)->int"));
  empty.mutable_layout()->add_segments()->set_length(0);
  request(empty);
  EXPECT_TRUE(ear_->wait_for(FrameKind::kError));
  EXPECT_EQ((*cluster_)[0].debug_info().at("answers_foreign"), 3);
  EXPECT_FALSE(call.done());
  gate_->open();
  const StatusOr<int64_t> result = call.try_wait();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(*result, 42);
  expect_nobody_harmed();
}

TEST_P(HostilePeer, GoneInTheMiddleOfATransfer) {
  for (int part = 0; part < 4; ++part) {
    dial();
    request(header(256 << 10, 1 << 20));
    for (int i = 0; i < part; ++i) chunk(kFirst, static_cast<uint64_t>(i) << 17, 128 << 10);
    connection_->close(part % 2 == 0 ? absl::OkStatus()
                                     : make_error(ErrorKind::kState, "goes without a word"));
    EXPECT_TRUE(ear_->wait_lost());
    expect_nobody_harmed();
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, HostilePeer, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
