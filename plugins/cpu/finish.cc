#include "finish.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace sharp::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Whether a normalizer divides weights by their sum, so that a sink may take part.
bool divides_by_sum(SharpNormalizer normalizer) { return kNormalizers[normalizer].competes; }

bool drops_keys(SharpNormalizer normalizer) { return kNormalizers[normalizer].sparse; }

// The weight of a row's sink, relative to the weights of its keys times `factor`.
struct Sink {
  double factor = 1, weight = 0;
};

// Returns the sink of a row; `shift` is the shift of the row's sums.
Sink sink_of(const Problem& problem, const Row& row, const RowState& state, float shift) {
  const float logit = problem.sink(row.head);
  if (logit == -kInfinity) return {};
  const SharpAttributes& attributes = problem.attributes;
  if (attributes.normalizer == SHARP_ENTMAX) {
    const float scaled = (logit - std::max(state.highest, logit)) * (attributes.alpha - 1.0f);
    const double x = static_cast<double>(scaled) - state.threshold;
    if (scaled <= state.level) return {1, scaled > state.floor ? state.share : 0};
    return {1, x <= 0 ? 0 : std::pow(x, 1 / (attributes.alpha - 1.0))};
  }
  double exponent = logit, level = shift;
  if (attributes.normalizer == SHARP_SOFTPICK) {
    if (logit > shift) return {std::exp(level - exponent), std::fabs(std::expm1(-exponent))};
    return {1, std::fabs(std::expm1(exponent)) * std::exp(-level)};
  }
  if (attributes.normalizer == SHARP_SSA) {
    const float* params = problem.head_params + row.head * problem.parameters;
    exponent = std::copysign(params[1] * std::log1p(static_cast<double>(params[0]) * std::fabs(logit)), logit);
  } else if (attributes.normalizer == SHARP_ADAPTIVE_SOFTMAX) {
    level = static_cast<double>(state.inverse_temperature) * state.highest;
  }
  const double difference = exponent - level;
  return {std::exp(std::min(-difference, 0.0)), std::exp(std::min(difference, 0.0))};
}

double lane_sum(const float* lanes) {
  double sum = 0;
  for (int lane = 0; lane < kStateLanes; ++lane) sum += lanes[lane];
  return sum;
}

// Returns shift - highest, 0 if equal. Both are -inf without a shift (stored, pointwise), and -inf - -inf is NaN.
float difference_of(float shift, float highest) { return shift == highest ? 0.0f : shift - highest; }

// Whether NaN or infinity is among the numbers.
bool all_finite(const float* numbers, int64_t count) {
  constexpr uint32_t kExponent = 0x7f800000;
  bool found = false;
  for (int64_t index = 0; index < count; ++index) {
    uint32_t bits;
    std::memcpy(&bits, numbers + index, sizeof bits);
    found |= (bits & kExponent) == kExponent;
  }
  return !found;
}

}  // namespace

void start_part(const Part& part, int64_t rows, int64_t value_dim) {
  RowState empty{};
  empty.shift = empty.highest = -kInfinity;
  empty.lowest = kInfinity;
  empty.certain_floor = -kInfinity;
  empty.lowest_upper = kInfinity;
  empty.inverse_temperature = 1.0f;
  std::fill_n(empty.highest_lanes, kStateLanes, -kInfinity);
  std::fill_n(empty.lowest_lanes, kStateLanes, kInfinity);
  std::fill_n(empty.lower_lanes, kStateLanes, -kInfinity);
  std::fill_n(part.states, rows, empty);
  std::fill_n(part.output, rows * value_dim, 0.0f);
}

void merge_observations(const Part* parts, int64_t count, int64_t index) {
  RowState& whole = parts[0].states[index];
  for (int64_t part = 1; part < count; ++part) {
    const RowState& state = parts[part].states[index];
    whole.highest = std::max(whole.highest, state.highest);
    whole.lowest = std::min(whole.lowest, state.lowest);
    whole.visible += state.visible;
  }
  for (int64_t part = 1; part < count; ++part) {
    RowState& state = parts[part].states[index];
    state.highest = whole.highest;
    state.lowest = whole.lowest;
    state.visible = whole.visible;
  }
}

