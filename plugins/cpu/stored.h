// The form that keeps a row's logits, for a softmax whose temperature depends on all logits.
#pragma once

#include "adaptive_softmax.h"
#include "stream.h"

namespace sharp::cpu::SHARP_ISA {

// Stores the logits of the part's keys in part.logits, and the sums of their softmax in the states. Keys that a row
// does not see get -inf.
inline void score_part(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  Row rows[kMaxTileRows];
  rows_of(problem, tile, rows);
  for (int64_t index = 0; index < tile.rows(); ++index)
    for (int64_t begin = part.keys.begin; begin < part.keys.end; begin += kChunkKeys)
      for (int v = 0; v < kChunkVectors; ++v)
        store(part.logits + index * part.logits_stride + begin - part.keys.begin + v * kLanes, splat(-kInfinity));
  const bool collect = problem.stats != nullptr;
  const auto row_done = [&](int64_t index, int64_t begin, uint64_t visible, float* logits) {
    RowState& state = part.states[index];
    state.visible += __builtin_popcountll(visible);
    if (collect) observe_lowest(logits, visible, state);
    float* to = part.logits + index * part.logits_stride + begin - part.keys.begin;
    for (int v = 0; v < kChunkVectors; ++v) store(to + v * kLanes, load(logits + v * kLanes));
    weigh_exponential<true>(Softmax(problem, rows[index]), logits, state, part.output, 0);
  };
  BfloatProducts products(problem, tile, scratch);
  walk_keys<Ahead::kKeys>(problem, tile, part, scratch, products, rows, row_done, [](const Chunk&, uint64_t) {});
  for (int64_t index = 0; index < tile.rows(); ++index) settle<true>(part.states[index]);
}

// Computes weights from the stored logits, and adds the weighted values.
template <typename Normalizer>
void weigh_part(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  const bool collect = problem.stats != nullptr;
  const BfloatProducts products(problem, tile, scratch);
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
        if (collect) weighted_log += w * normalizer.log_weight(z, w);
      }
      add_lanes(state.sum, sum);
      if (collect) add_lanes(state.weighted_log, weighted_log);
    }
    Chunk chunk = chunk_at(problem, tile, begin, part.keys.end, scratch);
    fetch_ahead(problem, tile, begin + kChunkKeys, part.keys.end, Ahead::kValues, chunk);
    // Only mapped keys are added, because a row with a NaN logit has NaN weights even for keys that do not exist.
    add_chunk(problem, tile, products, scratch, chunk.mapped, chunk, part.output);
  }
}

}  // namespace sharp::cpu::SHARP_ISA
