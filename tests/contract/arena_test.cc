// The parts of shared memory below the transport: files, leases, private sockets, and the
// negotiation against a peer that plays its part by hand and badly.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/condition.h"
#include "weft/proto/transport.pb.h"
#include "weft/transport/internal/arena/link.h"
#include "weft/transport/internal/arena/shared_arena.h"
#include "weft/transport/internal/local/gate.h"
#include "weft/transport/memory_file.h"
#include "weft/transport/shared_writes.h"
#include "weft/transport/stream_copy.h"

namespace weft::internal {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;

std::string unique_name(Runtime& runtime) {
  return absl::StrCat("weft-test-", absl::Hex(runtime.random().next(), absl::kZeroPad16));
}

int open_files() {
  int n = 0;
  for (int fd = 0; fd < 1024; ++fd) n += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return n;
}

// ---- files -----------------------------------------------------------------------------------

UniqueFd file_of(uint64_t bytes, int seals) {
  UniqueFd fd(memfd_create("weft-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_TRUE(seals == 0 || fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

TEST(MemoryFile, nobody_can_truncate_ours) {
  const auto file = *MemoryFile::make(kMiB);
  EXPECT_NE(ftruncate(file->fd(), 0), 0);
  EXPECT_NE(ftruncate(file->fd(), 2 * kMiB), 0);
  EXPECT_NE(fcntl(file->fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0) << "sealed against seals";
  file->data()[kMiB - 1] = 7;
  EXPECT_EQ(file->data()[kMiB - 1], 7);
}

TEST(MemoryFile, what_a_peer_hands_over_is_checked_before_the_first_access) {
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const auto refusal = [](UniqueFd fd, uint64_t announced) {
    const auto file = MemoryFile::adopt(std::move(fd), announced);
    return file.ok() ? std::string("accepted") : std::string(file.status().message());
  };
  EXPECT_EQ(refusal(file_of(kMiB, kAll), kMiB), "accepted");
  EXPECT_THAT(refusal(file_of(kMiB, 0), kMiB), HasSubstr("seals are 0"));
  EXPECT_THAT(refusal(file_of(kMiB, F_SEAL_GROW | F_SEAL_SEAL), kMiB), HasSubstr("truncated"));
  EXPECT_THAT(refusal(file_of(kMiB, F_SEAL_SHRINK | F_SEAL_GROW), kMiB), HasSubstr("truncated"));
  // Truncated by the peer after it had announced it.
  EXPECT_THAT(refusal(file_of(4096, kAll), kMiB), HasSubstr("it has 4096 bytes"));
  EXPECT_THAT(refusal(file_of(kMiB, kAll), 0), HasSubstr("announced as 0"));
  EXPECT_THAT(refusal(file_of(kMiB, kAll), ~uint64_t{0}), HasSubstr("announced as"));
  EXPECT_THAT(refusal(UniqueFd(open("/dev/zero", O_RDWR | O_CLOEXEC)), kMiB),
              HasSubstr("no regular file"));
  EXPECT_THAT(refusal(UniqueFd(), kMiB), HasSubstr("refused"));
}

TEST(MemoryFile, a_limit_of_the_process_is_an_error_and_no_signal) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit small = {kMiB, kMiB};
    if (setrlimit(RLIMIT_FSIZE, &small) != 0) _exit(2);
    const auto file = MemoryFile::make(2 * kMiB);
    _exit(!file.ok() && file.status().message().find("ulimit -f") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// ---- leases ----------------------------------------------------------------------------------

// ARENA-1
TEST(StreamCopy, copies_every_byte_from_and_to_any_address) {
  std::vector<char> from(4096 + 64);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + 1);
  for (const size_t shift : {0, 1, 15, 63}) {
    for (const size_t at : {0, 1, 17, 63}) {
      for (const size_t bytes : {0, 1, 62, 63, 64, 65, 127, 128, 1000, 4000}) {
        std::vector<char> to(4096 + 128, 'x');
        copy_part(to.data() + at, from.data() + shift, bytes, kStreamAbove);
        EXPECT_EQ(std::memcmp(to.data() + at, from.data() + shift, bytes), 0) << at << " " << bytes;
        EXPECT_EQ(std::count(to.begin(), to.begin() + static_cast<ptrdiff_t>(at), 'x'),
                  static_cast<ptrdiff_t>(at));
        EXPECT_EQ(to[at + bytes], 'x') << at << " " << bytes;
      }
    }
  }
}

// WRITES-1 to WRITES-3: what a writer does next after writes that took so long.
TEST(SharedWrites, go_around_the_caches_while_plain_ones_are_slow) {
  constexpr size_t kBytes = 256 << 10;
  const absl::Duration fast = SharedWrites::kSlowMiB / 4;
  const absl::Duration slow = fast + absl::Nanoseconds(1);
  SharedWrites writes;
  const auto next = [&](size_t bytes, absl::Duration took) {
    const bool streamed = writes.streams(bytes);
    writes.wrote(bytes, took);
    return streamed;
  };
  // One slow write between fast ones, as of a thread that lost its core, changes nothing.
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(next(kBytes, slow)) << i;
    EXPECT_FALSE(next(kBytes, fast)) << i;
  }
  // Small ones are neither judged nor streamed.
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(next(SharedWrites::kSmallest - 1, absl::Seconds(1)));
  for (int i = 0; i < SharedWrites::kPatience; ++i) EXPECT_FALSE(next(kBytes, slow));
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < SharedWrites::kStreamed; ++i) {
      EXPECT_TRUE(next(kBytes, i % 2 == 0 ? slow : fast)) << round << " " << i;
      EXPECT_FALSE(next(SharedWrites::kSmallest - 1, absl::Seconds(1)));
    }
    EXPECT_FALSE(next(kBytes, round < 2 ? slow : fast)) << round;
  }
  // The plain one was fast: it takes as much patience as at first.
  for (int i = 0; i < SharedWrites::kPatience; ++i) EXPECT_FALSE(next(kBytes, slow)) << i;
  EXPECT_TRUE(next(kBytes, fast));
}

TEST(SharedWrites, copy_the_same_bytes_in_both_ways) {
  // Each reading is a millisecond later: every write is slow.
  class Slow : public Clock {
   public:
    absl::Time now() const override { return at_ += absl::Milliseconds(1); }

   private:
    mutable absl::Time at_ = absl::UnixEpoch();
  };
  const Slow clock;
  SharedWrites writes;
  int streamed = 0;
  for (int i = 0; i < 2 * SharedWrites::kPatience; ++i) {
    const std::vector<char> from(SharedWrites::kSmallest + 5, static_cast<char>('a' + i));
    std::vector<char> to(from.size() + 2, 'x');
    streamed += writes.streams(from.size()) ? 1 : 0;
    writes.copy(clock, to.data() + 1, from.data(), from.size());
    EXPECT_EQ(std::memcmp(to.data() + 1, from.data(), from.size()), 0) << i;
    EXPECT_TRUE(to.front() == 'x' && to.back() == 'x') << i;
  }
  EXPECT_EQ(streamed, SharedWrites::kPatience);
  writes.copy(clock, nullptr, nullptr, 0);
}

TEST(SharedArena, a_block_is_free_when_it_has_neither_holders_nor_leases) {
  const auto arena = *SharedArena::make(8 * kMiB, make_system_runtime());
  const uint64_t a = arena->new_link();
  const uint64_t b = arena->new_link();
  std::shared_ptr<char> tensor = arena->allocate(kMiB);
  std::memset(tensor.get(), 3, kMiB);
  const auto whole = arena->lend({tensor.get(), kMiB}, a);
  const auto part = arena->lend({tensor.get() + 100, 200}, b);
  ASSERT_TRUE(whole && part);
  EXPECT_TRUE(whole->shared);
  EXPECT_EQ(part->offset, whole->offset + 100);
  tensor = nullptr;
  EXPECT_EQ(arena->counters().blocks, 1u);
  EXPECT_TRUE(arena->take_back(whole->lease, a));
  EXPECT_EQ(arena->counters().blocks, 1u);
  EXPECT_TRUE(arena->take_back(part->lease, b));
  EXPECT_EQ(arena->counters().blocks, 0u);
  EXPECT_EQ(arena->counters().used_bytes, 0u);
}

// ARENA-2
TEST(SharedArena, a_lease_ends_once_and_only_by_its_own_link) {
  const auto arena = *SharedArena::make(8 * kMiB, make_system_runtime());
  const uint64_t a = arena->new_link();
  const uint64_t b = arena->new_link();
  const std::string bytes(100'000, 'x');
  const auto loan = arena->lend(bytes, a);
  ASSERT_TRUE(loan.has_value());
  EXPECT_FALSE(loan->shared);
  EXPECT_EQ(std::memcmp(arena->file().data() + loan->offset, bytes.data(), bytes.size()), 0);
  EXPECT_FALSE(arena->take_back(loan->lease, b)) << "another link's";
  EXPECT_FALSE(arena->take_back(loan->lease + 1, a)) << "unknown";
  EXPECT_TRUE(arena->take_back(loan->lease, a));
  EXPECT_FALSE(arena->take_back(loan->lease, a)) << "twice";
  EXPECT_EQ(arena->counters().ignored_frees, 3u);
  EXPECT_EQ(arena->counters().blocks, 0u);
}

// ARENA-3
TEST(SharedArena, the_end_of_a_peer_ends_its_leases_and_no_others) {
  const auto arena = *SharedArena::make(8 * kMiB, make_system_runtime());
  const uint64_t a = arena->new_link();
  const uint64_t b = arena->new_link();
  const std::string bytes(100'000, 'x');
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(arena->lend(bytes, a).has_value());
  const auto kept = arena->lend(bytes, b);
  arena->forget(a);
  EXPECT_EQ(arena->counters().leases, 1u);
  EXPECT_EQ(arena->counters().blocks, 1u);
  arena->forget(b);
  EXPECT_EQ(arena->counters().used_bytes, 0u);
  EXPECT_FALSE(arena->take_back(kept->lease, b));
}

// ARENA-4
TEST(SharedArena, full_is_an_answer_and_no_wait) {
  const auto arena = *SharedArena::make(2 * kMiB, make_system_runtime());
  const uint64_t a = arena->new_link();
  const std::string bytes(kMiB + 1, 'x');
  const auto first = arena->lend(bytes, a);
  ASSERT_TRUE(first.has_value());
  EXPECT_FALSE(arena->lend(bytes, a).has_value());
  EXPECT_EQ(arena->allocate(kMiB + 1), nullptr);
  EXPECT_EQ(arena->counters().full, 2u);
  EXPECT_TRUE(arena->take_back(first->lease, a));
  EXPECT_TRUE(arena->lend(bytes, a).has_value());
}

// Small blocks that are sent and given back one after the other lie at other places each time, kRest
// bytes of them; a full arena takes them at once.
TEST(SharedArena, small_blocks_rest_before_they_are_used_again) {
  const auto arena = *SharedArena::make(8 * kMiB, make_system_runtime());
  const uint64_t link = arena->new_link();
  const std::string bytes(256 << 10, 'x');
  std::vector<uint64_t> places;
  for (int i = 0; i < 100; ++i) {
    const auto loan = arena->lend(bytes, link);
    ASSERT_TRUE(loan.has_value());
    places.push_back(loan->offset);
    EXPECT_TRUE(arena->take_back(loan->lease, link));
    EXPECT_EQ(arena->counters().used_bytes, 0u);
  }
  constexpr uint64_t kBlocks = SharedArena::kRest / (256 << 10);
  for (size_t i = 0; i + 1 < places.size(); ++i) {
    for (size_t k = i + 1; k < places.size() && k <= i + kBlocks; ++k) {
      ASSERT_NE(places[i], places[k]) << i << " and " << k;
    }
  }
  EXPECT_LE(arena->counters().populated_bytes, SharedArena::kRest + 2 * SharedArena::kPiece);
  // Larger ones do not rest.
  const std::string large(SharedArena::kSmallBlock + 1, 'x');
  const auto once = arena->lend(large, link);
  ASSERT_TRUE(once && arena->take_back(once->lease, link));
  const auto twice = arena->lend(large, link);
  ASSERT_TRUE(twice.has_value());
  EXPECT_EQ(once->offset, twice->offset);
  EXPECT_TRUE(arena->take_back(twice->lease, link));
  EXPECT_NE(arena->allocate(8 * kMiB), nullptr) << "though blocks rest";
  EXPECT_EQ(arena->counters().full, 0u);
}

TEST(SharedArena, memory_goes_back_to_the_system_after_two_sweeps_without_use) {
  const auto arena = *SharedArena::make(64 * kMiB, make_system_runtime());
  EXPECT_EQ(arena->counters().populated_bytes, 0u);
  std::shared_ptr<char> kept = arena->allocate(kMiB);
  arena->allocate(20 * kMiB) = nullptr;
  EXPECT_EQ(arena->counters().populated_bytes, 22 * kMiB);
  std::memset(kept.get(), 5, kMiB);
  arena->sweep();
  EXPECT_EQ(arena->counters().populated_bytes, 22 * kMiB);
  arena->sweep();
  EXPECT_EQ(arena->counters().populated_bytes, 2 * kMiB) << "the piece of the kept block stays";
  EXPECT_EQ(kept.get()[kMiB - 1], 5);
  // And is there again when it is needed.
  std::shared_ptr<char> again = arena->allocate(20 * kMiB);
  std::memset(again.get(), 6, 20 * kMiB);
  EXPECT_EQ(arena->counters().populated_bytes, 22 * kMiB);
}

TEST(SharedArena, memory_outlives_whoever_made_it) {
  std::shared_ptr<char> memory;
  {
    const auto arena = *SharedArena::make(2 * kMiB, make_system_runtime());
    memory = arena->allocate(100);
  }
  std::memset(memory.get(), 1, 100);
}

// ---- private sockets -------------------------------------------------------------------------

class Sockets : public ::testing::Test {
 protected:
  Sockets() : runtime(make_system_runtime()), name(unique_name(*runtime)) {
    EXPECT_TRUE(gate->listen(name).ok());
  }
  ~Sockets() override { gate->stop(); }

  const std::shared_ptr<Runtime> runtime;
  const std::string name;
  const std::shared_ptr<LocalGate> gate = std::make_shared<LocalGate>(runtime);
};

TEST_F(Sockets, a_ticket_is_known_at_once_and_claimed_once) {
  const auto visitor = std::make_shared<LocalGate>(runtime);
  const auto session = visitor->visit(name);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_TRUE(gate->knows((*session)->ticket()));
  EXPECT_FALSE(gate->knows(std::string(LocalGate::kTicketBytes, 'x'))) << "a wrong one";
  EXPECT_FALSE(gate->knows("")) << "none";
  EXPECT_EQ(gate->claim(std::string(LocalGate::kTicketBytes, 'x')), nullptr);
  EXPECT_NE(gate->claim((*session)->ticket()), nullptr);
  EXPECT_EQ(gate->claim((*session)->ticket()), nullptr) << "somebody has it";
}

TEST(LocalSocket, what_a_peer_sent_before_it_closed_arrives_though_it_left_something_unread) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd here(ends[0]);
  {
    const UniqueFd there(ends[1]);
    ASSERT_TRUE(send_local(here.get(), "never read", {}).ok());
    ASSERT_TRUE(send_local(there.get(), "last words", {}).ok());
  }
  const StatusOr<LocalMessage> words = receive_local(here.get());
  ASSERT_TRUE(words.ok()) << words.status();
  ASSERT_EQ(words->what, LocalMessage::What::kMessage) << "the reset of the socket came first";
  EXPECT_EQ(words->bytes, "last words");
  const StatusOr<LocalMessage> end = receive_local(here.get());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->what, LocalMessage::What::kEnd);
}

TEST_F(Sockets, who_says_no_ticket_or_too_much_is_sent_away) {
  const UniqueFd silent = *connect_local(name);
  const UniqueFd garbage = *connect_local(name);
  ASSERT_TRUE(send_local(garbage.get(), "hello", {}).ok());
  const UniqueFd files = *connect_local(name);
  const int fd = 0;
  ASSERT_TRUE(
      send_local(files.get(), std::string(LocalGate::kTicketBytes, 'f'), absl::MakeSpan(&fd, 1))
          .ok());
  const UniqueFd chatty = *connect_local(name);
  ASSERT_TRUE(send_local(chatty.get(), std::string(LocalGate::kTicketBytes, 't'), {}).ok());
  ASSERT_TRUE(send_local(chatty.get(), "and more, before anyone has asked", {}).ok());
  { const UniqueFd gone = *connect_local(name); }
  (void)gate->knows("");
  EXPECT_EQ(gate->visitors_for_test(), 1u) << "the silent one may still speak";
  EXPECT_FALSE(gate->knows(std::string(LocalGate::kTicketBytes, 't')));
}

TEST_F(Sockets, visitors_are_bounded_and_the_oldest_goes_first) {
  std::vector<UniqueFd> crowd;
  const auto visitor = std::make_shared<LocalGate>(runtime);
  const auto first = visitor->visit(name);
  ASSERT_TRUE(gate->knows((*first)->ticket()));
  for (size_t i = 0; i < LocalGate::kMaxVisitors; ++i) {
    crowd.push_back(*connect_local(name));
    if (i % 64 == 0) (void)gate->visitors_for_test();  // the door has a queue of its own
  }
  EXPECT_EQ(gate->visitors_for_test(), LocalGate::kMaxVisitors);
  EXPECT_FALSE(gate->knows((*first)->ticket()));
}

TEST_F(Sockets, another_user_is_not_let_in) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(65534) != 0) _exit(2);
    // We see whose socket it is and say nothing there.
    const auto visitor = std::make_shared<LocalGate>(make_system_runtime());
    const auto session = visitor->visit(name);
    if (session.ok() || error_kind(session.status()) != ErrorKind::kPermission) _exit(3);
    // A process that ignores that refusal is not heard either.
    auto fd = connect_local(name);
    if (!fd.ok()) _exit(4);
    // It may have been closed already.
    send_local(fd->get(), std::string(LocalGate::kTicketBytes, 'x'), {}).IgnoreError();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_FALSE(gate->knows(std::string(LocalGate::kTicketBytes, 'x')));
  EXPECT_EQ(gate->visitors_for_test(), 0u);
}

