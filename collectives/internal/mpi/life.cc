#include "weft/collectives/internal/mpi/life.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "weft/collectives/internal/mpi/engine.h"
#include "weft/collectives/internal/text.h"
#include "weft/collectives/mpi.h"
#include "weft/common/runtime.h"

namespace weft {
namespace internal {
namespace {

Status state_error(std::string_view why) { return make_error(ErrorKind::kState, why); }

// MPI's own text, without the line breaks of some.
std::string version_of_mpi() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text, static_cast<size_t>(length));
  return all.substr(0, all.find_first_of(",\n"));
}

}  // namespace

StatusOr<std::shared_ptr<MpiLife>> MpiLife::begin(int* argc, char*** argv) {
  const std::shared_ptr<MpiLife> life(new MpiLife());
  WEFT_RETURN_IF_ERROR(life->start(argc, argv));
  return life;
}

Status MpiLife::start(int* argc, char*** argv) {
  int done = 0;
  MPI_Finalized(&done);
  if (done != 0) return state_error("MPI was finalized in this process, and has one life");
  int there = 0;
  int level = MPI_THREAD_SINGLE;
  MPI_Initialized(&there);
  if (there != 0) {
    MPI_Query_thread(&level);
  } else {
    WEFT_RETURN_IF_ERROR(
        mpi_status(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread"));
    owner_ = true;
  }
  version_ = version_of_mpi();
  if (level < MPI_THREAD_MULTIPLE) {
    if (owner_) MPI_Finalize();
    return make_error(ErrorKind::kUnavailable,
                      cat(version_, " serves one thread at a time (level ", level,
                          "), and groups have threads of their own: initialize it with "
                          "MPI_THREAD_MULTIPLE"));
  }
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &size_);
  WEFT_RETURN_IF_ERROR(types_.make());
  return agree_on_job();
}

// Ranks of two jobs may meet at one store.
Status MpiLife::agree_on_job() {
  job_ = make_system_runtime()->random().next();
  return mpi_status(MPI_Bcast(&job_, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD), "MPI_Bcast");
}

StatusOr<HostOffer> MpiLife::offer() {
  const MutexLock lock(&mutex_);
  if (ended_) return state_error("backend mpi: MPI is finalized");
  return HostOffer{cat("mpi: ", version_), cat(absl::Hex(job_), " ", rank_)};
}

StatusOr<int> MpiLife::place_of(const std::string& place, int member) const {
  const std::string job = cat(absl::Hex(job_), " ");
  if (place.rfind(job, 0) != 0) {
    return make_error(ErrorKind::kInvalidArgument, cat("backend mpi: rank ", member,
                                                       " and this process were not started by one "
                                                       "mpirun, so MPI does not connect them"));
  }
  const int rank = std::atoi(place.c_str() + job.size());
  if (rank < 0 || rank >= size_) {
    return make_error(ErrorKind::kInvalidArgument, cat("backend mpi: rank ", member, " says it is ",
                                                       rank, " of ", size_, " in MPI's world"));
  }
  return rank;
}

StatusOr<std::unique_ptr<Engine>> MpiLife::connect(HostConnection connection) {
  std::vector<int> ranks;
  for (size_t i = 0; i < connection.places.size(); ++i) {
    WEFT_ASSIGN_OR_RETURN(const int rank, place_of(connection.places[i], static_cast<int>(i)));
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
      return make_error(ErrorKind::kInvalidArgument, cat("backend mpi: rank ", i,
                                                         " and another are one process, which MPI "
                                                         "takes once"));
    }
    ranks.push_back(rank);
  }
  WEFT_RETURN_IF_ERROR(enter());
  auto engine = std::make_unique<MpiEngine>(shared_from_this(), std::move(connection));
  WEFT_RETURN_IF_ERROR(engine->connect(ranks));
  return engine;
}

Status MpiLife::enter() {
  const MutexLock lock(&mutex_);
  if (ended_) return state_error("backend mpi: MPI is finalized");
  ++groups_;
  return absl::OkStatus();
}

void MpiLife::leave() {
  const MutexLock lock(&mutex_);
  --groups_;
}

void MpiLife::keep(MPI_Request request, std::unique_ptr<char[]> memory) {
  const MutexLock lock(&mutex_);
  kept_.push_back(Kept{request, std::move(memory)});
}

// MPI goes on with the process and may still write there.
MpiLife::~MpiLife() {
  const MutexLock lock(&mutex_);
  for (Kept& one : kept_) (void)one.memory.release();
}

Status MpiLife::end() {
  {
    const MutexLock lock(&mutex_);
    if (ended_) return absl::OkStatus();
    if (groups_ > 0) {
      return state_error(cat("MPI is not finalized: ", groups_, " process group",
                             groups_ == 1 ? "" : "s", " by it still live; destroy them first"));
    }
    const auto ended = [](Kept& one) {
      int done = 0;
      return MPI_Test(&one.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done != 0;
    };
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), ended), kept_.end());
    // Open MPI's end leaves them alone; the standard promises nothing.
    if (!kept_.empty() && version_.rfind("Open MPI", 0) != 0) {
      return state_error(cat("MPI is not finalized: ", kept_.size(),
                             " of its operations, of groups "
                             "that failed, ",
                             kept_.size() == 1 ? "has" : "have", " not ended"));
    }
    ended_ = true;
  }
  types_.free();
  if (!owner_) return absl::OkStatus();
  return mpi_status(MPI_Finalize(), "MPI_Finalize");
}

}  // namespace internal

StatusOr<std::unique_ptr<Mpi>> Mpi::try_init(int* argc, char*** argv, const Logger& log) {
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<internal::MpiLife> life,
                        internal::MpiLife::begin(argc, argv));
  return std::unique_ptr<Mpi>(new Mpi(std::move(life), log));
}

Mpi::Mpi(int* argc, char*** argv, const Logger& log)
    : life_(value_or_throw(internal::MpiLife::begin(argc, argv))), log_(log) {}

Mpi::Mpi(std::shared_ptr<internal::MpiLife> life, const Logger& log)
    : life_(std::move(life)), log_(log) {}

Mpi::~Mpi() {
  if (const Status ended = life_->end(); !ended.ok()) WEFT_LOG(log_, kError) << ended;
}

std::shared_ptr<internal::HostLibrary> Mpi::library() const { return life_; }
int Mpi::rank() const { return life_->rank(); }
int Mpi::size() const { return life_->size(); }
const std::string& Mpi::version() const { return life_->version(); }
Status Mpi::try_finalize() { return life_->end(); }

}  // namespace weft
