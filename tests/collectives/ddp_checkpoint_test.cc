// Checkpoints: a training that goes on from one ends as one that was not disturbed, bit for bit, in
// both formats and with every optimizer; and a file that is not whole, or is of another model, is
// named, and the one before it is used.

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include <caffe2/serialize/inline_container.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "ATen/CPUGeneratorImpl.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "weft/collectives/ddp/checkpoint.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/distributed_sampler.h"
#include "weft/rpc/safetensors.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/forwarding_runtime.h"
#include "weft/tests/testing/names_made.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct KeptNetImpl : torch::nn::Module {
  explicit KeptNetImpl(int64_t width = 8) {
    first = register_module("first", torch::nn::Linear(4, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    out = register_module("out", torch::nn::Linear(width, 1));
  }
  at::Tensor forward(const at::Tensor& x, const at::Generator& noise) {
    const at::Tensor h = torch::tanh(norm(first(x)));
    return out(h * (torch::rand(h.sizes(), noise) > 0.2));
  }
  torch::nn::Linear first = nullptr, out = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
};

constexpr size_t kSamples = 40;

// What a rank trains with; made anew for a training that goes on.
struct KeptTraining {
  KeptTraining(ProcessGroup& g, uint64_t seed, int64_t width = 8)
      : group(g),
        net(std::make_shared<KeptNetImpl>(width)),
        optimizer(net->parameters(), torch::optim::AdamOptions(0.05)),
        sampler(kSamples, {.rank = g.rank(), .size = g.size(), .seed = 3}),
        noise(at::make_generator<at::CPUGeneratorImpl>(seed)) {
    state.module = net.get();
    state.optimizer = &optimizer;
    state.sampler = &sampler;
    state.generators = {{"noise", noise}};
    data = torch::arange(static_cast<double>(kSamples) * 4, torch::kFloat32).sin().view({-1, 4});
  }
  void step() {
    if (ddp == nullptr) ddp = std::make_unique<DistributedDataParallel<KeptNetImpl>>(net, group);
    auto batch = sampler.next(4);
    if (!batch.has_value()) {
      sampler.set_epoch(sampler.epoch() + 1);
      batch = sampler.next(4);
    }
    std::vector<int64_t> ids(batch->begin(), batch->end());
    const at::Tensor x = data.index_select(0, torch::tensor(ids));
    ddp->zero_grad();
    (ddp->forward(x, noise) - x.sum(1, true)).square().mean().backward();
    optimizer.step();
    ++state.step;
  }
  std::map<std::string, at::Tensor> tensors() const {
    std::map<std::string, at::Tensor> out;
    for (const auto& one : net->named_parameters()) out[one.key()] = one.value().detach().clone();
    for (const auto& one : net->named_buffers()) out[one.key()] = one.value().detach().clone();
    return out;
  }

  ProcessGroup& group;
  std::shared_ptr<KeptNetImpl> net;
  torch::optim::Adam optimizer;
  DistributedSampler sampler;
  at::Generator noise;
  at::Tensor data;
  TrainingState state;
  std::unique_ptr<DistributedDataParallel<KeptNetImpl>> ddp;
};

void expect_same(const std::map<std::string, at::Tensor>& got,
                 const std::map<std::string, at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, tensor] : want) {
    ASSERT_TRUE(got.contains(name)) << name;
    EXPECT_TRUE(torch::equal(got.at(name), tensor)) << name;
  }
}

// Ranks with files of their own choice.
class WithFiles : public ForwardingRuntime {
 public:
  explicit WithFiles(std::shared_ptr<Files> files)
      : ForwardingRuntime(make_system_runtime()), files_(std::move(files)) {}
  Files& files() override { return *files_; }

 private:
  const std::shared_ptr<Files> files_;
};

void run_with(const std::shared_ptr<Files>& files, int size,
              const std::function<void(ProcessGroup&)>& body) {
  run_ranks(size, std::make_shared<WithFiles>(files),
            [&body](ProcessGroup& group, InprocFabric&) { body(group); });
}

