#include "weft/tools/weftrun/peers.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace weft::launch {
namespace {

// How often a node gives a sign of life.
constexpr absl::Duration kBeat = absl::Seconds(1);

std::string run_key(const std::string& job_id, absl::string_view what) {
  return absl::StrCat("run/", job_id, "/", what);
}

// A goodbye says whether the node would start again; so does the verdict of node 0.
constexpr std::string_view kEnd = "end";
constexpr std::string_view kRestart = "restart";

}  // namespace

Peers::Peers(std::shared_ptr<Store> store, std::shared_ptr<Store> watch_store,
             std::shared_ptr<Runtime> runtime, Options options)
    : store_(std::move(store)),
      watch_store_(std::move(watch_store)),
      runtime_(std::move(runtime)),
      options_(std::move(options)) {
  absl::StatusOr<Pipe> pipe = make_pipe();
  if (pipe.ok()) wake_ = *std::move(pipe);
  for (int node = 0; node < static_cast<int>(options_.nodes.size()); ++node) {
    // A star: node 0 watches all, all watch node 0.
    if (node != options_.node && (options_.node == 0 || node == 0)) {
      signs_[node] = {.value = std::nullopt, .at = monotonic_now()};
    }
  }
  sender_ = runtime_->make_loop("weftrun-report");
  watcher_ = runtime_->spawn("weftrun-peers", [this] { watch(); });
}

Peers::~Peers() {
  stop_watching();
  store_->interrupt();
  sender_->shutdown();
}

void Peers::stop_watching() {
  {
    MutexLock lock(&mutex_);
    if (std::exchange(stopping_, true)) return;
  }
  watch_store_->interrupt();
  watcher_->join();
}

std::optional<Failure> Peers::failure() {
  MutexLock lock(&mutex_);
  return failure_;
}

void Peers::deliver(Failure failure) {
  MutexLock lock(&mutex_);
  if (failure_ || own_) return;
  failure_ = std::move(failure);
  char byte = 'f';
  while (write(wake_.write.get(), &byte, 1) < 0 && errno == EINTR) {
  }
}

absl::Status Peers::publish(Store& store, const Failure& failure) {
  // The first failure of the job stays.
  return store
      .compare_set(run_key(options_.job_id, "failed"), "",
                   absl::StrCat(options_.node, " ", failure.exit_code, " ", failure.text),
                   absl::Seconds(10))
      .status();
}

void Peers::report(const Failure& failure) {
  {
    MutexLock lock(&mutex_);
    if (own_ || failure_) return;
    own_ = failure;
  }
  sender_->post([this, failure] {
    // When the store is gone, the others notice that by themselves.
    publish(*store_, failure).IgnoreError();
  });
}

void Peers::deliver_published(const std::string& text) {
  std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits(' ', 2));
  int node = 0;
  Failure failure{.exit_code = 1, .text = text};
  if (parts.size() == 3 && absl::SimpleAtoi(parts[0], &node) &&
      absl::SimpleAtoi(parts[1], &failure.exit_code)) {
    failure.text = parts[2];
    // An exit code is a byte, and not 0 here.
    if (failure.exit_code < 1 || failure.exit_code > 255) failure.exit_code = 1;
  }
  if (node != options_.node) deliver(std::move(failure));
}

void Peers::watch() {
  const std::string failed = run_key(options_.job_id, "failed");
  const std::string own_beat = run_key(options_.job_id, absl::StrCat("beat/", options_.node));
  absl::Duration reached = monotonic_now();
  for (int64_t beat = 1;; ++beat) {
    // Waiting for a failure is also what spaces the signs of life.
    absl::Status status = watch_store_->set(own_beat, absl::StrCat(beat), kBeat);
    if (status.ok()) {
      absl::StatusOr<std::optional<std::string>> text =
          watch_store_->wait_change(failed, std::nullopt, kBeat);
      if (text.ok() && text->has_value()) {
        deliver_published(**text);
        return;
      }
      if (!text.ok() && !is_deadline(text.status())) status = text.status();
    }
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    if (status.ok()) {
      reached = monotonic_now();
      check_leases();
    } else if (monotonic_now() - reached > options_.lease) {
      deliver({.exit_code = 1,
               .text = absl::StrCat("the store ", watch_store_->describe(),
                                    " of node 0 does not answer for ",
                                    absl::FormatDuration(options_.lease), ": ", status.message())});
      return;
    }
  }
}

void Peers::check_leases() {
  for (auto& [node, sign] : signs_) {
    if (sign.left) continue;
    absl::StatusOr<bool> left =
        watch_store_->check({run_key(options_.job_id, absl::StrCat("bye/", node))}, kBeat);
    absl::StatusOr<std::optional<std::string>> beat =
        watch_store_->try_get(run_key(options_.job_id, absl::StrCat("beat/", node)), kBeat);
    if (!left.ok() || !beat.ok()) return;  // about the store, not about the node
    if (*left) {
      sign.left = true;
    } else if (*beat != sign.value) {
      sign.value = *beat;
      sign.at = monotonic_now();
    } else if (monotonic_now() - sign.at > options_.lease) {
      sign.left = true;
      Failure failure{.exit_code = 1,
                      .text = absl::StrCat("node ", node, " (host ", options_.nodes[node].host,
                                           ") has given no sign of life for ",
                                           absl::FormatDuration(options_.lease))};
      {
        MutexLock lock(&mutex_);
        lost_.insert(node);
      }
      publish(*watch_store_, failure)
          .IgnoreError();  // delivered here whether the others hear of it or not
      deliver(std::move(failure));
    }
  }
}