TEST_F(Sockets, nobody_listens) {
  const auto session = gate->visit(absl::StrCat(name, "-not"));
  ASSERT_FALSE(session.ok());
  EXPECT_EQ(error_kind(session.status()), ErrorKind::kUnavailable);
  EXPECT_THAT(std::string(session.status().message()), HasSubstr(name));
}

// ---- negotiation -----------------------------------------------------------------------------

// One side is an ArenaLink, the other is played by hand.
class Negotiation : public Sockets {
 protected:
  class Host final : public ArenaLink::Host {
   public:
    explicit Host(Runtime* runtime) : changed_(runtime) {}
    void send_arena_frame(FrameKind kind, std::string header) override {
      MutexLock lock(&mutex_);
      EXPECT_EQ(kind, FrameKind::kArenaProbe);
      EXPECT_TRUE(probe_.ParseFromString(header));
      answered_ = true;
      ++answers_;
      changed_.notify_all();
    }
    int answers() {
      MutexLock lock(&mutex_);
      return answers_;
    }
    void frees_waiting() override { ++frees; }
    void lending_settled(bool lends, std::string_view why_not) override {
      ++settled;
      lends_now = lends;
      reason = why_not;
    }
    v1::ArenaProbe answer() {
      MutexLock lock(&mutex_);
      while (!answered_) (void)changed_.wait_until(&mutex_, absl::InfiniteFuture());
      answered_ = false;
      return probe_;
    }
    std::atomic<int> frees{0};
    int settled = 0;  // on the thread that says so: the test's, in these tests
    bool lends_now = false;
    std::string reason;

