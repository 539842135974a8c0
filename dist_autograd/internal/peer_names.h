#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_PEER_NAMES_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_PEER_NAMES_H_

// PeerNames: what the workers are called that this one has to do with, for errors that are told
// when they have gone. Workers come and go for ever: of those that are gone the last ones are
// remembered. Not thread-safe.

#include <cstddef>
#include <deque>
#include <map>
#include <string>

#include "weft/common/worker_key.h"

namespace weft::internal {

class PeerNames {
 public:
  static constexpr size_t kMostGone = 1024;

  void add(const WorkerInfo& worker) { names_.try_emplace(key_of(worker), worker.name); }
  // Once for each.
  void add_gone(const WorkerInfo& worker) {
    add(worker);
    gone_.push_back(key_of(worker));
    if (gone_.size() <= kMostGone) return;
    names_.erase(gone_.front());
    gone_.pop_front();
  }
  // Null: not known, or not any more.
  const std::string* find(const WorkerKey& worker) const {
    const auto at = names_.find(worker);
    return at == names_.end() ? nullptr : &at->second;
  }
  size_t size() const { return names_.size(); }

 private:
  std::map<WorkerKey, std::string> names_;
  std::deque<WorkerKey> gone_;  // the longest gone first
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_PEER_NAMES_H_
