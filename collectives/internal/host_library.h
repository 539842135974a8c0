#ifndef WEFT_COLLECTIVES_INTERNAL_HOST_LIBRARY_H_
#define WEFT_COLLECTIVES_INTERNAL_HOST_LIBRARY_H_

// HostLibrary: another library that performs the operations of groups on plain memory. The core
// knows this interface alone; a program that wants one hands it in (ProcessGroupOptions), as
// weft::Mpi does.
//
// A group by a library has a Link as every other: it carries faults, goodbyes, the comparison of
// operations, and messages of send() and recv().

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/collectives/internal/engine.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"

namespace weft::internal {

// What a member's record says of its library.
struct HostOffer {
  std::string library;  // "mpi: Open MPI v4.1.4", equal for all members
  std::string place;    // of this process in it
};

// A group that is connected except for the library.
struct HostConnection {
  Membership member;
  std::vector<std::string> places;  // by rank
  std::unique_ptr<Link> link;
  AlgorithmChoice choice;
  bool compares = false;  // before each operation: ProcessGroupOptions::compare_operations
  std::shared_ptr<Runtime> runtime;
  absl::Time deadline;
};

// Threads: all methods from anywhere.
class HostLibrary {
 public:
  virtual ~HostLibrary() = default;
  virtual std::string_view name() const = 0;  // of the backend; a literal
  virtual StatusOr<HostOffer> offer() = 0;
  // Returns when the libraries of all members have connected.
  virtual StatusOr<std::unique_ptr<Engine>> connect(HostConnection connection) = 0;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_HOST_LIBRARY_H_
