#ifndef WEFT_TRANSPORT_INTERNAL_DATA_OFFER_H_
#define WEFT_TRANSPORT_INTERNAL_DATA_OFFER_H_

// A data offer as bytes (DataOffer in proto/transport.proto). Pure functions.

#include <cstddef>
#include <string>
#include <string_view>

#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::internal {

struct DataOffer {
  std::string ticket;
  size_t index = 0;  // of `count`, in order of the lanes' numbers
  size_t count = 0;
  std::string key;  // of TLS; empty: plain text
};

// `first`: the number of the first data connection.
WEFT_API std::string encode_data_offer(const DataOffer& offer, size_t first);
// Strict: errors are protocol errors. `tls`: whether there must be a key, or none.
WEFT_API StatusOr<DataOffer> decode_data_offer(std::string_view header, size_t first, bool tls);

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_DATA_OFFER_H_
