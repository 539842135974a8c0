#ifndef WEFT_TESTS_TESTING_FAKE_DEVICES_H_
#define WEFT_TESTS_TESTING_FAKE_DEVICES_H_

// Devices without hardware, for JoinOptions::device_backend.

#include "weft/rpc/internal/device_backend.h"

namespace weft::testing {

class FakeDevices : public internal::DeviceBackend {
 public:
  explicit FakeDevices(int count) : count_(count) {}
  int device_count() const override { return count_; }

 private:
  const int count_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_FAKE_DEVICES_H_
