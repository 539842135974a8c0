#include "weft/ps/internal/key_places.h"

#include "ATen/core/Tensor.h"
#include "ATen/ops/zeros.h"

namespace weft::ps::internal {
namespace {

template <class T>
void add_rows(const std::vector<KeyedRows>& parts, const std::vector<uint32_t>& places, bool last,
              const at::Tensor& out) {
  const int64_t length = out.size(1);
  T* const to = out.mutable_data_ptr<T>();
  const uint32_t* place = places.data();
  for (const KeyedRows& part : parts) {
    const T* given = part.values->const_data_ptr<T>();
    for (size_t i = 0; i < part.keys->size(); ++i, given += length) {
      T* const row = to + static_cast<int64_t>(*place++) * length;
      for (int64_t c = 0; c < length; ++c) row[c] = last ? given[c] : row[c] + given[c];
    }
  }
}

}  // namespace

void add_by_key(const std::vector<KeyedRows>& parts, bool last, Push* out) {
  const KeyedRows& first = parts.front();
  if (parts.size() == 1 && first.keys->size() == 1) {  // many pushes are of one row
    out->keys = *first.keys;
    out->values = *first.values;
    return;
  }
  size_t count = 0;
  for (const KeyedRows& part : parts) count += part.keys->size();
  KeyPlaces<uint64_t> distinct(count);
  std::vector<uint32_t> places;  // of each row among the sums
  places.reserve(count);
  for (const KeyedRows& part : parts) {
    for (const uint64_t key : *part.keys) places.push_back(distinct.place_of(key));
  }
  out->keys = distinct.take();
  if (parts.size() == 1 && out->keys.size() == count) {  // each key comes once
    out->values = *first.values;
    return;
  }
  const auto rows = static_cast<int64_t>(out->keys.size());
  out->values = at::zeros({rows, first.values->size(1)}, first.values->options());
  const bool is_double = first.values->scalar_type() == c10::ScalarType::Double;
  is_double ? add_rows<double>(parts, places, last, out->values)
            : add_rows<float>(parts, places, last, out->values);
}

}  // namespace weft::ps::internal
