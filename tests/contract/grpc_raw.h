#ifndef WEFT_TESTS_CONTRACT_GRPC_RAW_H_
#define WEFT_TESTS_CONTRACT_GRPC_RAW_H_

// Clients that are no workers of ours: a raw gRPC stream on a lane's method, a unary call, and a
// plain TCP socket. They wait with a bound of 20 s and belong to one thread.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include "weft/transport/credentials.h"

namespace weft::testing {

std::string text_of(const grpc::ByteBuffer& buffer);
grpc::ByteBuffer buffer_of(const std::string& bytes);

// Credentials as gRPC itself takes them, read once and unchecked: what a stranger brings along.
std::shared_ptr<grpc::ChannelCredentials> raw_channel_credentials(const Credentials& files);
std::shared_ptr<grpc::ServerCredentials> raw_server_credentials(const Credentials& files);

class RawStream {
 public:
  // Plain text when `credentials` is null.
  RawStream(const std::string& address, const std::string& method,
            std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr);
  ~RawStream();

  bool started() const { return started_; }
  bool write(const std::string& bytes);
  // Nothing: the stream has ended.
  std::optional<std::string> read();
  grpc::Status finish();
  // The certificate of the other side, PEM.
  std::string peer_certificate() const;

 private:
  bool wait();

  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  bool started_ = false;
};

// One unary call with raw bytes.
grpc::Status raw_call(const std::string& address, const std::string& method,
                      const std::string& request, std::string* response,
                      std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr);

class RawSocket {
 public:
  explicit RawSocket(const std::string& address);
  ~RawSocket();
  bool open() const { return fd_ >= 0; }
  void send(const std::string& bytes);
  // Everything until the other side closes.
  std::string read_all();

 private:
  int fd_ = -1;
};

// A listening socket that never answers; its address.
class DeafListener {
 public:
  DeafListener();
  ~DeafListener();
  std::string address() const { return address_; }

 private:
  int fd_ = -1;
  std::string address_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_CONTRACT_GRPC_RAW_H_
