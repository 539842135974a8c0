#include "weft/tests/contract/transport_harness.h"

#include "weft/common/error.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/tests/testing/tls_files.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {

World::World(const Backend& backend, uint64_t seed) : late_(backend.late) {
  if (backend.simulated) {
    SimOptions options;
    options.seed = seed;
    options.keep_events = 64;
    sim_ = std::make_shared<SimRuntime>(options);
    runtime_ = sim_;
  } else {
    runtime_ = make_system_runtime();
  }
  network_ = std::make_shared<InprocNetwork>();
  signal_ = std::make_unique<Signal>(runtime_.get());
  factory_ = backend.make(*this);
}

void World::run(const std::function<void()>& body) {
  if (sim_ == nullptr) return body();
  const Status s = sim_->run([&] { body(); });
  std::string tail;
  if (!s.ok()) {
    for (const std::string& event : sim_->last_events()) tail += event + "\n";
  }
  EXPECT_TRUE(s.ok()) << s << "\n" << tail << network_->dump();
}

std::unique_ptr<Peer> World::make_peer(const std::string& name, size_t max_frame_bytes) {
  auto peer = std::make_unique<Peer>();
  peer->name = name;
  peer->hello.job_id = std::string("0123456789abcde\0", 16);
  peer->hello.name = name;
  peer->hello.id = ++next_id_;
  peer->hello.incarnation = 0x1000 + next_id_;
  peer->acceptor = std::make_shared<RecordingAcceptor>(signal_.get(), peer->hello);
  TransportContext context;
  context.runtime = runtime_;
  context.worker_name = name;
  context.max_frame_bytes = max_frame_bytes;
  StatusOr<std::unique_ptr<Transport>> transport = factory_(context);
  EXPECT_TRUE(transport.ok()) << transport.status();
  if (transport.ok()) peer->transport = *std::move(transport);
  return peer;
}

Status World::listen(Peer& peer, ListenOptions options) {
  StatusOr<std::string> address = peer.transport->listen(options, peer.acceptor);
  if (!address.ok()) return address.status();
  peer.address = *address;
  return absl::OkStatus();
}

StatusOr<End> World::dial(Peer& from, std::string_view address, absl::Duration timeout,
                          const std::function<void(Hello*)>& change) {
  struct Outcome {
    int calls = 0;
    StatusOr<ConnectionRef> result = make_error(ErrorKind::kInternal, "not called");
  };
  auto outcome = std::make_shared<Outcome>();
  auto handler = std::make_shared<RecordingHandler>(signal_.get());
  Hello hello = from.hello;
  if (late_) hello.lanes = 0;
  if (change) change(&hello);
  from.transport->connect(address, hello, runtime_->now() + timeout, handler,
                          [this, outcome, handler](StatusOr<ConnectionRef> result) {
                            EXPECT_EQ(handler->frame_count(), 0u) << "a frame before done";
                            signal_->with([&] {
                              ++outcome->calls;
                              outcome->result = std::move(result);
                            });
                          });
  EXPECT_TRUE(signal_->wait([&] { return outcome->calls > 0; }, timeout + absl::Seconds(30)))
      << "the dial of " << address << " has no outcome";
  return signal_->with([&]() -> StatusOr<End> {
    EXPECT_EQ(outcome->calls, 1);
    if (!outcome->result.ok()) return outcome->result.status();
    return End{*outcome->result, handler};
  });
}

std::vector<Backend> transport_backends() {
  std::vector<Backend> out;
  auto inproc = [](World& world) { return inproc_transport(world.network()); };
  out.push_back({"inproc", false, false, inproc});
  out.push_back({"inproc_sim", true, false, inproc});
  auto plan = std::make_shared<FaultPlan>(1);  // no rules: the decorator alone
  auto faulty_inproc = [plan, inproc](World& world) {
    return faulty_transport(inproc(world), plan);
  };
  out.push_back({"faulty_inproc", false, false, faulty_inproc});
  out.push_back({"faulty_inproc_sim", true, false, faulty_inproc});
  if (kThreadSanitizer) return out;
  out.push_back({"grpc", false, true, [](World&) { return grpc_transport(); }});
  out.push_back({"grpc_late", false, true, [](World&) { return grpc_transport(); }, true});
  out.push_back(
      {"grpc_tcp", false, true, [](World&) { return grpc_transport({.local_sockets = false}); }});
  // One certificate for peers of any name.
  auto files = std::make_shared<TlsFiles>();
  out.push_back({"grpc_tls", false, true, [files](World&) {
                   Credentials credentials = files->make("anyone");
                   credentials.shared_certificate = true;
                   return grpc_transport({.local_sockets = false, .credentials = credentials});
                 }});
  out.push_back({"faulty_grpc", false, true,
                 [plan](World&) { return faulty_transport(grpc_transport(), plan); }});
  return out;
}

Pair TransportContract::join(size_t max_frame_bytes) {
  Pair pair;
  pair.a = world().make_peer("a", max_frame_bytes);
  pair.b = world().make_peer("b-with-dashes", max_frame_bytes);
  const Status listening = world().listen(*pair.b);
  EXPECT_TRUE(listening.ok()) << listening;
  if (!listening.ok()) return pair;
  StatusOr<End> end = world().dial(*pair.a, pair.b->address);
  EXPECT_TRUE(end.ok()) << end.status();
  if (!end.ok()) return pair;
  pair.at_a = *end;
  pair.at_b = pair.b->acceptor->accepted();
  pair.ok = pair.at_b.connection != nullptr;
  return pair;
}

Frame make_frame(FrameKind kind, std::string header, std::string payload, uint64_t cookie) {
  Frame frame;
  frame.kind = kind;
  frame.header = std::move(header);
  frame.cookie = cookie;
  if (!payload.empty()) {
    auto owner = std::make_shared<std::string>(std::move(payload));
    frame.payload.push_back({owner->data(), owner->size(), owner});
  }
  return frame;
}

std::string pattern(size_t size, uint64_t salt) {
  std::string out(size, '\0');
  uint64_t x = salt * 0x9e3779b97f4a7c15u + 1;
  for (size_t i = 0; i < size; ++i) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    out[i] = static_cast<char>(x);
  }
  return out;
}

}  // namespace weft::testing