class DdpCheckpoint : public ::testing::TestWithParam<CheckpointFormat> {
 protected:
  CheckpointOptions options() const { return {.format = GetParam()}; }
  // Two checkpoints, of steps 3 and 5.
  void write_two() {
    run_with(files_, 2, [this](ProcessGroup& group) {
      KeptTraining training(group, 7);
      for (int i = 0; i < 3; ++i) training.step();
      save_checkpoint(group, "run", training.state, options());
      for (int i = 0; i < 2; ++i) training.step();
      save_checkpoint(group, "run", training.state, options());
    });
  }

  const std::shared_ptr<std::atomic<uint64_t>> capacity_ =
      std::make_shared<std::atomic<uint64_t>>(UINT64_MAX);
  const std::shared_ptr<Files> files_ = make_memory_files(capacity_);
};

INSTANTIATE_TEST_SUITE_P(All, DdpCheckpoint,
                         ::testing::Values(CheckpointFormat::kSafetensors,
                                           CheckpointFormat::kArchive),
                         [](const auto& info) {
                           return info.param == CheckpointFormat::kArchive ? "Archive"
                                                                           : "Safetensors";
                         });

TEST_P(DdpCheckpoint, ATrainingGoesOnInTheMiddleOfAnEpoch) {
  run_with(files_, 2, [this](ProcessGroup& group) {
    const auto seed = static_cast<uint64_t>(11 + group.rank());
    KeptTraining undisturbed(group, seed);
    for (int i = 0; i < 7; ++i) undisturbed.step();  // five in an epoch
    undisturbed.state.notes = {{"rate", "0.05"}};
    save_checkpoint(group, "run", undisturbed.state, options());
    for (int i = 0; i < 6; ++i) undisturbed.step();

    KeptTraining resumed(group, 99);
    resumed.step();  // has a state, which is to go
    const auto loaded = load_checkpoint(group, "run", &resumed.state);
    ASSERT_TRUE(loaded.has_value());
    EXPECT_EQ(loaded->path, "run");
    EXPECT_EQ(loaded->refused, "");
    EXPECT_EQ(resumed.state.step, 7);
    EXPECT_EQ(resumed.state.notes, undisturbed.state.notes);
    EXPECT_EQ(resumed.sampler.epoch(), 1);
    for (int i = 0; i < 6; ++i) resumed.step();
    expect_same(resumed.tensors(), undisturbed.tensors());
    EXPECT_TRUE(torch::equal(resumed.noise.get_state(), undisturbed.noise.get_state()));
  });
}

TEST_P(DdpCheckpoint, NoneIsNoError) {
  run_with(files_, 2, [](ProcessGroup& group) {
    KeptTraining training(group, 1);
    EXPECT_FALSE(load_checkpoint(group, "run", &training.state).has_value());
  });
}

// Each of LibTorch's optimizers, with all that it keeps, but LBFGS, which LibTorch itself cannot save.
TEST_P(DdpCheckpoint, EveryOptimizerGoesOn) {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
  namespace optim = torch::optim;
  const std::map<std::string, Make> all = {
      {"sgd", [](auto p) { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.1)); }},
      {"momentum",
       [](auto p) {
         return std::make_unique<optim::SGD>(p,
                                             optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
       }},
      {"adam",
       [](auto p) {
         return std::make_unique<optim::Adam>(
             p, optim::AdamOptions(0.1).betas({0.8, 0.97}).amsgrad(true));
       }},
      {"adamw", [](auto p) { return std::make_unique<optim::AdamW>(p); }},
      {"adagrad", [](auto p) { return std::make_unique<optim::Adagrad>(p); }},
      {"rmsprop",
       [](auto p) {
         return std::make_unique<optim::RMSprop>(
             p, optim::RMSpropOptions(0.1).centered(true).momentum(0.5));
       }},
  };
  run_with(files_, 1, [&](ProcessGroup& group) {
    for (const auto& [name, make] : all) {
      SCOPED_TRACE(name);
      const auto train = [](torch::nn::Linear& net, optim::Optimizer& optimizer, int steps) {
        for (int i = 0; i < steps; ++i) {
          optimizer.step([&net, &optimizer, i]() -> at::Tensor {
            optimizer.zero_grad();
            const at::Tensor x = torch::full({2, 3}, 0.3 + i);
            const at::Tensor loss = (net(x) - 1).square().mean();
            loss.backward();
            return loss;
          });
        }
      };
      torch::nn::Linear net(3, 2);
      const auto optimizer = make(net->parameters());
      train(net, *optimizer, 3);
      const TrainingState state{.module = net.get(), .optimizer = optimizer.get(), .step = 3};
      save_checkpoint(group, name, state, options());
      train(net, *optimizer, 3);

      torch::nn::Linear again(3, 2);
      const auto other = make(again->parameters());
      TrainingState loaded{.module = again.get(), .optimizer = other.get()};
      ASSERT_TRUE(load_checkpoint(group, name, &loaded).has_value());
      train(again, *other, 3);
      EXPECT_TRUE(torch::equal(again->weight, net->weight)) << again->weight << net->weight;
      EXPECT_TRUE(torch::equal(again->bias, net->bias));
    }
    torch::nn::Linear net(3, 2);
    optim::LBFGS lbfgs(net->parameters(), optim::LBFGSOptions(0.1).max_iter(3));
    lbfgs.step([&net, &lbfgs]() -> at::Tensor {
      lbfgs.zero_grad();
      const at::Tensor loss = net(torch::ones({2, 3})).square().mean();
      loss.backward();
      return loss;
    });
    const TrainingState state{.module = net.get(), .optimizer = &lbfgs};
    EXPECT_THAT(
        std::string(error_of([&] { save_checkpoint(group, "lbfgs", state, options()); }).message()),
        HasSubstr("saving checkpoint 'lbfgs'"));
    EXPECT_EQ(error_kind(files_->stamp("lbfgs").status()), ErrorKind::kNotFound);
  });
}

