#ifndef WEFT_PIPELINE_INTERNAL_PLAN_WORDS_H_
#define WEFT_PIPELINE_INTERNAL_PLAN_WORDS_H_

// The words that both notations of plans share: numbers, edges and actions, read strictly.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/pipeline/plan.h"

namespace weft::pipeline::internal {

// Abseil's are for its own string_view.
bool consume(std::string_view* text, std::string_view prefix);
std::vector<std::string_view> split(std::string_view text, char at);
// "', found '...'": closes a quotation that has begun, but for its end.
std::string found(std::string_view text);

std::string edge_text(const Edge& e);
bool take_number(std::string_view* text, int* out);
bool is_word(std::string_view text);

// Finds edges by what they connect.
class ActionReader {
 public:
  explicit ActionReader(const Plan& plan);
  bool read(std::string_view text, Action* out) const;

 private:
  std::map<Edge, int> edges_;
};

Status set_edges(const std::vector<std::string_view>& words, Plan* plan);
Status set_numbers(const std::vector<std::string_view>& words, std::vector<int>* out);
Status set_actions(const ActionReader& reader, const std::vector<std::string_view>& words,
                   std::vector<Action>* out);

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_PLAN_WORDS_H_
