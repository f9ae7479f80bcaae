// The two attention loops. `stream` keeps nothing but running sums; `score` + `solve` + `weigh` keep a row's logits,
// for normalizers that need all of them first. Neither knows more of a normalizer than normalizers.h says.
#pragma once

#include "chunk.h"
#include "normalizers.h"
#include "stored_normalizers.h"
#include "tile.h"

namespace sharp::cpu::SHARP_ISA {

constexpr int kChunkVectors = kChunkKeys / kLanes;

// The tile's query rows times `scale`, [rows, head_dim].
inline void gather_query(const Problem& problem, const Tile& tile, const Row* rows, float* query) {
  for (int64_t index = 0; index < tile.rows(); ++index) {
    const float* from = problem.query + (rows[index].token * problem.q_heads + rows[index].head) * problem.head_dim;
    for (int64_t channel = 0; channel < problem.head_dim; ++channel)
      query[index * problem.head_dim + channel] = from[channel] * problem.attributes.scale;
  }
}

// Soft cap and position bias of the logits of one row and chunk, in place; keys that are not visible become -inf.
inline void shape_logits(const Problem& problem, const Row& row, int64_t begin, uint64_t visible, float* logits) {
  const float cap = problem.attributes.softcap;
  if (cap > 0)
    for (int v = 0; v < kChunkVectors; ++v)
      store(logits + v * kLanes, tanh_of(load(logits + v * kLanes) * (1.0f / cap)) * cap);
  const float slope = problem.alibi_slopes == nullptr ? 0.0f : problem.alibi_slopes[row.head];
  if (slope != 0)
    for (int v = 0; v < kChunkVectors; ++v) {
      const Vec distance = lane_numbers() + static_cast<float>(begin + v * kLanes - row.position);
      store(logits + v * kLanes, load(logits + v * kLanes) - absolute(distance) * slope);
    }
  if (~visible != 0)
    for (int v = 0; v < kChunkVectors; ++v)
      store(logits + v * kLanes,
            select(lanes_of(visible >> (v * kLanes)), load(logits + v * kLanes), splat(-kInfinity)));
}

// Highest and, for the statistics, lowest visible logit; a NaN counts in neither.
inline void observe(const float* logits, uint64_t visible, bool collect, RowState& state) {
  state.visible += __builtin_popcountll(visible);
  Vec highest = splat(-kInfinity), lowest = splat(kInfinity);
  for (int v = 0; v < kChunkVectors; ++v) highest = maximum(load(logits + v * kLanes), highest);
  state.highest = larger(maximum_of(highest), state.highest);
  if (!collect) return;
  for (int v = 0; v < kChunkVectors; ++v)
    lowest = select(lanes_of(visible >> (v * kLanes)), minimum(load(logits + v * kLanes), lowest), lowest);
  state.lowest = smaller(minimum_of(lowest), state.lowest);
}

inline void clear_weights(float* weights) {
  for (int v = 0; v < kChunkVectors; ++v) store(weights + v * kLanes, Vec{});
}

// Keys of the chunk that have a weight in any row.
inline uint64_t weighted_keys(const float* weights, int64_t rows) {
  uint64_t keys = 0;
  for (int v = 0; v < kChunkVectors; ++v) {
    VecInt any{};
    for (int64_t row = 0; row < rows; ++row) any |= bits_of(load(weights + row * kChunkKeys + v * kLanes));
    for (int lane = 0; lane < kLanes; ++lane) keys |= uint64_t{any[lane] != 0} << (v * kLanes + lane);
  }
  return keys;
}

inline void count_support(const float* weights, RowState& state) {
  for (int key = 0; key < kChunkKeys; ++key) state.support += weights[key] != 0;
}

inline void add_lanes(float* lanes, Vec value) { store(lanes, load(lanes) + value); }

// A larger maximum came: bring the sums so far to it (ICML 2025, App. G, in the conditioned form).
inline void move_shift(float shift, RowState& state, float* output, int64_t channels) {
  const float difference = state.shift - shift;
  const bool first = state.shift == -kInfinity;
  state.shift = shift;
  if (first) return;
  const float factor = exp_nonpositive(splat(difference))[0];
  const Vec sum = load(state.sum);
  store(state.weighted_log, (load(state.weighted_log) + sum * difference) * factor);
  store(state.sum, sum * factor);
  for (int64_t channel = 0; channel < channels; ++channel) output[channel] *= factor;
}

// Logits -> weights of one row and chunk, in place, and into the row's sums; exponential normalizers.
template <typename Normalizer>
void weigh_exponential(const Normalizer& normalizer, bool collect, float* row, RowState& state, float* output,
                       int64_t channels) {
  Vec exponents[kChunkVectors], highest = splat(-kInfinity);
  for (int v = 0; v < kChunkVectors; ++v) {
    exponents[v] = normalizer.exponent(load(row + v * kLanes));
    highest = maximum(exponents[v], highest);
  }
  const float top = maximum_of(highest);
  if (top > state.shift) move_shift(top, state, output, channels);
  // Before the first finite logit there is no maximum; -inf - -inf would be NaN.
  const float shift = state.shift == -kInfinity ? 0.0f : state.shift;
  Vec sum{}, weighted_log{};
  for (int v = 0; v < kChunkVectors; ++v) {
    const Vec shifted = exponents[v] - shift, w = exp_nonpositive(shifted);
    store(row + v * kLanes, w);
    sum += w;
    if (collect) weighted_log += select(w == 0.0f, Vec{}, w * shifted);
  }
  add_lanes(state.sum, sum);
  if (collect) add_lanes(state.weighted_log, weighted_log);
}

// The same for pointwise normalizers; w ln w is left out where w = 0.
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

// Computes the logits of every chunk of the part into scratch.weights, shaped and masked. Calls `row(index, begin,
// state)` for each row that sees a key of the chunk, then `chunk(chunk, visible)` with the keys that any row sees.
template <typename RowDone, typename ChunkDone>
void walk_keys(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch, const Row* rows,
               RowDone row_done, ChunkDone chunk_done) {
  gather_query(problem, tile, rows, scratch.query);
  for (int64_t begin = part.keys.begin; begin < part.keys.end; begin += kChunkKeys) {
    const Chunk chunk = chunk_at(problem, tile, begin, part.keys.end, scratch.packed_keys);
    if (chunk.mapped == 0) continue;
    score(scratch.query, tile.rows(), problem.head_dim, chunk.keys, scratch.weights);
    uint64_t seen = 0;
    for (int64_t index = 0; index < tile.rows(); ++index) {
      float* logits = scratch.weights + index * kChunkKeys;
      const uint64_t visible = bits_in(rows[index].visible, begin) & chunk.mapped;
      if (visible == 0) {
        clear_weights(logits);
        continue;
      }
      seen |= visible;
      shape_logits(problem, rows[index], begin, visible, logits);
      row_done(index, begin, visible, logits);
    }
    chunk_done(chunk, seen);
  }
}

inline void rows_of(const Problem& problem, const Tile& tile, Row* rows) {
  for (int64_t index = 0; index < tile.rows(); ++index) rows[index] = row_of(problem, tile, index);
}

template <typename Normalizer>
void stream(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  const bool collect = problem.stats != nullptr;
  const int64_t channels = problem.value_dim;
  Row rows[kMaxTileRows];
  rows_of(problem, tile, rows);
  if (!Normalizer::kExponential)
    for (int64_t index = 0; index < tile.rows(); ++index) part.states[index].shift = 0;
  const auto row_done = [&](int64_t index, int64_t, uint64_t visible, float* logits) {
    RowState& state = part.states[index];
    const Normalizer normalizer(problem, rows[index]);
    if (collect)
      observe(logits, visible, collect, state);
    else
      state.visible += __builtin_popcountll(visible);
    if constexpr (Normalizer::kExponential)
      weigh_exponential(normalizer, collect, logits, state, part.output + index * channels, channels);
    else
      weigh_pointwise(normalizer, collect, logits, state);
  };
  walk_keys(problem, tile, part, scratch, rows, row_done, [&](const Chunk& chunk, uint64_t seen) {
    if (Normalizer::kSparse) seen &= weighted_keys(scratch.weights, tile.rows());
    add_values(scratch.weights, tile.rows(), values_of(chunk, seen), channels, part.output);
  });
}

// The logits of the part's keys into part.logits; keys that a row does not see get -inf.
inline void score_part(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  Row rows[kMaxTileRows];
  rows_of(problem, tile, rows);
  for (int64_t index = 0; index < tile.rows(); ++index)
    for (int64_t begin = part.keys.begin; begin < part.keys.end; begin += kChunkKeys)
      for (int v = 0; v < kChunkVectors; ++v)
        store(part.logits + index * part.logits_stride + begin - part.keys.begin + v * kLanes, splat(-kInfinity));
  const auto row_done = [&](int64_t index, int64_t begin, uint64_t visible, const float* logits) {
    observe(logits, visible, problem.stats != nullptr, part.states[index]);
    float* to = part.logits + index * part.logits_stride + begin - part.keys.begin;
    for (int v = 0; v < kChunkVectors; ++v) store(to + v * kLanes, load(logits + v * kLanes));
  };
  walk_keys(problem, tile, part, scratch, rows, row_done, [](const Chunk&, uint64_t) {});
}

// Weights from the stored logits, then the values of the keys that have one: the others are not read.
template <typename Normalizer>
void weigh_part(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  const bool collect = problem.stats != nullptr;
  for (int64_t begin = part.keys.begin; begin < part.keys.end; begin += kChunkKeys) {
    for (int64_t index = 0; index < tile.rows(); ++index) {
      RowState& state = part.states[index];
      const Normalizer normalizer(problem, state);
      const float* logits = part.logits + index * part.logits_stride + begin - part.keys.begin;
      float* weights = scratch.weights + index * kChunkKeys;
      if (state.visible == 0) {
        clear_weights(weights);
        continue;
      }
      Vec sum{}, weighted_log{};
      for (int v = 0; v < kChunkVectors; ++v) {
        const Vec z = load(logits + v * kLanes), w = normalizer.weight(z);
        store(weights + v * kLanes, w);
        sum += w;
        if (collect) weighted_log += select(w == 0.0f, Vec{}, w * normalizer.log_weight(z, w));
      }
      add_lanes(state.sum, sum);
      if (!collect) continue;
      add_lanes(state.weighted_log, weighted_log);
      count_support(weights, state);
    }
    const uint64_t used = weighted_keys(scratch.weights, tile.rows());
    if (used == 0) continue;
    const Chunk chunk = chunk_at(problem, tile, begin, part.keys.end, scratch.packed_keys);
    // A row with a NaN logit has NaN weights even for keys that do not exist.
    add_values(scratch.weights, tile.rows(), values_of(chunk, used & chunk.mapped), problem.value_dim, part.output);
  }
}

template <typename Normalizer>
constexpr Loops streamed() {
  return {stream<Normalizer>, nullptr, nullptr, nullptr};
}

template <typename Normalizer>
constexpr Loops stored() {
  return {nullptr, score_part, Normalizer::solve, weigh_part<Normalizer>};
}

// Alpha 1.5 and 2 need no power function.
inline Loops loops_for(const Attributes& attributes) {
  switch (attributes.normalizer) {
    case NormalizerKind::kSsa:
      return streamed<Ssa>();
    case NormalizerKind::kSigmoid:
      return streamed<Sigmoid>();
    case NormalizerKind::kRelu:
      return streamed<Relu>();
    case NormalizerKind::kRelu2:
      return streamed<Relu2>();
    case NormalizerKind::kAdaptiveSoftmax:
      return stored<AdaptiveSoftmax>();
    case NormalizerKind::kEntmax:
      if (attributes.alpha == 1.5f) return stored<Entmax<Power::kTwo>>();
      if (attributes.alpha == 2.0f) return stored<Entmax<Power::kOne>>();
      return stored<Entmax<Power::kAny>>();
    default:
      return streamed<Softmax>();
  }
}

}  // namespace sharp::cpu::SHARP_ISA
