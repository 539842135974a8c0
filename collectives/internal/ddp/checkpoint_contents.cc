#include "weft/collectives/internal/ddp/checkpoint_contents.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include "ATen/core/grad_mode.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/ddp/distributed_sampler.h"

namespace weft::internal {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr std::string_view kGenerator = "generator/";
constexpr std::string_view kNote = "note/";
constexpr std::string_view kFormat = "weft checkpoint 1";

Status bad_contents(std::string_view what) { return make_error(ErrorKind::kInvalidArgument, what); }

// Parameters and buffers by their names.
std::map<std::string, at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> out;
  for (const auto& item : module.named_parameters()) out.emplace(item.key(), item.value());
  for (const auto& item : module.named_buffers()) out.emplace(item.key(), item.value());
  std::erase_if(out, [](const auto& item) { return !item.second.defined(); });
  return out;
}

int64_t number_in(const CheckpointContents& contents, const std::string& name) {
  const auto it = contents.metadata.find(name);
  int64_t out = -1;
  if (it == contents.metadata.end() || !absl::SimpleAtoi(it->second, &out)) return -1;
  return out;
}

std::string shape_text(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), " of [",
                      absl::StrJoin(tensor.sizes(), ", "), "]");
}

Status check_module(const CheckpointContents& contents, const torch::nn::Module& module) {
  const auto own = tensors_of(module);
  for (const auto& [name, tensor] : own) {
    const auto it = contents.tensors.find(name);
    if (it == contents.tensors.end()) {
      return bad_contents(absl::StrCat("it has no '", name, "', which the module has"));
    }
    if (it->second.sizes() != tensor.sizes() || it->second.scalar_type() != tensor.scalar_type()) {
      return bad_contents(absl::StrCat("its '", name, "' is ", shape_text(it->second),
                                       ", and the module's ", shape_text(tensor)));
    }
  }
  for (const auto& [name, tensor] : contents.tensors) {
    if (!absl::StrContains(name, '/') && !own.contains(name)) {
      return bad_contents(absl::StrCat("it has '", name, "', which the module does not have"));
    }
  }
  return absl::OkStatus();
}

Status check_ranks(const CheckpointContents& contents, std::string_view what, int ranks) {
  const int64_t saved = number_in(contents, "ranks");
  if (saved == ranks) return absl::OkStatus();
  return bad_contents(absl::StrCat("its ", std::string(what), " are those of ", saved,
                                   " ranks, and the group has ", ranks));
}

Status check_sampler(const CheckpointContents& contents, const DistributedSampler& sampler,
                     int ranks) {
  const int64_t position = number_in(contents, "sampler_position");
  if (position < 0) return bad_contents("it has no sampler");
  if (position > 0) WEFT_RETURN_IF_ERROR(check_ranks(contents, "samples of an epoch", ranks));
  const int64_t size = number_in(contents, "sampler_size");
  if (position > 0 && size != static_cast<int64_t>(sampler.size())) {
    return bad_contents(absl::StrCat("its sampler has ", size,
                                     " samples of each rank in an epoch, and this one ",
                                     sampler.size()));
  }
  return absl::OkStatus();
}

Status check_generators(const CheckpointContents& contents, const TrainingState& state, int ranks) {
  for (const auto& [name, generator] : state.generators) {
    const auto it = contents.tensors.find(absl::StrCat(std::string(kGenerator), name));
    if (it == contents.tensors.end()) {
      return bad_contents(absl::StrCat("it has no generator '", name, "'"));
    }
    const int64_t bytes = generator.get_state().numel();
    if (it->second.dim() != 2 || it->second.size(1) != bytes ||
        it->second.scalar_type() != at::kByte) {
      return bad_contents(absl::StrCat("its generator '", name, "' is ", shape_text(it->second),
                                       ", and the state of this one has ", bytes,
                                       " bytes: it is of another kind of device"));
    }
    if (it->second.size(0) != ranks) return check_ranks(contents, "generators", ranks);
  }
  return absl::OkStatus();
}

}  // namespace

CheckpointContents contents_of(const TrainingState& state,
                               const std::map<std::string, at::Tensor>& generators, int ranks) {
  CheckpointContents out;
  out.metadata = {{"format", std::string(kFormat)},
                  {"step", absl::StrCat(state.step)},
                  {"ranks", absl::StrCat(ranks)}};
  for (const auto& [name, text] : state.notes) {
    out.metadata.emplace(absl::StrCat(std::string(kNote), name), text);
  }
  for (const auto& [name, tensor] : tensors_of(*state.module)) {
    if (absl::StrContains(name, '/')) {
      throw_error(bad_contents(
          absl::StrCat("'", name, "' has a '/', which the names of other tensors have")));
    }
    out.tensors.emplace(name, tensor.detach());
  }
  if (state.optimizer != nullptr) put_optimizer(state, &out);
  if (state.sampler != nullptr) {
    out.metadata["sampler_epoch"] = absl::StrCat(state.sampler->epoch());
    out.metadata["sampler_position"] = absl::StrCat(state.sampler->position());
    out.metadata["sampler_size"] = absl::StrCat(state.sampler->size());
  }
  for (const auto& [name, all] : generators) {
    out.tensors.emplace(absl::StrCat(std::string(kGenerator), name), all);
  }
  return out;
}

