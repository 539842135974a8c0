// What layers cost, as text: a line for each.

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "weft/pipeline/partition.h"

namespace weft::pipeline {
namespace {

constexpr std::string_view kLayersTitle = "weft-layers 1";
constexpr int64_t kMostOfALayer = int64_t{1} << 50;  // of any number: sums of them do not overflow
constexpr size_t kLayerFields = 7;

bool is_layer_name(std::string_view name) {
  if (name.empty() || name.size() > 200) return false;
  for (const char c : name) {
    if (static_cast<unsigned char>(c) <= ' ' || c == '\x7f' || c == '#') return false;
  }
  return true;
}

Status wrong_line(size_t line, std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("line ", line, ": ", std::string(what)));
}

}  // namespace

StatusOr<std::string> layer_costs_to_text(const std::vector<LayerCost>& layers) {
  std::string out = absl::StrCat(std::string(kLayersTitle),
                                 "\n# name forward_ns input_grad_ns weight_grad_ns parameter_bytes "
                                 "activation_bytes output_bytes\n");
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerCost& l = layers[i];
    if (!is_layer_name(l.name)) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("layer ", i, " is called '", l.name.substr(0, 80),
                                     "': a name here has 1 to 200 bytes, no blank and no #"));
    }
    absl::StrAppend(&out, l.name, " ", l.forward, " ", l.input_grad, " ", l.weight_grad, " ",
                    l.parameters, " ", l.activation, " ", l.output, "\n");
  }
  return out;
}

StatusOr<std::vector<LayerCost>> layer_costs_from_text(std::string_view text) {
  std::vector<LayerCost> out;
  size_t number = 0;
  bool titled = false;
  const std::vector<std::string> lines =
      absl::StrSplit(absl::string_view(text.data(), text.size()), '\n');
  for (const std::string& line : lines) {
    ++number;
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0][0] == '#') continue;
    if (!titled) {
      if (words.size() != 2 || words[0] + " " + words[1] != kLayersTitle) {
        return wrong_line(number, absl::StrCat("expected '", std::string(kLayersTitle), "'"));
      }
      titled = true;
      continue;
    }
    if (words.size() != kLayerFields || !is_layer_name(words[0])) {
      return wrong_line(
          number, absl::StrCat("expected a name and six numbers, found ", words.size(), " words"));
    }
    if (out.size() == kMaxLayers) {
      return wrong_line(number, absl::StrCat("more than ", kMaxLayers, " layers"));
    }
    LayerCost l;
    l.name = words[0];
    size_t at = 1;
    for (int64_t* field :
         {&l.forward, &l.input_grad, &l.weight_grad, &l.parameters, &l.activation, &l.output}) {
      const std::string& word = words[at++];
      if (!absl::SimpleAtoi(word, field) || *field < 0 || *field > kMostOfALayer) {
        return wrong_line(number, absl::StrCat("'", word.substr(0, 40),
                                               "' is no number of nanoseconds or bytes"));
      }
    }
    out.push_back(std::move(l));
  }
  if (!titled) {
    return wrong_line(1, absl::StrCat("expected '", std::string(kLayersTitle), "'"));
  }
  if (out.empty()) return wrong_line(number, "no layer");
  return out;
}

}  // namespace weft::pipeline