TEST_P(DdpCheckpoint, BadInput_ACheckpointThatIsCut) {
  write_two();
  const std::string whole = *files_->read("run");
  const std::string before = *files_->read("run.previous");
  for (const size_t left : {size_t{0}, size_t{5}, size_t{40}, whole.size() / 2, whole.size() - 1}) {
    SCOPED_TRACE(left);
    ASSERT_TRUE(files_->write_atomic("run", whole.substr(0, left)).ok());
    run_with(files_, 2, [](ProcessGroup& group) {
      KeptTraining training(group, 1);
      const auto loaded = load_checkpoint(group, "run", &training.state);
      ASSERT_TRUE(loaded.has_value());
      EXPECT_EQ(loaded->path, "run.previous");
      EXPECT_THAT(loaded->refused, HasSubstr("'run' is not used: "));
      EXPECT_EQ(training.state.step, 3);
    });
  }
  // The one before it, too.
  ASSERT_TRUE(files_->write_atomic("run.previous", before.substr(0, before.size() - 1)).ok());
  run_with(files_, 2, [](ProcessGroup& group) {
    KeptTraining training(group, 1);
    const auto untouched = training.tensors();
    const Status refused = error_of([&] { load_checkpoint(group, "run", &training.state); });
    expect_error(
        refused, ErrorKind::kInvalidArgument,
        {"loading checkpoint 'run'", "'run' is not used: ", "'run.previous' is not used: "});
    expect_same(training.tensors(), untouched);
    EXPECT_EQ(training.state.step, 0);
  });
}

TEST_P(DdpCheckpoint, BadInput_ACheckpointOfAnotherModel) {
  write_two();
  run_with(files_, 2, [](ProcessGroup& group) {
    KeptTraining wider(group, 1, /*width=*/9);
    const auto untouched = wider.tensors();
    expect_error(error_of([&] { load_checkpoint(group, "run", &wider.state); }),
                 ErrorKind::kInvalidArgument,
                 {"its 'first.bias' is Float of [8], and the module's Float of [9]"});
    expect_same(wider.tensors(), untouched);
    KeptTraining training(group, 1);
    torch::optim::SGD sgd(training.net->parameters(), 0.1);
    training.state.optimizer = &sgd;
    expect_error(error_of([&] { load_checkpoint(group, "run", &training.state); }),
                 ErrorKind::kInvalidArgument,
                 {"its optimizer is a torch::optim::Adam, and this one a torch::optim::SGD"});
    training.state.optimizer = &training.optimizer;
    training.state.generators.emplace("other", training.noise);
    expect_error(error_of([&] { load_checkpoint(group, "run", &training.state); }),
                 ErrorKind::kInvalidArgument, {"it has no generator 'other'"});
  });
  // One rank alone has another model.
  run_with(files_, 2, [](ProcessGroup& group) {
    KeptTraining training(group, 1, group.rank() == 1 ? 9 : 8);
    const auto untouched = training.tensors();
    expect_error(error_of([&] { load_checkpoint(group, "run", &training.state); }),
                 ErrorKind::kInvalidArgument, {"rank 1: its 'first.bias' is Float of [8]"});
    expect_same(training.tensors(), untouched);
  });
  // Another number of ranks: the module alone can be had.
  run_with(files_, 3, [](ProcessGroup& group) {
    KeptTraining training(group, 1);
    expect_error(error_of([&] { load_checkpoint(group, "run", &training.state); }),
                 ErrorKind::kInvalidArgument, {"of 2 ranks, and the group has 3"});
    TrainingState module{.module = training.net.get()};
    EXPECT_TRUE(load_checkpoint(group, "run", &module).has_value());
    EXPECT_EQ(module.step, 5);
  });
}

