// The form that keeps only running sums, for normalizers whose weights each follow from one logit.
#pragma once

#include <type_traits>

#include "normalizers.h"
#include "walk.h"

namespace sharp::cpu::SHARP_ISA {

// Returns the keys of the chunk that have a weight in any row.
inline uint64_t weighted_keys(const float* weights, int64_t rows) {
  uint64_t keys = 0;
  for (int v = 0; v < kChunkVectors; ++v) {
    VecInt any{};
    for (int64_t row = 0; row < rows; ++row) any |= bits_of(load(weights + row * kChunkKeys + v * kLanes));
    keys |= mask_of(any != 0) << (v * kLanes);
  }
  return keys;
}

// Adds the number of weights of a row and chunk that are not 0 to the row's support; NaN counts.
inline void count_support(const float* weights, RowState& state) {
  for (int key = 0; key < kChunkKeys; ++key) state.support += weights[key] != 0;
}

// Brings the sums so far to a new, larger maximum (ICML 2025, App. G, in the conditioned form).
inline void move_shift(float shift, RowState& state, float* output, int64_t channels) {
  const float difference = state.shift - shift;
  const bool first = state.shift == -kInfinity;
  state.shift = shift;
  if (first) return;
  const float factor = exp_nonpositive(splat(difference))[0];
  const Vec sum = load(state.sum);
  store(state.weighted_log, (load(state.weighted_log) + sum * difference) * factor);
  store(state.sum, sum * factor);
  store(state.opposed, load(state.opposed) * factor);
  for (int64_t channel = 0; channel < channels; ++channel) output[channel] *= factor;
}

// Turns logits of one row and chunk into weights, in place, and adds them to the row's sums; exponential normalizers.
template <bool kCollect, typename Normalizer>
void weigh_exponential(const Normalizer& normalizer, float* row, RowState& state, float* output, int64_t channels) {
  Vec exponents[kChunkVectors], highest = splat(-kInfinity);
  for (int v = 0; v < kChunkVectors; ++v) {
    exponents[v] = normalizer.exponent(load(row + v * kLanes));
    highest = maximum(exponents[v], highest);
  }
  const float top = maximum_of(highest);
  if (top > state.shift) move_shift(top, state, output, channels);
  // Before the first finite logit the maximum is -inf, and -inf - -inf would be NaN.
  const float shift = state.shift == -kInfinity ? 0.0f : state.shift;
  Vec sum{}, weighted_log{};
  for (int v = 0; v < kChunkVectors; ++v) {
    const Vec shifted = exponents[v] - shift, w = exp_nonpositive(shifted);
    store(row + v * kLanes, w);
    sum += w;
    if (kCollect) weighted_log += w * maximum(splat(kLowestExponent), shifted);
  }
  add_lanes(state.sum, sum);
  if (kCollect) add_lanes(state.weighted_log, weighted_log);
}

// `weigh_exponential` for softpick, whose shift is at least 0, so that the 1 in e^z - 1 stays in range, too.
template <bool kCollect>
void weigh_softpick(float* row, RowState& state, float* output, int64_t channels) {
  Vec highest = splat(-kInfinity);
  for (int v = 0; v < kChunkVectors; ++v) highest = maximum(load(row + v * kLanes), highest);
  const float top = maximum_of(highest);
  if (top > state.shift) move_shift(top, state, output, channels);
  const float one = exp_nonpositive(splat(-state.shift))[0];
  if (kCollect)  // counted by logits, because a weight may underflow float32; a NaN counts
    for (int key = 0; key < kChunkKeys; ++key) state.support += !(row[key] <= 0.0f);
  Vec sum{}, opposed{}, weighted_log{};
  for (int v = 0; v < kChunkVectors; ++v) {
    const Vec part = shifted_expm1(load(row + v * kLanes), state.shift, one);
    const Vec w = select(part <= 0.0f, Vec{}, part);  // a maximum would drop a NaN
    store(row + v * kLanes, w);
    sum += w;
    opposed += select(part < 0.0f, -part, Vec{});
    if (kCollect) weighted_log += select(w == 0.0f, Vec{}, w * log_positive(w));
  }
  add_lanes(state.sum, sum);
  add_lanes(state.opposed, opposed);
  if (kCollect) add_lanes(state.weighted_log, weighted_log);
}

// `weigh_exponential` for pointwise normalizers; w ln w is skipped where w = 0.
template <typename Normalizer>
void weigh_pointwise(const Normalizer& normalizer, bool collect, float* row, RowState& state) {
  Vec sum{}, weighted_log{};
  for (int v = 0; v < kChunkVectors; ++v) {
    const Vec w = normalizer.weight(load(row + v * kLanes));
    store(row + v * kLanes, w);
    sum += w;
    if (collect) weighted_log += select(w == 0.0f, Vec{}, w * log_positive(w));
  }
  add_lanes(state.sum, sum);
  if (!collect) return;
  add_lanes(state.weighted_log, weighted_log);
  if (Normalizer::kSparse) count_support(row, state);
}

// Adds all keys of the part to the rows' sums and output, in one pass over keys and values.
template <typename Normalizer>
void stream(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  constexpr bool kShiftIsHighest = std::is_same_v<Normalizer, Softmax>;  // its exponent is the logit
  constexpr bool kSoftpick = std::is_same_v<Normalizer, Softpick>;
  const bool collect = problem.stats != nullptr;
  const int64_t channels = problem.value_dim;
  Row rows[kMaxTileRows];
  rows_of(problem, tile, rows);
  float length_terms[kMaxTileRows] = {};
  if (!Normalizer::kExponential || kSoftpick)
    for (int64_t index = 0; index < tile.rows(); ++index) {
      part.states[index].shift = 0;
      if (!kSoftpick) length_terms[index] = length_term(problem, tile.sequence, rows[index]);
    }
  const auto row_done = [&](int64_t index, int64_t, uint64_t visible, float* logits) {
    RowState& state = part.states[index];
    const Normalizer normalizer(problem, rows[index], length_terms[index]);
    state.visible += __builtin_popcountll(visible);
    if (collect) {
      if (!kShiftIsHighest) observe_highest(logits, state);
      observe_lowest(logits, visible, state);
    }
    if constexpr (kSoftpick) {
      const auto weigh = collect ? weigh_softpick<true> : weigh_softpick<false>;
      weigh(logits, state, part.output + index * channels, channels);
    } else if constexpr (Normalizer::kExponential) {
      const auto weigh = collect ? weigh_exponential<true, Normalizer> : weigh_exponential<false, Normalizer>;
      weigh(normalizer, logits, state, part.output + index * channels, channels);
    } else {
      weigh_pointwise(normalizer, collect, logits, state);
    }
  };
  BfloatProducts products(problem, tile, scratch);
  const auto chunk_done = [&](Chunk& chunk, uint64_t seen) {
    if (Normalizer::kSparse) seen &= weighted_keys(scratch.weights, tile.rows());
    add_chunk(problem, tile, products, scratch, seen, chunk, part.output);
  };
  walk_keys<Ahead::kValuesAndKeys>(problem, tile, part, scratch, products, rows, row_done, chunk_done);
  if (!collect) return;
  for (int64_t index = 0; index < tile.rows(); ++index) settle<kShiftIsHighest>(part.states[index]);
}

}  // namespace sharp::cpu::SHARP_ISA
