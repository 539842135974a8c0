// collectives_tour: what process groups do, step by step, printed by rank 0. Start it with 4 ranks:
//
//   weftrun -n 4 collectives_tour

#include <cstdio>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_format.h"
#include "weft/collectives/process_group.h"

namespace {

std::string text(const at::Tensor& t) {
  std::string out = "[";
  const at::Tensor flat = t.to(at::kDouble).contiguous().view({-1});
  for (int64_t i = 0; i < flat.numel(); ++i) {
    out += absl::StrFormat(i == 0 ? "%g" : " %g", flat[i].item<double>());
  }
  return out + "]";
}

// Of rank 0; the others' lines would come in any order.
template <class... Args>
void say(const weft::ProcessGroup& group, const absl::FormatSpec<Args...>& format,
         const Args&... args) {
  if (group.rank() == 0) absl::PrintF(format, args...);
}

at::Tensor filled(int64_t n, double value) { return at::full({n}, value); }

void operations(weft::ProcessGroup& group) {
  const int rank = group.rank();
  const int size = group.size();

  at::Tensor t = filled(3, rank);
  group.all_reduce(t);
  say(group, "all_reduce, sum: %s\n", text(t));
  t = filled(3, rank);
  group.all_reduce(t, {.op = weft::ReduceOp::kMax});
  say(group, "all_reduce, max: %s\n", text(t));

  // Tensors of any strides: every second element.
  t = at::arange(6, at::kFloat);
  group.all_reduce(t.slice(0, 0, 6, 2));
  say(group, "all_reduce of every second element: %s\n", text(t));

  t = filled(2, rank);
  group.broadcast(t, {.root = size - 1});
  say(group, "broadcast from rank %d: %s\n", size - 1, text(t));

  // Parts of different sizes.
  weft::TensorList parts;
  for (int r = 0; r < size; ++r) parts.push_back(at::zeros({r + 1}));
  group.all_gather(parts, filled(rank + 1, rank));
  say(group, "all_gather, the last part: %s\n", text(parts.back()));

  const at::Tensor mine = at::zeros({2});
  group.reduce_scatter_tensor(mine, at::arange(2 * size, at::kFloat));
  say(group, "reduce_scatter, the first part: %s\n", text(mine));

  // Sequence parallelism: from rows of the sequence for all heads to all rows for one head.
  const at::Tensor rows = filled(size, rank).view({size, 1});  // head x own row
  const at::Tensor head = at::zeros({size, 1});                // all rows of the own head
  group.all_to_all_single(head, rows);
  say(group, "all_to_all: head 0 has rows %s\n", text(head));
}

void messages(weft::ProcessGroup& group) {
  const int rank = group.rank();
  const int next = (rank + 1) % group.size();
  const int previous = (rank + group.size() - 1) % group.size();
  if (group.size() == 1) return;
  // Two tensors at once, told apart by their tags; the receiver takes the second first.
  std::vector<weft::Work> sent;
  sent.push_back(group.send_async(filled(2, rank), next, {.tag = 1}));
  sent.push_back(group.send_async(filled(2, 10 + rank), next, {.tag = 2}));
  at::Tensor a = at::zeros({2});
  at::Tensor b = at::zeros({2});
  group.recv(b, previous, {.tag = 2});
  group.recv(a, previous, {.tag = 1});
  for (const weft::Work& work : sent) work.wait();
  say(group, "from rank %d: tag 1 %s, tag 2 %s\n", previous, text(a), text(b));
  // A shape that the receiver does not know.
  if (rank == 1) group.send(at::arange(6, at::kFloat).view({2, 3}), 0);
  if (rank == 0) {
    const at::Tensor any = group.recv_any_shape();
    say(group, "a tensor of %d x %d came: %s\n", any.size(0), any.size(1), text(any));
  }
}

void asynchronous(weft::ProcessGroup& group) {
  std::vector<at::Tensor> tensors;
  std::vector<weft::Work> works;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(filled(1000, i));
    works.push_back(group.all_reduce_async(tensors.back(), {.op = weft::ReduceOp::kAvg}));
  }
  double sum = 0;
  for (int i = 0; i < 4; ++i) {
    works[static_cast<size_t>(i)].wait();
    sum += tensors[static_cast<size_t>(i)][0].item<double>();
  }
  say(group, "four averages under way at once: %g together\n", sum);
}

void groups(weft::ProcessGroup& group) {
  // Odd and even ranks.
  weft::ProcessGroup half = group.split(group.rank() % 2);
  const at::Tensor t = filled(1, group.rank());
  half.all_reduce(t);
  say(group, "even ranks alone: %d ranks, sum %s\n", half.size(), text(t));
  // Some of them; only these call it.
  if (group.size() > 2 && group.rank() < 2) {
    weft::ProcessGroup first = group.new_group({1, 0});
    say(group, "rank 0 is rank %d of the group of 1 and 0\n", first.rank());
  }
  // Memory that all ranks of a host see: nothing is staged.
  at::Tensor shared = group.empty({1000});
  shared.fill_(group.rank());
  group.all_reduce(shared);
  say(group, "a tensor of the group's memory: %g\n", shared[999].item<double>());
  group.monitored_barrier();
}

void errors(weft::ProcessGroup& group) {
  // Found at the caller: nothing moved, and the group goes on.
  const weft::Status bad = group.try_broadcast(at::zeros({1}), {.root = 99});
  say(group, "refused: %s\n", std::string(bad.message()));
  group.barrier();
  // Found where ranks meet: an error on all of them, and the end of the group.
  const weft::Status differs = group.try_all_reduce(at::zeros({group.rank() == 0 ? 4 : 5}));
  say(group, "ranks that differ: %s\n", std::string(differs.message()));
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  at::set_num_threads(1);
  try {
    weft::ProcessGroup group = weft::init_process_group();
    say(group, "%d ranks over %s\n", group.size(), std::string(group.backend()));
    operations(group);
    messages(group);
    asynchronous(group);
    groups(group);
    errors(group);
    if (group.rank() == 0) std::puts("collectives_tour: ok");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "collectives_tour: %s\n", e.what());
    return 1;
  }
}
