#include "weft/transport/internal/data/loop.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::internal {
namespace {

constexpr int kEventsAtOnce = 64;
// A yield costs as much as a look or two.
constexpr unsigned kLoopPollsPerYield = 4;
constexpr uint64_t kWakeNumber = 0;  // clients begin with 1

epoll_event event_for(uint64_t number, bool writing) {
  epoll_event event = {};
  event.events = EPOLLIN | (writing ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  event.data.u64 = number;
  return event;
}

}  // namespace

Status DataLoop::open_locked() {
  UniqueFd poll(epoll_create1(EPOLL_CLOEXEC));
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event = event_for(kWakeNumber, false);
  if (!poll.valid() || !wake.valid() ||
      epoll_ctl(poll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat("cannot wait for data connections: ", system_error(errno)));
  }
  epoll_ = std::move(poll);
  wake_ = std::move(wake);
  thread_ = runtime_->spawn(name_, [this] { run(); });
  return absl::OkStatus();
}

Status DataLoop::add(std::shared_ptr<Client> client, int fd, bool writing, uint64_t* number) {
  MutexLock lock(&mutex_);
  if (stopping_) return make_error(ErrorKind::kState, "the transport is shut down");
  if (thread_ == nullptr) WEFT_RETURN_IF_ERROR(open_locked());
  *number = ++last_;
  epoll_event event = event_for(*number, writing);
  clients_.emplace(*number, std::move(client));
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return absl::OkStatus();
  clients_.erase(*number);
  return make_error(ErrorKind::kResource,
                    absl::StrCat("cannot wait for a data connection: ", system_error(errno)));
}

void DataLoop::watch_writing(uint64_t number, int fd, bool on) {
  epoll_event event = event_for(number, on);
  // Cannot fail for a registered socket.
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void DataLoop::remove(uint64_t number, int fd) {
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  std::shared_ptr<Client> last;  // destroyed without the lock
  MutexLock lock(&mutex_);
  const auto it = clients_.find(number);
  if (it == clients_.end()) return;
  last = std::move(it->second);
  clients_.erase(it);
  lock.unlock();
}

void DataLoop::wake() {
  const uint64_t one = 1;
  // A full counter is as good as one more.
  (void)!write(wake_.get(), &one, sizeof one);
}

void DataLoop::call(uint64_t number) {
  MutexLock lock(&mutex_);
  if (clients_.count(number) == 0) return;
  called_.push_back(number);
  wake();
}

std::shared_ptr<DataLoop::Client> DataLoop::find(uint64_t number) {
  MutexLock lock(&mutex_);
  const auto it = clients_.find(number);
  return it == clients_.end() ? nullptr : it->second;
}

int DataLoop::wait(bool due, epoll_event* events) {
  absl::Time now = due ? runtime_->now() : absl::InfinitePast();
  // Between two turns other threads that wait for this core get it, above all those of small calls.
  if (due) sched_yield();
  if (due && !crowd_.crowded(now)) {
    const absl::Time end = now + max_spin_;
    for (unsigned polls = 1; now < end; ++polls) {
      const int n = epoll_wait(epoll_.get(), events, kEventsAtOnce, 0);
      if (n != 0) return n;
      if (polls % kLoopPollsPerYield == 0) sched_yield();
      now = runtime_->now();
    }
  }
  return epoll_wait(epoll_.get(), events, kEventsAtOnce, -1);
}

void DataLoop::run() {
  std::array<epoll_event, kEventsAtOnce> events;
  bool due = false;
  while (true) {
    const int n = wait(due, events.data());
    turn_.look(runtime_->now());
    bool woken = false;
    due = false;
    for (int i = 0; i < n; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kWakeNumber) {
        woken = true;
        continue;
      }
      const std::shared_ptr<Client> client = find(event.data.u64);
      if (client == nullptr) continue;
      const bool broken = (event.events & (EPOLLERR | EPOLLHUP)) != 0;
      due |= client->on_ready(broken || (event.events & EPOLLIN) != 0,
                              broken || (event.events & EPOLLOUT) != 0);
    }
    if (!woken) continue;
    uint64_t count = 0;
    (void)!read(wake_.get(), &count, sizeof count);
    std::vector<uint64_t> called;
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
      called.swap(called_);
    }
    for (const uint64_t number : called) {
      if (const std::shared_ptr<Client> client = find(number)) client->on_called();
    }
  }
}

void DataLoop::stop() {
  std::unique_ptr<Thread> thread;
  std::map<uint64_t, std::shared_ptr<Client>> clients;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    thread = std::move(thread_);
    if (thread != nullptr) wake();
  }
  if (thread != nullptr) thread->join();
  {
    MutexLock lock(&mutex_);
    clients = clients_;
  }
  for (const auto& [number, client] : clients) client->on_stopped();
}

}  // namespace weft::internal
