#ifndef WEFT_STORE_INTERNAL_TABLE_STORE_H_
#define WEFT_STORE_INTERNAL_TABLE_STORE_H_

// TableStore: every operation of Store on a table that the process can reach itself. A subclass
// says how a function is applied to the table atomically, and how one waits for a change of it.
// Threads: any.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "weft/store/internal/checks.h"
#include "weft/store/internal/table.h"
#include "weft/store/store.h"

namespace weft::internal {

class TableStore : public Store {
 public:
  TableStore(std::shared_ptr<Runtime> runtime, Timeout default_timeout)
      : runtime_(std::move(runtime)), default_timeout_(default_timeout) {}

  Status set(std::string_view key, std::string_view value, Timeout timeout) override;
  StatusOr<std::optional<std::string>> try_get(std::string_view key, Timeout timeout) override;
  StatusOr<std::string> get(std::string_view key, Timeout timeout) override;
  StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout) override;
  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout) override;
  StatusOr<bool> delete_key(std::string_view key, Timeout timeout) override;
  StatusOr<bool> check(const std::vector<std::string>& keys, Timeout timeout) override;
  Status wait(const std::vector<std::string>& keys, Timeout timeout) override;
  StatusOr<std::optional<std::string>> wait_change(std::string_view key,
                                                   const std::optional<std::string>& seen,
                                                   Timeout timeout) override;
  StatusOr<std::vector<std::string>> list_keys(std::string_view prefix, Timeout timeout) override;
  StatusOr<int64_t> num_keys(Timeout timeout) override;
  StatusOr<std::vector<std::optional<std::string>>> multi_get(const std::vector<std::string>& keys,
                                                              Timeout timeout) override;
  StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix, Timeout timeout) override;

 protected:
  enum class Step { kDone, kChanged, kNotYet };
  // Looks at the table once; must leave it as it was unless it returns kChanged.
  using Body = std::function<StatusOr<Step>(StoreTable* table)>;
  // What a body is known to do before it has looked: kChange: it returns kChanged, or an error.
  enum class Access { kLook, kChange };

  // Applies `body` atomically, and again after changes while it answers kNotYet, which only a change
  // of one of `keys` ends. Kind deadline when the time has come first (whatever its message),
  // cancelled when this object was interrupted.
  virtual Status perform(const StoreOp& op, Access access, const std::vector<std::string>& keys,
                         const Body& body) = 0;

  Runtime& runtime() const { return *runtime_; }
  const std::shared_ptr<Runtime>& shared_runtime() const { return runtime_; }
  Timeout default_timeout() const { return default_timeout_; }

 private:
  StoreOp op(std::string what, Timeout timeout) const;
  // perform() with checks before and the message of a deadline after.
  Status run(const StoreOp& op, Access access, const Body& body,
             const std::function<std::string()>& not_yet,
             const std::vector<std::string>& keys = {});
  // Returns what `read` finds in the table. `read` may be called again, and then replaces what it
  // found.
  template <class Read>
  StatusOr<std::invoke_result_t<const Read&, const StoreTable&>> look(const StoreOp& op,
                                                                      const Read& read);

  const std::shared_ptr<Runtime> runtime_;
  const Timeout default_timeout_;
};

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_TABLE_STORE_H_
