// The key screen: a copy of the keys in 8 bits with a bound on its error. It tells which keys surely have weight 0
// under entmax, without reading the keys. plugins/op/key_screen.py has the definition and the proof.
//
// Layout per block and head: integers int8 [quads, block_size, 4] (a quad is 4 channels; the last is filled up with
// zeros), then scale and distance, float [block_size] each. A key differs from shift + scale * integers by a vector of
// at most the length `distance`. Zeros, or an infinite distance, mean that nothing is known of a key.
#pragma once

#include "tile.h"

namespace sharp::cpu {

constexpr int kStripKeys = 16;         // keys that are read or skipped together
constexpr int64_t kScreenedRows = 18;  // with more query rows, the screen costs more arithmetic than it saves
constexpr int64_t kScreenedKeys = 512;
// A fraction of a part's strips. If more strips are in doubt, all strips are read in order.
constexpr int64_t kReadAllNumerator = 3, kReadAllDenominator = 4;

// Keys and queries longer than this are never screened, so that no sum of products can overflow.
constexpr double kLongest = 0x1p60;

[[gnu::always_inline]] inline int64_t screen_quads(const Problem& problem) { return (problem.head_dim + 3) / 4; }
[[gnu::always_inline]] inline int64_t screen_bytes(const Problem& problem) {
  return sharp::screen_bytes(problem.head_dim, problem.block_size);
}

// Returns the size of the integers of one query row, in 16-bit numbers, with four spare ones.
[[gnu::always_inline]] inline int64_t screen_query_size(const Problem& problem) {
  return 4 * screen_quads(problem) + 4;
}

struct ScreenBlock {
  int8_t* integers;
  float *scale, *distance;
};
// Returns the screen of a block, given as an index of blocks * heads.
[[gnu::always_inline]] inline ScreenBlock screen_block(const Problem& problem, int64_t block) {
  int8_t* integers = problem.key_screen + block * screen_bytes(problem);
  float* scale = reinterpret_cast<float*>(integers + 4 * screen_quads(problem) * problem.block_size);
  return {integers, scale, scale + problem.block_size};
}

// Whether keys of this shape are screened if there is a screen; with more rows none are.
[[gnu::always_inline]] inline bool fits_screen(const Problem& problem, const Tile& tile) {
  return problem.block_size % kStripKeys == 0 && tile.rows() <= kScreenedRows &&
         tile.key_end - tile.key_begin >= kScreenedKeys;
}

// Whether the keys of this tile are screened. It depends on the shapes and the instruction set.
[[gnu::always_inline]] inline bool is_screened(const Problem& problem, const Tile& tile, const Loops& loops) {
  const int64_t rows = problem.cache_type == SHARP_BFLOAT16 ? loops.screened_bfloat_rows : kScreenedRows;
  return problem.key_screen != nullptr && problem.attributes.normalizer == SHARP_ENTMAX && fits_screen(problem, tile) &&
         tile.rows() <= rows;
}

}  // namespace sharp::cpu
