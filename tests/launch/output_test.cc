// DEF_15: a reader of weftrun's output that stands still does not hold up weftrun.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/store/internal/launch/output_queue.h"
#include "weft/store/internal/launch/system.h"
#include "weft/tests/launch/harness.h"

namespace weft::launch {
namespace {

using ::testing::EndsWith;
using ::testing::StartsWith;

constexpr int kNoProgressMs = 30'000;
constexpr int kPage = 4096;

// A pipe that holds one page, so that one write fills it.
Pipe small_pipe() {
  Pipe pipe = make_pipe().value();
  EXPECT_EQ(fcntl(pipe.write.get(), F_SETPIPE_SZ, kPage), kPage);
  return pipe;
}

bool readable(int fd) {
  pollfd probe = {fd, POLLIN, 0};
  return poll(&probe, 1, kNoProgressMs) == 1;
}

std::string read_page(int fd) {
  std::string text(kPage, '\0');
  const ssize_t n = readable(fd) ? read(fd, text.data(), text.size()) : 0;
  text.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return text;
}

class LaunchOutput : public ::testing::Test {
 protected:
  LaunchOutput() {
    EXPECT_EQ(mkfifo(dir_.path("fifo").c_str(), 0600), 0);
    fifo_ = UniqueFd(open(dir_.path("fifo").c_str(), O_RDWR | O_CLOEXEC));
  }

  // One byte of the rank; 0 when none comes.
  char heard() const {
    char byte = 0;
    return readable(fifo_.get()) && read(fifo_.get(), &byte, 1) == 1 ? byte : '\0';
  }

  TestDir dir_;
  UniqueFd fifo_;
};

TEST_F(LaunchOutput, DEF_15_signals_reach_weftrun_while_its_reader_stands_still) {
  Pipe pipe = small_pipe();
  Running running =
      Running::start({"--grace", "0.2", WEFT_TEST_CHILD, "chatter", dir_.path("fifo")},
                     {.both_outputs = pipe.write.get()});
  Watched weftrun(running.pid());
  ASSERT_EQ(heard(), 'r');
  // Each page that is read makes room for one more, whichever stream takes it.
  for (int page = 0; page < 16; ++page) {
    ASSERT_FALSE(read_page(pipe.read.get()).empty()) << page;
    ASSERT_TRUE(readable(pipe.read.get())) << page;
    running.send(SIGUSR1);
    ASSERT_EQ(heard(), 'u') << "SIGUSR1 was not passed on after page " << page;
  }
  // The rank dies of it. The reader has the grace to take the rest, and takes nothing.
  running.send(SIGTERM);
  ASSERT_TRUE(weftrun.ended());
  EXPECT_EQ(running.finish().code, 128 + SIGTERM);
}

TEST_F(LaunchOutput, DEF_15_lines_of_both_streams_in_one_file_are_whole) {
  Pipe pipe = small_pipe();
  Running running = Running::start(
      {"-q", "-n", "2", "--grace", "0.2", WEFT_TEST_CHILD, "chatter", dir_.path("fifo")},
      {.both_outputs = pipe.write.get()});
  Watched weftrun(running.pid());
  std::string text;
  while (text.size() < 64 * kPage) {
    const std::string page = read_page(pipe.read.get());
    ASSERT_FALSE(page.empty());
    text += page;
  }
  running.send(SIGTERM);
  ASSERT_TRUE(weftrun.ended());
  EXPECT_EQ(running.finish().code, 128 + SIGTERM);
  std::vector<std::string> lines = lines_of(text);
  lines.pop_back();  // cut by the end of the page
  for (const std::string& line : lines) {
    ASSERT_THAT(line, StartsWith("[worker")) << line;
    ASSERT_EQ(line.size(), std::string("[worker0] ").size() + 200) << line;
  }
}

TEST(LaunchOutputQueue, DEF_15_adding_to_a_full_pipe_returns) {
  // The thread of the queue may use it until the process ends.
  Pipe& pipe = *new Pipe(small_pipe());
  absl::StatusOr<std::unique_ptr<OutputQueue>> queue = OutputQueue::make(pipe.write.get());
  ASSERT_TRUE(queue.ok()) << queue.status();
  const std::string text(2 << 20, 'x');
  (*queue)->add(text);
  (*queue)->add("end");
  EXPECT_TRUE((*queue)->full());
  std::string got;
  while (got.size() < text.size() + 3) {
    const std::string page = read_page(pipe.read.get());
    ASSERT_FALSE(page.empty()) << got.size();
    got += page;
  }
  EXPECT_THAT(got, EndsWith("xend"));
  while (!(*queue)->empty()) {
    ASSERT_TRUE(readable((*queue)->progress_fd()));
    (*queue)->clear_progress();
  }
  EXPECT_FALSE((*queue)->full());
  EXPECT_FALSE((*queue)->broken());
  (*queue)->add(text);  // its destructor does not wait for a reader, either
}

TEST(LaunchOutputQueue, DEF_15_a_reader_that_has_gone_is_told) {
  signal(SIGPIPE, SIG_IGN);
  Pipe pipe = small_pipe();
  absl::StatusOr<std::unique_ptr<OutputQueue>> queue = OutputQueue::make(pipe.write.get());
  ASSERT_TRUE(queue.ok()) << queue.status();
  (*queue)->add(std::string(3 * kPage, 'x'));
  ASSERT_TRUE(readable(pipe.read.get()));
  pipe.read.reset();
  ASSERT_TRUE(readable((*queue)->progress_fd()));
  EXPECT_TRUE((*queue)->broken());
  EXPECT_TRUE((*queue)->empty());
  (*queue)->add("more");
  EXPECT_TRUE((*queue)->empty());
}

}  // namespace
}  // namespace weft::launch
