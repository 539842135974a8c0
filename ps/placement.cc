#include "weft/ps/placement.h"

#include <algorithm>

#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"

namespace weft::ps {

ElementRange element_range(int64_t elements, size_t count, size_t index) {
  const auto cut = [&](size_t i) {
    return static_cast<int64_t>(absl::int128(elements) * static_cast<int64_t>(i) /
                                static_cast<int64_t>(count));
  };
  return {cut(index), cut(index + 1)};
}

size_t dense_parts(int64_t elements, size_t servers, uint64_t most) {
  const uint64_t whole = most * servers;
  const uint64_t at_each = (static_cast<uint64_t>(elements) + whole - 1) / whole;
  return servers * std::clamp<uint64_t>(at_each, 1, std::max<uint64_t>(1, kMostParts / servers));
}

size_t home_of(size_t part, size_t parts, size_t servers) { return part / (parts / servers); }

uint64_t mix_bits(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15U;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  return bits ^ (bits >> 31);
}

uint64_t hash_text(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return mix_bits(hash);
}

HashRing::HashRing(const std::vector<std::string>& servers, size_t virtual_nodes)
    : servers_(servers.size()) {
  points_.reserve(servers.size() * virtual_nodes);
  for (size_t s = 0; s < servers.size(); ++s) {
    for (size_t node = 0; node < virtual_nodes; ++node) {
      points_.emplace_back(hash_text(absl::StrCat(servers[s], "#", node)),
                           static_cast<uint32_t>(s));
    }
  }
  std::sort(points_.begin(), points_.end());
  first_of_.resize(kBuckets + 1);
  for (size_t bucket = 0, point = 0; bucket <= kBuckets; ++bucket) {
    while (point < points_.size() && bucket_of(points_[point].first) < bucket) ++point;
    first_of_[bucket] = static_cast<uint32_t>(point);
  }
}

size_t HashRing::owner(uint64_t key) const {
  const uint64_t hash = mix_bits(key);
  // The first point that is not below it is in its bucket, or the first one after that.
  const size_t bucket = bucket_of(hash);
  const auto at =
      std::lower_bound(points_.begin() + first_of_[bucket], points_.begin() + first_of_[bucket + 1],
                       std::pair(hash, uint32_t{0}));
  return at == points_.end() ? points_.front().second : at->second;
}

std::vector<std::vector<int64_t>> slice_keys(const HashRing& ring, const uint64_t* keys,
                                             size_t count) {
  std::vector<std::vector<int64_t>> places(ring.servers());
  for (auto& of_server : places) of_server.reserve(count / ring.servers() + count / 8);
  for (size_t i = 0; i < count; ++i) places[ring.owner(keys[i])].push_back(static_cast<int64_t>(i));
  return places;
}

}  // namespace weft::ps
