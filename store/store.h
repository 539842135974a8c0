#ifndef WEFT_STORE_STORE_H_
#define WEFT_STORE_STORE_H_

// Store: the small key-value service where the workers of a job find each other. c10d's vocabulary.
//
//   HashStore    in this process                           (store/hash_store.h)
//   FileStore    a file shared by processes of one host     (store/file_store.h)
//   TcpStore     ours, over gRPC: one server, many clients  (store/tcp_store.h)
//   EtcdStore    a real etcd, v3 API                        (store/etcd_store.h)
//   PrefixStore  puts a prefix before every key             (store/prefix_store.h)
//
// Values are bytes; a missing key and an empty value are different things except where compare_set
// says so. Keys: 1 to 1,024 bytes. Values: at most 1 MiB. Anything else is invalid_argument.
// Every operation is atomic and has a deadline (`timeout`, 60 s by default; an error of kind
// deadline names the operation, the key and the store). A store that cannot be reached is retried
// with backoff until the deadline, then kind unavailable. Any thread; operations may block.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/common/time.h"
#include "weft/transport/credentials.h"

namespace weft {

struct StoreEntry {  // a key with its value
  std::string key;
  std::string value;

  friend bool operator==(const StoreEntry&, const StoreEntry&) = default;
};

class WEFT_API Store {
 public:
  virtual ~Store() = default;
  // Sets the value of a key, whatever it was.
  virtual Status set(std::string_view key, std::string_view value, Timeout timeout = {}) = 0;

  // Returns the value; an empty optional when there is no such key. Does not wait for the key.
  virtual StatusOr<std::optional<std::string>> try_get(std::string_view key,
                                                       Timeout timeout = {}) = 0;

  // Waits until the key exists, and returns its value.
  virtual StatusOr<std::string> get(std::string_view key, Timeout timeout = {}) = 0;

  // Adds to a decimal counter (0 when missing) and returns the new value.
  virtual StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout = {}) = 0;

  // Replaces the value if it is `expected`; an empty `expected` stands for "no such key". Returns
  // the value after the operation: equal to `desired` when it was replaced, "" when the key is
  // missing and something else was expected.
  virtual StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                            std::string_view desired, Timeout timeout = {}) = 0;

  // Deletes a key. Returns false when there was no such key.
  virtual StatusOr<bool> delete_key(std::string_view key, Timeout timeout = {}) = 0;

  // Returns whether all of the keys exist now.
  virtual StatusOr<bool> check(const std::vector<std::string>& keys, Timeout timeout = {}) = 0;

  // Waits until all of the keys exist. A deadline error names the missing keys.
  virtual Status wait(const std::vector<std::string>& keys, Timeout timeout = {}) = 0;

  // Waits until the value of `key` differs from `seen`, and returns the new value. An empty
  // optional stands for a missing key, in `seen` and in the result. Callers watch a key by
  // repeating this.
  virtual StatusOr<std::optional<std::string>> wait_change(std::string_view key,
                                                           const std::optional<std::string>& seen,
                                                           Timeout timeout = {}) = 0;

  // Returns the keys that begin with `prefix`, sorted.
  virtual StatusOr<std::vector<std::string>> list_keys(std::string_view prefix,
                                                       Timeout timeout = {}) = 0;
  // Returns the number of keys.
  virtual StatusOr<int64_t> num_keys(Timeout timeout = {}) = 0;

  // The next two read many keys, each value as it is at some moment of the operation. The stores of
  // weft send one request, or one per MiB of values. The default implementations, for a Store that
  // does not override them, read key by key, each with the whole of `timeout`.
  // Returns the values of `keys`, in their order; an empty optional for each missing key.
  virtual StatusOr<std::vector<std::optional<std::string>>> multi_get(
      const std::vector<std::string>& keys, Timeout timeout = {});
  // Returns the keys that begin with `prefix`, sorted, with their values.
  virtual StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix,
                                                         Timeout timeout = {});

  // Makes every blocked and every later operation of this object fail with kind cancelled, for an
  // owner that shuts down. Idempotent. Other clients of the same data are not affected.
  virtual void interrupt() = 0;

  // Returns the store's name for messages, such as "tcp://127.0.0.1:29500".
  virtual std::string describe() const = 0;
};

// How open_store() opens a store.
struct StoreOptions {
  bool is_server = false;     // tcp: host the data here (rank 0)
  Timeout timeout{};          // default for every operation, and for connecting: 60 s
  std::string run_id{};       // file: content of another run is refused
  Credentials credentials{};  // tcp: TLS, at the server and at its clients; empty: plain text
};
// Opens the store that a URL names:
//   hash://                in this process: a new, empty one (tests)
//   file:///path           FileStore
//   tcp://host:port        TcpStore client; with is_server, also starts the server in this process
//   etcd://host:port/path  EtcdStore below that prefix; several hosts and "?user=..." are described
//                          in docs/stores.md
// weft::join resolves env://, since it knows the launcher's variables. Errors name the URL and say
// what is wrong with it.
WEFT_API StatusOr<std::shared_ptr<Store>> open_store(std::string_view url,
                                                     const StoreOptions& options,
                                                     std::shared_ptr<Runtime> runtime);

}  // namespace weft

#endif  // WEFT_STORE_STORE_H_
