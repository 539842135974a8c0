// The contract of channels (transport/channel.h), for every backend: two ends over a control lane
// that can lose, hold and cut, and over sockets that are refused, cut or mute.
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/executor.h"
#include "weft/common/runtime.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/transport/channel.h"
#include "weft/transport/internal/arena/channel.h"
#include "weft/transport/internal/data/channel.h"
#include "weft/transport/internal/local/gate.h"

namespace weft::testing {
namespace {

using internal::Channel;
using internal::ChannelBackend;
using internal::ChannelHost;
using internal::ChannelSite;
using internal::kPromptLaneVersion;
using internal::LaneEnd;
using internal::LocalGate;
using internal::LocalSession;
using internal::Timed;
using internal::UniqueFd;

enum class Sockets { kGood, kRefused, kCut, kMute };

// What lies between the two ends. Shared state is guarded by the signal.
struct Wires {
  explicit Wires(std::shared_ptr<Runtime> r)
      : runtime(std::move(r)), signal(runtime.get()), loop(runtime->make_loop("control")) {}

  const std::shared_ptr<Runtime> runtime;
  Signal signal;
  const std::shared_ptr<Executor> loop;
  int own_sent = 0;
  int lose = -1;      // this one of the negotiation's frames
  bool cut = false;   // the control lane
  bool hold = false;  // its frames wait
  std::vector<std::function<void()>> held;
  Sockets sockets = Sockets::kGood;
  std::vector<UniqueFd> mute;
};

// A connection's side of a channel, and its checks: CHAN-1, CHAN-2.
class Host final : public ChannelHost, public std::enable_shared_from_this<Host> {
 public:
  Host(std::shared_ptr<Wires> wires, bool dialled)
      : handler(std::make_shared<RecordingHandler>(&wires->signal)),
        wires_(std::move(wires)),
        dialled_(dialled) {}

  bool dialled() const override { return dialled_; }
  uint32_t peer_version() const override { return peer_speaks; }
  std::string describe() const override { return dialled_ ? "dialler" : "acceptor"; }
  void send_own(Frame frame) override {
    wires_->signal.with([&] {
      const bool lost = wires_->own_sent++ == wires_->lose || wires_->cut;
      if (lost) return;
      auto deliver = [to = peer_, kind = frame.kind, header = frame.header] {
        if (const std::shared_ptr<Host> host = to.lock()) host->take(kind, header);
      };
      if (wires_->hold) {
        wires_->held.push_back(deliver);
      } else {
        (void)wires_->loop->post(deliver);
      }
    });
  }
  void set_deadline(absl::Time when, std::weak_ptr<Timed> what) override {
    auto timer = wires_->runtime->make_timer([what] {
      if (const std::shared_ptr<Timed> timed = what.lock()) timed->on_deadline();
    });
    wires_->signal.with([&] {
      if (no_timers_) return;
      timer->arm(when);
      timers_.push_back(std::move(timer));
    });
  }
  StatusOr<UniqueFd> dial_socket() override;
  void channel_settled(Channel& channel, bool serves, std::string_view why_not) override {
    EXPECT_EQ(serves, why_not.empty());
    if (serves && channel.capabilities().lanes) {
      EXPECT_GT(channel.lanes(), 0u);
    }
    wires_->signal.with([&] {
      ++settled;
      EXPECT_EQ(settled, 1) << "CHAN-1";
      EXPECT_FALSE(closed) << "CHAN-1";
      serving = serves;
      why = std::string(why_not);
    });
  }
  bool lane_begun() override {
    return wires_->signal.with([&] {
      if (ending) return false;
      ++begun;
      return true;
    });
  }
  ConnectionHandler* lane_up() override { return handler.get(); }
  void lane_ended(LaneEnd end, bool was_up) override {
    (void)was_up;
    wires_->signal.with([&] {
      ++ended;
      EXPECT_LE(ended, begun) << "CHAN-2";
      for (const uint64_t cookie : end.unsent) unsent.push_back(cookie);
    });
  }

  // By the control lane, in order.
  void take(FrameKind kind, const std::string& header) {
    EXPECT_TRUE(channel->owns(kind));
    const Status status = channel->on_own_frame(kind, header);
    EXPECT_TRUE(status.ok()) << status;
    wires_->signal.with([] {});  // what it has changed may be waited for
  }
  void link(const std::shared_ptr<Host>& peer) { peer_ = peer; }
  // Waits for those that fire now, so that nothing is let go of on the timer thread: it may be the
  // last that holds the runtime.
  void stop_timers() {
    std::vector<std::unique_ptr<Timer>> timers;
    wires_->signal.with([&] {
      no_timers_ = true;
      timers.swap(timers_);
    });
  }

