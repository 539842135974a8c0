#ifndef WEFT_TESTS_TESTING_GLOO_GROUP_H_
#define WEFT_TESTS_TESTING_GLOO_GROUP_H_

// LibTorch's own process group on gloo, for tests of workers and collectives side by side. On
// loopback.
//
//   auto store = c10::make_intrusive<c10d::HashStore>();  // one for all ranks
//   auto group = make_gloo_group(store, rank, size);      // blocks until all ranks are here
//   at::Tensor sum = all_reduce(group, at::ones({3}));
//
// Threads: each rank makes its own, all at the same time. Collectives of several ranks of one
// process are begun through all_reduce() only: LibTorch 2.11 notes each in a process-wide recorder
// (c10d::FlightRecorder), in a map that it does not lock.

#include <chrono>

#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace weft::testing {

// Every wait of the group and of its making is bounded by `timeout`; c10d throws when it is over.
c10::intrusive_ptr<c10d::Backend> make_gloo_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout = std::chrono::seconds(30));

// The sum over all ranks; blocks until they are in.
at::Tensor all_reduce(const c10::intrusive_ptr<c10d::Backend>& group, const at::Tensor& mine);

// The same backend for allreduce, broadcast and allgather, which it begins under that lock.
c10::intrusive_ptr<c10d::Backend> begun_one_at_a_time(c10::intrusive_ptr<c10d::Backend> group);

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_GLOO_GROUP_H_