TEST_P(DdpCheckpoint, BadInput_ACheckpointOnAFullDisk) {
  write_two();
  const uint64_t used = files_->stamp("run")->size + files_->stamp("run.previous")->size;
  // Not one byte less: LibTorch names parameters by their addresses in an archive, whose size differs
  // by a few bytes for it.
  for (const uint64_t left : {uint64_t{0}, uint64_t{100}, files_->stamp("run")->size / 10 * 9}) {
    SCOPED_TRACE(left);
    capacity_->store(used + left);
    run_with(files_, 2, [this](ProcessGroup& group) {
      KeptTraining training(group, 1);
      ASSERT_TRUE(load_checkpoint(group, "run", &training.state).has_value());
      training.step();
      expect_error(error_of([&] { save_checkpoint(group, "run", training.state, options()); }),
                   ErrorKind::kUnavailable, {"saving checkpoint 'run'", "No space left on device"});
      // What was there is there, and nothing else.
      EXPECT_EQ(error_kind(files_->stamp("run.next").status()), ErrorKind::kNotFound);
      ASSERT_TRUE(load_checkpoint(group, "run", &training.state).has_value());
      EXPECT_EQ(training.state.step, 5);
    });
  }
  capacity_->store(UINT64_MAX);
  run_with(files_, 2, [this](ProcessGroup& group) {
    KeptTraining training(group, 1);
    ASSERT_TRUE(load_checkpoint(group, "run", &training.state).has_value());
    training.step();
    save_checkpoint(group, "run", training.state, options());
    EXPECT_EQ(load_checkpoint(group, "run", &training.state)->path, "run");
    EXPECT_EQ(training.state.step, 6);
  });
}

// A writer that ends before, between or after the renames: a whole checkpoint is found each time.
TEST_P(DdpCheckpoint, AWriterMayEndAtEveryMoment) {
  write_two();
  const std::string newest = *files_->read("run");
  ASSERT_TRUE(files_->rename("run", "run.next").ok());
  run_with(files_, 2, [this](ProcessGroup& group) {
    KeptTraining training(group, 1);
    EXPECT_EQ(load_checkpoint(group, "run", &training.state)->path, "run.next");
    EXPECT_EQ(training.state.step, 5);
    training.step();
    save_checkpoint(group, "run", training.state, options());
    EXPECT_EQ(load_checkpoint(group, "run", &training.state)->path, "run");
    EXPECT_EQ(training.state.step, 6);
  });
  EXPECT_EQ(error_kind(files_->stamp("run.next").status()), ErrorKind::kNotFound);
}

// Names that a writer leaves when it is killed are those that the next one knows, at every moment: a folder in which
// trainings are killed does not fill with parts of files.
TEST_P(DdpCheckpoint, AWriterThatIsKilledLeavesNoOtherNames) {
  std::string folder = ::testing::TempDir() + "weft_checkpoint_XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const absl::Cleanup remove = [&folder] { std::filesystem::remove_all(folder); };
  const std::string path = folder + "/run";
  const std::shared_ptr<Files> files = make_system_files();
  const NamesMade names(folder);
  run_with(files, 2, [&](ProcessGroup& group) {
    KeptTraining training(group, 7);
    for (int i = 0; i < 3; ++i) {
      training.step();
      save_checkpoint(group, path, training.state, options());
    }
    // One that was killed between the two names, and one before the first.
    for (const bool both : {false, true}) {
      if (group.rank() == 0) {
        throw_if_error(files->rename(path, path + ".next"));
        if (both) throw_if_error(files->write_atomic(path, *files->read(path + ".previous")));
      }
      group.barrier();
      training.step();
      save_checkpoint(group, path, training.state, options());
      EXPECT_EQ(load_checkpoint(group, path, &training.state)->path, path);
    }
    EXPECT_EQ(training.state.step, 5);
  });
  EXPECT_THAT(names.take(), ::testing::ElementsAre("run", "run.next", "run.previous"));
  EXPECT_EQ(files->list(folder).value(), (std::vector<std::string>{"run", "run.previous"}));
}