   private:
    Mutex mutex_;
    Condition changed_;
    bool answered_ ABSL_GUARDED_BY(mutex_) = false;
    int answers_ ABSL_GUARDED_BY(mutex_) = 0;
    v1::ArenaProbe probe_ ABSL_GUARDED_BY(mutex_);
  };

  Negotiation()
      : host(std::make_shared<Host>(runtime.get())),
        arena(*SharedArena::make(8 * kMiB, make_system_runtime())) {
    connect();
  }
  // Anew: of one link only the first offer counts.
  void connect() {
    if (link != nullptr) link->close();
    auto session = *gate->visit(name);
    peer = gate->claim(session->ticket());
    link = std::make_shared<ArenaLink>(arena, "", std::move(session), gate, runtime->random());
    link->start(host);
    // Our offer has been sent by now.
    own_offer = std::move(*receive_peer());
    EXPECT_TRUE(offer.ParseFromString(own_offer.bytes));
  }
  // The refusal of a link that has heard nothing yet.
  std::string refusal(uint64_t size, uint64_t probe, absl::Span<const int> files) {
    connect();
    return send_offer(size, probe, files).refused();
  }
  ~Negotiation() override { link->close(); }

  StatusOr<LocalMessage> receive_peer() {
    // The session's descriptor is private to the gate: the peer reads through one of its own.
    class Catch : public LocalHandler {
     public:
      explicit Catch(Runtime* runtime) : changed(runtime) {}
      Status on_local_message(LocalMessage message) override {
        MutexLock lock(&mutex);
        got = std::move(message);
        changed.notify_all();
        return absl::OkStatus();
      }
      void on_local_end() override {}
      Mutex mutex;
      Condition changed;
      std::optional<LocalMessage> got;
    };
    auto caught = std::make_shared<Catch>(runtime.get());
    WEFT_RETURN_IF_ERROR(gate->attach(peer, caught));
    MutexLock lock(&caught->mutex);
    while (!caught->got.has_value()) {
      (void)caught->changed.wait_until(&caught->mutex, absl::InfiniteFuture());
    }
    return *std::move(caught->got);
  }

