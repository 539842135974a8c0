// ps_skipgram: vectors of the words of a text (word2vec, skip-gram with negative samples), in two sparse
// tables over several servers. --help says how to start it; examples/README.md explains it.

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/log_sigmoid.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/str_format.h"
#include "weft/common/launch_info.h"
#include "weft/examples/command_line.h"
#include "weft/examples/rnn_model_parallel/text.h"
#include "weft/weft.h"

namespace ps_skipgram {
namespace {

namespace ps = weft::ps;

constexpr int64_t kLength = 32;     // of a vector
constexpr int64_t kBatch = 256;     // pairs of a word and a neighbour
constexpr int64_t kWindow = 3;      // words to each side
constexpr int64_t kNegatives = 5;   // words that are no neighbours, for each pair
constexpr double kTarget = 2.2;     // nats for a pair with its negatives; without learning 4.16
constexpr int64_t kShownWords = 5;  // of the nearest words
constexpr int64_t kLeastWords = 1000;

const char kUsage[] =
    "usage: ps_skipgram [options], on 2 or more processes\n"
    "\n"
    "Learns vectors of the words of a text: the first processes serve the tables, the others "
    "train.\n"
    "For example\n"
    "\n"
    "  weftrun -n 4 ps_skipgram --servers 2\n"
    "\n"
    "  --servers N   how many of the processes serve (2, or 1 of 2 processes)\n"
    "  --epochs N    times through the text (12)\n"
    "  --seed N      of the first vectors and the samples (1)\n"
    "  --ahead N     batches whose rows are pulled before they are needed (1)\n"
    "  --text FILE   the text (a licence of the system)\n"
    "  --help\n";

// A text as numbers of its words, those that are frequent first.
struct Words {
  std::vector<int64_t> text;
  std::vector<std::string> names;
  std::vector<double> counts;
};

Words words_of(const std::string& characters) {
  std::vector<std::string> all;
  std::map<std::string, int64_t> counted;
  std::string word;
  for (const char c : characters + " ") {
    if (std::isalpha(static_cast<unsigned char>(c)) != 0) {
      word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else if (!word.empty()) {
      ++counted[word];
      all.push_back(std::exchange(word, {}));
    }
  }
  if (static_cast<int64_t>(all.size()) < kLeastWords) {
    throw std::invalid_argument("the text has " + std::to_string(all.size()) +
                                " words, and at least " + std::to_string(kLeastWords) +
                                " are needed; name a longer one with --text FILE");
  }
  std::vector<std::pair<int64_t, std::string>> order;
  for (const auto& [name, count] : counted) order.emplace_back(-count, name);
  std::sort(order.begin(), order.end());
  Words out;
  std::map<std::string, int64_t> number;
  for (const auto& [count, name] : order) {
    number[name] = static_cast<int64_t>(out.names.size());
    out.names.push_back(name);
    out.counts.push_back(static_cast<double>(-count));
  }
  for (const std::string& name : all) out.text.push_back(number[name]);
  return out;
}

struct Batch {
  at::Tensor words;   // [pairs]
  at::Tensor others;  // [pairs, 1 + negatives]: the neighbour first
};

// The pairs of every `step`-th word of the text, in a new order in each epoch.
class Pairs {
 public:
  Pairs(const Words& words, int64_t first, int64_t step, int64_t epochs, uint64_t seed)
      : words_(words), first_(first), step_(step), left_(epochs), random_(seed) {
    std::vector<double> weights;
    for (const double count : words.counts) weights.push_back(std::pow(count, 0.75));
    negative_ = std::discrete_distribution<int64_t>(weights.begin(), weights.end());
  }

  std::optional<Batch> next() {
    if (pairs_.size() < kBatch) {
      if (left_-- == 0) return std::nullopt;
      fill();
    }
    std::vector<int64_t> words;
    std::vector<int64_t> others;
    for (int64_t i = 0; i < kBatch; ++i) {
      words.push_back(pairs_.back().first);
      others.push_back(pairs_.back().second);
      pairs_.pop_back();
      for (int64_t n = 0; n < kNegatives; ++n) others.push_back(negative_(random_));
    }
    return Batch{at::tensor(words, at::kLong),
                 at::tensor(others, at::kLong).view({kBatch, 1 + kNegatives})};
  }

 private:
  void fill() {
    const auto size = static_cast<int64_t>(words_.text.size());
    for (int64_t i = first_; i < size; i += step_) {
      for (int64_t k = std::max<int64_t>(0, i - kWindow); k <= std::min(size - 1, i + kWindow);
           ++k) {
        if (k == i) continue;
        pairs_.emplace_back(words_.text[static_cast<size_t>(i)],
                            words_.text[static_cast<size_t>(k)]);
      }
    }
    std::shuffle(pairs_.begin(), pairs_.end(), random_);
  }

  const Words& words_;
  const int64_t first_;
  const int64_t step_;
  int64_t left_;
  std::mt19937_64 random_;
  std::discrete_distribution<int64_t> negative_;
  std::vector<std::pair<int64_t, int64_t>> pairs_;
};

ps::TableDefinition vectors(double bound, uint64_t seed) {
  auto out = ps::sparse(kLength, ps::rule<weft::optim::RowWiseAdagrad>({.lr = 0.1}));
  if (bound > 0) out.init = ps::Init::uniform(-bound, bound, seed);
  return out;
}

at::Tensor loss_of(const at::Tensor& words, const at::Tensor& others) {
  at::Tensor scores = (others * words.unsqueeze(1)).sum(2);  // [pairs, 1 + negatives]
  const at::Tensor near = at::log_sigmoid(scores.select(1, 0));
  const at::Tensor far = at::log_sigmoid(-scores.narrow(1, 1, kNegatives)).sum(1);
  return -(near + far).sum();
}

// The nearest ones by angle, of some frequent words that are long enough to mean something.
void print_nearest(const Words& words, at::Tensor vectors) {
  vectors = vectors / vectors.norm(2, {1}, true).clamp_min(1e-12);
  int shown = 0;
  for (size_t w = 0; w < words.names.size() && shown < 8; ++w) {
    if (words.names[w].size() < 5) continue;
    const at::Tensor angles = vectors.matmul(vectors[static_cast<int64_t>(w)]);
    const at::Tensor nearest = std::get<1>(angles.topk(1 + kShownWords));
    std::string line = absl::StrFormat("nearest to %-12s", words.names[w] + ":");
    for (int64_t i = 1; i <= kShownWords; ++i) {
      line += " " + words.names[static_cast<size_t>(nearest[i].item<int64_t>())];
    }
    absl::PrintF("%s\n", line);
    ++shown;
  }
}

bool leave(const weft::Worker& worker) {
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) {
    absl::FPrintF(stderr, "ps_skipgram: shutdown: %s\n", result.status.message());
  }
  return result.status.ok();
}

int train(const weft::Worker& worker, const examples::CommandLine& line, int trainer, int trainers,
          const std::vector<std::string>& servers) {
  const Words words = words_of(rnn::read_characters(line.text("--text", "")));
  const auto seed = static_cast<uint64_t>(line.number("--seed", 1, 0, 1'000'000'000));
  Pairs pairs(words, trainer, trainers, line.number("--epochs", 12, 1, 100'000),
              seed + static_cast<uint64_t>(trainer));
  const ps::Client client(worker, {.servers = servers});
  ps::Embedding of_words(client.open_table("words", vectors(0.5 / kLength, seed)));
  ps::Embedding of_others(client.open_table("others", vectors(0, seed)));
  ps::Trainer steps({&of_words, &of_others},
                    {.ahead = static_cast<int>(line.number("--ahead", 1, 0, 32))});
  double first = 0;
  double sum = 0;
  int64_t taken = 0;
  const int64_t every = 100;
  const ps::TrainerReport report = steps.run(
      [&] { return pairs.next(); },
      [&](const Batch& b) {
        of_words.prefetch(b.words);
        of_others.prefetch(b.others);
      },
      [&](const Batch& b) {
        const at::Tensor loss = loss_of(of_words.forward(b.words), of_others.forward(b.others));
        loss.backward();
        const double now = loss.item<double>() / kBatch;
        if (taken == 0) first = now;
        if (taken % every == 0) sum = 0;
        sum += now;
        ++taken;
        if (taken % every != 0 || trainer != 0) return;
        absl::PrintF("step %d  loss %.3f  %d rows at %d servers\n", taken,
                     sum / static_cast<double>(every), words.names.size(), servers.size());
        std::fflush(stdout);
      });
  const double last = sum / static_cast<double>((taken - 1) % every + 1);
  const bool learned = last < kTarget;
  if (trainer == 0) {
    const auto count = static_cast<int64_t>(words.names.size());
    print_nearest(words, of_words.table().pull_rows(at::arange(count, at::kLong)).wait());
  }
  absl::PrintF(
      "ps_skipgram: %s trainer=%d steps=%d first_loss=%.3f last_loss=%.3f (%s %.2f nats)\n",
      learned ? "ok" : "not learned", trainer, report.steps, first, last,
      learned ? "below" : "not below", kTarget);
  std::fflush(stdout);
  return leave(worker) && learned ? 0 : 1;
}

int run(int argc, char** argv) {
  const examples::CommandLine line(argc, argv,
                                   {"--servers", "--epochs", "--seed", "--ahead", "--text"});
  if (line.help()) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  at::set_num_threads(1);
  const weft::Environment environment = weft::process_environment();
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  if (launch.world_size < 2) {
    throw std::invalid_argument(
        "this program needs at least 2 processes, a server and a trainer, and was started as one; "
        "try: weftrun -n 4 ps_skipgram --servers 2");
  }
  const int most = launch.world_size - 1;
  const auto servers = static_cast<int>(line.number("--servers", std::min(2, most), 1, most));
  std::vector<std::string> names;
  for (int i = 0; i < servers; ++i) names.push_back("ps" + std::to_string(i));
  const bool serves = launch.rank < servers;
  weft::JoinOptions options;
  options.name = serves ? names[static_cast<size_t>(launch.rank)]
                        : "trainer" + std::to_string(launch.rank - servers);
  if (environment.count("WEFT_LOG_LEVEL") == 0) options.log_level = weft::Severity::kWarning;
  const weft::Worker worker = weft::join(std::move(options));
  if (!serves) {
    return train(worker, line, launch.rank - servers, launch.world_size - servers, names);
  }
  const weft::ps::Server server(worker);
  return leave(worker) ? 0 : 1;  // when all trainers have finished
}

}  // namespace
}  // namespace ps_skipgram

int main(int argc, char** argv) {
  return examples::run_main("ps_skipgram", &ps_skipgram::run, argc, argv);
}
