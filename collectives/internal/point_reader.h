#ifndef WEFT_COLLECTIVES_INTERNAL_POINT_READER_H_
#define WEFT_COLLECTIVES_INTERNAL_POINT_READER_H_

// PointReader: messages of send() out of a stream of bytes, in any pieces. Everything in a header
// is checked before memory is taken for what it announces, and memory grows with the bytes that
// have come. After an error it takes nothing more. One thread.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "weft/collectives/internal/header.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::internal {

// Error, kind protocol: no correct member sends such a header on the lane of send().
WEFT_API Status check_point_header(const Header& header, uint64_t group, uint32_t generation,
                                   int peer);

class WEFT_API PointReader {
 public:
  static constexpr uint64_t kMaxBytes = uint64_t{1} << 40;

  PointReader(uint64_t group, uint32_t generation, int peer)
      : group_(group), generation_(generation), peer_(peer) {}

  // Where the next bytes belong, and how many at most; never none.
  char* place(size_t* bytes);
  // So many were put there. OK, or what is wrong with the header that they complete.
  Status took(size_t bytes);
  // The message is whole: take it, and the next begins.
  bool whole() const { return header_done_ && body_got_ == header_.bytes; }
  Header take(std::vector<char>* body);

 private:
  const uint64_t group_;
  const uint32_t generation_;
  const int peer_;
  Header header_;
  size_t header_got_ = 0;
  bool header_done_ = false;
  std::vector<char> body_;
  uint64_t body_got_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_POINT_READER_H_
