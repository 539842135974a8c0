// What several nodes give to one, added up in a fixed order.

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "weft/dist_autograd/internal/graph.h"

namespace weft::internal {

void PassGraph::push_ready(uint32_t index) {
  ready_.push(Ready{place_of(nodes_[index]), order_++, index});
}

// A leaf and a recv run as soon as they can: others wait for a recv, and nothing for a leaf.
Place PassGraph::place_of(const Entry& entry) const {
  if (entry.kind == Kind::kLeaf || entry.kind == Kind::kRecv) return Place{};
  Place place = entry.place;
  if (entry.kind == Kind::kSend) return place;
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  const auto own = static_cast<int64_t>(std::min(entry.node->sequence_nr(), kMost));
  // One that another thread has made may have any number. It runs right after what it waited for.
  place.sequence = std::min(own, place.sequence);
  return place;
}

// What is still to come is of messages that are not here yet, of nodes that are held back because
// more may be named, and of what depends on these.
std::optional<Place> PassGraph::first_to_come() {
  if (!awaited_.has_value()) {  // all is named
    awaited_.emplace();
    for (const auto& [message, index] : sends_) awaited_->add(message, nodes_[index].node);
    awaited_->sort();
  }
  const CallOrder* const latest = awaited_->latest([this](uint64_t message) {
    const auto at = sends_.find(message);
    return at == sends_.end() ? no_more_named_ : nodes_[at->second].fed;
  });
  std::optional<Place> first;
  if (latest != nullptr) first = Place{latest, latest};
  for (const uint32_t index : held_interior_) {
    if (nodes_[index].waits_for > 0) continue;
    const Place place = place_of(nodes_[index]);
    if (!first.has_value() || comes_before(place, *first)) first = place;
  }
  return first;
}

void PassGraph::bring(uint32_t index, uint32_t input, at::Tensor gradient,
                      std::optional<c10::Stream> from, const Place& place) {
  Entry& entry = nodes_[index];
  if (std::exchange(entry.placed, true)) {
    entry.place.merge(place);
  } else {
    entry.place = place;
  }
  // Two are the same in either order.
  const bool ordered = entry.edges > 2 || (!held_.empty() && held_.contains(entry.node.get())) ||
                       (!apart_.empty() && apart_.contains(index));
  if (ordered && gradient.defined()) {
    if (on_device(gradient) && !from.has_value()) streams_.add(from = stream_here(gradient));
    if (!entry.buffer.has_value()) entry.buffer.emplace(entry.node->num_inputs());
    keep_apart(index, place, ApartGradient{input, std::move(gradient), from});
  } else {
    put(&entry, input, std::move(gradient), from);
  }
  arrived(index);
}

void PassGraph::keep_apart(uint32_t index, const Place& place, ApartGradient one) {
  const std::optional<Place> limit = first_to_come();
  const auto in_turn = [&limit](const Place& at) {
    return !limit.has_value() || comes_before(at, *limit);
  };
  if (in_turn(place) && !apart_.contains(index)) {
    return put(&nodes_[index], one.input, std::move(one.gradient), one.from);
  }
  ApartGradients& all = apart_[index];
  const auto end = std::next(all.emplace(place, std::move(one)));
  auto at = all.begin();
  for (; at != end && in_turn(at->first); ++at) {
    put(&nodes_[index], at->second.input, std::move(at->second.gradient), at->second.from);
  }
  all.erase(all.begin(), at);
  if (all.empty()) apart_.erase(index);
}

void PassGraph::put_apart(uint32_t index) {
  const auto found = apart_.find(index);
  if (found == apart_.end()) return;
  for (auto& [place, one] : found->second) {
    put(&nodes_[index], one.input, std::move(one.gradient), one.from);
  }
  apart_.erase(found);
}

}  // namespace weft::internal
