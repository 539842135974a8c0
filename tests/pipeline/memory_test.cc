// What stages hold in memory, in bytes: what the simulator predicts from the bytes of one micro-batch.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/verifier.h"
#include "weft/tests/pipeline/model.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

constexpr int kOwners = 4;
constexpr int64_t kRows = 64;
constexpr int kLayers = 192;

// Whose memory this thread allocates: a stage's runner, from its first forward on; -1: no stage's.
thread_local int owner_here = -1;

// LibTorch's own, with the bytes that each owner has and had at most.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}
  c10::DataPtr allocate(size_t n) override {
    c10::DataPtr got = inner_->allocate(n);
    auto* const block = new Block{this, std::move(got), owner_here, static_cast<int64_t>(n)};
    add(block->owner, block->bytes);
    return {block->inner.get(), block, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override {
    inner_->copy_data(to, from, n);
  }

  void forget_peaks() {
    const std::lock_guard<std::mutex> lock(mutex_);
    peaks_ = now_;
  }
  std::array<int64_t, kOwners> peaks() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return peaks_;
  }
  std::array<int64_t, kOwners> now() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return now_;
  }

 private:
  struct Block {
    CountingAllocator* of;
    c10::DataPtr inner;
    int owner;
    int64_t bytes;
  };
  static void drop(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->of->add(block->owner, -block->bytes);
  }
  void add(int owner, int64_t bytes) {
    if (owner < 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    now_[owner] += bytes;
    peaks_[owner] = std::max(peaks_[owner], now_[owner]);
  }

  c10::Allocator* const inner_;
  mutable std::mutex mutex_;
  std::array<int64_t, kOwners> now_{};
  std::array<int64_t, kOwners> peaks_{};
};

CountingAllocator& counting() {
  static CountingAllocator* const one = [] {
    auto* const made = new CountingAllocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(made, /*priority=*/100);
    return made;
  }();
  return *one;
}

// So deep that what a backward needs for a moment is little beside what a forward keeps.
struct DeepImpl : torch::nn::Module {
  explicit DeepImpl(int64_t owner) : owner(owner) {
    weight = register_parameter("weight", at::ones({kRows, kRows}));
  }
  at::Tensor forward(const at::Tensor& x) {
    owner_here = static_cast<int>(owner);
    at::Tensor h = x * weight;
    for (int k = 0; k < kLayers; ++k) h = at::tanh(h);
    return h;
  }
  const int64_t owner;
  at::Tensor weight;
};

// Peaks above the weights' gradients, by worker, of a second step.
std::array<int64_t, kOwners> peak_bytes(const pipeline::Plan& plan) {
  counting();
  ClusterOptions o;
  o.size = kOwners;
  o.library = model_library();
  module_<DeepImpl>(o.library, "Deep").constructor<int64_t>().def("forward", &DeepImpl::forward);
  o.adjust = [](int, JoinOptions* join) { add_pipeline_services(join); };
  Cluster cluster(o);
  std::array<int64_t, kOwners> out{};
  {
    std::vector<RemoteModule<DeepImpl>> modules;
    for (const int w : plan.placement) {
      modules.emplace_back(cluster[0], absl::StrCat("worker", w), int64_t{w});
    }
    pipeline::Pipeline pipe(cluster[0],
                            std::vector<pipeline::Stage>(modules.begin(), modules.end()), plan,
                            {.loss = "app.squares"});
    const int64_t rows = kRows * plan.micro_batches;
    const at::Tensor x = at::ones({rows, kRows});
    pipe.step({x}, x);
    const auto before = counting().now();
    counting().forget_peaks();
    pipe.step({x}, x);
    const auto peaks = counting().peaks();
    const auto after = counting().now();
    const int64_t each = plan.stages() / kOwners;  // stages of a worker
    const int64_t one = each * kRows * kRows * 4;
    for (int w = 0; w < kOwners; ++w) {
      out[w] = peaks[w] - one;
      // Gradients are there already, in one set: a copy per micro-batch would be more. What was sent
      // last may still wait for its answer.
      EXPECT_NEAR(static_cast<double>(after[w]), static_cast<double>(before[w]), 2 * one) << w;
      EXPECT_GE(before[w], one) << w;
      EXPECT_LE(before[w], 4 * one) << w;
    }
    pipe.close();
  }
  cluster.shutdown();
  return out;
}

TEST(PipelineMemory, PP_5_BytesAreWhatIsPredicted) {
  const auto one = peak_bytes(pipeline::gpipe(kOwners, 1));
  for (const std::string name : {"gpipe", "1f1b", "zb-h1", "zb-v"}) {
    if (kSanitizer && name != "1f1b") continue;
    const int most = kSanitizer ? 16 : name == "1f1b" ? 64 : 24;
    std::map<int, std::array<int64_t, kOwners>> by_m;
    for (const int m : {8, most}) {
      if (name == "gpipe" && m > 8) continue;
      const pipeline::Plan plan = *pipeline::make_schedule(name, kOwners, m);
      by_m[m] = peak_bytes(plan);
      const auto live = pipeline::verify(plan).peak_activations;
      for (int w = 0; w < kOwners; ++w) {
        const auto got = static_cast<double>(by_m[m][w]);
        const auto want = static_cast<double>(one[w] * live[w]);
        EXPECT_LE(got, 1.05 * want) << name << " m=" << m << " worker " << w;
        EXPECT_GE(got, 0.9 * want) << name << " m=" << m << " worker " << w;
      }
    }
    if (name == "gpipe") continue;
    for (int w = 0; w < kOwners; ++w) {  // more micro-batches hold no more
      EXPECT_NEAR(static_cast<double>(by_m[most][w]) / static_cast<double>(by_m[8][w]), 1, 0.02)
          << name << " worker " << w;
    }
  }
}

// With recompute: the inputs of those that wait, and one stage.
TEST(PipelineMemory, PP_6_RecomputeHoldsInputsAndOneStage) {
  const auto one = peak_bytes(pipeline::gpipe(kOwners, 1));
  const auto got = peak_bytes(pipeline::with_recompute(pipeline::gpipe(kOwners, 8)));
  for (int w = 0; w + 1 < kOwners; ++w) {
    const int64_t boundaries = 8 * 2 * kRows * kRows * 4;  // an input and what is sent of it
    EXPECT_LE(static_cast<double>(got[w]), 1.05 * static_cast<double>(one[w] + boundaries)) << w;
  }
}

}  // namespace
}  // namespace weft::testing
