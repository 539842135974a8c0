#ifndef WEFT_TESTS_TESTING_GLOO_GROUP_H_
#define WEFT_TESTS_TESTING_GLOO_GROUP_H_

// LibTorch's own process group on gloo, for tests of workers and collectives side by side. On
// loopback.
//
//   auto store = c10::make_intrusive<c10d::HashStore>();           // one for all ranks
//   auto group = make_gloo_group(store, rank, size);               // blocks until all ranks are
//   here std::vector<at::Tensor> tensors{at::ones({3})}; group->allreduce(tensors)->wait();
//
// Threads: each rank makes its own, all at the same time.

#include <chrono>

#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace weft::testing {

// Every wait of the group and of its making is bounded by `timeout`; c10d throws when it is over.
c10::intrusive_ptr<c10d::Backend> make_gloo_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout = std::chrono::seconds(30));

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_GLOO_GROUP_H_
