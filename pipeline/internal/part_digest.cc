#include <bit>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/internal/messages.h"

namespace weft::pipeline::internal {
namespace {

// FNV-1a: the same in every process.
class Digest {
 public:
  Digest& add(uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) byte(static_cast<uint8_t>(number >> shift));
    return *this;
  }
  Digest& add(std::string_view text) {
    add(text.size());
    for (char c : text) byte(static_cast<uint8_t>(c));
    return *this;
  }
  uint64_t value() const { return value_; }

 private:
  void byte(uint8_t b) { value_ = (value_ ^ b) * 0x100000001B3u; }
  uint64_t value_ = 0xCBF29CE484222325u;
};

}  // namespace

PartDigest digest_of(const OpenMessage& m) {
  PartDigest out;
  out.plan = Digest().add(m.plan).value();
  out.seed = Digest().add(m.has_seed ? 1 : 0).add(m.seed).value();
  Digest partition;
  for (const WorkerInfo& w : m.workers) partition.add(w.name).add(static_cast<uint64_t>(w.id));
  for (const auto& names : m.tied) {
    partition.add(names.size());
    for (const std::string& name : names) partition.add(name);
  }
  out.partition = partition.value();
  Digest options;
  options.add(m.loss).add(m.optimizer);
  options.add(std::bit_cast<uint64_t>(m.clip_norm)).add(m.skip_not_finite ? 1 : 0);
  for (double x : m.optimizer_options) options.add(std::bit_cast<uint64_t>(x));
  options.add(static_cast<uint64_t>(m.deadline_ns)).add(static_cast<uint64_t>(m.first_step));
  out.options = options.add(m.keep_copies ? 1 : 0).value();
  return out;
}

std::string differences(const PartDigest& a, const PartDigest& b) {
  std::string out;
  const auto compare = [&](uint64_t x, uint64_t y, std::string_view what) {
    if (x != y) absl::StrAppend(&out, out.empty() ? "" : " and ", std::string(what));
  };
  compare(a.plan, b.plan, "plan");
  compare(a.seed, b.seed, "seed");
  compare(a.partition, b.partition, "partition");
  compare(a.options, b.options, "options");
  return out;
}

}  // namespace weft::pipeline::internal
