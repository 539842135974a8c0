#include "weft/examples/async_ps/digits.h"

#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/index_select.h"
#include "ATen/ops/tensor.h"

namespace async_ps {
namespace {

constexpr int kPixels = 64;
constexpr int kDigits = 10;

// The numbers of a line into `row`; false unless it has just these, each in its range.
bool parse_row(const std::string& line, std::array<int, kPixels + 1>* row) {
  const char* at = line.data();
  const char* end = at + line.size();
  if (end != at && end[-1] == '\r') --end;
  for (int i = 0; i <= kPixels; ++i) {
    if (i > 0 && (at == end || *at++ != ',')) return false;
    auto [next, error] = std::from_chars(at, end, (*row)[i]);
    if (error != std::errc() || (*row)[i] < 0) return false;
    if ((*row)[i] > (i < kPixels ? 16 : kDigits - 1)) return false;
    at = next;
  }
  return at == end;
}

}  // namespace

std::string default_digits() {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  return (program.parent_path().parent_path() / "share" / "weft" / "digits.csv").string();
}

std::string find_digits(const std::string& given) {
  std::string path = given.empty() ? default_digits() : given;
  if (!std::filesystem::is_regular_file(path)) {
    throw std::invalid_argument("there is no file " + path +
                                "; name the images with --data (examples/data/digits.csv)");
  }
  return path;
}

Images read_digits(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot open the data file " + path);
  std::vector<uint8_t> pixels;
  std::vector<int64_t> labels;
  std::array<int, kPixels + 1> row{};
  for (std::string line; std::getline(file, line);) {
    if (!parse_row(line, &row)) {
      throw std::runtime_error(
          path + ":" + std::to_string(labels.size() + 1) +
          ": expected 64 pixels from 0 to 16 and a digit, separated by commas");
    }
    pixels.insert(pixels.end(), row.begin(), row.begin() + kPixels);
    labels.push_back(row[kPixels]);
  }
  if (file.bad()) throw std::runtime_error("cannot read " + path);
  const auto n = static_cast<int64_t>(labels.size());
  return {at::tensor(pixels, at::kByte).reshape({n, kPixels}), at::tensor(labels, at::kLong)};
}

std::vector<int64_t> shuffled(int64_t n, uint64_t seed) {
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  // Not std::shuffle: what it makes of the generator differs between standard libraries.
  std::mt19937_64 random(seed);
  for (int64_t i = n - 1; i > 0; --i) {
    std::swap(order[i], order[random() % static_cast<uint64_t>(i + 1)]);
  }
  return order;
}

Images select(const Images& images, const std::vector<int64_t>& positions) {
  const at::Tensor index = at::tensor(positions, at::kLong);
  return {at::index_select(images.pixels, 0, index), at::index_select(images.labels, 0, index)};
}

Split split_by_class(const Images& all, int64_t held_out, uint64_t seed) {
  if (held_out <= 0 || held_out >= all.size()) {
    throw std::runtime_error("cannot hold out " + std::to_string(held_out) + " of " +
                             std::to_string(all.size()) + " images");
  }
  // In order of class, shuffled inside it; then every n-th part of that order is held out, which
  // takes from each class in proportion.
  const int64_t* label = all.labels.const_data_ptr<int64_t>();
  std::array<std::vector<int64_t>, kDigits> of_class;
  for (int64_t i : shuffled(all.size(), seed)) of_class[label[i]].push_back(i);
  std::vector<int64_t> train;
  std::vector<int64_t> test;
  int64_t seen = 0;
  for (const std::vector<int64_t>& members : of_class) {
    for (int64_t i : members) {
      const bool taken = (seen + 1) * held_out / all.size() > seen * held_out / all.size();
      (taken ? test : train).push_back(i);
      ++seen;
    }
  }
  return {select(all, train), select(all, test)};
}

std::vector<Images> deal(const Images& images, int hands) {
  if (hands > images.size()) {
    throw std::runtime_error("there are only " + std::to_string(images.size()) +
                             " training images for " + std::to_string(hands) + " trainers");
  }
  std::vector<std::vector<int64_t>> positions(hands);
  for (int64_t i = 0; i < images.size(); ++i) positions[i % hands].push_back(i);
  std::vector<Images> result;
  result.reserve(hands);
  for (const std::vector<int64_t>& hand : positions) result.push_back(select(images, hand));
  return result;
}

}  // namespace async_ps