  const HandlerRef handler;
  std::shared_ptr<Channel> channel;
  std::shared_ptr<ChannelBackend> backend;
  uint32_t peer_speaks = kPromptLaneVersion;
  // Guarded by the signal.
  int settled = 0, begun = 0, ended = 0;
  bool serving = false, closed = false, ending = false;
  std::string why;
  std::vector<uint64_t> unsent;

 private:
  const std::shared_ptr<Wires> wires_;
  const bool dialled_;
  std::weak_ptr<Host> peer_;
  bool no_timers_ = false;
  std::vector<std::unique_ptr<Timer>> timers_;
};

StatusOr<UniqueFd> Host::dial_socket() {
  const Sockets sockets = wires_->signal.with([&] { return wires_->sockets; });
  if (sockets == Sockets::kRefused) return make_error(ErrorKind::kUnavailable, "refused");
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  UniqueFd ours(fds[0]);
  auto theirs = std::make_shared<UniqueFd>(fds[1]);
  if (sockets == Sockets::kCut) return ours;
  if (sockets == Sockets::kMute) {
    wires_->signal.with([&] { wires_->mute.push_back(std::move(*theirs)); });
    return ours;
  }
  // As a listener does.
  (void)wires_->loop->post([to = peer_, theirs] {
    const std::shared_ptr<Host> host = to.lock();
    char greeting[internal::kSocketGreetingBytes];
    pollfd ready{theirs->get(), POLLIN, 0};
    if (host == nullptr || poll(&ready, 1, 30'000) != 1) return;
    const ssize_t n = recv(theirs->get(), greeting, sizeof greeting, MSG_DONTWAIT);
    if (n != static_cast<ssize_t>(sizeof greeting)) return;
    EXPECT_EQ(std::string_view(greeting, 8), internal::kSocketMagic);
    const std::string ticket(greeting + 8, internal::kSocketTicketBytes);
    EXPECT_FALSE(host->backend->take_socket(std::string(16, '?'), theirs.get())) << "a stranger's";
    (void)host->backend->take_socket(ticket, theirs.get());
  });
  return ours;
}

struct Kind {
  std::string name;
  bool tls = false;
  bool prompt = false;  // lanes for prompt frames, of "data" at a local socket
  bool asked = false;   // the dialler wants them, otherwise the acceptor
  friend void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }
};

class ChannelContract : public ::testing::TestWithParam<Kind> {
 protected:
  static constexpr size_t kFirstLane = 3;

  void TearDown() override { leave(); }

  bool is_arena() const { return GetParam().name == "arena"; }
  std::shared_ptr<ChannelBackend> make_backend(const std::shared_ptr<LocalGate>& gate) {
    if (is_arena()) return std::make_shared<internal::ArenaBackend>(runtime_, gate, 64u << 20);
    internal::DataBackend::Options options;
    options.tls = GetParam().tls;
    options.max_frame_bytes = 4u << 20;
    options.handshake_timeout = patience_;
    return std::make_shared<internal::DataBackend>(runtime_, options);
  }
  // Frames of the negotiation, by either backend.
  int negotiated() const { return GetParam().prompt && !GetParam().asked ? 1 : 2; }
  // Two ends, not begun.
  void make() {
    leave();
    wires_ = std::make_shared<Wires>(runtime_);
    const std::string name =
        absl::StrCat("weft-test-", absl::Hex(runtime_->random().next(), absl::kZeroPad16));
    std::array<std::shared_ptr<LocalSession>, 2> sessions;
    for (auto& gate : gates_) gate = std::make_shared<LocalGate>(runtime_);
    if (is_arena()) {
      ASSERT_TRUE(gates_[1]->listen(name).ok());
      sessions[0] = *gates_[0]->visit(name);
      sessions[1] = gates_[1]->claim(sessions[0]->ticket());
      ASSERT_NE(sessions[1], nullptr);
    }
    for (size_t i = 0; i < 2; ++i) {
      ends_[i] = std::make_shared<Host>(wires_, i == 0);
      ends_[i]->backend = make_backend(gates_[i]);
      ChannelSite site;
      site.dialled = i == 0;
      site.local = is_arena() || GetParam().prompt;
      site.session = sessions[i];
      site.first_lane = kFirstLane;
      site.max_lanes = 2;
      ends_[i]->channel = ends_[i]->backend->make(site);
    }
    ends_[0]->link(ends_[1]);
    ends_[1]->link(ends_[0]);
  }
  void start() {
    for (const auto& end : ends_) end->channel->start(end);
    for (const auto& end : ends_) end->channel->opened();
    if (!GetParam().prompt) return;
    for (const auto& end : ends_) {
      EXPECT_TRUE(end->channel->only_prompt());
      EXPECT_EQ(end->channel->lanes(), 0u) << "before they are wanted";
    }
    for (int k = 0; k < 3; ++k) ends_[GetParam().asked ? 0 : 1]->channel->want_lanes();
  }
  bool wait(std::function<bool()> done) { return wires_->signal.wait(std::move(done)); }
  void serve() {
    make();
    start();
    ASSERT_TRUE(wait([&] { return ends_[0]->settled == 1 && ends_[1]->settled == 1; }));
    ASSERT_TRUE(ends_[0]->serving) << ends_[0]->why;
    ASSERT_TRUE(ends_[1]->serving) << ends_[1]->why;
  }
  // What the control lane has got to carry is carried.
  void settle_control() {
    bool through = false;
    (void)wires_->loop->post([&] { wires_->signal.with([&] { through = true; }); });
    ASSERT_TRUE(wait([&] { return through; }));
  }
  // As a connection ends: CHAN-2, CHAN-3.
  void leave(bool abort = false) {
    if (wires_ == nullptr) return;
    wires_->signal.with([&] {
      for (const auto& end : ends_) end->ending = true;
    });
    for (const auto& end : ends_) {
      if (abort) {
        end->channel->abort(make_error(ErrorKind::kUnavailable, "the connection broke"));
      } else {
        end->channel->drain();
      }
    }
    EXPECT_TRUE(wait([&] {
      return ends_[0]->begun == ends_[0]->ended && ends_[1]->begun == ends_[1]->ended;
    })) << "CHAN-2: "
        << ends_[0]->begun << "/" << ends_[0]->ended << ", " << ends_[1]->begun << "/"
        << ends_[1]->ended;
    for (const auto& end : ends_) {
      end->channel->close();
      wires_->signal.with([&] { end->closed = true; });
      EXPECT_FALSE(end->channel->place("late").has_value());
    }
    for (const auto& gate : gates_) gate->stop();
    for (const auto& end : ends_) end->backend->stop();
    wires_->loop->shutdown();
    for (const auto& end : ends_) end->stop_timers();
    for (auto& end : ends_) end = nullptr;
    wires_ = nullptr;
  }
  int64_t counter(const Host& end, const std::string& name) {
    std::vector<std::pair<std::string, int64_t>> all;
    end.backend->add_counters(&all);
    for (const auto& [key, value] : all) {
      if (key == name) return value;
    }
    return -1;
  }

  const std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  absl::Duration patience_ = absl::Seconds(30);
  std::array<std::shared_ptr<LocalGate>, 2> gates_;
  std::shared_ptr<Wires> wires_;
  std::array<std::shared_ptr<Host>, 2> ends_;
};

TEST_P(ChannelContract, BytesPassBothWaysOnceItServes) {
  ASSERT_NO_FATAL_FAILURE(serve());
  for (size_t from = 0; from < 2; ++from) {
    Host& sender = *ends_[from];
    Host& receiver = *ends_[1 - from];
    EXPECT_EQ(sender.channel->name(), sender.backend->name());
    EXPECT_EQ(sender.channel->capabilities().places, sender.backend->capabilities().places);
    EXPECT_EQ(sender.channel->capabilities().lanes, sender.backend->capabilities().lanes);
    for (uint64_t i = 1; i <= 8; ++i) {
      const std::string bytes = pattern(100'000 + i, i);
      if (sender.channel->capabilities().places) {
        const std::optional<Placement> placed = sender.channel->place(bytes);
        ASSERT_TRUE(placed.has_value());
        StatusOr<Borrowed> got = receiver.channel->borrow(*placed, bytes.size());
        ASSERT_TRUE(got.ok()) << got.status();
        EXPECT_TRUE(std::string_view(got->data, bytes.size()) == bytes);
      }
      if (sender.channel->capabilities().lanes) {
        const size_t lane = i % sender.channel->lanes();
        ASSERT_TRUE(
            sender.channel->send(make_frame(FrameKind::kChunk, std::to_string(i), bytes), lane)
                .ok());
        ASSERT_TRUE(receiver.handler->wait_frames(i));
        const Received got = receiver.handler->frames().back();
        EXPECT_EQ(got.header, std::to_string(i));
        EXPECT_TRUE(got.payload == bytes);
        EXPECT_EQ(got.lane, static_cast<int>(kFirstLane + lane));
      }
    }
    ConnectionStats stats;
    sender.channel->add_to(&stats);
    EXPECT_EQ(is_arena() ? stats.arena_hits : 8, 8);
    EXPECT_FALSE((is_arena() ? stats.arena : stats.data).empty());
  }
}

TEST_P(ChannelContract, WhatItCannotDoItDoesNotDo) {
  ASSERT_NO_FATAL_FAILURE(serve());
  Channel& channel = *ends_[0]->channel;
  if (!channel.capabilities().places) {
    EXPECT_FALSE(channel.place("bytes").has_value());
    EXPECT_EQ(error_kind(channel.borrow({0, 1}, 1).status()), ErrorKind::kProtocol);
    EXPECT_FALSE(channel.rider_waits());
  }
  if (!channel.capabilities().lanes) {
    EXPECT_EQ(channel.lanes(), 0u);
    EXPECT_EQ(error_kind(channel.send(make_frame(FrameKind::kChunk, "", ""), 0)),
              ErrorKind::kInvalidArgument);
  }
  for (const FrameKind kind : {FrameKind::kRequest, FrameKind::kChunk, FrameKind::kDataEnd}) {
    EXPECT_FALSE(channel.owns(kind)) << "none of the connection's";
  }
}

TEST_P(ChannelContract, CHAN_1_NothingBeforeItIsSettled) {
  make();
  wires_->hold = true;
  start();
  for (const auto& end : ends_) {
    EXPECT_FALSE(end->channel->place("bytes").has_value());
    EXPECT_EQ(end->channel->lanes(), 0u);
    ConnectionStats stats;
    end->channel->add_to(&stats);
    EXPECT_FALSE((is_arena() ? stats.arena : stats.data).empty()) << "what is in the way";
  }
  ASSERT_TRUE(wait([&] {
    return wires_->held.size() >= (GetParam().asked ? 1u : static_cast<size_t>(negotiated()));
  })) << "offers, or answers to them";
  EXPECT_EQ(ends_[0]->settled + ends_[1]->settled, 0);
  wires_->signal.with([&] {
    wires_->hold = false;
    for (const auto& deliver : wires_->held) (void)wires_->loop->post(deliver);
    wires_->held.clear();
  });
  ASSERT_TRUE(wait([&] { return ends_[0]->settled == 1 && ends_[1]->settled == 1; }));
  EXPECT_TRUE(ends_[0]->serving && ends_[1]->serving);
}

TEST_P(ChannelContract, CHAN_3_ALostFrameLeavesNobodyWaiting) {
  for (int lost = 0; lost < negotiated(); ++lost) {
    make();
    wires_->lose = lost;
    start();
    // An ask that is lost has no offer.
    const int sent = GetParam().asked && lost == 0 ? 1 : negotiated();
    ASSERT_TRUE(wait([&] { return wires_->own_sent >= sent; }));
    ASSERT_NO_FATAL_FAILURE(settle_control());
    EXPECT_FALSE(wires_->signal.with([&] { return ends_[0]->serving && ends_[1]->serving; }));
    leave();
  }
  // The control lane itself is gone.
  make();
  wires_->cut = true;
  start();
  leave();
}

TEST_P(ChannelContract, CHAN_2_SocketsThatFailAreNoService) {
  for (const Sockets sockets : {Sockets::kRefused, Sockets::kCut, Sockets::kMute}) {
    patience_ = sockets == Sockets::kMute ? absl::Milliseconds(200) : absl::Seconds(30);
    make();
    wires_->sockets = sockets;
    // The arena's socket ends before anything was said.
    if (is_arena()) gates_[1]->stop();
    start();
    ASSERT_TRUE(wait([&] { return ends_[0]->settled + ends_[1]->settled >= 1; }));
    for (const auto& end : ends_) {
      if (wires_->signal.with([&] { return end->settled; }) == 0) continue;
      EXPECT_FALSE(end->serving);
      EXPECT_FALSE(end->why.empty());
      EXPECT_EQ(end->channel->lanes(), 0u);
      EXPECT_FALSE(end->channel->place("bytes").has_value());
    }
    leave();
  }
}

TEST_P(ChannelContract, CHAN_4_HostileFramesAreProtocolErrors) {
  ASSERT_NO_FATAL_FAILURE(serve());
  const std::vector<std::string> hostile = {"", "\x0a\xff", std::string(1000, '\xff'),
                                            std::string(60'000, '\x08')};
  int refused = 0;
  for (const auto& end : ends_) {
    for (int kind = 1; kind <= 14; ++kind) {
      if (!end->channel->owns(static_cast<FrameKind>(kind))) continue;
      for (const std::string& header : hostile) {
        const Status status = end->channel->on_own_frame(static_cast<FrameKind>(kind), header);
        if (!status.ok()) ++refused;
        EXPECT_TRUE(status.ok() || error_kind(status) == ErrorKind::kProtocol) << status;
      }
    }
  }
  EXPECT_GE(refused, 4);
  // What serves, serves on.
  if (is_arena()) {
    EXPECT_TRUE(ends_[0]->channel->place("bytes").has_value());
  } else {
    ASSERT_TRUE(ends_[0]->channel->send(make_frame(FrameKind::kChunk, "x", "bytes"), 0).ok());
    EXPECT_TRUE(ends_[1]->handler->wait_frames(1));
  }
}

TEST_P(ChannelContract, WhatWasLentComesBack) {
  ASSERT_NO_FATAL_FAILURE(serve());
  if (!is_arena()) {
    // A channel that lends nothing says so, and its user sends.
    EXPECT_FALSE(ends_[0]->channel->place(pattern(1'000'000, 1)).has_value());
    return;
  }
  // By a frame that rides, and by one of its own when none does.
  for (const bool rides : {true, false}) {
    const std::string bytes = pattern(1'000'000, 1);
    const std::optional<Placement> placed = ends_[0]->channel->place(bytes);
    ASSERT_TRUE(placed.has_value());
    EXPECT_EQ(counter(*ends_[0], "arena_leases"), 1);
    StatusOr<Borrowed> got = ends_[1]->channel->borrow(*placed, bytes.size());
    ASSERT_TRUE(got.ok());
    EXPECT_FALSE(ends_[1]->channel->rider_waits());
    got = Borrowed{};
    if (rides && ends_[1]->channel->rider_waits()) {
      Frame rider = ends_[1]->channel->take_rider();
      if (!rider.header.empty()) ends_[1]->send_own(std::move(rider));
    }
    EXPECT_TRUE(wait([&] { return counter(*ends_[0], "arena_leases") == 0; }));
  }
  // One that was not told of after all.
  const std::optional<Placement> placed = ends_[0]->channel->place("bytes");
  ASSERT_TRUE(placed.has_value());
  ends_[0]->channel->unplace(*placed);
  EXPECT_EQ(counter(*ends_[0], "arena_leases"), 0);
}

TEST_P(ChannelContract, ThreadsUseItWhileItBreaks) {
  for (const bool abort : {true, false}) {
    ASSERT_NO_FATAL_FAILURE(serve());
    std::atomic<uint64_t> cookie{0};
    std::atomic<int> working{0};
    std::vector<std::unique_ptr<Thread>> threads;
    const auto work = [&, ends = ends_](size_t from) {
      Channel& channel = *ends[from]->channel;
      const std::string bytes = pattern(300'000, from);
      ++working;
      for (int i = 0; i < 40; ++i) {
        if (is_arena()) {
          const std::optional<Placement> placed = channel.place(bytes);
          if (!placed.has_value()) break;
          const StatusOr<Borrowed> got = ends[1 - from]->channel->borrow(*placed, bytes.size());
          if (!got.ok()) {
            channel.unplace(*placed);
            break;
          }
          EXPECT_TRUE(std::string_view(got->data, bytes.size()) == bytes);
        } else {
          const size_t lane = static_cast<size_t>(i) % (GetParam().prompt ? 1 : 2);
          Frame frame = make_frame(FrameKind::kChunk, "x", bytes, ++cookie);
          const Status sent = channel.send(std::move(frame), lane);
          if (sent.ok()) continue;
          EXPECT_EQ(error_kind(sent), ErrorKind::kNotDelivered) << sent;
          break;
        }
      }
    };
    for (size_t i = 0; i < 4; ++i) {
      threads.push_back(runtime_->spawn("worker", [&, i] { work(i % 2); }));
    }
    while (working < 2) sched_yield();
    const std::array<HandlerRef, 2> handlers = {ends_[0]->handler, ends_[1]->handler};
    // Threads may still be within a call while the connection ends.
    wires_->signal.with([&] {
      for (const auto& end : ends_) end->ending = true;
    });
    if (abort) {
      ends_[0]->channel->abort(make_error(ErrorKind::kUnavailable, "the connection broke"));
    }
    for (const auto& thread : threads) thread->join();
    if (!abort) {
      // One side closes; what the other one has queued then is told as unsent (CONN-4).
      ends_[0]->channel->drain();
      ASSERT_TRUE(wait([&] {
        return ends_[0]->begun == ends_[0]->ended && ends_[1]->begun == ends_[1]->ended;
      }));
    }
    const auto ends = ends_;
    leave(abort);
    if (!abort && !is_arena()) {
      EXPECT_TRUE(ends[0]->unsent.empty()) << "a drain sends what is queued";
      EXPECT_EQ(handlers[1]->frame_count(), 80u);
    }
    for (const HandlerRef& handler : handlers) {
      for (const Received& got : handler->frames()) EXPECT_EQ(got.payload.size(), 300'000u);
    }
  }
}

// Lanes that are made when they are wanted: transport.proto, `data_offer` by the local socket.
class WantedLanes : public ChannelContract {
 protected:
  void begin() {
    make();
    for (const auto& end : ends_) end->channel->start(end);
    for (const auto& end : ends_) end->channel->opened();
  }
  int own_sent() {
    return wires_->signal.with([&] { return wires_->own_sent; });
  }
};

TEST_P(WantedLanes, BothEndsMayWantThemAtOnce) {
  begin();
  wires_->signal.with([&] { wires_->hold = true; });
  for (const auto& end : ends_) end->channel->want_lanes();
  ASSERT_TRUE(wait([&] { return wires_->held.size() == 2; })) << "the ask and the offer cross";
  wires_->signal.with([&] {
    wires_->hold = false;
    for (const auto& deliver : wires_->held) (void)wires_->loop->post(deliver);
  });
  ASSERT_TRUE(wait([&] { return ends_[0]->settled == 1 && ends_[1]->settled == 1; }));
  ASSERT_NO_FATAL_FAILURE(settle_control());
  for (const auto& end : ends_) {
    EXPECT_TRUE(end->serving);
    EXPECT_EQ(end->channel->lanes(), 1u);
    EXPECT_EQ(end->begun, 1);
  }
  EXPECT_EQ(own_sent(), 2);
}

TEST_P(WantedLanes, AnOlderPeerIsToldNothing) {
  for (const auto wants : {0u, 1u}) {
    begin();
    ends_[wants]->peer_speaks = kPromptLaneVersion - 1;
    ends_[wants]->channel->want_lanes();
    EXPECT_EQ(own_sent(), 0);
    EXPECT_EQ(ends_[wants]->channel->lanes(), 0u);
    leave();
  }
}

TEST_P(WantedLanes, OneOfferIsMadeHoweverOftenTheDiallerAsks) {
  begin();
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(ends_[1]->channel->on_own_frame(FrameKind::kDataOffer, "").ok());
  }
  EXPECT_EQ(own_sent(), 1);
  EXPECT_EQ(error_kind(ends_[1]->channel->on_own_frame(FrameKind::kDataOffer, "x")),
            ErrorKind::kProtocol);
  ASSERT_TRUE(wait([&] { return ends_[0]->settled == 1 && ends_[1]->settled == 1; }));
  EXPECT_TRUE(ends_[0]->serving && ends_[1]->serving);
}

// The connection ends between the wish and the offer, at the asker's, the asked one's, or after both.
TEST_P(WantedLanes, AnEndInBetweenLeavesNoLane) {
  for (const bool abort : {true, false}) {
    begin();
    wires_->signal.with([&] { wires_->hold = true; });
    const std::array<std::shared_ptr<Channel>, 2> channels = {ends_[0]->channel, ends_[1]->channel};
    for (const auto& channel : channels) channel->want_lanes();
    leave(abort);
    for (const auto& channel : channels) {
      channel->want_lanes();
      EXPECT_EQ(channel->lanes(), 0u);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, WantedLanes,
                         ::testing::Values(Kind{"prompt", false, true},
                                           Kind{"prompt_tls", true, true}),
                         [](const auto& p) { return p.param.name; });

INSTANTIATE_TEST_SUITE_P(, ChannelContract,
                         ::testing::Values(Kind{"arena"}, Kind{"data"}, Kind{"data_tls", true},
                                           Kind{"prompt", false, true},
                                           Kind{"prompt_tls", true, true, true}),
                         [](const auto& p) { return p.param.name; });

}  // namespace
}  // namespace weft::testing