  // What the link answers to an offer.
  v1::ArenaProbe send_offer(uint64_t size, uint64_t probe, absl::Span<const int> files) {
    v1::ArenaOffer bad;
    bad.set_size(size);
    bad.set_probe_offset(probe);
    bad.set_reason("none");  // a message of no bytes would be the end
    EXPECT_TRUE(peer->send(bad.SerializeAsString(), files).ok());
    return host->answer();
  }
  static std::string found(std::string_view bytes) {
    v1::ArenaProbe probe;
    probe.set_found(std::string(bytes));
    return probe.SerializeAsString();
  }
  std::string nonce() {
    auto file = *MemoryFile::adopt(std::move(own_offer.files.at(0)), offer.size());
    return std::string(file->data() + offer.probe_offset(), 16);
  }

  const std::shared_ptr<Host> host;
  const std::shared_ptr<SharedArena> arena;
  std::shared_ptr<LocalSession> peer;
  std::shared_ptr<ArenaLink> link;
  LocalMessage own_offer;
  v1::ArenaOffer offer;
};

TEST_F(Negotiation, lends_only_after_the_probe_was_answered) {
  const std::string bytes(100'000, 'x');
  EXPECT_FALSE(link->lend(bytes).has_value());
  EXPECT_TRUE(link->on_probe(found(nonce())).ok());
  EXPECT_TRUE(link->lends());
  EXPECT_TRUE(link->lend(bytes).has_value());
  EXPECT_THAT(link->describe(), HasSubstr("lends"));
  EXPECT_EQ(host->settled, 1);
  EXPECT_TRUE(host->lends_now);
}

TEST_F(Negotiation, a_wrong_answer_switches_lending_off_with_a_reason) {
  EXPECT_TRUE(link->on_probe(found(std::string(16, '?'))).ok());
  EXPECT_FALSE(link->lends());
  EXPECT_THAT(link->describe(), HasSubstr("other bytes"));
  EXPECT_THAT(host->reason, HasSubstr("other bytes"));
  EXPECT_TRUE(link->on_probe(found(nonce())).ok());
  EXPECT_FALSE(link->lends()) << "one guess";
  EXPECT_EQ(host->settled, 1) << "told once";
  EXPECT_EQ(arena->counters().blocks, 0u);
}

TEST_F(Negotiation, a_refusal_switches_lending_off_with_its_reason) {
  v1::ArenaProbe probe;
  probe.set_refused("I live in another container");
  EXPECT_TRUE(link->on_probe(probe.SerializeAsString()).ok());
  EXPECT_FALSE(link->lends());
  EXPECT_THAT(link->describe(), HasSubstr("another container"));
}

TEST_F(Negotiation, frames_that_are_no_answers_are_violations) {
  EXPECT_EQ(error_kind(link->on_probe("")), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(link->on_probe("\xff\xff")), ErrorKind::kProtocol);
  EXPECT_EQ(error_kind(link->on_free("\xff\xff")), ErrorKind::kProtocol);
}

TEST_F(Negotiation, bad_offers_are_refused_and_their_files_closed) {
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const int before = open_files();
  const UniqueFd good = file_of(kMiB, kAll);
  const UniqueFd unsealed = file_of(kMiB, 0);
  const int files[] = {good.get(), good.get(), good.get()};
  EXPECT_THAT(refusal(kMiB, 0, {}), HasSubstr("0 files"));
  EXPECT_THAT(refusal(kMiB, 0, files), HasSubstr("3 files"));
  EXPECT_THAT(refusal(kMiB, kMiB - 15, {files, 1}), HasSubstr("probe at"));
  EXPECT_THAT(refusal(kMiB, ~uint64_t{0}, {files, 1}), HasSubstr("probe at"));
  EXPECT_THAT(refusal(8, 0, {files, 1}), HasSubstr("probe at"));
  EXPECT_THAT(refusal(2 * kMiB, 0, {files, 1}), HasSubstr("announced were"));
  EXPECT_THAT(refusal(0, 0, {}), HasSubstr("nothing to share"));
  const int bad = unsealed.get();
  EXPECT_THAT(refusal(kMiB, 0, {&bad, 1}), HasSubstr("truncated"));
  connect();
  ASSERT_TRUE(peer->send("\xff\xff\xff", {}).ok());
  EXPECT_THAT(host->answer().refused(), HasSubstr("an offer of 3 bytes"));
  while (open_files() != before + 2) sched_yield();  // bounded by the test's own limit
  EXPECT_EQ(error_kind(link->borrow({0, 1}, 1).status()), ErrorKind::kProtocol);
}

// A flood of offers costs no frames: the second one ends the session.
TEST_F(Negotiation, a_second_offer_ends_the_session_and_is_not_answered) {
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const UniqueFd good = file_of(kMiB, kAll);
  const int fd = good.get();
  ASSERT_TRUE(link->on_probe(found(nonce())).ok());
  ASSERT_TRUE(link->lends());
  ASSERT_TRUE(link->lend(std::string(1000, 'x')).has_value());
  EXPECT_TRUE(send_offer(kMiB, 4096, {&fd, 1}).has_found());
  v1::ArenaOffer again;
  again.set_size(kMiB);
  for (int i = 0; i < 100; ++i) (void)peer->send(again.SerializeAsString(), {&fd, 1});
  // Such a peer is lent nothing more, and what it was lent is ours again.
  while (link->lends() || arena->counters().leases > 0) sched_yield();
  EXPECT_THAT(link->describe(), HasSubstr("more than one thing"));
  EXPECT_THAT(link->describe(), HasSubstr(", borrows"));
  EXPECT_EQ(host->answers(), 1);
}

TEST_F(Negotiation, places_outside_of_the_file_are_violations) {
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const UniqueFd file = file_of(kMiB, kAll);
  const int fd = file.get();
  ASSERT_TRUE(send_offer(kMiB, 0, {&fd, 1}).has_found());
  EXPECT_TRUE(link->borrow({kMiB - 1, 1}, 1).ok());
  EXPECT_TRUE(link->borrow({0, 2}, kMiB).ok());
  for (const auto& [offset, length] : std::vector<std::pair<uint64_t, uint64_t>>{
           {kMiB, 1}, {kMiB + 1, 0}, {1, kMiB}, {~uint64_t{0}, 2}, {2, ~uint64_t{0}}}) {
    EXPECT_EQ(error_kind(link->borrow({offset, 3}, length).status()), ErrorKind::kProtocol)
        << offset << "+" << length;
  }
}

TEST_F(Negotiation, what_is_free_again_is_told_in_batches) {
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const UniqueFd file = file_of(kMiB, kAll);
  const int fd = file.get();
  ASSERT_TRUE(send_offer(kMiB, 0, {&fd, 1}).has_found());
  EXPECT_FALSE(link->frees_wait());
  for (uint64_t lease = 1; lease <= 1500; ++lease) (void)link->borrow({0, lease}, 100);
  EXPECT_EQ(host->frees, 1) << "one call for all of them";
  v1::ArenaFree frees;
  ASSERT_TRUE(frees.ParseFromString(link->take_frees()));
  EXPECT_EQ(frees.lease_size(), 1024) << "so that the frame stays small";
  EXPECT_TRUE(link->frees_wait());
  ASSERT_TRUE(frees.ParseFromString(link->take_frees()));
  EXPECT_EQ(frees.lease_size(), 476);
  EXPECT_FALSE(link->frees_wait());
  EXPECT_TRUE(link->take_frees().empty());
}

// ARENA-3: a lost connection alone frees nothing, the end of the socket does.
TEST_F(Negotiation, leases_end_with_the_socket_and_not_with_the_connection) {
  ASSERT_TRUE(link->on_probe(found(nonce())).ok());
  const std::string bytes(100'000, 'x');
  ASSERT_TRUE(link->lend(bytes).has_value());
  link->close();
  EXPECT_FALSE(link->lend(bytes).has_value());
  EXPECT_EQ(arena->counters().leases, 1u);
  peer->done();
  while (arena->counters().leases > 0) sched_yield();  // bounded by the test's own limit
  EXPECT_EQ(arena->counters().blocks, 0u);
}

}  // namespace
}  // namespace weft::internal
