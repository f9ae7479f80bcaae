// The units of work of the attention loops: a tile of query rows that share a key-value head, and a part of its keys.
#pragma once

#include <cstdint>

#include "half.h"
#include "problem.h"

// Functions are always_inline, because they are compiled for every instruction set and the linker keeps only one copy.

namespace sharp::cpu {

constexpr int kChunkKeys = 64;    // keys that a loop handles at once, as 4 strips of 16
constexpr int kMaxTileRows = 48;  // maximum query rows (token, head) of a tile
constexpr int kStateLanes = 16;   // lanes of the widest vector
constexpr int kBfloatItems = 32;  // channels or keys that an instruction of bfloat_products.h multiplies
constexpr int kQueryParts = 3, kWeightParts = 2;

// A tile of query rows, which are numbered (token of the sequence) * group + (head of the group).
struct Tile {
  int64_t sequence, kv_head;
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;  // the keys that any row sees; key_begin is a multiple of kChunkKeys
  // Whether each row reads values by itself and only where it has a weight. That is slower, but skips 0 times NaN.
  bool row_by_row = false;

  [[gnu::always_inline]] int64_t rows() const { return row_end - row_begin; }
};

// The keys [begin, end) of a sequence, by position.
struct KeyRange {
  int64_t begin, end;
};

// Token, head and visible keys of one row of a tile.
struct Row {
  int64_t token, head, position;
  KeyRange visible;
};

// Returns the row `index` of a tile. A row may see keys without a block, too, which count as hidden.
[[gnu::always_inline]] inline Row row_of(const Problem& problem, const Tile& tile, int64_t index) {
  const int64_t row = tile.row_begin + index, group = problem.group();
  const int64_t first = problem.query_start[tile.sequence], total = problem.total(tile.sequence);
  const int64_t position = problem.context_lens[tile.sequence] + row / group;
  const SharpAttributes& attributes = problem.attributes;
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

// Running sums of one row over the keys seen so far. Let w be the unnormalized weight of a key (e^(t - shift) for the
// exponential normalizers). sum is the sum of w and weighted_log the sum of w ln w, so the entropy is
// ln(sum) - weighted_log / sum.
struct RowState {
  alignas(64) float sum[kStateLanes];
  float weighted_log[kStateLanes];
  float opposed[kStateLanes];  // softpick: sum of e^-shift - e^(z - shift) of keys with z < 0, which have no weight
  float highest_lanes[kStateLanes], lowest_lanes[kStateLanes];  // `highest` and `lowest` by lane
  float shift;                // largest exponent so far; weights of two parts are comparable after e^(shift difference)
  float highest, lowest;      // logits of visible keys; lowest only when statistics are collected
  float threshold;            // entmax: tau, or for alpha above 2 the upper end of the bracket around tau
  float floor, level, share;  // entmax: every s in (floor, level] has the weight `share`
  float inverse_temperature;  // adaptive softmax: beta
  int64_t visible;
  int64_t support;   // keys with weight > 0; only if statistics are collected
  int64_t selected;  // selected form: number of kept logits
  int64_t streamed;  // selected form: number of weights whose values `weigh` adds; the same in all parts
  // Screened keys have intervals that contain their logits. lower_lanes are the largest lower ends by lane,
  // certain_floor is the logit below which no key has a weight by the lower ends, and lowest_upper is the smallest
  // upper end; the last two are the same in all parts.
  float lower_lanes[kStateLanes];
  float certain_floor, lowest_upper;
};

// The keys [begin, end) of a tile with their results; a tile that is not split has one part.
struct Part {
  KeyRange keys;     // begin is a multiple of kChunkKeys
  RowState* states;  // [rows]
  float* output;     // [rows, value_dim], sum of w * value
  float* logits;     // stored and selected form: the logits of row 0 from `keys.begin` on
  int64_t logits_stride;
  int32_t* keys_of_logits;  // selected form: the key of each logit, laid out like `logits`
  // Screened keys: for every 16 keys the largest upper end and, for statistics, the smallest lower end; -inf and inf
  // for keys that are not in doubt. Row 0 starts at `keys.begin`; null if the tile is not screened.
  float *highest_bounds, *lowest_bounds;
  int64_t bounds_stride;
};

// Buffers of the thread that runs a part.
struct Scratch {
  float* query;          // [kMaxTileRows, head_dim], scaled
  float* weights;        // [kMaxTileRows, kChunkKeys]
  float* packed_keys;    // [head_dim, kChunkKeys]; null if keys are always read in place
  float* packed_values;  // [kChunkKeys, value_dim]; null for a float32 cache
  // For products in bfloat16, with head_dim rounded up to kBfloatItems; null unless the cache is bfloat16, int8 or fp8.
  Bfloat16* query_parts;    // [kQueryParts, kMaxTileRows, head_dim]
  Bfloat16* weight_parts;   // [kWeightParts, kMaxTileRows, kChunkKeys]
  Bfloat16* key_tiles;      // [kChunkKeys / 16, head_dim / 32, 16, 16, 2]: 16 keys, 32 channels in pairs
  Bfloat16* value_tiles;    // [kChunkKeys / 32, value_dim / 16, 16, 16, 2]: 32 keys in pairs, 16 channels
  int16_t* query_integers;  // [kScreenedRows, screen_query_size()]; null without a key screen
};

// The attention loops of one normalizer, compiled for one instruction set, in one of three forms: `stream` alone;
// `score`, then a temperature for every row, then `weigh`; or `score`, then `resolve` for every row, then `weigh` if
// `resolve` left values to it. For screened keys `bound` and `score_doubtful` replace `score`; between the two the
// bounds of all parts are merged.
struct Loops {
  void (*stream)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*score)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*weigh)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*resolve)(const Problem&, const Tile&, const Part* parts, int64_t count, int64_t row);
  void (*bound)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*merge_bounds)(const Problem&, const Tile&, const Part* parts, int64_t count);
  void (*score_doubtful)(const Problem&, const Tile&, const Part&, const Scratch&);
  void (*screen_key)(const Problem&, int64_t head, int64_t block, int64_t offset, const float* key);
  int64_t screened_bfloat_rows;  // maximum query rows for which keys of a bfloat16 cache are screened

  [[gnu::always_inline]] bool keeps_logits() const { return score != nullptr; }
  [[gnu::always_inline]] bool selects() const { return resolve != nullptr; }
};

}  // namespace sharp::cpu
