// The key screen: a copy of the keys in 8 bits with a bound on its error, which tells without the keys which of them
// surely have weight 0 under entmax. plugins/ops/key_screen.py has the definition and the proof.
//
// Of every block and head: integers int8 [quads, block_size, 4] (4 channels each, the last filled up with zeros), then
// scale and distance, float [block_size] each. A key is shift + scale * integers, but for a vector that is no longer
// than `distance`. Zeros are the screen of a key that nothing is known of, and so is an infinite distance.
#pragma once

#include "tile.h"

namespace sharp::cpu {

constexpr int kStripKeys = 16;         // keys that are read, or left out, together
constexpr int64_t kScreenedRows = 18;  // with more query rows the arithmetic on the screen costs what it saves
constexpr int64_t kScreenedKeys = 512;
// Of a part's strips. Where more are in doubt all of them are read in their order, without looking for them.
constexpr int64_t kReadAllNumerator = 3, kReadAllDenominator = 4;

// Longer keys and queries are never screened, so that no sum of products can overflow.
constexpr double kLongest = 0x1p60;

[[gnu::always_inline]] inline int64_t screen_quads(const Problem& problem) { return (problem.head_dim + 3) / 4; }
[[gnu::always_inline]] inline int64_t screen_bytes(const Problem& problem) {
  return (4 * screen_quads(problem) + 8) * problem.block_size;
}

// Of the integers of one query row, in numbers of 16 bits; four are left over.
[[gnu::always_inline]] inline int64_t screen_query_size(const Problem& problem) {
  return 4 * screen_quads(problem) + 4;
}

struct ScreenBlock {
  int8_t* integers;
  float *scale, *distance;
};
// `block` is an index of blocks * heads.
[[gnu::always_inline]] inline ScreenBlock screen_block(const Problem& problem, int64_t block) {
  int8_t* integers = problem.key_screen + block * screen_bytes(problem);
  float* scale = reinterpret_cast<float*>(integers + 4 * screen_quads(problem) * problem.block_size);
  return {integers, scale, scale + problem.block_size};
}

// Whether keys of such a shape are screened where there is a screen; with more rows than that none are.
[[gnu::always_inline]] inline bool fits_screen(const Problem& problem, const Tile& tile) {
  return problem.block_size % kStripKeys == 0 && tile.rows() <= kScreenedRows &&
         tile.key_end - tile.key_begin >= kScreenedKeys;
}

// Whether the keys of this tile are screened. It depends on the shapes and the instruction set.
[[gnu::always_inline]] inline bool is_screened(const Problem& problem, const Tile& tile, const Loops& loops) {
  const int64_t rows = problem.cache_type == CacheType::kBfloat16 ? loops.screened_bfloat_rows : kScreenedRows;
  return problem.key_screen != nullptr && problem.attributes.normalizer == NormalizerKind::kEntmax &&
         fits_screen(problem, tile) && tile.rows() <= rows;
}

}  // namespace sharp::cpu
