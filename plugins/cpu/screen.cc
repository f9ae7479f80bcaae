#include "screen.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "quantize.h"

namespace sharp::cpu {
namespace {

constexpr float kLeast = std::numeric_limits<float>::min();
constexpr float kSmall = 0x1p-100f;      // the inverse of a scale below it might be infinite
constexpr double kUpward = 1 + 0x1p-20;  // more than the roundings of a norm

}  // namespace

void screen_key(const Problem& problem, int64_t head, int64_t block, int64_t offset, const float* key) {
  const ScreenBlock to = screen_block(problem, block);
  const float* shift = problem.key_shift == nullptr ? nullptr : problem.key_shift + head * problem.head_dim;
  const auto moved = [&](int64_t channel) { return shift == nullptr ? key[channel] : key[channel] - shift[channel]; };
  const int64_t channels = problem.head_dim, padded = 4 * screen_quads(problem);
  double square = 0;
  float largest = 0;
  for (int64_t channel = 0; channel < channels; ++channel) {
    square += static_cast<double>(key[channel]) * key[channel];
    largest = std::max(largest, std::fabs(moved(channel)));  // a NaN is in the square
  }
  const bool known = square < kLongest * kLongest;
  const float scale = known && largest >= kSmall ? largest / 127.0f : 0.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
  double distance = 0;
  for (int64_t channel = 0; channel < padded; ++channel) {
    const int8_t integer = known && channel < channels ? quantize(moved(channel), inverse) : 0;
    to.integers[(channel / 4 * problem.block_size + offset) * 4 + channel % 4] = integer;
    if (channel >= channels) continue;
    const double exact = shift == nullptr ? key[channel] : static_cast<double>(key[channel]) - shift[channel];
    const double rest = exact - static_cast<double>(scale) * integer;
    distance += rest * rest;
  }
  to.scale[offset] = scale;
  // Never 0, which says that nothing is known.
  to.distance[offset] =
      known ? static_cast<float>(std::sqrt(distance) * kUpward) + kLeast : std::numeric_limits<float>::infinity();
}

void merge_bounds(const Part* parts, int64_t count, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    float lower = parts[0].states[row].highest_lower, upper = parts[0].states[row].lowest_upper;
    for (int64_t part = 1; part < count; ++part) {
      lower = std::max(lower, parts[part].states[row].highest_lower);
      upper = std::min(upper, parts[part].states[row].lowest_upper);
    }
    for (int64_t part = 0; part < count; ++part) {
      parts[part].states[row].highest_lower = lower;
      parts[part].states[row].lowest_upper = upper;
    }
  }
}

}  // namespace sharp::cpu
