#include "weft/collectives/internal/mpi/transfer.h"

#include <algorithm>
#include <cstring>

#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

constexpr uint64_t kMessage = uint64_t{1} << 20;
// MPI keeps the order of messages between two ranks, so one tag is enough.
constexpr int kTag = 0;

}  // namespace

MpiEngine::Transfer::Transfer(int peer, bool sends, char* data, uint64_t bytes)
    : peer_(peer),
      sends_(sends),
      data_(data),
      bytes_(bytes),
      room_bytes_(sizeof(uint64_t) + std::min(bytes, kMessage)),
      room_(new char[room_bytes_]) {}

uint64_t MpiEngine::Transfer::front() const { return moved_ == 0 ? sizeof(uint64_t) : 0; }

StatusOr<bool> MpiEngine::Transfer::advance(MPI_Comm comm) {
  if (begun_ && !under_way_ && moved_ == bytes_) return true;
  if (!under_way_) WEFT_RETURN_IF_ERROR(begin(comm));
  int done = 0;
  MPI_Status status;
  const int tested = MPI_Test(&request_, &done, &status);
  if (tested != MPI_SUCCESS) under_way_ = false;
  const Status went = mpi_status(tested, sends_ ? "MPI_Isend" : "MPI_Irecv");
  if (!sends_ && error_kind(went) == ErrorKind::kInvalidArgument) {
    return make_error(ErrorKind::kInvalidArgument, cat("rank ", peer_, " sends more than the ",
                                                       bytes_, " bytes that this rank expects"));
  }
  WEFT_RETURN_IF_ERROR(annotate(went, cat(sends_ ? "to" : "from", " rank ", peer_)));
  if (done == 0) return false;
  under_way_ = false;
  int came = 0;
  if (!sends_) {
    MPI_Get_count(&status, MPI_BYTE, &came);
    WEFT_RETURN_IF_ERROR(take(static_cast<uint64_t>(came)));
  }
  moved_ += piece_;
  return moved_ == bytes_;
}

Status MpiEngine::Transfer::begin(MPI_Comm comm) {
  piece_ = std::min(bytes_ - moved_, kMessage);
  const uint64_t before = front();
  int got = MPI_SUCCESS;
  if (sends_) {
    if (before > 0) std::memcpy(room_.get(), &bytes_, before);
    if (piece_ > 0) std::memcpy(room_.get() + before, data_ + moved_, piece_);
    got = MPI_Isend(room_.get(), static_cast<int>(before + piece_), MPI_BYTE, peer_, kTag, comm,
                    &request_);
  } else {
    got = MPI_Irecv(room_.get(), static_cast<int>(before + piece_), MPI_BYTE, peer_, kTag, comm,
                    &request_);
  }
  begun_ = true;
  under_way_ = got == MPI_SUCCESS;
  return mpi_status(got, sends_ ? "MPI_Isend" : "MPI_Irecv");
}

Status MpiEngine::Transfer::take(uint64_t came) {
  const uint64_t before = front();
  uint64_t theirs = bytes_;
  if (before > 0 && came >= before) std::memcpy(&theirs, room_.get(), before);
  if (came != before + piece_ || theirs != bytes_) {
    return make_error(ErrorKind::kInvalidArgument, cat("rank ", peer_, " sends ", theirs,
                                                       " bytes, and this rank expects ", bytes_));
  }
  if (piece_ > 0) std::memcpy(data_ + moved_, room_.get() + before, piece_);
  return absl::OkStatus();
}

bool MpiEngine::Transfer::give_up(MpiLife& life) {
  if (!under_way_) return false;
  if (!sends_) MPI_Cancel(&request_);  // what has been sent cannot be called back
  life.keep(request_, std::move(room_));
  return true;
}

}  // namespace weft::internal
