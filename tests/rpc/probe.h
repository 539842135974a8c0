#ifndef WEFT_TESTS_RPC_PROBE_H_
#define WEFT_TESTS_RPC_PROBE_H_

// A service whose interceptor attaches to every call it is asked about, keeps a record of what it
// is told, and does what the test says with what arrives.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/mutex.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/value.h"

namespace weft::testing {

// Stands for an RRef: a number that travels as metadata.
struct Token : Reference {
  explicit Token(int64_t n) : number(n) {}
  const int64_t number;
};
struct TokenValue {
  int64_t number = 0;
};

// What a test tells the probe about one call.
struct ProbeRider : CallRider {
  explicit ProbeRider(std::string m) : metadata(std::move(m)) {}
  const std::string metadata;
};

class Probe : public Service, public Interceptor, public std::enable_shared_from_this<Probe> {
 public:
  using OnArrive =
      std::function<void(IncomingRequest& request, const std::string& metadata, Proceed proceed)>;

  explicit Probe(std::string key = "@probe", bool all = true) : key_(std::move(key)), all_(all) {}

  // Before it joins.
  OnArrive on_arrive;
  // What is attached to calls without a rider.
  std::string attached = "x";

  std::vector<Method> methods() override { return {}; }
  std::shared_ptr<Interceptor> interceptor() override { return shared_from_this(); }
  std::string_view key() const override { return key_; }

  bool concerns(const UntypedCall& call) const override {
    return all_ || call.rider != nullptr || !call.arguments.references.empty();
  }
  StatusOr<AttachmentPtr> attach(const WorkerInfo& to, const UntypedCall& call) override {
    const auto* rider = dynamic_cast<const ProbeRider*>(call.rider.get());
    std::string text = rider != nullptr ? rider->metadata : attached;
    append(call.arguments, &text);
    MutexLock lock(&mutex_);
    ++counts_["attached"];
    return AttachmentPtr(new Attached(this, text, absl::StrCat(call.method, ">", to.name)));
  }
  void arrive(IncomingRequest& request, std::string_view metadata, Proceed proceed) override {
    {
      MutexLock lock(&mutex_);
      ++counts_["arrived"];
      ++arrivals_[{request.context().caller().incarnation, request.context().call_id()}];
    }
    request.on_end([this] { note("ended"); });
    take(metadata, &request.arguments());
    if (on_arrive != nullptr) return on_arrive(request, std::string(metadata), std::move(proceed));
    proceed(absl::OkStatus());
  }
  StatusOr<AttachmentPtr> attach_answer(IncomingRequest& request, const Payload& result) override {
    std::string text = "answer";
    append(result, &text);
    note("attached_answer");
    return AttachmentPtr(new Attached(this, text, absl::StrCat("<", request.method().name)));
  }
  void arrive_answer(const WorkerInfo&, Payload& result, std::string_view metadata,
                     Proceed proceed) override {
    note("arrived_answer");
    take(metadata, &result);
    proceed(absl::OkStatus());
  }

  int64_t count(const std::string& what) const {
    MutexLock lock(&mutex_);
    auto it = counts_.find(what);
    return it == counts_.end() ? 0 : it->second;
  }
  // The most often that one request has arrived.
  int most_arrivals() const {
    MutexLock lock(&mutex_);
    int most = 0;
    for (const auto& [call, times] : arrivals_) most = std::max(most, times);
    return most;
  }
  // How each message ended, in order: "test.add>worker1 delivered".
  std::vector<std::string> ends() const {
    MutexLock lock(&mutex_);
    return ends_;
  }
  void note(const std::string& what) {
    MutexLock lock(&mutex_);
    ++counts_[what];
  }

 private:
  class Attached : public Attachment {
   public:
    Attached(Probe* probe, std::string bytes, std::string label)
        : Attachment(std::move(bytes)), probe_(probe), label_(std::move(label)) {}
    void ended(Delivery delivery, const Status& result) override {
      const char* const how = delivery == Delivery::kDelivered      ? "delivered"
                              : delivery == Delivery::kNotDelivered ? "not_delivered"
                                                                    : "unknown";
      MutexLock lock(&probe_->mutex_);
      ++probe_->counts_[label_[0] == '<' ? "answers_told" : "told"];
      if (delivery == Delivery::kNotDelivered && result.ok()) ++probe_->counts_["undelivered_ok"];
      probe_->ends_.push_back(absl::StrCat(label_, " ", how));
    }

   private:
    Probe* const probe_;
    const std::string label_;
  };

  static void append(const Payload& payload, std::string* text) {
    for (const auto& r : payload.references) {
      absl::StrAppend(text, ",", dynamic_cast<const Token&>(*r).number);
    }
  }
  static void take(std::string_view text, Payload* payload) {
    for (size_t at = text.find(','); at != std::string_view::npos; at = text.find(',', at + 1)) {
      payload->references.push_back(
          std::make_shared<Token>(std::atoll(std::string(text.substr(at + 1)).c_str())));
    }
  }

  const std::string key_;
  const bool all_;
  mutable Mutex mutex_;
  std::map<std::string, int64_t> counts_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<uint64_t, uint64_t>, int> arrivals_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> ends_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::testing

template <>
struct weft::Codec<weft::testing::TokenValue> {
  static constexpr weft::KindText kKind{"token"};
  static void encode(Encoder& out, const testing::TokenValue& value) {
    out.put_reference(std::make_shared<testing::Token>(value.number));
  }
  static StatusOr<testing::TokenValue> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(const std::shared_ptr<const Reference> reference, in.take_reference());
    const auto* token = dynamic_cast<const testing::Token*>(reference.get());
    if (token == nullptr) return in.fail("expected a token");
    return testing::TokenValue{token->number};
  }
};

#endif  // WEFT_TESTS_RPC_PROBE_H_
