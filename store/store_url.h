#ifndef WEFT_STORE_STORE_URL_H_
#define WEFT_STORE_STORE_URL_H_

// StoreUrl: the parts of a store's URL, for open_store() and for schemes of a program's own. Value
// type and pure functions; any thread.

#include <map>
#include <string>
#include <string_view>

#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft {

struct StoreUrl {
  std::string text;                          // the whole, for errors
  std::string scheme;                        // before "://"
  std::string rest;                          // between "://" and "?"
  std::map<std::string, std::string> query;  // "?a=b&c": c is ""

  // Takes a parameter out of the query; what is left in the end is unknown.
  WEFT_API std::string take(const std::string& name, const std::string& fallback);
  // OK when every parameter was taken; otherwise an error that names one.
  WEFT_API Status nothing_left() const;
  // An error, kind invalid_argument, that names the URL.
  WEFT_API Status error(std::string_view why) const;
};

// Error, kind invalid_argument: there is no "://", or nothing before it.
WEFT_API StatusOr<StoreUrl> parse_store_url(std::string_view text);

}  // namespace weft

#endif  // WEFT_STORE_STORE_URL_H_
