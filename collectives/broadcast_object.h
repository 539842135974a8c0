#ifndef WEFT_COLLECTIVES_BROADCAST_OBJECT_H_
#define WEFT_COLLECTIVES_BROADCAST_OBJECT_H_

// broadcast_object: a value of any type that travels with calls (rpc/value.h), from one rank to
// all: numbers, texts, containers, tensors, structs with WEFT_STRUCT; never code.
//
//   Settings settings = weft::broadcast_object(group, read_settings_if(group.rank() == 0));
//
// Threads: as ProcessGroup.

#include <utility>

#include "weft/collectives/process_group.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/rpc/value.h"

namespace weft {

namespace internal {
// What the root has encoded, at every rank. `mine` counts at the root only; an error of its is one
// of all ranks.
WEFT_API StatusOr<Payload> broadcast_payload(ProcessGroup& group, StatusOr<Payload> mine,
                                             const RootedOptions& options);
}  // namespace internal

// `value` counts at the root only. An error when it cannot travel or is not a T at the others: on
// every rank that finds it.
template <class T>
StatusOr<T> try_broadcast_object(ProcessGroup& group, const T& value,
                                 const RootedOptions& options = {}) {
  StatusOr<Payload> mine = Payload();
  if (group.rank() == options.root) {
    Encoder encoder(&*mine);
    encoder.put(value);
    if (!encoder.status().ok()) mine = encoder.status();
  }
  WEFT_ASSIGN_OR_RETURN(Payload payload,
                        internal::broadcast_payload(group, std::move(mine), options));
  Decoder decoder(std::move(payload));
  WEFT_ASSIGN_OR_RETURN(T out, decoder.take<T>());
  WEFT_RETURN_IF_ERROR(decoder.finish());
  return out;
}
template <class T>
T broadcast_object(ProcessGroup& group, const T& value, const RootedOptions& options = {}) {
  return value_or_throw(try_broadcast_object(group, value, options));
}

}  // namespace weft

#endif  // WEFT_COLLECTIVES_BROADCAST_OBJECT_H_
