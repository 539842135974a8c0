#include "weft/transport/internal/arena/link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/proto/transport.pb.h"
#include "weft/transport/protocol_error.h"

namespace weft::internal {
namespace {

constexpr size_t kProbeNonceBytes = 16;
constexpr size_t kMaxReasonBytes = 512;
// In one frame, so that it stays a small one.
constexpr size_t kMaxFreesAtOnce = 1024;

}  // namespace

// This process's use of the peer's memory. Lives as long as the link or anything borrowed; its end
// tells the peer that nothing of its memory is used here.
class ArenaLink::Use {
 public:
  Use(std::shared_ptr<MemoryFile> file, std::shared_ptr<LocalSession> session,
      std::shared_ptr<Host> host, std::shared_ptr<std::atomic<bool>> frees_wait)
      : file_(std::move(file)),
        session_(std::move(session)),
        frees_wait_(std::move(frees_wait)),
        host_(std::move(host)) {}
  ~Use() { session_->done(); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  const MemoryFile& file() const { return *file_; }

  void give_back(uint64_t lease) {
    std::shared_ptr<Host> host;
    {
      MutexLock lock(&mutex_);
      if (host_ == nullptr) return;
      frees_.push_back(lease);
      if (frees_wait_->exchange(true, std::memory_order_relaxed)) return;
      host = host_;
    }
    host->frees_waiting();
  }

  std::vector<uint64_t> take_frees() {
    std::vector<uint64_t> out;
    MutexLock lock(&mutex_);
    if (frees_.size() <= kMaxFreesAtOnce) {
      frees_wait_->store(false, std::memory_order_relaxed);
      out.swap(frees_);
    } else {
      out.assign(frees_.end() - kMaxFreesAtOnce, frees_.end());
      frees_.resize(frees_.size() - kMaxFreesAtOnce);
    }
    return out;
  }

  void close() {
    std::shared_ptr<Host> host;
    MutexLock lock(&mutex_);
    host.swap(host_);
    lock.unlock();
  }

 private:
  const std::shared_ptr<MemoryFile> file_;
  const std::shared_ptr<LocalSession> session_;
  const std::shared_ptr<std::atomic<bool>> frees_wait_;
  Mutex mutex_;
  std::shared_ptr<Host> host_ ABSL_GUARDED_BY(mutex_);  // null: the connection is lost
  std::vector<uint64_t> frees_ ABSL_GUARDED_BY(mutex_);
};

class ArenaLink::Loan {
 public:
  Loan(std::shared_ptr<Use> use, uint64_t lease) : use_(std::move(use)), lease_(lease) {}
  ~Loan() { use_->give_back(lease_); }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

