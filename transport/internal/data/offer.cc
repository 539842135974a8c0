#include "weft/transport/internal/data/offer.h"

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/proto/transport.pb.h"
#include "weft/transport/channel.h"
#include "weft/transport/internal/wire/handshake.h"
#include "weft/transport/tls_stream.h"

namespace weft::internal {
namespace {

WEFT_COLD Status bad_offer(std::string_view why) {
  return make_error(ErrorKind::kProtocol, absl::StrCat("a data offer ", view(why)));
}

}  // namespace

std::string encode_data_offer(const DataOffer& offer, size_t first) {
  v1::DataOffer out;
  out.set_ticket(offer.ticket);
  out.set_number(static_cast<uint32_t>(first + offer.index));
  out.set_count(static_cast<uint32_t>(offer.count));
  out.set_key(offer.key);
  return out.SerializeAsString();
}

StatusOr<DataOffer> decode_data_offer(std::string_view header, size_t first, bool tls) {
  v1::DataOffer in;
  if (!in.ParseFromArray(header.data(), static_cast<int>(header.size()))) {
    return bad_offer("that cannot be read");
  }
  if (in.ticket().size() != kSocketTicketBytes) {
    return bad_offer(absl::StrCat("with a ticket of ", in.ticket().size(), " bytes, must be ",
                                  kSocketTicketBytes));
  }
  const size_t key = tls ? kTlsKeyBytes : 0;
  if (in.key().size() != key) {
    return bad_offer(absl::StrCat("with a key of ", in.key().size(), " bytes, must be ", key));
  }
  if (in.count() > kMaxLanes - first || in.number() < first || in.number() - first >= in.count()) {
    return bad_offer(absl::StrCat("of number ", in.number(), " of ", in.count(),
                                  ", where the first is ", first, " and the last ", kMaxLanes - 1));
  }
  return DataOffer{in.ticket(), in.number() - first, in.count(), in.key()};
}

}  // namespace weft::internal
