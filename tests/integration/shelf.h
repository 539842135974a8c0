#ifndef WEFT_TESTS_INTEGRATION_SHELF_H_
#define WEFT_TESTS_INTEGRATION_SHELF_H_

// Shelf: the RRefs that a worker of the integration tests holds, by name, and the verbs by which a
// test moves them. Threads: any.

#include <functional>
#include <istream>
#include <map>
#include <string>

#include "weft/common/mutex.h"
#include "weft/rpc/library.h"
#include "weft/rref/rref.h"

namespace weft::integration {

class Shelf {
 public:
  using Ref = RRef<int64_t>;
  using Waiter = std::function<std::string(Timeout)>;

  Shelf();

  // What is to be waited for:
  //   make NAME TO number|hold VALUE DEADLINE_MS   an object at TO; hold: when its gate is open
  //   get NAME DEADLINE_MS                         its value
  //   lend NAME TO DEADLINE_MS                     its value, fetched by TO
  //   keep NAME TO THEIRS DEADLINE_MS              TO puts it on its shelf
  //   drop NAME                                    "ok 1" when there was one
  //   cycles TO THIRD COUNT                        so many objects at TO, each fetched by THIRD and
  //                                                dropped; "ok COUNT"
  // Throws weft::Error for what the calls throw.
  Waiter begin(const Worker& worker, const std::string& verb, std::istream& words);

  Library library{"shelf"};

 private:
  void put(const std::string& name, Ref ref);
  Ref find(const std::string& name) const;
  bool drop(const std::string& name);

  mutable Mutex mutex_;
  std::map<std::string, Ref> held_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::integration

#endif  // WEFT_TESTS_INTEGRATION_SHELF_H_
