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

namespace weft::testing {

std::string text_of(const grpc::ByteBuffer& buffer);
grpc::ByteBuffer buffer_of(const std::string& bytes);

class RawStream {
 public:
  RawStream(const std::string& address, const std::string& method);
  ~RawStream();

  bool started() const { return started_; }
  bool write(const std::string& bytes);
  // Nothing: the stream has ended.
  std::optional<std::string> read();
  grpc::Status finish();

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
                      const std::string& request, std::string* response);

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
