#include "weft/transport/internal/data/offer.h"

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/proto/transport.pb.h"
#include "weft/transport/internal/data/lane.h"
#include "weft/transport/internal/data/sealed.h"
#include "weft/transport/internal/wire/handshake.h"

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
  out.set_dialler_key(offer.dialler_key);
  out.set_acceptor_key(offer.acceptor_key);
  return out.SerializeAsString();
}

StatusOr<DataOffer> decode_data_offer(std::string_view header, size_t first, bool sealed) {
  v1::DataOffer in;
  if (!in.ParseFromArray(header.data(), static_cast<int>(header.size()))) {
    return bad_offer("that cannot be read");
  }
  if (in.ticket().size() != kDataTicketBytes) {
    return bad_offer(absl::StrCat("with a ticket of ", in.ticket().size(), " bytes, must be ",
                                  kDataTicketBytes));
  }
  const size_t key = sealed ? kSealKeyBytes : 0;
  if (in.dialler_key().size() != key || in.acceptor_key().size() != key) {
    return bad_offer(absl::StrCat("with keys of ", in.dialler_key().size(), " and ",
                                  in.acceptor_key().size(), " bytes, must be ", key));
  }
  if (in.count() > kMaxLanes - first || in.number() < first || in.number() - first >= in.count()) {
    return bad_offer(absl::StrCat("of number ", in.number(), " of ", in.count(),
                                  ", where the first is ", first, " and the last ", kMaxLanes - 1));
  }
  return DataOffer{in.ticket(), in.number() - first, in.count(), in.dialler_key(),
                   in.acceptor_key()};
}

}  // namespace weft::internal
