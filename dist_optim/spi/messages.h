#ifndef WEFT_DIST_OPTIM_SPI_MESSAGES_H_
#define WEFT_DIST_OPTIM_SPI_MESSAGES_H_

// What an optimizer says to its parts at the owners of parameters. Ordinary structs of ordinary
// method calls (weft/rpc/struct.h); fields may be added at their ends.

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/dist_autograd/id.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/struct.h"
#include "weft/rref/rref.h"

namespace weft::internal {

// Options of a group as numbers: those of a tag of weft::optim in the order in which it visits
// them, or nothing but the learning rate, or nothing.
using PackedOptions = std::vector<double>;

template <class Tag>
PackedOptions pack_options(const typename Tag::Options& options) {
  PackedOptions out;
  Tag::visit(options,
             [&out](const char*, auto value) { out.push_back(static_cast<double>(value)); });
  return out;
}

// REQUIRES: they are pack_options()'s.
template <class Tag>
typename Tag::Options unpack_options(const PackedOptions& packed) {
  typename Tag::Options out;
  size_t i = 0;
  Tag::visit(out, [&](const char*, auto& field) {
    field = static_cast<std::decay_t<decltype(field)>>(packed[i++]);
  });
  return out;
}

struct ParameterPlan {
  int64_t isolation = 0;
  int64_t group = 0;
  std::vector<RRef<at::Tensor>> parameters{};  // that the callee owns
  PackedOptions options{};
  uint64_t optimizer = 0;  // of the caller's
};
WEFT_STRUCT(ParameterPlan, isolation, group, parameters, options, optimizer);

struct StepPlan {
  // The context.
  uint32_t creator = 0;
  uint64_t incarnation = 0;
  uint64_t context = 0;
  // Number of the step at this optimizer; names the step in its second phase.
  uint64_t step = 0;
  std::vector<PackedOptions> options{};  // by group
  bool require_finite = false;
  // versioned: of this owner's parameters, in their order, and how far behind they may be.
  std::vector<int64_t> versions{};
  int64_t max_staleness = 0;
  // The trainer's passes whose gradients it is to use (weft/dist_autograd/ended_passes.h).
  uint64_t ended_below = 0;
  uint64_t last_pass = 0;
  std::vector<uint64_t> running{};
  std::vector<uint64_t> aborted{};

  AutogradContextId context_id() const {
    return AutogradContextId{WorkerKey{WorkerId(creator), Incarnation(incarnation)}, context};
  }
};
WEFT_STRUCT(StepPlan, creator, incarnation, context, step, options, require_finite, versions,
            max_staleness, ended_below, last_pass, running, aborted);

// A step within a backward, of whatever is there of this optimizer.
struct FusedPlan {
  uint32_t creator = 0;
  uint64_t incarnation = 0;
  uint64_t optimizer = 0;
  StepPlan step{};
};
WEFT_STRUCT(FusedPlan, creator, incarnation, optimizer, step);

struct StepAnswer {
  int64_t updated = 0;              // parameters; before the second phase: that will be
  int64_t stale = 0;                // of them, updated by others since their versions were read
  std::vector<int64_t> versions{};  // of all, now
  bool applied = false;
};
WEFT_STRUCT(StepAnswer, updated, stale, versions, applied);

// By "3.exp_avg": parameter of this owner, buffer. To be loaded into one of weft::optim, also by
// "group.0" the options of each group.
using OwnerStateDict = std::map<std::string, at::Tensor>;
inline constexpr char kGroupKey[] = "group.";

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_SPI_MESSAGES_H_
