#ifndef WEFT_COMMON_POSIX_H_
#define WEFT_COMMON_POSIX_H_

// Small pieces around POSIX calls that several parts need. A UniqueFd belongs to one owner.

#include <unistd.h>

#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace weft::internal {

// "Permission denied" for EACCES.
inline std::string system_error(int code) { return std::strerror(code); }

// Closes what it owns.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  // Gives up ownership and returns the descriptor, which the caller now owns.
  int release() { return std::exchange(fd_, -1); }
  // Owns `fd` from now on.
  void reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// Takes as long for a near miss as for a far one. The length is no secret.
inline bool same_bytes_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char differs = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    differs = static_cast<unsigned char>(differs | (a[i] ^ b[i]));
  }
  return differs == 0;
}

}  // namespace weft::internal

#endif  // WEFT_COMMON_POSIX_H_