// The archive with its tensors at another device: that of a training which had a GPU.
std::string moved_to_gpu(const std::string& archive) {
  const std::string from = std::string("X\3\0\0\0cpu", 8);
  const std::string to = std::string("X\6\0\0\0cuda:0", 11);
  std::istringstream in(archive);
  caffe2::serialize::PyTorchStreamReader reader(&in);
  std::string out;
  size_t moved = 0;
  {
    caffe2::serialize::PyTorchStreamWriter writer([&out](const void* data, size_t size) {
      out.append(static_cast<const char*>(data), size);
      return size;
    });
    for (const std::string& name : reader.getAllRecords()) {
      if (name == "version" || name == "byteorder" || name.starts_with(".")) continue;
      const auto [bytes, size] = reader.getRecord(name);
      std::string record(static_cast<const char*>(bytes.get()), size);
      if (name == "data.pkl") {
        for (size_t at = record.find(from); at != std::string::npos; at = record.find(from, at)) {
          record.replace(at, from.size(), to);
          ++moved;
        }
      }
      writer.writeRecord(name, record.data(), record.size());
    }
    writer.writeEndOfFile();
  }
  EXPECT_GT(moved, 0U);
  return out;
}

// Tensors come to where the module has its own, wherever they were saved. (The other way round: label gpu.)
TEST(DdpCheckpointFiles, AnArchiveOfAnotherDeviceLoadsHere) {
  const std::shared_ptr<Files> files = make_memory_files();
  run_with(files, 2, [&files](ProcessGroup& group) {
    KeptTraining training(group, 7);
    for (int i = 0; i < 3; ++i) training.step();
    save_checkpoint(group, "run", training.state, {.format = CheckpointFormat::kArchive});
    if (group.rank() == 0) {
      throw_if_error(files->write_atomic("run", moved_to_gpu(*files->read("run"))));
    }
    group.barrier();
    KeptTraining again(group, 8);
    ASSERT_TRUE(load_checkpoint(group, "run", &again.state).has_value());
    // Statistics are those of rank 0 until the next forward.
    if (group.rank() == 0) expect_same(again.tensors(), training.tensors());
    training.step();
    again.step();
    expect_same(again.tensors(), training.tensors());
  });
}

// Without weft: LibTorch reads its archive, and names in a safetensors file are the module's.
TEST(DdpCheckpointFiles, OthersReadThem) {
  const std::shared_ptr<Files> files = make_memory_files();
  run_with(files, 2, [&files](ProcessGroup& group) {
    KeptTraining training(group, 7);
    training.step();
    save_checkpoint(group, "archive", training.state, {.format = CheckpointFormat::kArchive});
    save_checkpoint(group, "tensors", training.state);
    if (group.rank() != 0) return;
    const std::string bytes = *files->read("archive");
    torch::serialize::InputArchive archive, model;
    archive.load_from(bytes.data(), bytes.size());
    archive.read("model", model);
    KeptNetImpl net;
    net.load(model);
    EXPECT_TRUE(torch::equal(net.first->weight, training.net->first->weight));
    const auto file = SafetensorsFile::open(*files, "tensors");
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_TRUE(torch::equal(*file->read("norm.running_mean"), training.net->norm->running_mean));
    EXPECT_EQ(file->read("optimizer/out.weight/exp_avg")->sizes(),
              training.net->out->weight.sizes());
    EXPECT_EQ(file->read("generator/noise")->size(0), 2);
    EXPECT_EQ(file->header().metadata.at("optimizer/out.weight/step"), "int 1");
    EXPECT_EQ(file->header().metadata.at("optimizer/group0/lr"), "double 0.050000000000000003");
  });
}

}  // namespace
}  // namespace weft::testing