Ending Peers::finish(absl::Duration bound, bool may_restart) {
  std::optional<Failure> own;
  {
    MutexLock lock(&mutex_);
    own = own_;
  }
  // The failure comes before the goodbye, so that no node takes this for a good end; it may be told
  // already. Where nothing follows, the goodbye is the last that this node writes: node 0 may take
  // the store away after it. Node 0 itself goes on watching the others.
  const bool last_word = options_.node != 0 && !options_.may_restart;
  if (last_word) stop_watching();
  if (own) publish(*store_, *own).IgnoreError();
  absl::Status told = store_->set(run_key(options_.job_id, absl::StrCat("bye/", options_.node)),
                                  may_restart ? kRestart : kEnd, absl::Seconds(5));
  if (last_word || !told.ok()) return {.other = failure()};
  if (options_.node != 0) return await_verdict(bound);

  const bool all = await_goodbyes(bound, &may_restart);
  stop_watching();
  if (!all && !options_.may_restart) return {.other = failure()};
  // A node that failed said so before the goodbye, but the watch may not have brought it yet.
  const auto failed = store_->try_get(run_key(options_.job_id, "failed"), absl::Seconds(5));
  Ending ending;
  if (failed.ok() && failed->has_value()) {
    deliver_published(**failed);
    ending.restart = all && options_.may_restart && may_restart;
  }
  {
    MutexLock lock(&mutex_);
    all_left_ = all && lost_.empty();
    ending.restart = ending.restart && lost_.empty();
    ending.other = failure_;
  }
  if (options_.may_restart) announce(ending.restart ? kRestart : kEnd);
  return ending;
}

// Runs at node 0. False: not all came before the time was over that a failure leaves them.
bool Peers::await_goodbyes(absl::Duration bound, bool* may_restart) {
  std::optional<absl::Duration> deadline;
  for (int node = 1; node < static_cast<int>(options_.nodes.size()); ++node) {
    while (true) {
      {
        MutexLock lock(&mutex_);
        if (lost_.count(node) > 0) break;
        if ((failure_ || own_) && !deadline) deadline = monotonic_now() + bound;
      }
      if (deadline && monotonic_now() >= *deadline) return false;
      absl::StatusOr<std::optional<std::string>> bye = store_->wait_change(
          run_key(options_.job_id, absl::StrCat("bye/", node)), std::nullopt, kBeat);
      if (bye.ok() && bye->has_value()) {
        *may_restart = *may_restart && **bye == kRestart;
        break;
      }
      if (!bye.ok() && !is_deadline(bye.status())) return false;
    }
  }
  return true;
}

// Runs at node 0: the others read it before the store may go away.
void Peers::announce(std::string_view verdict) {
  constexpr absl::Duration kPatience = absl::Seconds(5);
  const absl::Duration deadline = monotonic_now() + kPatience;
  if (!store_->set(run_key(options_.job_id, "verdict"), verdict, kPatience).ok()) return;
  for (int node = 1; node < static_cast<int>(options_.nodes.size()); ++node) {
    {
      MutexLock lock(&mutex_);
      if (lost_.count(node) > 0) continue;
    }
    const absl::Duration left = std::max(deadline - monotonic_now(), absl::ZeroDuration());
    // One that has gone away meanwhile is missed when the nodes meet again.
    store_->wait_change(run_key(options_.job_id, absl::StrCat("heard/", node)), std::nullopt, left)
        .status()
        .IgnoreError();
  }
}

// Runs at another node: returns what node 0 decides. Without its decision nothing follows.
Ending Peers::await_verdict(absl::Duration bound) {
  Ending ending;
  std::optional<absl::Duration> deadline;
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (lost_.count(0) > 0) break;
      // Node 0 may still stop its processes, and then waits for the others.
      if ((failure_ || own_) && !deadline) deadline = monotonic_now() + 2 * bound;
    }
    if (deadline && monotonic_now() >= *deadline) break;
    const auto verdict =
        store_->wait_change(run_key(options_.job_id, "verdict"), std::nullopt, kBeat);
    if (verdict.ok() && verdict->has_value()) {
      ending.restart = **verdict == kRestart;
      const auto failed = store_->try_get(run_key(options_.job_id, "failed"), absl::Seconds(5));
      if (failed.ok() && failed->has_value()) deliver_published(**failed);
      stop_watching();
      store_
          ->set(run_key(options_.job_id, absl::StrCat("heard/", options_.node)), "1",
                absl::Seconds(5))
          .IgnoreError();
      break;
    }
    if (!verdict.ok() && !is_deadline(verdict.status())) break;
  }
  stop_watching();
  ending.other = failure();
  return ending;
}

}  // namespace weft::launch