 private:
  const std::shared_ptr<Use> use_;
  const uint64_t lease_;
};

ArenaLink::ArenaLink(std::shared_ptr<SharedArena> arena, std::string why_none,
                     std::shared_ptr<LocalSession> session, std::shared_ptr<LocalGate> gate,
                     Random& random)
    : arena_(std::move(arena)),
      link_(arena_ == nullptr ? 0 : arena_->new_link()),
      session_(std::move(session)),
      gate_(std::move(gate)),
      nonce_(random_bytes(random, kProbeNonceBytes)),
      frees_wait_(std::make_shared<std::atomic<bool>>(false)),
      why_not_lending_(std::move(why_none)) {}

void ArenaLink::start(std::shared_ptr<Host> host) {
  v1::ArenaOffer offer;
  std::vector<int> files;
  std::shared_ptr<char> probe = arena_ == nullptr ? nullptr : arena_->allocate(kProbeNonceBytes);
  {
    MutexLock lock(&mutex_);
    host_ = std::move(host);
    if (arena_ != nullptr && probe == nullptr)
      why_not_lending_ = "no room for a probe (WEFT_ARENA_BYTES)";
    if (probe != nullptr) {
      why_not_lending_ = "the peer has not answered yet";
      std::memcpy(probe.get(), nonce_.data(), kProbeNonceBytes);
      offer.set_size(arena_->file().size());
      offer.set_probe_offset(static_cast<uint64_t>(probe.get() - arena_->file().data()));
      files.push_back(arena_->file().fd());
      probe_ = std::move(probe);
    } else {
      offer.set_reason(why_not_lending_.substr(0, kMaxReasonBytes));
    }
  }
  const std::string bytes = offer.SerializeAsString();
  Status sent = gate_->attach(session_, shared_from_this());
  if (sent.ok()) sent = session_->send(bytes, files);
  if (!sent.ok()) no_lending(std::string(sent.message()));
  if (files.empty()) settle(false, offer.reason());
}

void ArenaLink::settle(bool lends, std::string_view why_not) {
  std::shared_ptr<Host> host;
  {
    MutexLock lock(&mutex_);
    if (settled_ || closed_) return;
    settled_ = true;
    host = host_;
  }
  if (host != nullptr) host->lending_settled(lends, why_not);
}

void ArenaLink::no_lending(std::string why) {
  settle(false, why);
  std::shared_ptr<char> probe;
  MutexLock lock(&mutex_);
  lends_.store(false, std::memory_order_release);
  probe.swap(probe_);
  why_not_lending_ = std::move(why);
  lock.unlock();
}

void ArenaLink::close() {
  std::shared_ptr<Use> use;
  std::shared_ptr<Host> host;
  std::shared_ptr<char> probe;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    lends_.store(false, std::memory_order_release);
    use.swap(use_);
    host.swap(host_);
    probe.swap(probe_);
    why_not_lending_ = why_not_borrowing_ = "the connection is lost";
  }
  if (use != nullptr) {
    use->close();
  } else {
    // Nothing was ever borrowed.
    session_->done();
  }
}

std::optional<Placement> ArenaLink::lend(std::string_view bytes) {
  if (!lends()) return std::nullopt;
  const std::optional<SharedArena::Loan> loan = arena_->lend(bytes, link_);
  if (!loan.has_value()) return std::nullopt;
  const Placement placement{loan->offset, loan->lease};
  if (lends()) return placement;
  // The socket has ended since, and nothing else will end this lease.
  take_back(placement);
  return std::nullopt;
}

void ArenaLink::take_back(const Placement& placement) {
  if (arena_ != nullptr) (void)arena_->take_back(placement.lease, link_);
}

StatusOr<Borrowed> ArenaLink::borrow(const Placement& placement, uint64_t length) {
  std::shared_ptr<Use> use;
  {
    MutexLock lock(&mutex_);
    use = use_;
  }
  if (use == nullptr) return protocol_error("a message in an arena that was not offered");
  const uint64_t size = use->file().size();
  if (placement.offset > size || length > size - placement.offset) {
    return protocol_error(absl::StrCat("a message at ", placement.offset, "+", length,
                                       " of an arena of ", size, " bytes"));
  }
  char* const data = use->file().data() + placement.offset;
  return Borrowed{data, std::make_shared<Loan>(std::move(use), placement.lease)};
}

Status ArenaLink::on_probe(std::string_view header) {
  v1::ArenaProbe probe;
  if (!probe.ParseFromArray(header.data(), static_cast<int>(header.size())) ||
      probe.outcome_case() == v1::ArenaProbe::OUTCOME_NOT_SET) {
    return protocol_error(
        absl::StrCat("an arena probe of ", header.size(), " bytes without an answer"));
  }
  if (probe.has_refused()) {
    no_lending(absl::StrCat("the peer does not use our memory: ",
                            probe.refused().substr(0, kMaxReasonBytes)));
    return absl::OkStatus();
  }
  std::shared_ptr<char> done;
  MutexLock lock(&mutex_);
  if (closed_ || probe_ == nullptr) return absl::OkStatus();
  done.swap(probe_);
  if (probe.found() == nonce_) {
    lends_.store(true, std::memory_order_release);
    why_not_lending_.clear();
  } else {
    why_not_lending_ = "the peer found other bytes in our memory than we wrote";
  }
  const std::string why_not = why_not_lending_;
  lock.unlock();
  settle(why_not.empty(), why_not);
  return absl::OkStatus();
}

Status ArenaLink::on_free(std::string_view header) {
  v1::ArenaFree frees;
  if (!frees.ParseFromArray(header.data(), static_cast<int>(header.size()))) {
    return protocol_error(
        absl::StrCat("an arena_free of ", header.size(), " bytes that cannot be parsed"));
  }
  if (arena_ == nullptr) return absl::OkStatus();
  for (const uint64_t lease : frees.lease()) (void)arena_->take_back(lease, link_);
  return absl::OkStatus();
}

std::string ArenaLink::take_frees() {
  std::shared_ptr<Use> use;
  {
    MutexLock lock(&mutex_);
    use = use_;
  }
  if (use == nullptr) return {};
  const std::vector<uint64_t> leases = use->take_frees();
  if (leases.empty()) return {};
  v1::ArenaFree frees;
  frees.mutable_lease()->Add(leases.begin(), leases.end());
  return frees.SerializeAsString();
}

std::string ArenaLink::describe() const {
  MutexLock lock(&mutex_);
  return absl::StrCat(
      lends() ? "lends" : absl::StrCat("does not lend (", why_not_lending_, ")"), ", ",
      use_ != nullptr ? "borrows" : absl::StrCat("does not borrow (", why_not_borrowing_, ")"));
}

// The bytes that lie where the offer says, once its file is mapped.
StatusOr<std::string> ArenaLink::map_offer(LocalMessage message) {
  v1::ArenaOffer offer;
  if (!offer.ParseFromString(message.bytes)) {
    return protocol_error(absl::StrCat("an offer of ", message.bytes.size(), " bytes"));
  }
  if (offer.size() == 0) {
    return make_error(
        ErrorKind::kUnavailable,
        absl::StrCat("it has nothing to share: ", offer.reason().substr(0, kMaxReasonBytes)));
  }
  if (message.files.size() != 1) {
    return protocol_error(absl::StrCat("an offer with ", message.files.size(), " files"));
  }
  if (offer.size() < kProbeNonceBytes || offer.probe_offset() > offer.size() - kProbeNonceBytes) {
    return protocol_error(absl::StrCat("an offer of ", offer.size(), " bytes with a probe at ",
                                       offer.probe_offset()));
  }
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<MemoryFile> file,
                        MemoryFile::adopt(std::move(message.files[0]), offer.size()));
  std::string found(file->data() + offer.probe_offset(), kProbeNonceBytes);
  std::shared_ptr<Use> made;  // destroyed without the lock
  MutexLock lock(&mutex_);
  if (closed_) return make_error(ErrorKind::kState, "the connection is lost");
  made = std::make_shared<Use>(std::move(file), session_, host_, frees_wait_);
  use_ = std::move(made);
  why_not_borrowing_.clear();
  return found;
}

Status ArenaLink::on_local_message(LocalMessage message) {
  {
    MutexLock lock(&mutex_);
    if (offered_) {
      why_ended_ = "the peer said more than one thing on the private socket";
      return protocol_error(why_ended_);
    }
    offered_ = true;
  }
  const StatusOr<std::string> found = map_offer(std::move(message));
  v1::ArenaProbe probe;
  std::shared_ptr<Host> host;
  {
    MutexLock lock(&mutex_);
    host = host_;
    if (found.ok()) {
      probe.set_found(*found);
    } else {
      why_not_borrowing_ = std::string(found.status().message());
      probe.set_refused(std::string(found.status().message().substr(0, kMaxReasonBytes)));
    }
  }
  if (host != nullptr) host->send_arena_frame(FrameKind::kArenaProbe, probe.SerializeAsString());
  return absl::OkStatus();
}

void ArenaLink::on_local_end() {
  std::string why;
  {
    MutexLock lock(&mutex_);
    why = why_ended_;
  }
  no_lending(std::move(why));
  if (arena_ != nullptr) arena_->forget(link_);
}

}  // namespace weft::internal
