#include "weft/tools/weftrun/session.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>
#include <algorithm>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "weft/common/mutex.h"
#include "weft/store/file_store.h"
#include "weft/store/internal/launch/system.h"
#include "weft/tools/weftrun/rendezvous.h"
#include "weft/tools/weftrun/tls.h"

namespace weft::launch {
namespace {

struct Address {
  std::string host;
  int port = 0;
};

// The address in tcp://host:port or tcp://[v6]:port.
absl::StatusOr<Address> tcp_address(absl::string_view url) {
  absl::string_view rest = url;
  absl::ConsumePrefix(&rest, "tcp://");
  size_t colon = rest.rfind(':');
  Address address;
  if (colon == absl::string_view::npos ||
      !absl::SimpleAtoi(rest.substr(colon + 1), &address.port) || address.port < 1 ||
      address.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rdzv ", url, ": tcp:// wants a host and a port from 1 to 65535"));
  }
  absl::string_view host = rest.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[") && !absl::ConsumeSuffix(&host, "]")) host = "";
  if (host.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rdzv ", url, ": tcp:// wants a host and a port"));
  }
  address.host = std::string(host);
  return address;
}

std::string tcp_url(const std::string& host, int port) {
  bool v6 = host.find(':') != std::string::npos;
  return absl::StrCat("tcp://", v6 ? "[" : "", host, v6 ? "]" : "", ":", port);
}

}  // namespace

Session::Session(const Options& options, absl::Duration lease, int signal_fd, Outputs* outputs)
    : options_(options),
      lease_(lease),
      signal_fd_(signal_fd),
      outputs_(outputs),
      runtime_(make_system_runtime()) {}

Session::~Session() {
  peers_.reset();
  store_.reset();
  base_.reset();
  if (server_) server_->stop(absl::Seconds(1));
}

absl::Status Session::open_store() {
  const std::string id = options_.rdzv_id.empty() ? "default" : options_.rdzv_id;
  std::shared_ptr<Store> store;
  if (absl::StartsWith(options_.rdzv, "tcp://")) {
    absl::StatusOr<Address> address = tcp_address(options_.rdzv);
    if (!address.ok()) return address.status();
    const Credentials credentials =
        options_.tls.empty() ? Credentials() : own_credentials(options_.tls);
    if (options_.node_rank == 0) {
      absl::StatusOr<std::unique_ptr<TcpStoreServer>> server =
          TcpStoreServer::start({.host = address->host,
                                 .port = address->port,
                                 .allow_insecure = options_.allow_insecure,
                                 .credentials = credentials},
                                runtime_);
      if (!server.ok()) return annotate(server.status(), "node 0 hosts the meeting place");
      server_ = *std::move(server);
    }
    absl::StatusOr<std::shared_ptr<TcpStore>> client =
        TcpStore::connect(address->host, address->port,
                          {.timeout = options_.rdzv_timeout, .credentials = credentials}, runtime_);
    if (!client.ok())
      return annotate(client.status(), "node 0 hosts the meeting place; is it there?");
    store = *std::move(client);
  } else if (absl::StartsWith(options_.rdzv, "file://")) {
    absl::StatusOr<std::shared_ptr<FileStore>> client = FileStore::open(
        options_.rdzv.substr(7), {.run_id = absl::StrCat("weftrun ", id), .timeout = {}}, runtime_);
    if (!client.ok()) return client.status();
    store = *std::move(client);
  } else {
    absl::StatusOr<std::shared_ptr<Store>> client = weft::open_store(
        options_.rdzv, {.is_server = false, .timeout = options_.rdzv_timeout, .run_id = id},
        runtime_);
    if (!client.ok()) return client.status();
    store = *std::move(client);
  }
  base_ = std::make_shared<PrefixStore>(absl::StrCat("weftrun/", id), std::move(store));
  return absl::OkStatus();
}

absl::StatusOr<Job> Session::meet(const std::string& host, int master_port, int store_port,
                                  int restart_count) {
  peers_.reset();
  MeetingOptions meeting{.node = options_.node_rank,
                         .nnodes = options_.nnodes,
                         .max_restarts = options_.max_restarts,
                         .self = {.host = host, .roles = options_.roles},
                         .master_addr = options_.address,
                         .master_port = master_port,
                         .timeout = options_.rdzv_timeout};
  meeting.store_url = [this, store_port](const Job& job) {
    // Rank 0 hosts the programs' store, so it needs a place of its own.
    if (absl::StartsWith(options_.rdzv, "tcp://")) return tcp_url(job.master_addr, store_port);
    if (absl::StartsWith(options_.rdzv, "file://")) return absl::StrCat(options_.rdzv, ".", job.id);
    // A prefix of its own, before what the URL says of users and files.
    const size_t path = std::min(options_.rdzv.find('?'), options_.rdzv.size());
    return absl::StrCat(options_.rdzv.substr(0, path), "/", job.id, options_.rdzv.substr(path));
  };
  absl::StatusOr<Job> job = absl::CancelledError("not met");
  Mutex mutex;
  std::shared_ptr<Store> opened;
  bool ended = run_interruptibly(
      [&] {
        absl::Status status = base_ == nullptr ? open_store() : absl::OkStatus();
        if (status.ok()) {
          MutexLock lock(&mutex);
          store_ = std::make_shared<PrefixStore>(absl::StrCat("life", restart_count), base_);
          opened = store_;
        }
        if (status.ok() && !options_.quiet) {
          outputs_->say(absl::StrCat("node ", options_.node_rank, " of ", options_.nnodes,
                                     " waits for the others at ", options_.rdzv));
        }
        job = status.ok() ? launch::meet(*store_, meeting) : absl::StatusOr<Job>(status);
      },
      [&](int) {
        MutexLock lock(&mutex);
        if (opened != nullptr) opened->interrupt();
      });
  if (!ended) {
    // Still dialling. Nothing was started, and the guard cleans up.
    outputs_->say(absl::StrCat("stopped by ", signal_name(stopped_by_),
                               " while looking for the other nodes"));
    leave(128 + stopped_by_);
  }
  if (stopped_by_ != 0) {
    return absl::CancelledError(absl::StrCat("stopped by ", signal_name(stopped_by_),
                                             " while looking for the other nodes"));
  }
  if (!job.ok()) return job;
  peers_ =
      std::make_unique<Peers>(store_, store_->new_client(), runtime_,
                              Peers::Options{.job_id = job->id,
                                             .node = options_.node_rank,
                                             .nodes = job->nodes,
                                             .lease = lease_,
                                             .may_restart = restart_count < options_.max_restarts});
  job_store_url_ = job->store_url;
  job->restart_count = restart_count;
  return job;
}

SessionEnd Session::finish(int code, bool may_restart) {
  Ending ending;
  bool ended = run_interruptibly(
      [&] { ending = peers_->finish(options_.grace + absl::Seconds(5), may_restart); },
      [&](int signal) {
        peers_->report({.exit_code = 128 + signal,
                        .text = absl::StrCat("weftrun of node ", options_.node_rank,
                                             " was stopped by ", signal_name(signal))});
        store_->interrupt();
      });
  if (!ended) leave(code != 0 ? code : 128 + stopped_by_);
  const bool restart = ending.restart && stopped_by_ == 0;
  if (peers_->all_left() && absl::StartsWith(options_.rdzv, "file://")) {
    // The last to use them, and a job leaves nothing behind.
    if (!restart) std::remove(options_.rdzv.substr(7).c_str());
    std::remove(job_store_url_.substr(7).c_str());
  }
  if (peers_->all_left() && !restart && absl::StartsWith(options_.rdzv, "etcd://")) {
    absl::StatusOr<std::vector<std::string>> keys = base_->list_keys("", absl::Seconds(5));
    for (const std::string& key : keys.ok() ? *keys : std::vector<std::string>()) {
      base_->delete_key(key, absl::Seconds(5)).status().IgnoreError();  // they harm no later job
    }
  }
  if (code == 0 && ending.other) {
    outputs_->say(
        absl::StrCat("another node, after the processes here had ended: ", ending.other->text));
    code = ending.other->exit_code;
  }
  if (code == 0 && stopped_by_ != 0) code = 128 + stopped_by_;
  return {.code = code, .restart = restart};
}

void Session::leave(int code) {
  outputs_->flush(signal_fd_, absl::Seconds(1));
  std::_Exit(code);
}

bool Session::run_interruptibly(std::function<void()> body,
                                std::function<void(int signal)> interrupt) {
  absl::StatusOr<Pipe> done = make_pipe();
  if (!done.ok()) {
    body();
    return true;
  }
  std::unique_ptr<Thread> thread = runtime_->spawn("weftrun-session", [&] {
    body();
    char byte = 'd';
    while (write(done->write.get(), &byte, 1) < 0 && errno == EINTR) {
    }
  });
  bool ended = false;
  std::optional<absl::Duration> deadline;
  while (!ended) {
    pollfd fds[2] = {{done->read.get(), POLLIN, 0}, {signal_fd_, POLLIN, 0}};
    int timeout = -1;
    if (deadline) {
      timeout = static_cast<int>(
          std::max<int64_t>(0, absl::ToInt64Milliseconds(*deadline - monotonic_now())));
      if (timeout == 0) break;
    }
    poll(fds, 2, timeout);
    ended = fds[0].revents != 0;
    signalfd_siginfo info;
    while (fds[1].revents != 0 &&
           read(signal_fd_, &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
      int signal = static_cast<int>(info.ssi_signo);
      if (!is_stop_signal(signal)) continue;
      if (stopped_by_ == 0) {
        stopped_by_ = signal;
        deadline = monotonic_now() + absl::Seconds(1);
        interrupt(signal);
      }
    }
  }
  if (ended) {
    thread->join();
  } else {
    // The caller leaves the process; joining would be the wait that the user wants to end.
    thread.release();
  }
  return ended;
}

}  // namespace weft::launch
