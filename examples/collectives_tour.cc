// collectives_tour: what process groups do, step by step, printed by rank 0: every operation, groups
// of groups, errors, and what survivors of a failure do. Start it with any number of ranks, under
// weftrun, torchrun --no-python, mpirun or srun:
//
//   weftrun -n 4 collectives_tour [--ranks-per-node 2]
//
// --ranks-per-node: shows the groups of nodes on one machine; default: what the launcher says.

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "ATen/ops/sparse_coo_tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_format.h"
#include "weft/collectives/broadcast_object.h"
#include "weft/collectives/point_operations.h"
#include "weft/collectives/process_group.h"
#include "weft/collectives/sparse.h"
#include "weft/common/config.h"
#include "weft/common/launch_info.h"
#include "weft/examples/command_line.h"
#include "weft/rpc/containers.h"

namespace {

std::string text(const at::Tensor& t) {
  std::string out = "[";
  const at::Tensor flat = t.to(at::kDouble).contiguous().view({-1});
  for (int64_t i = 0; i < flat.numel(); ++i) {
    out += absl::StrFormat(i == 0 ? "%g" : " %g", flat[i].item<double>());
  }
  return out + "]";
}

// Prints at rank 0; the others' lines would come in any order.
template <class... Args>
void say(const weft::ProcessGroup& group, const absl::FormatSpec<Args...>& format,
         const Args&... args) {
  if (group.rank() == 0) absl::PrintF(format, args...);
}

at::Tensor filled(int64_t n, double value) { return at::full({n}, value); }

void reductions(weft::ProcessGroup& group) {
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
  // Several tensors as one.
  const weft::TensorList two{filled(1, rank), filled(2, 1)};
  group.all_reduce_coalesced(two);
  say(group, "all_reduce_coalesced: %s and %s\n", text(two[0]), text(two[1]));
  // The result at one rank.
  t = filled(2, rank + 1);
  group.reduce(t, {.root = 0, .op = weft::ReduceOp::kProd});
  say(group, "reduce, product: %s\n", text(t));
  const at::Tensor mine = at::zeros({2});
  group.reduce_scatter_tensor(mine, at::arange(2 * size, at::kFloat));
  say(group, "reduce_scatter_tensor, the first part: %s\n", text(mine));
  weft::TensorList inputs;  // parts of different sizes
  for (int r = 0; r < size; ++r) inputs.push_back(filled(r + 1, rank));
  const at::Tensor part = at::zeros({rank + 1});
  group.reduce_scatter(part, inputs);
  say(group, "reduce_scatter, the part of rank 0: %s\n", text(part));
  // Each rank has one row of a table of `size` rows.
  const at::Tensor row = at::full({1, 1}, rank, at::kLong);
  const at::Tensor sparse =
      at::sparse_coo_tensor(row, filled(1, rank + 1), {size}, at::TensorOptions());
  const at::Tensor sum = weft::all_reduce_sparse(group, sparse);
  say(group, "all_reduce_sparse: %s\n", text(sum.to_dense()));
}

void copies(weft::ProcessGroup& group) {
  const int rank = group.rank();
  const int size = group.size();
  const int last = size - 1;
  at::Tensor t = filled(2, rank);
  group.broadcast(t, {.root = last});
  say(group, "broadcast from rank %d: %s\n", last, text(t));
  const weft::TensorList two{filled(1, rank), filled(1, 10 * rank)};
  group.broadcast_coalesced(two, {.root = last});
  say(group, "broadcast_coalesced: %s and %s\n", text(two[0]), text(two[1]));
  // Whatever calls carry: here a map.
  std::map<std::string, int64_t> settings;
  if (rank == last) settings = {{"epochs", 12}, {"batch", 32}};
  settings = weft::broadcast_object(group, settings, {.root = last});
  say(group, "broadcast_object: %d epochs\n", settings.at("epochs"));

  weft::TensorList parts;  // of different sizes
  for (int r = 0; r < size; ++r) parts.push_back(at::zeros({r + 1}));
  group.all_gather(parts, filled(rank + 1, rank));
  say(group, "all_gather, the last part: %s\n", text(parts.back()));
  const at::Tensor all = at::zeros({size});
  group.all_gather_into_tensor(all, filled(1, rank));
  say(group, "all_gather_into_tensor: %s\n", text(all));
  group.gather(rank == 0 ? parts : weft::TensorList(), filled(rank + 1, 2 * rank));
  say(group, "gather, the last part: %s\n", text(parts.back()));
  const at::Tensor own = at::zeros({rank + 1});
  group.scatter(own, rank == 0 ? parts : weft::TensorList());
  say(group, "scatter, the part of rank 0: %s\n", text(own));

  weft::TensorList from;
  weft::TensorList to;
  for (int r = 0; r < size; ++r) {
    from.push_back(filled(1, 10 * rank + r));
    to.push_back(at::zeros({1}));
  }
  group.all_to_all(to, from);
  say(group, "all_to_all, from the last rank: %s\n", text(to.back()));
  // Sequence parallelism: from rows of the sequence for all heads to all rows for one head.
  const at::Tensor rows = filled(size, rank).view({size, 1});  // head x own row
  const at::Tensor head = at::zeros({size, 1});                // all rows of the own head
  group.all_to_all_single(head, rows);
  say(group, "all_to_all_single: head 0 has rows %s\n", text(head));
}

void messages(weft::ProcessGroup& group) {
  const int rank = group.rank();
  const int size = group.size();
  const int next = (rank + 1) % size;
  const int previous = (rank + size - 1) % size;
  if (size == 1) return;
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
  // Sends and receives that begin together.
  const std::vector<weft::Work> both = weft::batch_isend_irecv(
      group, {weft::isend(filled(2, rank), next), weft::irecv(a, previous)});
  for (const weft::Work& work : both) work.wait();
  say(group, "batch_isend_irecv: %s\n", text(a));
  // From any rank, and in a shape that the receiver does not know.
  if (rank == 1) group.send(at::arange(6, at::kFloat).view({2, 3}), 0);
  if (rank == 0) {
    const at::Tensor any = group.recv_any_shape();
    say(group, "a tensor of %d x %d came: %s\n", any.size(0), any.size(1), text(any));
  }
  if (rank != 0) group.send(filled(1, rank), 0, {.tag = 3});
  double sum = 0;
  for (int i = 1; rank == 0 && i < size; ++i) {
    const int who = group.recv(b.slice(0, 0, 1), weft::kAnySource, {.tag = 3});
    sum += b[0].item<double>() == who ? who : 1000;
  }
  say(group, "from any rank, each its number: %g together\n", sum);
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

// A sum in two steps, as between machines: inside each node, then between the nodes.
void nodes(weft::ProcessGroup& group, int per_node) {
  const int rank = group.rank();
  weft::ProcessGroup inside = group.split(rank / per_node);
  weft::ProcessGroup across = group.split(inside.rank());  // one rank of each node
  const at::Tensor t = filled(1, rank);
  inside.all_reduce(t);
  say(group, "node-local: %d ranks over %s, sum %s\n", inside.size(), std::string(inside.backend()),
      text(t));
  across.all_reduce(t);
  say(group, "cross-node: %d nodes, sum %s\n", across.size(), text(t));
}

void errors(weft::ProcessGroup& group) {
  // Found at the caller: nothing moved, and the group goes on.
  const weft::Status bad = group.try_broadcast(at::zeros({1}), {.root = 99});
  say(group, "refused: %s\n", std::string(bad.message()));
  group.barrier();
  if (group.size() == 1) return;
  // Found where ranks meet: an error on all of them, and the end of the group.
  const weft::Status differs = group.try_all_reduce(at::zeros({group.rank() == 0 ? 4 : 5}));
  say(group, "ranks that differ: %s\n", std::string(differs.message()));
}

// After a failure those that live go on as a group of the next generation.
void survivors(weft::ProcessGroup group) {
  weft::ProcessGroup second = group.rebuild();
  say(second, "rebuilt: generation %d of %d ranks\n", second.generation(), second.size());
  if (second.rank() == 0) second.abort("the tour says so");
  const weft::Status aborted = second.try_barrier();
  say(second, "aborted: %s\n", std::string(weft::kind_name(weft::error_kind(aborted))));
  weft::ProcessGroup third = second.rebuild();
  const int last = third.size() - 1;
  if (last == 0) return;
  if (third.rank() == last) return;  // the last rank leaves, as one that has ended does
  const weft::Status left = third.try_barrier();
  say(third, "without its last rank: %s\n", std::string(weft::kind_name(weft::error_kind(left))));
  weft::ProcessGroup fourth = third.rebuild();
  const at::Tensor t = filled(1, 1);
  fourth.all_reduce(t);
  say(fourth, "rebuilt: generation %d of %d ranks, rank 0 was rank %d, sum %s\n",
      fourth.generation(), fourth.size(), fourth.previous_ranks()[0], text(t));
}

int ranks_per_node(const examples::CommandLine& line) {
  const weft::Environment environment = weft::process_environment();
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  return static_cast<int>(
      line.number("--ranks-per-node", launch.local_world_size, 1, launch.world_size));
}

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  at::set_num_threads(1);
  const examples::CommandLine line(argc, argv, {"--ranks-per-node"});
  if (line.help()) {
    std::puts("weftrun -n 4 collectives_tour [--ranks-per-node N]");
    return 0;
  }
  weft::ProcessGroup group = weft::init_process_group();
  const bool first = group.rank() == 0;
  say(group, "%d ranks over %s\n", group.size(), std::string(group.backend()));
  reductions(group);
  copies(group);
  messages(group);
  asynchronous(group);
  groups(group);
  nodes(group, ranks_per_node(line));
  errors(group);
  survivors(std::move(group));
  if (first) std::puts("collectives_tour: ok");
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return examples::run_main("collectives_tour", &run, argc, argv); }
