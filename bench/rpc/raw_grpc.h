// What the drivers of raw gRPC streams share: the poller, frames, the channel.
//
// Threading: everything belongs to one thread.
#ifndef WEFT_BENCH_RPC_RAW_GRPC_H_
#define WEFT_BENCH_RPC_RAW_GRPC_H_

#include <grpc/grpc.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sched.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "weft/bench/line_protocol.h"

namespace weft::bench {

inline constexpr int64_t kChunk = 1 << 20;
inline constexpr int kMaxFrame = 5 << 20;
inline constexpr auto kMaxSpin = std::chrono::microseconds(50);
inline constexpr auto kRecent = std::chrono::milliseconds(1);
inline constexpr char kMethod[] = "/raw/stream";
inline constexpr char kBulk = 'B';  // first byte of the frame that announces a bulk transfer

// Spins only while traffic is recent and spinning has paid, as the lanes do.
class Poller {
 public:
  explicit Poller(grpc::CompletionQueue& queue) : queue_(queue) {}

  void* next(bool* ok) {
    void* tag = nullptr;
    const auto start = Clock::now();
    const bool recent = start - last_traffic_ <= kRecent;
    auto status = grpc::CompletionQueue::TIMEOUT;
    if (recent && spin_allowed()) {
      const auto end = start + kMaxSpin;
      do {
        status = queue_.AsyncNext(&tag, ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
        if (status == grpc::CompletionQueue::TIMEOUT) sched_yield();
      } while (status == grpc::CompletionQueue::TIMEOUT && Clock::now() < end);
    }
    if (status == grpc::CompletionQueue::TIMEOUT) {
      status = queue_.AsyncNext(&tag, ok, gpr_inf_future(GPR_CLOCK_MONOTONIC));
    }
    if (status != grpc::CompletionQueue::GOT_EVENT) throw std::runtime_error("queue was shut");
    last_traffic_ = Clock::now();
    if (recent) paid_ += ((last_traffic_ - start < kMaxSpin ? 1.0 : 0.0) - paid_) / 8;
    return tag;
  }

 private:
  // Every 16th wait spins as a probe: a phase of bulk must not end spinning for good.
  bool spin_allowed() { return paid_ >= 0.5 || ++probe_ % 16 == 0; }

  grpc::CompletionQueue& queue_;
  Clock::time_point last_traffic_{};
  double paid_ = 1.0;
  unsigned probe_ = 0;
};

inline void* tag_of(intptr_t value) { return reinterpret_cast<void*>(value); }
inline grpc::ByteBuffer frame_of(const void* data, size_t size) {
  grpc::Slice slice(data, size, grpc::Slice::STATIC_SLICE);
  return grpc::ByteBuffer(&slice, 1);
}

inline void copy_out(grpc::ByteBuffer& frame, char* to, int64_t room) {
  std::vector<grpc::Slice> slices;
  if (!frame.Dump(&slices).ok()) throw std::runtime_error("a frame could not be read");
  for (const auto& slice : slices) {
    if (static_cast<int64_t>(slice.size()) > room) throw std::runtime_error("a frame is too long");
    std::memcpy(to, slice.begin(), slice.size());
    to += slice.size();
    room -= static_cast<int64_t>(slice.size());
  }
}

struct BulkHeader {
  char kind = kBulk;
  char unused[7] = {};
  int64_t bytes = 0;
};

// A connection of its own for every `number`.
inline std::shared_ptr<grpc::Channel> connect(const std::string& address, int number,
                                              const std::shared_ptr<grpc::ChannelCredentials>&
                                                  credentials = grpc::InsecureChannelCredentials(),
                                              const std::string& certificate_name = {}) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxFrame);
  arguments.SetMaxSendMessageSize(kMaxFrame);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_CHANNELZ, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt("bench.connection", number);
  if (!certificate_name.empty()) arguments.SetSslTargetNameOverride(certificate_name);
  auto channel = grpc::CreateCustomChannel(address, credentials, arguments);
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(60))) {
    throw std::runtime_error("cannot connect to " + address);
  }
  return channel;
}

// The main of a driver of raw streams.
inline int raw_main(const char* name, int (*run)(int argc, char** argv), int argc, char** argv) {
  // As ours does: otherwise we would measure Abseil's debugging, not the stream.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return driver_main(name, run, argc, argv);
}

}  // namespace weft::bench

#endif  // WEFT_BENCH_RPC_RAW_GRPC_H_