Status check_contents(const CheckpointContents& contents, const TrainingState& state, int ranks) {
  const auto format = contents.metadata.find("format");
  if (format == contents.metadata.end() || format->second != kFormat ||
      number_in(contents, "step") < 0) {
    return bad_contents(absl::StrCat("it is no checkpoint: expected format '", std::string(kFormat),
                                     "' and 'step' in its metadata"));
  }
  WEFT_RETURN_IF_ERROR(check_module(contents, *state.module));
  if (state.optimizer != nullptr) WEFT_RETURN_IF_ERROR(check_optimizer(contents, state));
  if (state.sampler != nullptr) {
    WEFT_RETURN_IF_ERROR(check_sampler(contents, *state.sampler, ranks));
  }
  return check_generators(contents, state, ranks);
}

void apply_contents(const CheckpointContents& contents, TrainingState* state, int rank) {
  const at::NoGradGuard no_grad;
  // First what may still fail: the optimizer is LibTorch's.
  if (state->optimizer != nullptr) load_optimizer(contents, *state);
  for (auto& [name, tensor] : tensors_of(*state->module)) tensor.copy_(contents.tensors.at(name));
  if (state->sampler != nullptr) {
    state->sampler->load_position(number_in(contents, "sampler_epoch"),
                                  static_cast<size_t>(number_in(contents, "sampler_position")));
  }
  for (auto& [name, generator] : state->generators) {
    const at::Tensor& all = contents.tensors.at(absl::StrCat(std::string(kGenerator), name));
    generator.set_state(all.select(0, rank).clone());
  }
  state->step = number_in(contents, "step");
  state->notes.clear();
  const std::string note(kNote);
  for (auto it = contents.metadata.lower_bound(note);
       it != contents.metadata.end() && absl::StartsWith(it->first, note); ++it) {
    state->notes.emplace(it->first.substr(note.size()), it->second);
  }
}

// ---- LibTorch's archive ------------------------------------------------------------------------

Status write_archive(const TrainingState& state, const CheckpointContents& contents,
                     FileAppender* file) {
  OutputArchive archive;
  OutputArchive model(archive.compilation_unit());
  state.module->save(model);
  archive.write("model", model);
  if (state.optimizer != nullptr) {
    OutputArchive optimizer(archive.compilation_unit());
    state.optimizer->save(optimizer);
    archive.write("optimizer", optimizer);
  }
  if (state.sampler != nullptr) {
    OutputArchive sampler(archive.compilation_unit());
    state.sampler->save(sampler);
    archive.write("sampler", sampler);
  }
  OutputArchive generators(archive.compilation_unit());
  for (const auto& [name, generator] : state.generators) {
    generators.write(name, contents.tensors.at(absl::StrCat(std::string(kGenerator), name)),
                     /*is_buffer=*/true);
  }
  archive.write("generators", generators);
  OutputArchive metadata(archive.compilation_unit());
  for (const auto& [name, text] : contents.metadata) metadata.write(name, c10::IValue(text));
  archive.write("metadata", metadata);
  archive.write("step", at::scalar_tensor(state.step, at::kLong), /*is_buffer=*/true);
  // LibTorch's writer writes its directory in its destructor when a write has failed before, and
  // must not fail there again: it is told that all is well.
  Status written = absl::OkStatus();
  archive.save_to([&](const void* data, size_t size) {
    if (written.ok()) written = file->append({static_cast<const char*>(data), size});
    return size;
  });
  return written;
}

namespace {

// Archives are read in the order of their parts: whole pages ahead would gain nothing.
void load_archive(LockedFile* file, uint64_t size, InputArchive* archive, Status* failed) {
  archive->load_from(
      [file, failed](uint64_t pos, void* buffer, size_t n) -> size_t {
        const auto piece = file->read(pos, n);
        if (!piece.ok()) {
          *failed = piece.status();
          return 0;
        }
        std::copy(piece->begin(), piece->end(), static_cast<char*>(buffer));
        return piece->size();
      },
      [size] { return static_cast<size_t>(size); }, at::Device(at::kCPU));
}

void put_model(InputArchive& archive, const std::string& prefix, CheckpointContents* out) {
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    if (value.isTensor()) {
      if (value.toTensor().defined()) {
        out->tensors.emplace(absl::StrCat(prefix, key), value.toTensor().detach());
      }
      continue;
    }
    InputArchive child;
    if (archive.try_read(key, child)) put_model(child, absl::StrCat(prefix, key, "."), out);
  }
}

}  // namespace

StatusOr<CheckpointContents> read_archive(LockedFile* file, const TrainingState& state) {
  WEFT_ASSIGN_OR_RETURN(const FileStamp stamp, file->stamp());
  CheckpointContents out;
  Status failed = absl::OkStatus();
  try {
    InputArchive archive;
    InputArchive model;
    InputArchive metadata;
    InputArchive part;
    load_archive(file, stamp.size, &archive, &failed);
    if (!archive.try_read("model", model) || !archive.try_read("metadata", metadata)) {
      return bad_contents("it is no checkpoint: the archive has no 'model' and 'metadata'");
    }
    put_model(model, "", &out);
    for (const std::string& key : metadata.keys()) {
      c10::IValue value;
      metadata.read(key, value);
      out.metadata.emplace(key, value.toStringRef());
    }
    if (state.optimizer != nullptr && archive.try_read("optimizer", part)) {
      put_optimizer_archive(part, state, &out);
    }
    if (archive.try_read("generators", part)) {
      for (const std::string& key : part.keys()) {
        at::Tensor all;
        part.read(key, all, /*is_buffer=*/true);
        out.tensors.emplace(absl::StrCat(std::string(kGenerator), key), all);
      }
    }
  } catch (...) {
    if (!failed.ok()) return failed;
    return bad_contents(absl::StrCat("it is no whole archive of LibTorch: ",
                                     status_from_current_exception().message()));
  }
  return out;
}

}  // namespace weft::internal
