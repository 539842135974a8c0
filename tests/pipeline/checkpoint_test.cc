// Checkpoints by layer: what four stages have learned goes on in one, two or three, bit for bit; and one
// that is not whole, or of another model, is refused by name with nothing loaded.
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"
#include "weft/common/files.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/stage_optimizer.h"
#include "weft/rpc/inspection.h"
#include "weft/rpc/safetensors.h"
#include "weft/tests/pipeline/model.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/gate.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Layers `first` to `last - 1`, called by their numbers in the whole model or in the stage.
struct LayersImpl : torch::nn::Module {
  LayersImpl(int64_t first, int64_t last, bool local_names) {
    for (int64_t i = first; i < last; ++i) {
      const std::string name = std::to_string(local_names ? i - first : i);
      layers.push_back(register_module(name, std::make_shared<BlockImpl>(i, false)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    if (gate != nullptr) gate->arrive_and_wait();
    for (const auto& layer : layers) x = layer->forward(x);
    return x;
  }
  // From now on until release(), forwards wait.
  void hold() { gate = std::make_shared<Gate>(make_system_runtime()); }
  void release() { gate->open(); }

  std::vector<std::shared_ptr<BlockImpl>> layers;
  std::shared_ptr<Gate> gate;
};

// An optimizer for the stages; null: Adam of weft::optim.
using MakeOptimizer =
    std::function<std::shared_ptr<pipeline::StageOptimizer>(std::vector<at::Tensor>)>;

struct Model {
  Model(std::vector<int> b, bool local_names = false, const MakeOptimizer& make_optimizer = nullptr)
      : begins(std::move(b)) {
    const int p = static_cast<int>(begins.size()) - 1;
    ClusterOptions o;
    o.size = p;
    o.library = Library("app");
    module_<LayersImpl>(o.library, "Layers")
        .constructor<int64_t, int64_t, bool>()
        .def("forward", &LayersImpl::forward)
        .def("hold", &LayersImpl::hold)
        .def("release", &LayersImpl::release);
    o.library.def("squares", &squares);
    o.library.merge(dist_optim_library());
    o.adjust = [make_optimizer](int, JoinOptions* join) {
      add_pipeline_services(join);
      if (make_optimizer == nullptr) return;
      join->services.back() = pipeline_service(
          {.make_optimizer = [make_optimizer](const ServiceContext&, const pipeline::Plan&, int,
                                              std::vector<at::Tensor> parameters) {
            return make_optimizer(std::move(parameters));
          }});
    };
    cluster = std::make_unique<Cluster>(o);
    for (int s = 0; s < p; ++s) {
      modules.emplace_back((*cluster)[0], absl::StrCat("worker", s), int64_t{begins[s]},
                           int64_t{begins[s + 1]}, local_names);
    }
    pipe = std::make_unique<pipeline::Pipeline>(
        (*cluster)[0], std::vector<pipeline::Stage>(modules.begin(), modules.end()),
        pipeline::one_f_one_b(p, 4),
        pipeline::PipelineOptions{.loss = "app.squares",
                                  .optimizer = optimizer_choice<optim::Adam>({.lr = 0.01})});
  }
  ~Model() {
    pipe->close();
    pipe = nullptr;
    modules.clear();
    cluster->shutdown();
  }
  double step() {
    const int64_t k = pipe->next_step();
    return pipe->step({numbers(8, 0.3 + 0.1 * static_cast<double>(k))}, numbers(8, 0.8)).loss;
  }
  // All tensors by layer, whatever the stages.
  std::map<std::string, at::Tensor> state() {
    std::map<std::string, at::Tensor> out;
    for (int s = 0; s < pipe->plan().stages(); ++s) out.merge(pipe->state_dict(s));
    return out;
  }

  std::vector<int> begins;
  std::unique_ptr<Cluster> cluster;
  std::vector<RemoteModule<LayersImpl>> modules;
  std::unique_ptr<pipeline::Pipeline> pipe;
};

class Checkpoint : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_ + "/" + name; }
  void SetUp() override {
    std::string made = ::testing::TempDir() + "/weft_checkpoint_XXXXXX";
    ASSERT_NE(mkdtemp(made.data()), nullptr);
    dir_ = made;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(dir_)) {
      out.push_back(entry.path().filename().string());
    }
    std::sort(out.begin(), out.end());
    return out;
  }
  static std::string refused(const std::function<void()>& fn,
                             ErrorKind kind = ErrorKind::kInvalidArgument) {
    try {
      fn();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return error.what();
    }
    return "accepted";
  }
  std::string dir_;
};

