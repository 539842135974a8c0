// The floor: one long-lived bidirectional generic stream of gRPC, driven by hand.
//
// One thread per process polls its completion queue up to 50 us (with sched_yield) after recent
// traffic and then blocks, exactly as our lanes do; frames carry no header and nothing is decoded.
// Bulk goes as 1 MiB chunks which the receiver copies into a warm buffer. What our transport costs
// above this is what our layer costs (row T11).
//   --mode tcp   127.0.0.1
//   --mode unix  a Unix socket at --path
//   --mode tls   127.0.0.1, mutual TLS with ca.pem, bench.pem and bench.key in tls/ beside --path
#include <grpcpp/security/tls_credentials_options.h>

#include <cstring>
#include <memory>

#include "weft/bench/line_protocol.h"
#include "weft/bench/rpc/raw_grpc.h"

namespace weft::bench {
namespace {

constexpr intptr_t kStart = 1, kRead = 2, kWrite = 3;

// `Io` is grpc::GenericClientAsyncReaderWriter or grpc::GenericServerAsyncReaderWriter.
template <typename Io>
class Pipe {
 public:
  Pipe(Io& io, Poller& poller) : io_(io), poller_(poller) {}

  void start_read() { io_.Read(&incoming_, tag_of(kRead)); }

  void write(const void* data, size_t size) {
    io_.Write(frame_of(data, size), tag_of(kWrite));
    write_pending_ = true;
  }

  // The next frame; another read is posted at once. False at the end of the stream.
  bool read(grpc::ByteBuffer* frame) {
    while (!readable_) {
      if (!turn()) return false;
    }
    readable_ = false;
    frame->Swap(&incoming_);
    incoming_.Clear();
    start_read();
    return true;
  }

  bool finish_write() {
    while (write_pending_) {
      if (!turn()) return false;
    }
    return true;
  }

  bool send_bulk(const char* data, int64_t bytes) {
    for (int64_t sent = 0; sent < bytes; sent += kChunk) {
      if (!finish_write()) return false;
      write(data + sent, static_cast<size_t>(std::min(kChunk, bytes - sent)));
    }
    return true;
  }

  bool receive_bulk(char* to, int64_t bytes) {
    for (int64_t have = 0; have < bytes;) {
      grpc::ByteBuffer frame;
      if (!read(&frame)) return false;
      copy_out(frame, to + have, bytes - have);
      have += static_cast<int64_t>(frame.Length());
    }
    return true;
  }

 private:
  bool turn() {
    bool ok = false;
    const auto tag = reinterpret_cast<intptr_t>(poller_.next(&ok));
    if (!ok) return false;
    if (tag == kRead) readable_ = true;
    if (tag == kWrite) write_pending_ = false;
    return true;
  }

