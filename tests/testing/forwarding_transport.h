#ifndef WEFT_TESTS_TESTING_FORWARDING_TRANSPORT_H_
#define WEFT_TESTS_TESTING_FORWARDING_TRANSPORT_H_

// A Transport that passes everything on to another one, for tests that change or watch a part of
// it.

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/transport/transport.h"

namespace weft::testing {

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  std::string name() const override { return inner_->name(); }
  StatusOr<std::string> listen(const ListenOptions& options,
                               std::shared_ptr<Acceptor> acceptor) override {
    return inner_->listen(options, std::move(acceptor));
  }
  void connect(std::string_view address, const Hello& hello, absl::Time deadline,
               std::shared_ptr<ConnectionHandler> handler, DialDone done) override {
    inner_->connect(address, hello, deadline, std::move(handler), std::move(done));
  }
  void shutdown() override { inner_->shutdown(); }
  std::vector<std::pair<std::string, int64_t>> counters() const override {
    return inner_->counters();
  }
  std::shared_ptr<char> allocate_shared(size_t bytes) override {
    return inner_->allocate_shared(bytes);
  }
  std::shared_ptr<WaitDriver> wait_driver() override { return inner_->wait_driver(); }
  void sweep() override { inner_->sweep(); }

 private:
  const std::unique_ptr<Transport> inner_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_FORWARDING_TRANSPORT_H_