TEST_F(Checkpoint, PP_10_SavedByFourStagesAndLoadedByOneTwoAndThree) {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> want;
  {
    Model four({0, 1, 2, 4, 6});
    for (int k = 0; k < 3; ++k) four.step();
    four.pipe->save_checkpoint(path("run"));
    EXPECT_THAT(names(), ::testing::ElementsAre("run", "run-step3-0-stage0.safetensors",
                                                "run-step3-0-stage1.safetensors",
                                                "run-step3-0-stage2.safetensors",
                                                "run-step3-0-stage3.safetensors"));
    for (int k = 0; k < 10; ++k) losses.push_back(four.step());
    want = four.state();
  }
  const std::vector<std::vector<int>> divisions = {{0, 6}, {0, 3, 6}, {0, 1, 5, 6}};
  for (const auto& begins : divisions) {
    SCOPED_TRACE(absl::StrCat(begins.size() - 1, " stages"));
    Model other(begins);
    other.step();  // what it has learned is replaced
    EXPECT_EQ(other.pipe->load_checkpoint(path("run")), 3);
    EXPECT_EQ(other.pipe->next_step(), 3);
    for (const double loss : losses) EXPECT_EQ(other.step(), loss);
    expect_equal({other.state()}, {want});
    other.pipe->save_checkpoint(path("run2"));
  }
  // Each checkpoint takes the place of the one before, with its files.
  EXPECT_THAT(names(), ::testing::IsSupersetOf({"run2", "run2-step13-2-stage0.safetensors",
                                                "run2-step13-2-stage1.safetensors",
                                                "run2-step13-2-stage2.safetensors"}));
  EXPECT_EQ(names().size(), 5u + 4u);
}

