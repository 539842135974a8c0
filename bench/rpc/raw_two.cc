// The floor of row T12: two connections of gRPC, one for small messages there and back, one over
// which messages of any size flow as chunks of 1 MiB into a warm buffer. One thread and one queue
// per process serve both, as in our transport, and nothing is decoded.
#include <cstring>
#include <memory>

#include "weft/bench/line_protocol.h"
#include "weft/bench/rpc/raw_grpc.h"

namespace weft::bench {
namespace {

constexpr int kStreams = 2;
constexpr int kSmall = 0, kFlow = 1;
enum Operation : intptr_t { kStart = 1, kRead = 2, kWrite = 3 };

void* tag_of(int stream, Operation operation) {
  return bench::tag_of(intptr_t{stream} * 16 + operation);
}

template <typename Io>
struct Stream {
  Io* io = nullptr;
  int number = 0;
  grpc::ByteBuffer incoming;
  bool write_pending = false;

  void start_read() { io->Read(&incoming, tag_of(number, kRead)); }
  void write(const void* data, size_t size) {
    io->Write(frame_of(data, size), tag_of(number, kWrite));
    write_pending = true;
  }
};

class Caller {
 public:
  explicit Caller(const std::string& address) : poller_(queue_) {
    for (int i = 0; i < kStreams; ++i) {
      channels_[i] = connect(address, i);
      grpc::GenericStub stub(channels_[i]);
      ios_[i] = stub.PrepareCall(&contexts_[i], kMethod, &queue_);
      ios_[i]->StartCall(tag_of(i, kStart));
      bool ok = false;
      poller_.next(&ok);
      if (!ok) throw std::runtime_error("the stream did not start");
      streams_[i].io = ios_[i].get();
      streams_[i].number = i;
      streams_[i].start_read();
    }
  }
  ~Caller() {
    for (auto& context : contexts_) context.TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  void round_trip() {
    answered_ = false;
    while (streams_[kSmall].write_pending) turn();
    streams_[kSmall].write(small_, sizeof small_);
    while (!answered_) turn();
  }

  void begin(int64_t bytes) {
    data_.assign(static_cast<size_t>(bytes), 1);
    flowing_ = true;
    arrived_ = 0;
    announce();
  }
  // The message that is under way arrives as a whole.
  int64_t end() {
    const int64_t arrived = arrived_;
    flowing_ = false;
    while (under_way_) turn();
    return arrived;
  }

 private:
  void announce() {
    header_ = BulkHeader();
    header_.bytes = static_cast<int64_t>(data_.size());
    sent_ = 0;
    under_way_ = true;
    streams_[kFlow].write(&header_, sizeof header_);
  }

  void turn() {
    bool ok = false;
    const auto tag = reinterpret_cast<intptr_t>(poller_.next(&ok));
    if (!ok) throw std::runtime_error("a stream ended");
    auto& stream = streams_[tag / 16];
    if (tag % 16 == kWrite) {
      stream.write_pending = false;
      const auto left = static_cast<int64_t>(data_.size()) - sent_;
      if (stream.number == kFlow && under_way_ && left > 0) {
        const int64_t n = std::min(kChunk, left);
        stream.write(data_.data() + sent_, static_cast<size_t>(n));
        sent_ += n;
      }
      return;
    }
    char back[64];
    copy_out(stream.incoming, back, sizeof back);
    stream.incoming.Clear();
    stream.start_read();
    if (stream.number == kSmall) {
      answered_ = true;
      return;
    }
    arrived_ += static_cast<int64_t>(data_.size());
    under_way_ = false;
    if (flowing_) announce();
  }

  using Io = grpc::GenericClientAsyncReaderWriter;
  grpc::CompletionQueue queue_;
  Poller poller_;
  grpc::ClientContext contexts_[kStreams];
  std::shared_ptr<grpc::Channel> channels_[kStreams];
  std::unique_ptr<Io> ios_[kStreams];
  Stream<Io> streams_[kStreams];
  char small_[64] = {};
  bool answered_ = false;
  BulkHeader header_;
  std::vector<char> data_;
  bool flowing_ = false;
  bool under_way_ = false;
  int64_t sent_ = 0;
  int64_t arrived_ = 0;
};

void callee(const std::string& address) {
  using Io = grpc::GenericServerAsyncReaderWriter;
  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(kMaxFrame);
  builder.RegisterAsyncGenericService(&service);
  const auto queue = builder.AddCompletionQueue();
  const auto server = builder.BuildAndStart();
  if (server == nullptr) throw std::runtime_error("cannot listen on " + address);
  Poller poller(*queue);
  grpc::GenericServerContext contexts[kStreams];
  std::unique_ptr<Io> ios[kStreams];
  Stream<Io> streams[kStreams];
  bool ok = false;
  say(kReady);
  for (int i = 0; i < kStreams; ++i) {
    ios[i] = std::make_unique<Io>(&contexts[i]);
    streams[i].io = ios[i].get();
    streams[i].number = i;
    service.RequestCall(&contexts[i], ios[i].get(), queue.get(), queue.get(), tag_of(i, kStart));
    poller.next(&ok);
    if (!ok) throw std::runtime_error("no call arrived");
    streams[i].start_read();
  }
  std::vector<char> warm;
  int64_t have = 0;
  int64_t want = 0;
  char small[64];
  while (true) {
    const auto tag = reinterpret_cast<intptr_t>(poller.next(&ok));
    if (!ok) break;
    auto& stream = streams[tag / 16];
    if (tag % 16 == kWrite) {
      stream.write_pending = false;
      continue;
    }
    // Small messages are answered one at a time, a message of the flow once as a whole, so a write
    // is never under way here.
    grpc::ByteBuffer frame;
    frame.Swap(&stream.incoming);
    stream.incoming.Clear();
    stream.start_read();
    if (stream.number == kSmall) {
      copy_out(frame, small, sizeof small);
      stream.write(small, sizeof small);
    } else if (have == want) {
      BulkHeader header;
      copy_out(frame, reinterpret_cast<char*>(&header), sizeof header);
      have = 0;
      want = header.bytes;
      if (warm.size() < static_cast<size_t>(want)) warm.resize(static_cast<size_t>(want));
    } else {
      copy_out(frame, warm.data() + have, want - have);
      have += static_cast<int64_t>(frame.Length());
      if (have == want) stream.write(small, sizeof small);
    }
  }
  server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  queue->Shutdown();
  void* tag = nullptr;
  while (queue->Next(&tag, &ok)) {
  }
}

int run(int argc, char** argv) {
  const std::string address = "127.0.0.1:" + option(argc, argv, "--port", "29880");
  const auto call = [&address] {
    Caller caller(address);
    Operations operations;
    operations.call = [&](std::string_view name) -> std::function<void()> {
      if (name == "echo64") return [&] { caller.round_trip(); };
      throw std::invalid_argument("a raw stream has no function " + std::string(name));
    };
    operations.flow = [&](int64_t bytes) -> std::function<int64_t()> {
      caller.begin(bytes);
      caller.end();  // the memory that it arrives in is warm from here on
      caller.begin(bytes);
      return [&] { return caller.end(); };
    };
    serve(&operations);
  };
  return run_pair(argc, argv, call, [&address] { callee(address); });
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::raw_main("raw_two", weft::bench::run, argc, argv);
}
