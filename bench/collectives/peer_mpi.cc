// MPI as a driver of the `collectives` suite: the commands of driver.h. Compiled once with Open MPI
// and once with MPICH. One mpirun starts all ranks; rank 0 has its standard input and output. A
// rank of MPI spins while it waits, so commands go to the other rank through a pipe, and nothing
// runs between commands.
//
//   --cores A,B    where the ranks run; mpirun itself binds nothing
//
// Two ranks.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

// The C interface alone.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <stdexcept>
#include <string>
#include <utility>

#include "weft/bench/collectives/driver.h"
#include "weft/bench/line_protocol.h"

namespace weft::bench {
namespace {

void check(int code, const char* what) {
  if (code != MPI_SUCCESS) throw std::runtime_error(std::string(what) + " failed");
}

void pin(const std::string& cores, int rank) {
  const size_t comma = cores.find(',');
  if (comma == std::string::npos) return;
  const std::string one = rank == 0 ? cores.substr(0, comma) : cores.substr(comma + 1);
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(std::stoi(one)), &set);
  (void)sched_setaffinity(0, sizeof set, &set);
}

int open_pipe(const std::string& path, int rank) {
  if (rank == 0 && mkfifo(path.c_str(), 0600) != 0 && errno != EEXIST) {
    throw std::runtime_error("cannot make the pipe " + path);
  }
  check(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier");
  const int fd = open(path.c_str(), rank == 0 ? O_WRONLY : O_RDONLY);
  if (fd < 0) throw std::runtime_error("cannot open the pipe " + path);
  return fd;
}

int run(int argc, char** argv) {
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  check(MPI_Init(&argc, &argv), "MPI_Init");
  int rank = 0;
  int size = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  if (size != 2) throw std::runtime_error("this driver has two ranks");
  pin(option(argc, argv, "--cores", ""), rank);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  const int pipe = open_pipe(option(argc, argv, "--path", "") + ".pipe", rank);
  CollectiveOperations operations;
  operations.broadcast = [&](const at::Tensor& t) {
    void* const data = t.mutable_data_ptr();
    const ssize_t n = rank == 0 ? write(pipe, data, t.nbytes()) : read(pipe, data, t.nbytes());
    if (n == static_cast<ssize_t>(t.nbytes())) return;
    if (rank == 0) throw std::runtime_error("the other rank is gone");
    std::fill_n(t.mutable_data_ptr<int64_t>(), t.numel(), 0);  // the end of rank 0: quit
  };
  operations.all_reduce = [](const at::Tensor& t) {
    check(MPI_Allreduce(MPI_IN_PLACE, t.mutable_data_ptr(), static_cast<int>(t.numel()), MPI_FLOAT,
                        MPI_SUM, MPI_COMM_WORLD),
          "MPI_Allreduce");
  };
  operations.reduce_scatter = [](const at::Tensor& to, const at::Tensor& from) {
    check(
        MPI_Reduce_scatter_block(from.const_data_ptr(), to.mutable_data_ptr(),
                                 static_cast<int>(to.numel()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD),
        "MPI_Reduce_scatter_block");
  };
  operations.make = [](int64_t floats, bool) { return at::empty({floats}); };
  CollectiveDriver(rank, size, std::move(operations), rank == 0).run();
  close(pipe);
  check(MPI_Finalize(), "MPI_Finalize");
  if (rank == 0) say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main(WEFT_BENCH_MPI, &weft::bench::run, argc, argv);
}
