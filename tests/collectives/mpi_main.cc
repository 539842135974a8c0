// The tests of groups by MPI as one process of an mpirun: each runs all tests, and in each test the rank that it has.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "ATen/Parallel.h"
#include "weft/collectives/mpi.h"
#include "weft/tests/collectives/world.h"

int main(int argc, char** argv) {
  at::set_num_threads(1);
  weft::Mpi mpi(&argc, &argv);
  // mpirun's own name of the job tells the processes apart from those of another one.
  const char* const job = std::getenv("PMIX_NAMESPACE");
  if (job == nullptr) {
    std::fprintf(stderr, "mpi_test: run it by mpirun\n");
    return 2;
  }
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / (std::string("weft_mpi_test.") + job);
  std::filesystem::create_directories(folder);
  weft::testing::set_mpi_seat({mpi.library(), mpi.rank(), mpi.size(), folder});
  ::testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  const weft::Status ended = mpi.try_finalize();
  std::error_code ignored;  // another process may have been first
  std::filesystem::remove_all(folder, ignored);
  if (!ended.ok()) std::fprintf(stderr, "%s\n", ended.ToString().c_str());
  if (failed != 0 || !ended.ok()) return 1;
  std::printf("mpi_test: rank %d of %d ok\n", mpi.rank(), mpi.size());
  return 0;
}