  Io& io_;
  Poller& poller_;
  grpc::ByteBuffer incoming_;
  bool readable_ = false;
  bool write_pending_ = false;
};

namespace tls = grpc::experimental;

std::shared_ptr<tls::CertificateProviderInterface> certificates(const std::string& folder) {
  return std::make_shared<tls::FileWatcherCertificateProvider>(
      folder + "/bench.key", folder + "/bench.pem", folder + "/ca.pem", 10);
}

// `folder` is empty for plain text.
std::shared_ptr<grpc::ServerCredentials> server_credentials(const std::string& folder) {
  if (folder.empty()) return grpc::InsecureServerCredentials();
  tls::TlsServerCredentialsOptions options(certificates(folder));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_certificate_verifier(std::make_shared<tls::NoOpCertificateVerifier>());
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return tls::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> channel_credentials(const std::string& folder) {
  if (folder.empty()) return grpc::InsecureChannelCredentials();
  tls::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(certificates(folder));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_certificate_verifier(std::make_shared<tls::NoOpCertificateVerifier>());
  options.set_check_call_host(false);
  return tls::TlsCredentials(options);
}

void callee(const std::string& address, const std::string& credentials) {
  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, server_credentials(credentials));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(kMaxFrame);
  builder.RegisterAsyncGenericService(&service);
  const auto queue = builder.AddCompletionQueue();
  const auto server = builder.BuildAndStart();
  if (server == nullptr) throw std::runtime_error("cannot listen on " + address);
  Poller poller(*queue);
  grpc::GenericServerContext context;
  grpc::GenericServerAsyncReaderWriter io(&context);
  service.RequestCall(&context, &io, queue.get(), queue.get(), tag_of(kStart));
  say(kReady);
  bool ok = false;
  poller.next(&ok);
  if (!ok) throw std::runtime_error("no call arrived");

  Pipe<grpc::GenericServerAsyncReaderWriter> pipe(io, poller);
  pipe.start_read();
  std::vector<char> warm;
  std::vector<char> small(kMaxFrame);
  grpc::ByteBuffer frame;
  while (pipe.read(&frame)) {
    copy_out(frame, small.data(), kMaxFrame);
    if (small[0] != kBulk) {
      if (!pipe.finish_write()) break;
      pipe.write(small.data(), frame.Length());
      continue;
    }
    BulkHeader header;
    std::memcpy(&header, small.data(), sizeof header);
    if (warm.size() < static_cast<size_t>(header.bytes)) {
      warm.resize(static_cast<size_t>(header.bytes));
    }
    if (!pipe.receive_bulk(warm.data(), header.bytes)) break;
    if (!pipe.finish_write() || !pipe.send_bulk(warm.data(), header.bytes)) break;
  }
  server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  queue->Shutdown();
  void* tag = nullptr;
  while (queue->Next(&tag, &ok)) {
  }
}

void caller(const std::string& address, const std::string& credentials) {
  const auto channel = connect(address, 0, channel_credentials(credentials), "worker.weft");
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  Poller poller(queue);
  const auto io = stub.PrepareCall(&context, kMethod, &queue);
  io->StartCall(tag_of(kStart));
  bool ok = false;
  poller.next(&ok);
  if (!ok) throw std::runtime_error("the stream did not start");

  Pipe<grpc::GenericClientAsyncReaderWriter> pipe(*io, poller);
  pipe.start_read();
  char small[64] = {};
  char back[64];
  std::vector<char> out;
  std::vector<char> in;
  const auto round_trip = [&] {
    if (!pipe.finish_write()) throw std::runtime_error("the stream ended");
    pipe.write(small, sizeof small);
    grpc::ByteBuffer frame;
    if (!pipe.read(&frame)) throw std::runtime_error("the stream ended");
    copy_out(frame, back, sizeof back);
  };
  const auto pipelined = [&](int depth, int64_t count, bool window) {
    grpc::ByteBuffer frame;
    int64_t sent = 0;
    int64_t received = 0;
    while (received < count) {
      while (sent < count && sent - received < depth) {
        if (!pipe.finish_write()) throw std::runtime_error("the stream ended");
        pipe.write(small, sizeof small);
        ++sent;
      }
      const int64_t until = window ? received + 1 : sent;
      while (received < until) {
        if (!pipe.read(&frame)) throw std::runtime_error("the stream ended");
        copy_out(frame, back, sizeof back);
        ++received;
      }
    }
  };

  Operations operations;
  operations.call = [&](std::string_view name) -> std::function<void()> {
    if (name == "echo64") return round_trip;
    throw std::invalid_argument("a raw stream has no function " + std::string(name));
  };
  operations.flight = [&](int depth, int64_t count) { pipelined(depth, count, false); };
  operations.slide = [&](int depth, int64_t count) { pipelined(depth, count, true); };
  operations.echo = [&](int64_t bytes) -> std::function<void()> {
    out.assign(static_cast<size_t>(bytes), 1);
    in.assign(static_cast<size_t>(bytes), 0);
    return [&, bytes] {
      BulkHeader header;
      header.bytes = bytes;
      if (!pipe.finish_write()) throw std::runtime_error("the stream ended");
      std::memcpy(back, &header, sizeof header);
      pipe.write(back, sizeof header);
      if (!pipe.send_bulk(out.data(), bytes) || !pipe.receive_bulk(in.data(), bytes) ||
          !pipe.finish_write()) {
        throw std::runtime_error("the stream ended");
      }
    };
  };
  round_trip();
  serve(&operations);
  context.TryCancel();
  queue.Shutdown();
  void* tag = nullptr;
  while (queue.Next(&tag, &ok)) {
  }
}

int run(int argc, char** argv) {
  const std::string mode = option(argc, argv, "--mode", "tcp");
  const std::string path = option(argc, argv, "--path", "./raw.sock");
  const std::string credentials =
      mode == "tls" ? path.substr(0, path.rfind('/')) + "/tls" : std::string();
  const std::string address =
      mode == "unix" ? "unix:" + path : "127.0.0.1:" + option(argc, argv, "--port", "29878");
  return run_pair(
      argc, argv, [&] { caller(address, credentials); }, [&] { callee(address, credentials); });
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::raw_main("raw_grpc", weft::bench::run, argc, argv);
}
