#ifndef WEFT_RPC_GROUP_H_
#define WEFT_RPC_GROUP_H_

// all_gather and barrier over calls: for control, not for tensors of a model (that is
// `collectives`).
//
//   std::vector<int64_t> sizes = weft::all_gather(worker, my_size);
//   weft::barrier(worker, {"trainer0", "trainer1"});
//
// Every member of `names` (all living workers when empty) must make the same call; calls of the
// same set are matched in order, so different sets and several threads may be under way at once.
// A set is of living workers: one that comes back under its name is another member. A gathering
// that failed is over for all its members, also for one that calls late: it gets the same error at
// once, and who then tries again meets the others who do.
// The smallest name leads: the others report to it, it answers them all. Always bounded (`timeout`,
// the worker's rpc_timeout by default): then kind deadline names those that did not report. When a
// member dies or leaves, all others fail at once with kind peer_lost. Needs group_service() at
// join, which weft::join lists. Any thread; blocks.

#include <string>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/value.h"
#include "weft/rpc/worker.h"

namespace weft {

WEFT_API ServiceFactory group_service();

// One payload per name, in order of the sorted names. The untyped form.
WEFT_API StatusOr<std::vector<Payload>> all_gather_payloads(const Worker& worker, Payload mine,
                                                            std::vector<std::string> names,
                                                            Timeout timeout);

template <class T>
std::vector<T> all_gather(const Worker& worker, const T& value, std::vector<std::string> names = {},
                          Timeout timeout = {}) {
  Payload mine;
  Encoder encoder(&mine);
  encoder.put(value);
  throw_if_error(encoder.status());
  std::vector<T> out;
  for (Payload& payload :
       value_or_throw(all_gather_payloads(worker, std::move(mine), std::move(names), timeout))) {
    Decoder decoder(std::move(payload));
    out.push_back(value_or_throw(decoder.take<T>()));
    throw_if_error(decoder.finish());
  }
  return out;
}

// Returns when all have called it.
WEFT_API void barrier(const Worker& worker, std::vector<std::string> names = {},
                      Timeout timeout = {});

}  // namespace weft

#endif  // WEFT_RPC_GROUP_H_
