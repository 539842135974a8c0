// Any bytes as a plan, in text or JSON: an error, or a plan that both notations carry unchanged and
// that the verifier judges without harm.
#include <string>
#include <string_view>

#include "weft/pipeline/plan.h"
#include "weft/pipeline/verifier.h"
#include "weft/tests/fuzz/target.h"

// A line end makes a view of 16 bytes, a word "F0" too and an action of as many; vectors double.
const size_t kMostBytesPerByte = 192;

weft::Status fuzz_one(std::string_view input) {
  namespace pipeline = weft::pipeline;
  const auto plan = decoded(input.size(), [&] { return pipeline::parse_plan(input); });
  if (!plan.ok()) {
    require(weft::error_kind(plan.status()) == weft::ErrorKind::kInvalidArgument);
    return plan.status();
  }
  const auto text = pipeline::plan_from_text(pipeline::to_text(*plan));
  const auto json = pipeline::plan_from_json(pipeline::to_json(*plan));
  require(text.ok() && *text == *plan);
  require(json.ok() && *json == *plan);
  if (plan->stages() * plan->micro_batches > 4096) return absl::OkStatus();
  return pipeline::verify(*plan).status();
}
