// Checkpoints: every layer's tensors under a name that does not depend on the stages.
//
// The file `path` lists what belongs to a checkpoint, as a safetensors header without tensors; it is
// replaced in one step after all of the others were written, so that `path` is always a whole
// checkpoint: the one before, or this one.

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/pipeline/internal/pipeline_state.h"
#include "weft/rpc/safetensors.h"

namespace weft::pipeline {

using internal::refused;

namespace {

constexpr std::string_view kKept = "optimizer/";
constexpr std::string_view kFormat = "weft pipeline checkpoint 1";

bool is_kept(const std::string& name) { return name.compare(0, kKept.size(), kKept) == 0; }

// "weight" to "layer3.weight", and "optimizer/weight/steps" to "optimizer/layer3.weight/steps".
std::string layer_name(const CheckpointOptions& options, int stage, const std::string& name) {
  if (options.layer_name == nullptr) return name;
  if (!is_kept(name)) return options.layer_name(stage, name);
  const size_t slash = name.rfind('/');
  const std::string parameter = name.substr(kKept.size(), slash - kKept.size());
  return std::string(kKept) + options.layer_name(stage, parameter) + name.substr(slash);
}

// `generation` counts the checkpoints of this path, so that no file of a valid one is overwritten.
std::string file_of(const std::string& path, int64_t steps, int64_t generation, int stage) {
  return absl::StrCat(path, "-step", steps, "-", generation, "-stage", stage, ".safetensors");
}
// Files of a checkpoint lie beside it, and are named without their folder.
std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }
std::string beside(const std::string& path, const std::string& file) {
  return path.substr(0, path.rfind('/') + 1) + file;
}

struct Manifest {
  int64_t steps = 0;
  int64_t generation = 0;
  int64_t tensors = 0;
  std::vector<std::string> files{};
};

Status write_manifest(Files& files, const std::string& path, const Manifest& m) {
  SafetensorsHeader header;
  header.metadata = {{"format", std::string(kFormat)},
                     {"steps", absl::StrCat(m.steps)},
                     {"generation", absl::StrCat(m.generation)},
                     {"tensors", absl::StrCat(m.tensors)}};
  for (size_t i = 0; i < m.files.size(); ++i) {
    header.metadata.emplace(absl::StrCat("file", i), base_name(m.files[i]));
  }
  WEFT_ASSIGN_OR_RETURN(const std::string bytes, encode_safetensors_header(header));
  return files.write_atomic(path, bytes);
}

StatusOr<Manifest> read_manifest(Files& files, const std::string& path) {
  const auto bytes = files.read(path);
  if (!bytes.ok()) {
    const bool none = absl::IsNotFound(bytes.status());
    return make_error(none ? ErrorKind::kNotFound : ErrorKind::kUnavailable,
                      std::string(bytes.status().message()));
  }
  WEFT_ASSIGN_OR_RETURN(const SafetensorsHeader header,
                        decode_safetensors_header(*bytes, bytes->size()));
  const auto value = [&](const std::string& key) {
    const auto it = header.metadata.find(key);
    return it == header.metadata.end() ? std::string() : it->second;
  };
  Manifest m;
  if (value("format") != kFormat || !absl::SimpleAtoi(value("steps"), &m.steps) || m.steps < 0 ||
      !absl::SimpleAtoi(value("generation"), &m.generation) ||
      !absl::SimpleAtoi(value("tensors"), &m.tensors)) {
    return refused(absl::StrCat("it is no list of a checkpoint: expected format '",
                                std::string(kFormat),
                                "', 'steps', 'generation' and 'tensors' in its metadata"));
  }
  for (size_t i = 0; i + 4 < header.metadata.size(); ++i) {
    const std::string file = value(absl::StrCat("file", i));
    if (file.empty() || file.find('/') != std::string::npos) {
      return refused(absl::StrCat("its file ", i, " has no name, or one in another folder"));
    }
    m.files.push_back(beside(path, file));
  }
  return m;
}

// All layers of a checkpoint by name, each in its file.
struct Checkpoint {
  Manifest manifest{};
  std::vector<SafetensorsFile> files{};
  std::map<std::string, size_t> where{};
};

StatusOr<Checkpoint> open_checkpoint(Files& files, const std::string& path) {
  Checkpoint out;
  WEFT_ASSIGN_OR_RETURN(out.manifest, read_manifest(files, path));
  for (const std::string& name : out.manifest.files) {
    auto file = SafetensorsFile::open(files, name);
    if (!file.ok()) return file.status();
    for (const auto& [layer, entry] : file->header().tensors) {
      if (!out.where.emplace(layer, out.files.size()).second) {
        return refused(absl::StrCat("'", layer, "' is in two of its files"));
      }
    }
    out.files.push_back(*std::move(file));
  }
  if (static_cast<int64_t>(out.where.size()) != out.manifest.tensors) {
    return refused(absl::StrCat("its files have ", out.where.size(), " tensors, and it lists ",
                                out.manifest.tensors));
  }
  return out;
}

// "optimizer/layer3.weight/steps" belongs to "layer3.weight".
std::string owner_of(const std::string& layer) {
  if (!is_kept(layer)) return layer;
  return layer.substr(kKept.size(), layer.rfind('/') - kKept.size());
}

}  // namespace

CheckpointOptions layer_names(std::vector<int> begins, std::string prefix) {
  CheckpointOptions out;
  out.layer_name = [begins = std::move(begins), prefix = std::move(prefix)](
                       int stage, const std::string& name) {
    const size_t dot = name.find('.');
    int number = 0;
    if (stage < 0 || stage >= static_cast<int>(begins.size()) || dot == std::string::npos ||
        !absl::SimpleAtoi(name.substr(0, dot), &number)) {
      throw_error(refused(absl::StrCat("'", name, "' of stage ", stage,
                                       " does not begin with the number of a layer")));
    }
    return absl::StrCat(prefix, begins[static_cast<size_t>(stage)] + number, name.substr(dot));
  };
  return out;
}