RowSums merge_sums(const Part* parts, int64_t count, int64_t index) {
  RowSums whole{-kInfinity, 0, 0, 0};
  for (int64_t part = 0; part < count; ++part) whole.shift = std::max(whole.shift, parts[part].states[index].shift);
  for (int64_t part = 0; part < count; ++part) {
    const RowState& state = parts[part].states[index];
    const float difference = difference_of(state.shift, whole.shift), factor = std::exp(difference);
    const double sum = lane_sum(state.sum);
    if (factor != 0) whole.weighted_log += factor * (lane_sum(state.weighted_log) + difference * sum);
    whole.sum += factor * sum;
    whole.opposed += factor * lane_sum(state.opposed);
  }
  return whole;
}

bool finish_tile(const Problem& problem, const Tile& tile, const Part* parts, int64_t count, bool observations_merged) {
  const int64_t channels = problem.value_dim;
  const int64_t columns = problem.attributes.stats_columns;
  const SharpNormalizer normalizer = problem.attributes.normalizer;
  bool finite = true;
  for (int64_t index = 0; index < tile.rows(); ++index) {
    const Row row = row_of(problem, tile, index);
    float* output = problem.output_rows() + (row.token * problem.q_heads + row.head) * channels;
    float* stats =
        problem.stats == nullptr ? nullptr : problem.stats + (row.token * problem.q_heads + row.head) * columns;
    std::fill_n(output, channels, 0.0f);

    float highest = -kInfinity, lowest = kInfinity;
    int64_t visible = 0, support = 0;
    for (int64_t part = 0; part < count; ++part) {
      const RowState& state = parts[part].states[index];
      visible = observations_merged ? state.visible : visible + state.visible;
      support += state.support;
      highest = std::max(highest, state.highest);
      lowest = std::min(lowest, state.lowest);
    }
    if (visible == 0) {
      if (stats != nullptr) std::fill_n(stats, columns, 0.0f);
      continue;
    }
    const auto [shift, sum, weighted_log, opposed] = merge_sums(parts, count, index);
    for (int64_t part = 0; part < count; ++part) {
      const RowState& state = parts[part].states[index];
      if (state.visible == 0) continue;
      const float factor = std::exp(difference_of(state.shift, shift));
      const float* values = parts[part].output + index * channels;
      for (int64_t channel = 0; channel < channels; ++channel) output[channel] += factor * values[channel];
    }
    double total = 1, sink_mass = 0;
    if (divides_by_sum(normalizer)) {
      const Sink sink = sink_of(problem, row, parts[0].states[index], shift);
      total = sink.factor * (sum + opposed) + sink.weight;
      const bool no_weights = total == 0 && normalizer == SHARP_SOFTPICK;
      const float inverse = no_weights ? 0.0f : static_cast<float>(sink.factor / total);
      if (no_weights) total = 1;
      sink_mass = sink.weight / total;
      for (int64_t channel = 0; channel < channels; ++channel)
        output[channel] = total == 0 ? std::numeric_limits<float>::quiet_NaN() : output[channel] * inverse;
    }
    finite &= all_finite(output, channels);
    if (stats == nullptr) continue;
    // The entropy is that of the keys alone. Under entmax a sink can leave them no weight at all.
    const double entropy = sum == 0 && total != 0 ? 0.0 : std::log(sum) - weighted_log / sum;
    stats[0] = static_cast<float>(entropy < 0 ? 0.0 : entropy);
    stats[1] = static_cast<float>(drops_keys(normalizer) ? support : visible);
    stats[2] = parts[0].states[index].inverse_temperature;
    stats[3] = highest - lowest;
    if (columns > 4) stats[4] = static_cast<float>(sink_mass);
    if (std::isnan(stats[0])) std::fill_n(stats, columns, std::numeric_limits<float>::quiet_NaN());  // no weights
  }
  return finite;
}

}  // namespace sharp::cpu
