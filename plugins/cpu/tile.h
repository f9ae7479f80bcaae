// What the attention loops work on: a tile of query rows that share one key-value head, and a part of its keys.
#pragma once

#include <cstdint>

#include "half.h"
#include "problem.h"

// always_inline: these are compiled into every instruction set, and the linker would keep one copy for all.

namespace sharp::cpu {

constexpr int kChunkKeys = 64;    // keys that a loop handles at once; 4 strips of 16
constexpr int kMaxTileRows = 48;  // query rows (token, head) of a tile
constexpr int kStateLanes = 16;   // lanes of the widest vector
constexpr int kBfloatItems = 32;  // channels or keys that an instruction of bfloat_products.h multiplies
constexpr int kQueryParts = 3, kWeightParts = 2;

// Rows are numbered (token of the sequence) * group + (head of the group).
struct Tile {
  int64_t sequence, kv_head;
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;  // keys that any of the rows sees; key_begin is a multiple of kChunkKeys
  // Values are read by each row for itself and only where it has a weight: slower, and 0 times NaN is left out.
  bool row_by_row = false;

  [[gnu::always_inline]] int64_t rows() const { return row_end - row_begin; }
};

struct KeyRange {
  int64_t begin, end;
};

// Token, head and visible keys of one row of a tile.
struct Row {
  int64_t token, head, position;
  KeyRange visible;
};

[[gnu::always_inline]] inline Row row_of(const Problem& problem, const Tile& tile, int64_t index) {
  const int64_t row = tile.row_begin + index, group = problem.group();
  const int64_t first = problem.query_start[tile.sequence], total = problem.total(tile.sequence);
  const int64_t position = problem.context_lens[tile.sequence] + row / group;
  const Attributes& attributes = problem.attributes;
  KeyRange visible{0, total};
  if (attributes.causal || attributes.window >= 0) visible.end = position < total ? position + 1 : total;
  if (attributes.window >= 0 && position - attributes.window + 1 > 0) visible.begin = position - attributes.window + 1;
  const int64_t token = first + row / group, head = tile.kv_head * group + row % group;
  if (problem.reach != nullptr) {
    const int64_t nearest = position - problem.reach[token * problem.q_heads + head];
    if (nearest > visible.begin) visible.begin = nearest;
  }
  return {token, head, position, visible};
}

// Running sums of one row over the keys seen so far. With w the unnormalized weight of a key (e^(t - shift) for the
// exponential normalizers): sum = sum of w, weighted_log = sum of w ln w, so entropy = ln(sum) - weighted_log / sum.
struct RowState {
  alignas(64) float sum[kStateLanes];
  float weighted_log[kStateLanes];
  float opposed[kStateLanes];  // softpick: sum of e^-shift - e^(z - shift) of keys with z < 0, which have no weight
  float highest_lanes[kStateLanes], lowest_lanes[kStateLanes];  // what `highest` and `lowest` are made of
  float shift;                // largest exponent so far; weights of two parts are comparable after e^(shift difference)
  float highest, lowest;      // logits of visible keys; lowest only when statistics are collected
  float threshold;            // entmax: tau, or where alpha is above 2 the upper end of the bracket around it
  float floor, level, share;  // entmax: the weight of every s above the floor and up to the level is the share
  float inverse_temperature;  // adaptive softmax: beta
  int64_t visible;
  int64_t support;   // keys of weight > 0; only when statistics are collected
  int64_t selected;  // selected form: logits kept
  int64_t streamed;  // selected form: weights whose values `weigh` adds; the same in all parts
  // Screened keys: each has an interval that its logit lies in. The largest lower ends by lane, the logit below which
  // they say that no key has a weight, and the smallest upper end; the last two are the same in all parts.
  float lower_lanes[kStateLanes];
  float certain_floor, lowest_upper;
};

// The keys [begin, end) of a tile with their results; a tile that is not split has one part.
struct Part {
  KeyRange keys;     // begin is a multiple of kChunkKeys
  RowState* states;  // [rows]
  float* output;     // [rows, value_dim], sum of w * value
  float* logits;     // stored and selected form: row 0 at `keys.begin`
  int64_t logits_stride;
  int32_t* keys_of_logits;  // selected form: the key of each logit, laid out like `logits`
  // Screened keys: of every 16 keys the largest upper end and, for statistics, the smallest lower end; -inf and inf of
  // keys that are not in doubt. Row 0 at `keys.begin`; null where the tile is not screened.
  float *highest_bounds, *lowest_bounds;
  int64_t bounds_stride;
};

// Buffers of the thread that runs a part.
struct Scratch {
  float* query;          // [kMaxTileRows, head_dim], scaled
  float* weights;        // [kMaxTileRows, kChunkKeys]
  float* packed_keys;    // [head_dim, kChunkKeys]; null if keys are always read where they lie
  float* packed_values;  // [kChunkKeys, value_dim]; null for a float32 cache
  // For the products in bfloat16, with head_dim rounded up to kBfloatItems; null unless a cache has
  // bfloat16, int8 or fp8.
  Bfloat16* query_parts;    // [kQueryParts, kMaxTileRows, head_dim]
  Bfloat16* weight_parts;   // [kWeightParts, kMaxTileRows, kChunkKeys]
  Bfloat16* key_tiles;      // [kChunkKeys / 16, head_dim / 32, 16, 16, 2]: 16 keys, 32 channels in pairs
  Bfloat16* value_tiles;    // [kChunkKeys / 32, value_dim / 16, 16, 16, 2]: 32 keys in pairs, 16 channels
  int16_t* query_integers;  // [kScreenedRows, screen_query_size()]; null without a key screen
};

// The attention loops of one normalizer, compiled for one instruction set, in one of three forms: `stream` alone;
// `score`, then a temperature for every row, then `weigh`; or `score`, then `resolve` for every row, and `weigh` if it
// has left values to it. Where keys are screened, `bound` and `score_doubtful` stand in the place of that `score`, with
// the bounds of all parts merged between.
struct Loops {
  void (*stream)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*score)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*weigh)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*resolve)(const Problem&, const Tile&, const Part* parts, int64_t count, int64_t row);
  void (*bound)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*merge_bounds)(const Problem&, const Tile&, const Part* parts, int64_t count);
  void (*score_doubtful)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*screen_key)(const Problem&, int64_t head, int64_t block, int64_t offset, const float* key);
  int64_t screened_bfloat_rows;  // with more query rows the keys of a bfloat16 cache are not screened

  [[gnu::always_inline]] bool keeps_logits() const { return score != nullptr; }
  [[gnu::always_inline]] bool selects() const { return resolve != nullptr; }
};

}  // namespace sharp::cpu
