#ifndef WEFT_STORE_RENDEZVOUS_H_
#define WEFT_STORE_RENDEZVOUS_H_

// The rendezvous: which store the processes of a job meet at when none is given: by URL, or from
// the launcher's variables. weft::join and process groups without a worker meet the same way.
// Threads: any.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "weft/common/api.h"
#include "weft/common/config.h"
#include "weft/store/store.h"
#include "weft/transport/credentials.h"

namespace weft {

// Opens a store for a URL whose scheme open_store() does not know.
using OpenStoreFunction = std::function<StatusOr<std::shared_ptr<Store>>(
    std::string_view url, const StoreOptions& options, std::shared_ptr<Runtime> runtime)>;

struct RendezvousOptions {  // where and as whom workers meet
  std::string url;          // "" or "env://": from the variables
  Config config;
  Environment environment;
  bool is_first = false;  // rank 0: hosts a tcp store
  bool alone = false;     // the only worker: a store of its own will do
  absl::Duration timeout = absl::Seconds(60);
  Credentials credentials{};  // of a tcp store
  // Schemes of the program's own: "zk" stands for URLs that begin with zk://. Of "c10d" the
  // launcher's variables of torchrun make a URL; where it is missing, such a job has to set
  // WEFT_STORE.
  std::map<std::string, OpenStoreFunction> schemes{};
};

// A store of the job's own that its workers must clear away (found by dynamic_cast). The last
// process that lets go of it does.
class SharedPlace {
 public:
  virtual ~SharedPlace() = default;
  // This worker has shut down together with the others: the first one may wait for them, because
  // they are about to let go too. Without this it waits for none.
  virtual void others_are_leaving() = 0;
};

// Errors: invalid_argument, with the next step, when there is neither a URL nor a launcher that
// names a place; what open_store() says otherwise.
WEFT_API StatusOr<std::shared_ptr<Store>> open_rendezvous_store(const RendezvousOptions& options,
                                                                std::shared_ptr<Runtime> runtime);

}  // namespace weft

#endif  // WEFT_STORE_RENDEZVOUS_H_