void Pipeline::State::save(const std::string& path, const CheckpointOptions& options) const {
  Manifest manifest;
  {
    MutexLock lock(&mutex_);
    if (!error_.ok()) throw_error(error_);
    if (next_step_ != done_steps_) {
      throw_error(make_error(ErrorKind::kState, absl::StrCat("saving a checkpoint: step ",
                                                             done_steps_, " is under way")));
    }
    manifest.steps = next_step_;
  }
  const auto fail = [&](const Status& status) {
    throw_if_error(status.ok() ? status
                               : annotate(status, absl::StrCat("saving checkpoint '", path, "'")));
  };
  Files& files = worker_->runtime().files();
  const auto before = read_manifest(files, path);
  if (before.ok()) manifest.generation = before->generation + 1;
  std::map<std::string, int> stage_of;
  for (int s = 0; s < plan_.stages(); ++s) {
    StateMap layers;
    const StateMap state = fetch(s, internal::Fetch::kState, {}).wait();
    for (const auto& [name, tensor] : state) {
      const std::string layer = layer_name(options, s, name);
      const auto [other, is_new] = stage_of.emplace(layer, s);
      if (!is_new) {
        fail(refused(absl::StrCat("'", layer, "' is in stage ", other->second, " and in stage ", s,
                                  "; set CheckpointOptions::layer_name")));
      }
      layers.emplace(layer, tensor);
    }
    manifest.files.push_back(file_of(path, manifest.steps, manifest.generation, s));
    manifest.tensors += static_cast<int64_t>(layers.size());
    fail(write_safetensors(files, manifest.files.back(), layers,
                           {{"steps", absl::StrCat(manifest.steps)}}));
  }
  fail(write_manifest(files, path, manifest));
  if (!before.ok()) return;  // none, or none that says which files it has
  for (const std::string& old : before->files) {
    if (std::find(manifest.files.begin(), manifest.files.end(), old) == manifest.files.end()) {
      const Status removed = files.remove(old);
      if (!absl::IsNotFound(removed)) fail(removed);
    }
  }
}

void Pipeline::State::load(const std::string& path, const CheckpointOptions& options) {
  const auto fail = [&](const Status& status) {
    throw_if_error(annotate(status, absl::StrCat("loading checkpoint '", path, "'")));
  };
  auto opened = open_checkpoint(worker_->runtime().files(), path);
  if (!opened.ok()) fail(opened.status());
  const Checkpoint& checkpoint = *opened;
  // What each stage takes, by the names of the checkpoint; checked before anything is loaded.
  std::vector<std::map<std::string, std::string>> takes(static_cast<size_t>(plan_.stages()));
  std::map<std::string, std::pair<int, std::string>> taken;
  for (int s = 0; s < plan_.stages(); ++s) {
    for (const auto& [name, sizes] : fetch(s, internal::Fetch::kShapes, {}).wait()) {
      const std::string layer = layer_name(options, s, name);
      const auto it = checkpoint.where.find(layer);
      if (it == checkpoint.where.end()) {
        fail(refused(absl::StrCat("it has no '", layer, "', which stage ", s, " takes")));
      }
      const auto& entry = checkpoint.files[it->second].header().tensors.at(layer);
      const std::vector<int64_t> want(sizes.const_data_ptr<int64_t>(),
                                      sizes.const_data_ptr<int64_t>() + sizes.numel());
      if (entry.shape != want) {
        fail(refused(absl::StrCat("'", layer, "' is [", absl::StrJoin(entry.shape, ", "),
                                  "], and stage ", s, " takes [", absl::StrJoin(want, ", "), "]")));
      }
      if (!taken.emplace(layer, std::pair(s, name)).second) {
        fail(refused(absl::StrCat("two stages take '", layer, "'")));
      }
      takes[static_cast<size_t>(s)].emplace(name, layer);
    }
  }
  for (const auto& [layer, file] : checkpoint.where) {
    const auto owner = taken.find(owner_of(layer));
    if (owner == taken.end()) fail(refused(absl::StrCat("no stage takes its '", layer, "'")));
    if (owner->first == layer) continue;
    const auto& [stage, name] = owner->second;
    takes[static_cast<size_t>(stage)].emplace(
        absl::StrCat(std::string(kKept), name, layer.substr(kKept.size() + owner->first.size())),
        layer);
  }
  for (int s = 0; s < plan_.stages(); ++s) {
    StateMap state;
    for (const auto& [name, layer] : takes[static_cast<size_t>(s)]) {
      auto tensor = checkpoint.files[checkpoint.where.at(layer)].read(layer);
      if (!tensor.ok()) fail(tensor.status());
      state.emplace(name, *std::move(tensor));
    }
    fetch(s, internal::Fetch::kLoadState, std::move(state)).wait();
  }
  const int64_t steps = checkpoint.manifest.steps;
  for (int s = 0; s < plan_.stages(); ++s) {
    internal::FetchMessage message{.pipeline = id_, .stage = s};
    message.what = static_cast<int64_t>(internal::Fetch::kSetSteps);
    message.steps = steps;
    fetch_at(workers_[plan_.placement[s]], message).wait();
  }
  MutexLock lock(&mutex_);
  next_step_ = steps;
  done_steps_ = steps;
}

}  // namespace weft::pipeline
