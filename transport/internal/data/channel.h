#ifndef WEFT_TRANSPORT_INTERNAL_DATA_CHANNEL_H_
#define WEFT_TRANSPORT_INTERNAL_DATA_CHANNEL_H_

// The channel "data": frames on sockets of its own (lane.h), which the acceptor offers and the
// dialler opens. It serves when all that were offered are up.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/transport/channel.h"
#include "weft/transport/internal/data/loop.h"
#include "weft/transport/internal/descriptors.h"

namespace weft::internal {

class DataChannel;

class WEFT_API DataBackend final : public ChannelBackend,
                                   public std::enable_shared_from_this<DataBackend> {
 public:
  struct Options {
    bool enabled = true;
    bool tls = false;            // the control lane has TLS, so these have
    size_t max_frame_bytes = 0;  // that we take
    absl::Duration handshake_timeout = absl::Seconds(10);
    absl::Duration keepalive_timeout = absl::Seconds(120);
    absl::Duration max_spin = absl::ZeroDuration();
    std::shared_ptr<OptionalSockets> sockets{};  // null: no bound
  };
  DataBackend(std::shared_ptr<Runtime> runtime, const Options& options)
      : runtime_(std::move(runtime)),
        options_(options),
        loop_(std::make_shared<DataLoop>(runtime_, "weft-data", options.max_spin)),
        prompt_loop_(std::make_shared<DataLoop>(runtime_, "weft-prompt", absl::ZeroDuration())) {}

  std::string_view name() const override { return "data"; }
  ChannelCapabilities capabilities() const override { return {.lanes = options_.enabled}; }
  std::shared_ptr<Channel> make(const ChannelSite& site) override;
  bool take_socket(const std::string& ticket, UniqueFd* fd) override ABSL_LOCKS_EXCLUDED(mutex_);
  void add_counters(std::vector<std::pair<std::string, int64_t>>* out) const override {
    if (options_.sockets == nullptr) return;
    out->emplace_back("data_sockets_refused", options_.sockets->refused());
  }
  void stop() override {
    loop_->stop();
    prompt_loop_->stop();
  }

  // ---- for its channels ------------------------------------------------------------------------
  // The dialler was asked to show this ticket: good once, and for the time of a handshake.
  void expect(const std::string& ticket, std::weak_ptr<DataChannel> channel, size_t index,
              std::string key) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether a connection may have so many sockets.
  Status admit(size_t count) const {
    return options_.sockets == nullptr ? absl::OkStatus() : options_.sockets->admit(count);
  }
  const Options& options() const { return options_; }
  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  // Returns the loop of prompt lanes, or of lanes for large messages.
  const std::shared_ptr<DataLoop>& loop(bool prompt) const { return prompt ? prompt_loop_ : loop_; }

 private:
  struct Expected {
    std::weak_ptr<DataChannel> channel;
    size_t index = 0;
    std::string key;  // of TLS
    absl::Time until;
  };

  const std::shared_ptr<Runtime> runtime_;
  const Options options_;
  const std::shared_ptr<DataLoop> loop_;
  const std::shared_ptr<DataLoop> prompt_loop_;
  Mutex mutex_;
  std::map<std::string, Expected> expected_ ABSL_GUARDED_BY(mutex_);  // by ticket
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_DATA_CHANNEL_H_
