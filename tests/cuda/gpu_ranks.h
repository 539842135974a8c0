#ifndef WEFT_TESTS_CUDA_GPU_RANKS_H_
#define WEFT_TESTS_CUDA_GPU_RANKS_H_

// Ranks on one GPU that are processes: LibTorch's engine has one thread for each device of a process, on
// which a backward that waits for another rank on that device would wait for itself.

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "weft/collectives/process_group.h"
#include "weft/tests/integration/process.h"

namespace weft::testing {

inline std::string own_program() {
  std::array<char, 4096> path{};
  const ssize_t n = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
  return std::string(path.data(), n > 0 ? static_cast<size_t>(n) : 0);
}

// Runs `body` on so many ranks, each a process of this program that runs the same test. Once in a test.
inline void on_processes(int size, Backend backend,
                         const std::function<void(ProcessGroup&)>& body) {
  if (const char* const rank = std::getenv("WEFT_GPU_TEST_RANK"); rank != nullptr) {
    try {
      ProcessGroup group = init_process_group({.backend = backend,
                                               .rendezvous = std::getenv("WEFT_GPU_TEST_MEET"),
                                               .rank = std::atoi(rank),
                                               .size = size,
                                               .timeout = std::chrono::seconds(30),
                                               .init_timeout = std::chrono::seconds(60)});
      body(group);
      group.barrier();
    } catch (const std::exception& e) {
      ADD_FAILURE() << "rank " << rank << ": " << e.what();
    }
    return;
  }
  const ::testing::TestInfo* const test = ::testing::UnitTest::GetInstance()->current_test_info();
  const integration::TempDir folder;
  std::vector<integration::Process> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back(integration::ProcessOptions{
        .command = {own_program(),
                    std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name()},
        .environment = {{"WEFT_GPU_TEST_RANK", std::to_string(rank)},
                        {"WEFT_GPU_TEST_MEET", "file://" + folder.path("meet") + "?run_id=1"}}});
  }
  for (integration::Process& rank : ranks) {
    const std::string said = rank.read_all();
    EXPECT_EQ(rank.wait_exit(), 0) << said;
    EXPECT_NE(said.find("[  PASSED  ] 1 test."), std::string::npos) << said;
  }
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_CUDA_GPU_RANKS_H_
