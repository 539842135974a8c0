#include "weft/examples/async_ps/options.h"

#include <charconv>
#include <stdexcept>
#include <string_view>

namespace async_ps {
namespace {

template <class T>
T number(std::string_view name, std::string_view text, T low, T high) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    throw std::invalid_argument(std::string(name) + " wants a whole number from " +
                                std::to_string(low) + " to " + std::to_string(high) + ", not '" +
                                std::string(text) + "'");
  }
  return value;
}

}  // namespace

std::string usage() {
  const Options defaults;
  return "usage: async_ps [options], on 2 or more processes\n"
         "\n"
         "Trains a classifier of handwritten digits with an asynchronous parameter server: one "
         "process\n"
         "serves the parameters, the others train. For example\n"
         "\n"
         "  weftrun -n 3 async_ps\n"
         "  weftrun --role ps:1 --role trainer:2 async_ps\n"
         "  torchrun --no-python --nproc-per-node 3 async_ps\n"
         "  mpirun -n 3 async_ps\n"
         "  srun -n 3 async_ps\n"
         "\n"
         "Without roles, rank 0 serves.\n"
         "\n"
         "  --epochs N         times through the training images (" +
         std::to_string(defaults.epochs) +
         ")\n"
         "  --seed N           of the split, the first parameters and the order of batches (" +
         std::to_string(defaults.seed) +
         ")\n"
         "  --mode MODE        push: trainers pull the parameters and push gradients (default);\n"
         "                     autograd: the hidden layer stays at the server, the output layer "
         "at\n"
         "                     a trainer, and steps are distributed backward and optimizer\n"
         "  --data FILE        the images; read by the server only (digits.csv of the build)\n"
         "  --checkpoint FILE  where the server saves the parameters (" +
         defaults.checkpoint +
         ")\n"
         "  --help\n";
}

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    std::string_view name = argv[i];
    if (name == "--help" || name == "-h") {
      options.help = true;
      return options;
    }
    std::string_view value;
    if (size_t equals = name.find('='); equals != std::string_view::npos) {
      value = name.substr(equals + 1);
      name = name.substr(0, equals);
    } else if (i + 1 < argc) {
      value = argv[++i];
    }
    if (name != "--epochs" && name != "--mode" && name != "--seed" && name != "--data" &&
        name != "--checkpoint") {
      throw std::invalid_argument("there is no option " + std::string(name) + "; see --help");
    }
    if (value.empty()) throw std::invalid_argument(std::string(name) + " wants a value");
    if (name == "--epochs") options.epochs = number<int64_t>(name, value, 1, 100'000);
    if (name == "--seed") options.seed = number<uint64_t>(name, value, 0, 1'000'000'000);
    if (name == "--mode") {
      if (value != "push" && value != "autograd") {
        throw std::invalid_argument("--mode wants push or autograd, not '" + std::string(value) +
                                    "'");
      }
      options.autograd = value == "autograd";
    }
    if (name == "--data") options.data = value;
    if (name == "--checkpoint") options.checkpoint = value;
  }
  return options;
}

}  // namespace async_ps
