// Arbitrary bytes where a member of a process group sends tensors by send(): whatever comes, no
// memory is taken for what a header only announces, and a message that comes out is what its header
// says.

#include <algorithm>
#include <cstring>
#include <vector>

#include "weft/collectives/internal/point_reader.h"
#include "weft/tests/fuzz/target.h"

// A body grows by doubling, and its old half is copied.
const size_t kMostBytesPerByte = 8;

weft::Status fuzz_one(std::string_view input) {
  namespace in = weft::internal;
  in::PointReader reader(/*group=*/1, /*generation=*/1, /*peer=*/2);
  size_t pieces = 0;
  while (!input.empty()) {
    const Decoding counts(input.size());
    size_t room = 0;
    char* const place = reader.place(&room);
    require(place != nullptr && room > 0);
    // In pieces of 1 to 64 bytes, as a socket may give them.
    const size_t n = std::min({room, input.size(), 1 + (pieces++ * 7) % 64});
    std::memcpy(place, input.data(), n);
    input.remove_prefix(n);
    WEFT_RETURN_IF_ERROR(reader.took(n));
    if (!reader.whole()) continue;
    std::vector<char> body;
    const in::Header header = reader.take(&body);
    require(header.group == 1 && body.size() == header.bytes);
    require(in::check_point_header(header, 1, 1, 2).ok());
  }
  return absl::OkStatus();
}
