// The form for entmax, which keeps only logits that may get a weight: a key is dropped once its logit is
// 1 / (alpha - 1) below the highest logit so far. Values are read only where a weight is not 0. Each row reads its own
// values; rows that give weight to many keys instead read them together with the other rows, in the cache's order.
//
// A NaN logit is kept, so that its row becomes NaN. If the highest logit is infinite, nothing is kept and the row
// becomes NaN, too.
#pragma once

#include "entmax.h"
#include "floors.h"
#include "screen.h"
#include "walk.h"

namespace sharp::cpu::SHARP_ISA {

// Returns a floor: logits at or below it have weight 0. The last term covers the rounding of the difference.
inline float selection_floor(const Problem& problem, const RowState& state) {
  const float width = 1.0f / (problem.attributes.alpha - 1.0f);
  return state.highest - width - (__builtin_fabsf(state.highest) + width) * 0x1p-22f;
}

// Returns the bits of the lanes from `begin` on that hold one of `count` logits.
inline uint64_t lanes_before(int64_t count, int64_t begin) {
  return (uint64_t{1} << smaller<int64_t>(count - begin, kLanes)) - 1;
}

// Writes the lanes whose bit is set contiguously to `logits_to` and `keys_to`; returns their number.
inline int64_t keep_lanes(uint64_t bits, Vec logits, VecInt keys, float* logits_to, int32_t* keys_to) {
#if defined(__AVX512F__)
  const __mmask16 mask = static_cast<__mmask16>(bits);
  _mm512_mask_compressstoreu_ps(logits_to, mask, reinterpret_cast<__m512>(logits));
  _mm512_mask_compressstoreu_epi32(keys_to, mask, reinterpret_cast<__m512i>(keys));
  return __builtin_popcountll(bits);
#else
  int64_t count = 0;
  for (; bits != 0; bits &= bits - 1, ++count) {
    const int lane = __builtin_ctzll(bits);
    logits_to[count] = logits[lane];
    keys_to[count] = keys[lane];
  }
  return count;
#endif
}

// Selects among the logits of one row and 64 keys, in four strips that begin at `begins`: logits that may get a weight
// go into part.logits, their positions into part.keys_of_logits.
inline void select_row(const Problem& problem, const Part& part, int64_t index, const int64_t* begins, uint64_t visible,
                       const float* logits) {
  VecInt numbers{};
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  RowState& state = part.states[index];
  observe_highest(logits, state);
  if (problem.stats != nullptr) observe_lowest(logits, visible, state);
  state.highest = maximum_of(load(state.highest_lanes));
  const float floor = selection_floor(problem, state);
  const int64_t row = index * part.logits_stride;
  for (int v = 0; v < kChunkVectors; ++v) {
    const Vec z = load(logits + v * kLanes);
    const uint64_t kept = mask_of(~(z <= floor)) & visible >> (v * kLanes);
    if (kept == 0) continue;
    const int64_t to = row + state.selected;
    const int64_t first = begins[v * kLanes / 16] + v * kLanes % 16;
    state.selected +=
        keep_lanes(kept, z, numbers + static_cast<int32_t>(first), part.logits + to, part.keys_of_logits + to);
  }
}

// Selects logits among all keys of the part.
inline void select_part(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  Row rows[kMaxTileRows];
  rows_of(problem, tile, rows);
  const auto row_done = [&](int64_t index, int64_t begin, uint64_t visible, const float* logits) {
    part.states[index].visible += __builtin_popcountll(visible);
    const int64_t begins[] = {begin, begin + 16, begin + 32, begin + 48};
    select_row(problem, part, index, begins, visible, logits);
  };
  BfloatProducts products(problem, tile, scratch);
  walk_keys<Ahead::kKeys>(problem, tile, part, scratch, products, rows, row_done, [](const Chunk&, uint64_t) {});
  for (int64_t index = 0; index < tile.rows(); ++index) settle<false>(part.states[index]);
}

// Gathers the selected logits of all parts of a row at the front of the row's memory, without those that are now below
// the floor, and fills up to whole vectors with -inf. Returns the number of logits.
inline int64_t gather_selected(const Problem& problem, const Tile& tile, const Part* parts, int64_t count,
                               int64_t row) {
  const float of_largest = selection_floor(problem, parts[0].states[row]);
  // With a screen, logits below this floor may be missing, so shapes that fit a screen use the floor without one, too.
  // In prompts it would cost more than it saves.
  const float of_many = fits_screen(problem, tile) ? floor_of_lanes(problem.attributes.alpha, parts, count, row,
                                                                    &RowState::highest_lanes, 0x1p-21f)
                                                   : -kInfinity;
  const float floor = of_many > of_largest ? of_many : of_largest;
  float* logits = parts[0].logits + row * parts[0].logits_stride;
  int32_t* keys = parts[0].keys_of_logits + row * parts[0].logits_stride;
  int64_t kept = 0;
  for (int64_t part = 0; part < count; ++part) {
    const int64_t offset = row * parts[part].logits_stride, selected = parts[part].states[row].selected;
    for (int64_t begin = 0; begin < selected; begin += kLanes) {
      const Vec z = load(parts[part].logits + offset + begin);
      const VecInt key = load_lanes<int32_t>(parts[part].keys_of_logits + offset + begin);
      const uint64_t bits = mask_of(~(z <= floor)) & lanes_before(selected, begin);
      kept += keep_lanes(bits, z, key, logits + kept, keys + kept);
    }
  }
  for (int64_t key = kept; key % kLanes != 0; ++key) logits[key] = -kInfinity;
  return kept;
}

// Values are streamed for a row whose number of weights, times the rows that share a key-value head, exceeds this
// fraction of the visible keys.
constexpr int64_t kStreamedNumerator = 1, kStreamedDenominator = 2;

// Adds the values of `used` keys times their weights to a row's output.
inline void gather_values(const Problem& problem, const Tile& tile, const float* weights, const int32_t* keys,
                          int64_t used, float* output) {
  for (int64_t begin = 0; begin < used; begin += kChunkKeys) {
    const int count = static_cast<int>(smaller<int64_t>(used - begin, kChunkKeys));
    int numbers[kChunkKeys];
    const void* values[kChunkKeys];
    float scales[kChunkKeys];
    for (int index = 0; index < count; ++index) {
      const int64_t position = keys[begin + index], block = block_of(problem, tile, position);
      numbers[index] = index;
      scales[index] = scale_of(problem.value_scale, block);
      const char* value = value_at(problem, block, position % problem.block_size);
      values[index] = value;
      for (int64_t byte = 0; byte < problem.value_dim * bytes_of(problem.cache_type); byte += 64)
        __builtin_prefetch(value + byte);
    }
    const ValuePanel panel{problem.cache_type, count, numbers, values, scales, false, {}};
    add_values(weights + begin, 1, panel, problem.value_dim, output);
  }
}

// Computes threshold, weights and output of one row into the first part, or leaves the values to `stream_values`.
template <Power kPower>
void resolve_row(const Problem& problem, const Tile& tile, const Part* parts, int64_t count, int64_t row) {
  RowState& state = parts[0].states[row];
  const bool collect = problem.stats != nullptr;
  const int64_t selected = gather_selected(problem, tile, parts, count, row);
  float* logits = parts[0].logits + row * parts[0].logits_stride;
  int32_t* keys = parts[0].keys_of_logits + row * parts[0].logits_stride;
  const float sink = problem.sink(row_of(problem, tile, row).head);
  Entmax<kPower>::solve(problem, logits, selected, sink, state);
  const Entmax<kPower> normalizer(problem, sink, state);
  Vec sum{}, weighted_log{};
  int64_t used = 0;
  for (int64_t begin = 0; begin < selected; begin += kLanes) {
    const Vec z = load(logits + begin), w = normalizer.weight(z);
    sum += w;
    if (collect) weighted_log += select(w == 0.0f, Vec{}, w * normalizer.log_weight(z, w));
    const VecInt key = load_lanes<int32_t>(keys + begin);
    // In a row with a NaN, the lanes that fill up the last vector have NaN weights, too, and must be masked.
    const uint64_t weighted = mask_of(w != 0.0f) & lanes_before(selected, begin);
    used += keep_lanes(weighted, w, key, logits + used, keys + used);
  }
  add_lanes(state.sum, sum);
  add_lanes(state.weighted_log, weighted_log);
  state.support = used;
  // A tile is computed row by row if values with weight 0 are not finite, so such a tile must not stream values.
  if (!tile.row_by_row && used * problem.group() * kStreamedDenominator > state.visible * kStreamedNumerator)
    for (int64_t part = 0; part < count; ++part) parts[part].states[row].streamed = used;
  else
    gather_values(problem, tile, logits, keys, used, parts[0].output + row * problem.value_dim);
}

// Adds the values of the part's keys for the rows that `resolve_row` left to this function.
inline void stream_values(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  int64_t next[kMaxTileRows];
  const int64_t before = part.keys.begin - tile.key_begin;  // the weights of a row begin at the first part
  bool any = false;
  for (int64_t row = 0; row < tile.rows(); ++row) {
    const int32_t* keys = part.keys_of_logits - before + row * part.logits_stride;
    const int64_t count = part.states[row].streamed;
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (keys[middle] < part.keys.begin)
        low = middle + 1;
      else
        high = middle;
    }
    next[row] = low;
    any |= low < count;
  }
  if (!any) return;
  const BfloatProducts products(problem, tile, scratch);
  for (int64_t begin = part.keys.begin; begin < part.keys.end; begin += kChunkKeys) {
    const int64_t end = smaller(begin + kChunkKeys, part.keys.end);
    uint64_t used = 0;
    for (int64_t row = 0; row < tile.rows(); ++row) {
      const float* from = part.logits - before + row * part.logits_stride;
      const int32_t* keys = part.keys_of_logits - before + row * part.logits_stride;
      float* weights = scratch.weights + row * kChunkKeys;
      clear_weights(weights);
      for (; next[row] < part.states[row].streamed && keys[next[row]] < end; ++next[row]) {
        const int64_t key = keys[next[row]] - begin;
        weights[key] = from[next[row]];
        used |= uint64_t{1} << key;
      }
    }
    if (used == 0) continue;
    Chunk chunk = chunk_at(problem, tile, begin, part.keys.end, scratch);
    fetch_ahead(problem, tile, begin + kChunkKeys, part.keys.end, Ahead::kValues, chunk);
    add_chunk(problem, tile, products, scratch, used, chunk, part.output);
  }
}

}  // namespace sharp::cpu::SHARP_ISA
