#include "weft/tests/contract/grpc_raw.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <utility>

#include <grpcpp/security/tls_credentials_options.h>

#include "weft/tests/testing/loopback.h"

namespace weft::testing {
namespace {

std::chrono::system_clock::time_point bound() {
  return std::chrono::system_clock::now() + std::chrono::seconds(20);
}

std::shared_ptr<grpc::Channel> channel_to(const std::string& address,
                                          std::shared_ptr<grpc::ChannelCredentials> credentials) {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetSslTargetNameOverride("worker.weft");
  if (credentials == nullptr) credentials = grpc::InsecureChannelCredentials();
  return grpc::CreateCustomChannel(address.substr(0, address.find('/')), credentials, args);
}

std::string text_of_file(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider(
    const Credentials& files) {
  return std::make_shared<grpc::experimental::StaticDataCertificateProvider>(
      text_of_file(files.ca_file),
      std::vector<grpc::experimental::IdentityKeyCertPair>{
          {text_of_file(files.key_file), text_of_file(files.cert_file)}});
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> raw_channel_credentials(const Credentials& files) {
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(provider(files));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_certificate_verifier(std::make_shared<grpc::experimental::NoOpCertificateVerifier>());
  options.set_check_call_host(false);
  return grpc::experimental::TlsCredentials(options);
}

std::shared_ptr<grpc::ServerCredentials> raw_server_credentials(const Credentials& files) {
  grpc::experimental::TlsServerCredentialsOptions options(provider(files));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_certificate_verifier(std::make_shared<grpc::experimental::NoOpCertificateVerifier>());
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

std::string text_of(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  (void)buffer.Dump(&slices);
  std::string out;
  for (const grpc::Slice& s : slices) {
    out.append(reinterpret_cast<const char*>(s.begin()), s.size());
  }
  return out;
}

grpc::ByteBuffer buffer_of(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

RawStream::RawStream(const std::string& address, const std::string& method,
                     std::shared_ptr<grpc::ChannelCredentials> credentials)
    : channel_(channel_to(address, std::move(credentials))) {
  context_.set_deadline(bound());
  grpc::GenericStub stub(channel_);
  stream_ = stub.PrepareCall(&context_, method, &queue_);
  stream_->StartCall(this);
  started_ = wait();
}

RawStream::~RawStream() {
  context_.TryCancel();
  queue_.Shutdown();
  void* tag;
  bool ok;
  while (queue_.Next(&tag, &ok)) {
  }
}

bool RawStream::wait() {
  void* tag = nullptr;
  bool ok = false;
  return queue_.Next(&tag, &ok) && ok;
}

bool RawStream::write(const std::string& bytes) {
  stream_->Write(buffer_of(bytes), this);
  return wait();
}

std::optional<std::string> RawStream::read() {
  grpc::ByteBuffer buffer;
  stream_->Read(&buffer, this);
  if (!wait()) return std::nullopt;
  return text_of(buffer);
}

grpc::Status RawStream::finish() {
  grpc::Status status;
  stream_->Finish(&status, this);
  (void)wait();
  return status;
}

std::string RawStream::peer_certificate() const {
  const auto values = context_.auth_context()->FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME);
  return values.empty() ? std::string() : std::string(values[0].data(), values[0].size());
}

grpc::Status raw_call(const std::string& address, const std::string& method,
                      const std::string& request, std::string* response,
                      std::shared_ptr<grpc::ChannelCredentials> credentials) {
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(bound());
  grpc::GenericStub stub(channel_to(address, std::move(credentials)));
  grpc::ByteBuffer answer;
  grpc::Status status;
  auto call = stub.PrepareUnaryCall(&context, method, buffer_of(request), &queue);
  call->StartCall();
  call->Finish(&answer, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  (void)queue.Next(&tag, &ok);
  if (status.ok()) *response = text_of(answer);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  return status;
}

RawSocket::RawSocket(const std::string& address) {
  const int port = std::stoi(address.substr(address.rfind(':') + 1));
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval patience = {20, 0};
  setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const sockaddr_in in = loopback(port);
  if (connect(fd_, reinterpret_cast<const sockaddr*>(&in), sizeof in) != 0) {
    close(fd_);
    fd_ = -1;
  }
}

RawSocket::~RawSocket() {
  if (fd_ >= 0) close(fd_);
}

void RawSocket::send(const std::string& bytes) {
  (void)!::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

std::string RawSocket::read_all() {
  std::string out;
  char block[4096];
  for (ssize_t n; (n = recv(fd_, block, sizeof block, 0)) > 0;) {
    out.append(block, static_cast<size_t>(n));
  }
  return out;
}

DeafListener::DeafListener() {
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in in = loopback(0);
  socklen_t length = sizeof in;
  (void)bind(fd_, reinterpret_cast<sockaddr*>(&in), sizeof in);
  (void)listen(fd_, 16);
  (void)getsockname(fd_, reinterpret_cast<sockaddr*>(&in), &length);
  address_ = "127.0.0.1:" + std::to_string(ntohs(in.sin_port));
}

DeafListener::~DeafListener() { close(fd_); }

}  // namespace weft::testing