TEST_F(Checkpoint, PP_10_StagesThatNumberTheirLayersFromZero) {
  double loss = 0;
  {
    Model two({0, 2, 6}, /*local_names=*/true);
    two.step();
    EXPECT_THAT(refused([&] { two.pipe->save_checkpoint(path("run")); }),
                AllOf(HasSubstr("saving checkpoint '" + path("run") + "'"),
                      HasSubstr("'0.bias' is in stage 0 and in stage 1; set "
                                "CheckpointOptions::layer_name")));
    two.pipe->save_checkpoint(path("run"), pipeline::layer_names(two.begins));
    loss = two.step();
  }
  const auto files = make_system_files();
  const auto file = SafetensorsFile::open(*files, path("run-step1-0-stage1.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->header().tensors.count("layer5.weight"), 1u);
  EXPECT_EQ(file->header().tensors.count("optimizer/layer2.weight/exp_avg"), 1u);
  Model three({0, 1, 3, 6}, /*local_names=*/true);
  three.pipe->load_checkpoint(path("run"), pipeline::layer_names(three.begins));
  EXPECT_EQ(three.step(), loss);
}

template <class Class, class Options>
MakeOptimizer of_torch(Options options) {
  return [options](std::vector<at::Tensor> parameters) {
    return pipeline::torch_optimizer(std::make_unique<Class>(std::move(parameters), options));
  };
}

// What LibTorch's optimizers keep of a layer goes with it to another number of stages.
TEST_F(Checkpoint, PP_10_OptimizersOfLibTorchByLayer) {
  namespace optim = torch::optim;
  const std::vector<MakeOptimizer> all = {
      of_torch<optim::AdamW>(optim::AdamWOptions(0.01).amsgrad(true)),
      of_torch<optim::Adam>(optim::AdamOptions(0.01)),
      of_torch<optim::SGD>(optim::SGDOptions(0.05).momentum(0.9)),
      of_torch<optim::Adagrad>(optim::AdagradOptions(0.05).initial_accumulator_value(0.1)),
      of_torch<optim::RMSprop>(optim::RMSpropOptions(0.01).momentum(0.5).centered(true))};
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    Model two({0, 2, 4}, false, all[i]);
    two.pipe->save_checkpoint(path("none"));  // before it keeps anything
    for (int k = 0; k < 2; ++k) two.step();
    two.pipe->save_checkpoint(path("run"));
    const double loss = two.step();
    const auto want = two.state();
    Model three({0, 1, 3, 4}, false, all[i]);
    for (const bool again : {false, true}) {
      EXPECT_EQ(three.pipe->load_checkpoint(path("run")), 2) << again;
      EXPECT_EQ(three.step(), loss);
      expect_equal({three.state()}, {want});
    }
    three.pipe->load_checkpoint(path("none"));
    two.pipe->load_checkpoint(path("none"));
    EXPECT_EQ(three.step(), two.step());
    expect_equal({three.state()}, {two.state()});
  }
  const auto files = make_system_files();
  const auto file = SafetensorsFile::open(*files, path("run-step2-4-stage1.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->header().tensors.count("optimizer/3.weight/square_avg"), 1u);
}

TEST_F(Checkpoint, BadInput_OptimizersOfLibTorch) {
  const MakeOptimizer adam = of_torch<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
  Model two({0, 2, 4}, false, adam);
  two.step();
  two.pipe->save_checkpoint(path("run"));
  two.step();
  const auto before = two.state();
  const auto files = make_system_files();
  const std::string first = path("run-step1-0-stage0.safetensors");
  const std::string bytes = *files->read(first);
  ASSERT_TRUE(files->write_atomic(first, bytes.substr(0, bytes.size() - 8)).ok());
  EXPECT_THAT(refused([&] { two.pipe->load_checkpoint(path("run")); }),
              AllOf(HasSubstr(first), HasSubstr("it is cut")));
  ASSERT_TRUE(files->write_atomic(first, bytes).ok());
  // One of another class keeps other things of the same layers.
  Model sgd({0, 4}, false,
            of_torch<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)));
  EXPECT_THAT(refused([&] { sgd.pipe->load_checkpoint(path("run")); }),
              HasSubstr("the optimizer keeps no '0.weight/exp_avg'"));
  const auto state = two.pipe->state_dict(1);
  const auto changed = [&](const std::string& name, const at::Tensor& value) {
    auto other = state;
    other.erase(name);
    if (value.defined()) other.emplace(name, value);
    return refused([&] { two.pipe->load_state_dict(1, other); });
  };
  const std::string weight = "optimizer/2.weight/";
  EXPECT_THAT(changed(weight + "step", {}), HasSubstr("there is no '2.weight/step'"));
  EXPECT_THAT(changed(weight + "step", at::zeros({1})), HasSubstr("one whole number"));
  EXPECT_THAT(changed(weight + "exp_avg", at::zeros({2, 3})),
              HasSubstr("'2.weight/exp_avg' is [2, 3], and its parameter [6, 6]"));
  EXPECT_THAT(changed("optimizer/9.weight/exp_avg", at::zeros({2})), HasSubstr("'9.weight'"));
  EXPECT_THAT(changed("optimizer/weight", at::zeros({2})), HasSubstr("is of no parameter"));
  expect_equal({two.state()}, {before});
}

TEST_F(Checkpoint, BadInput_OneThatIsNotWhole) {
  Model two({0, 3, 6});
  two.step();
  two.pipe->save_checkpoint(path("run"));
  two.step();
  const auto before = two.state();
  const auto files = make_system_files();
  const std::string first = path("run-step1-0-stage0.safetensors");
  const std::string second = path("run-step1-0-stage1.safetensors");
  const std::string bytes = *files->read(first);
  const auto load = [&] { two.pipe->load_checkpoint(path("run")); };
  const std::string prefix = "loading checkpoint '" + path("run") + "'";

  ASSERT_TRUE(files->write_atomic(first, bytes.substr(0, bytes.size() / 2)).ok());
  EXPECT_THAT(refused(load), AllOf(HasSubstr(prefix), HasSubstr(first), HasSubstr("it is cut")));
  ASSERT_TRUE(files->remove(first).ok());
  EXPECT_THAT(refused(load, ErrorKind::kNotFound), AllOf(HasSubstr(prefix), HasSubstr(first)));
  ASSERT_TRUE(files->write_atomic(first, bytes).ok());

  // A layer that is missing, one too many, one of another shape.
  const auto changed = [&](const std::function<void(std::map<std::string, at::Tensor>*)>& change) {
    const auto file = SafetensorsFile::open(*files, second);
    std::map<std::string, at::Tensor> tensors;
    for (const auto& [name, entry] : file->header().tensors) tensors[name] = *file->read(name);
    const auto kept = tensors;
    change(&tensors);
    EXPECT_TRUE(write_safetensors(*files, second, tensors).ok());
    const std::string text = refused(load);
    EXPECT_TRUE(write_safetensors(*files, second, kept).ok());
    return text;
  };
  EXPECT_THAT(changed([](auto* t) {
                t->erase("4.weight");
                t->emplace("7.weight", at::zeros({kWidth, kWidth}));
              }),
              HasSubstr("it has no '4.weight', which stage 1 takes"));
  EXPECT_THAT(changed([](auto* t) { t->erase("4.weight"); }), HasSubstr("tensors, and it lists "));
  EXPECT_THAT(changed([](auto* t) { t->at("4.bias") = at::zeros({3}); }),
              HasSubstr("'4.bias' is [3], and stage 1 takes [6]"));
  EXPECT_THAT(changed([](auto* t) {
                t->erase("4.weight");
                t->emplace("0.weight", at::zeros({kWidth, kWidth}));
              }),
              HasSubstr("'0.weight' is in two of its files"));
  // The list itself.
  const std::string list = *files->read(path("run"));
  ASSERT_TRUE(files->write_atomic(path("run"), list.substr(0, list.size() / 2)).ok());
  EXPECT_THAT(refused(load), AllOf(HasSubstr(prefix), HasSubstr("it is cut")));
  ASSERT_TRUE(files->write_atomic(path("run"), bytes).ok());
  EXPECT_THAT(refused(load), HasSubstr("it is no list of a checkpoint"));
  EXPECT_THAT(refused([&] { two.pipe->load_checkpoint(path("no")); }, ErrorKind::kNotFound),
              HasSubstr("loading checkpoint '" + path("no") + "'"));
  ASSERT_TRUE(files->write_atomic(path("run"), list).ok());
  // Nothing was loaded by all that; a model without one of the layers refuses the others.
  expect_equal({two.state()}, {before});
  Model fewer({0, 5});
  EXPECT_THAT(refused([&] { fewer.pipe->load_checkpoint(path("run")); }),
              HasSubstr("no stage takes its '5.bias'"));
  two.pipe->load_checkpoint(path("run"));
}

TEST_F(Checkpoint, BadInput_WhileAStepIsUnderWay) {
  Model two({0, 3, 6});
  two.step();
  two.modules[1].rpc_sync(&LayersImpl::hold);
  auto step = two.pipe->step_async({numbers(8, 0.5)}, numbers(8, 0.8));
  EXPECT_THAT(refused([&] { two.pipe->save_checkpoint(path("run")); }, ErrorKind::kState),
              HasSubstr("saving a checkpoint: step 1 is under way"));
  EXPECT_TRUE(names().empty());
  // Meanwhile the table of pipelines says what the first stage waits for.
  eventually(
      [&] {
        Inspection seen(100);
        const auto service = (*two.cluster)[0].service<pipeline::internal::PipelineService>();
        service->put_inspection(&seen);
        return seen.text().find(
                   "of step 1, waits for the gradient of stage 1, micro-batch 0, "
                   "step 1, from worker 'worker1'") != std::string::npos;
      },
      "worker 0 waits for a gradient");
  two.modules[1].rpc_sync(&LayersImpl::release);
  step.wait();
  two.pipe->save_checkpoint(path("run"));
  EXPECT_EQ(two.pipe->next_step(), 2);
}

// Without copies, training goes back to the checkpoint when a worker is lost.
TEST_F(Checkpoint, PP_9_RebuiltFromACheckpoint) {
  Model three({0, 2, 4, 6});
  std::vector<double> losses;
  for (int k = 0; k < 2; ++k) losses.push_back(three.step());
  three.pipe->save_checkpoint(path("run"));
  for (int k = 0; k < 3; ++k) losses.push_back(three.step());
  (*three.cluster)[2].shutdown({.graceful = false});
  EXPECT_THROW(three.step(), Error);
  const auto replace = [&](int stage) -> pipeline::Stage {
    EXPECT_EQ(stage, 2);
    three.modules[2] =
        RemoteModule<LayersImpl>((*three.cluster)[0], "worker1", int64_t{4}, int64_t{6}, false);
    return three.modules[2];
  };
  EXPECT_EQ(three.pipe->rebuild(replace, {.checkpoint = path("run")}), 2);
  for (int k = 2; k < 5; ++k) EXPECT_EQ(three.step(), losses[k]);
  three.pipe->close();
  three.modules.clear();
  for (const size_t w : {0u, 1u}) (*three.cluster)[w].shutdown({.graceful = false});
  three.cluster->forget();
}

}  // namespace
}  // namespace weft::testing
