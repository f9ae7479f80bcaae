// The walk over the keys of a part, chunk by chunk: the logits of every row, shaped and masked.
#pragma once

#include "bfloat_products.h"
#include "chunk.h"
#include "tile.h"

namespace sharp::cpu::SHARP_ISA {

constexpr int kChunkVectors = kChunkKeys / kLanes;

// Gathers the tile's query rows times `scale`, [rows, head_dim].
inline void gather_query(const Problem& problem, const Tile& tile, const Row* rows, float* query) {
  for (int64_t index = 0; index < tile.rows(); ++index) {
    const float* from =
        problem.query_rows() + (rows[index].token * problem.q_heads + rows[index].head) * problem.head_dim;
    for (int64_t channel = 0; channel < problem.head_dim; ++channel)
      query[index * problem.head_dim + channel] = from[channel] * problem.attributes.scale;
  }
}

// Fills `rows` [tile.rows()].
inline void rows_of(const Problem& problem, const Tile& tile, Row* rows) {
  for (int64_t index = 0; index < tile.rows(); ++index) rows[index] = row_of(problem, tile, index);
}

// Applies soft cap and position bias to the logits of one row and 64 keys, in place; keys that are not visible get
// -inf. The keys are four strips of 16 that begin at `begins`.
inline void shape_logits(const Problem& problem, const Row& row, const int64_t* begins, uint64_t visible,
                         float* logits) {
  const float cap = problem.attributes.softcap;
  if (cap > 0)
    for (int v = 0; v < kChunkVectors; ++v)
      store(logits + v * kLanes, tanh_of(load(logits + v * kLanes) * (1.0f / cap)) * cap);
  const float slope = problem.alibi_slopes == nullptr ? 0.0f : problem.alibi_slopes[row.head];
  if (slope != 0)
    for (int v = 0; v < kChunkVectors; ++v) {
      const int64_t first = begins[v * kLanes / 16] + v * kLanes % 16;
      const Vec distance = lane_numbers() + static_cast<float>(first - row.position);
      store(logits + v * kLanes, load(logits + v * kLanes) - absolute(distance) * slope);
    }
  if (~visible != 0)
    for (int v = 0; v < kChunkVectors; ++v)
      store(logits + v * kLanes,
            select(lanes_of(visible >> (v * kLanes)), load(logits + v * kLanes), splat(-kInfinity)));
}

// Updates the highest logit of each lane, ignoring NaN.
inline void observe_highest(const float* logits, RowState& state) {
  Vec highest = load(state.highest_lanes);
  for (int v = 0; v < kChunkVectors; ++v) highest = maximum(load(logits + v * kLanes), highest);
  store(state.highest_lanes, highest);
}

// Updates the lowest visible logit of each lane, ignoring NaN; only the statistics need it.
inline void observe_lowest(const float* logits, uint64_t visible, RowState& state) {
  Vec lowest = load(state.lowest_lanes);
  if (visible == ~uint64_t{0})
    for (int v = 0; v < kChunkVectors; ++v) lowest = minimum(load(logits + v * kLanes), lowest);
  else
    for (int v = 0; v < kChunkVectors; ++v)
      lowest = select(lanes_of(visible >> (v * kLanes)), minimum(load(logits + v * kLanes), lowest), lowest);
  store(state.lowest_lanes, lowest);
}

// Reduces the observations of a row by lane to one number each.
template <bool kShiftIsHighest>
void settle(RowState& state) {
  state.highest = kShiftIsHighest ? state.shift : maximum_of(load(state.highest_lanes));
  state.lowest = minimum_of(load(state.lowest_lanes));
}

inline void clear_weights(float* weights) {
  for (int v = 0; v < kChunkVectors; ++v) store(weights + v * kLanes, Vec{});
}

inline void add_lanes(float* lanes, Vec value) { store(lanes, load(lanes) + value); }

// What is prefetched while a chunk is read. If a chunk's values are read with its keys: its own values, then the keys
// of the next chunk. Otherwise the next keys or the next values.
enum class Ahead { kValuesAndKeys, kKeys, kValues };

// Sets what is prefetched while the keys or values of `chunk` are read; `next` is the position of the next chunk.
inline void fetch_ahead(const Problem& problem, const Tile& tile, int64_t next, int64_t end, Ahead ahead,
                        Chunk& chunk) {
  // Many rows reuse the same keys, so their reads are few compared with the arithmetic.
  if (problem.block_size % 16 != 0 || tile.rows() > kMaxPanelRows) return;
  chunk.keys.fetch = ahead != Ahead::kValues;
  chunk.fetch_next = ahead != Ahead::kKeys;
  Strip strips[kChunkKeys / 16];
  strips_at(problem, tile, next, end, strips);
  for (int strip = 0; strip < kChunkKeys / 16; ++strip) {
    const auto [block, offset] = strips[strip];
    // If there is no next strip, or it is not mapped, the current keys are prefetched again, which costs nothing.
    const void* here = chunk.keys.strips[strip];
    const void* keys = block < 0 ? here : key_at(problem, block, offset);
    const bool mapped = chunk.mapped >> (strip * 16) & 1;
    switch (ahead) {
      case Ahead::kValuesAndKeys:
        chunk.keys.ahead[strip] = mapped ? chunk.values[strip * 16] : here;
        chunk.next[strip] = keys;
        break;
      case Ahead::kKeys:
        chunk.keys.ahead[strip] = keys;
        break;
      case Ahead::kValues:
        chunk.next[strip] = block < 0 ? here : value_at(problem, block, offset);
    }
  }
}

// Whether a chunk is converted to float once: tiles of many rows do so, because each row would convert it again.
inline bool converts(const Problem& problem, const Tile& tile) {
  return tile.rows() > kMaxPanelRows && problem.cache_type != SHARP_FLOAT32;
}

// Returns the bits of a row's weights in a chunk that are not 0; NaN counts as not 0.
inline uint64_t weighted_bits(const float* weights) {
  uint64_t bits = 0;
  for (int v = 0; v < kChunkVectors; ++v) bits |= mask_of(load(weights + v * kLanes) != 0.0f) << (v * kLanes);
  return bits;
}

// `add_chunk` for each row by itself, which reads only the values that the row gives a weight.
inline void add_chunk_row_by_row(const Problem& problem, const Tile& tile, const Scratch& scratch, uint64_t keys,
                                 const Chunk& chunk, float* output) {
  int numbers[kChunkKeys];
  for (int64_t row = 0; row < tile.rows(); ++row) {
    const float* weights = scratch.weights + row * kChunkKeys;
    const uint64_t weighted = weighted_bits(weights) & keys;
    if (weighted == 0) continue;
    add_values(weights, 1, values_of(chunk, weighted, numbers), problem.value_dim, output + row * problem.value_dim);
  }
}

// Adds the values of the chunk's keys whose bit is set, times scratch.weights, to `output` [rows, value_dim].
inline void add_chunk(const Problem& problem, const Tile& tile, const BfloatProducts& products, const Scratch& scratch,
                      uint64_t keys, Chunk& chunk, float* output) {
  if (keys == 0) return;
  if (tile.row_by_row) return add_chunk_row_by_row(problem, tile, scratch, keys, chunk, output);
  if (products.add(scratch.weights, chunk, keys, output)) return;
  if (converts(problem, tile)) convert_values(problem, scratch, chunk);
  int numbers[kChunkKeys];
  add_values(scratch.weights, tile.rows(), values_of(chunk, keys, numbers), problem.value_dim, output);
}

// Computes the logits of every chunk of the part in scratch.weights, shaped and masked. For each chunk it calls
// `row_done(index, begin, visible, logits)` for each row that sees a key of the chunk, then `chunk_done(chunk,
// visible)` with the keys that any row sees.
template <Ahead kAhead, typename RowDone, typename ChunkDone>
void walk_keys(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch,
               BfloatProducts& products, const Row* rows, RowDone row_done, ChunkDone chunk_done) {
  gather_query(problem, tile, rows, scratch.query);
  products.set_query(scratch.query);
  for (int64_t begin = part.keys.begin; begin < part.keys.end; begin += kChunkKeys) {
    Chunk chunk = chunk_at(problem, tile, begin, part.keys.end, scratch);
    if (chunk.mapped == 0) continue;
    if (!products.score(chunk, scratch.weights)) {
      if (converts(problem, tile))
        convert_keys(problem, scratch, chunk);
      else
        fetch_ahead(problem, tile, begin + kChunkKeys, part.keys.end, kAhead, chunk);
      score(scratch.query, tile.rows(), problem.head_dim, chunk.keys, scratch.weights);
    }
    uint64_t seen = 0;
    for (int64_t index = 0; index < tile.rows(); ++index) {
      float* logits = scratch.weights + index * kChunkKeys;
      const uint64_t visible = bits_in(rows[index].visible, begin) & chunk.mapped;
      if (visible == 0) {
        clear_weights(logits);
        continue;
      }
      seen |= visible;
      const int64_t begins[] = {begin, begin + 16, begin + 32, begin + 48};
      shape_logits(problem, rows[index], begins, visible, logits);
      row_done(index, begin, visible, logits);
    }
    chunk_done(chunk, seen);
  }
}

}  // namespace sharp::cpu::SHARP_ISA
