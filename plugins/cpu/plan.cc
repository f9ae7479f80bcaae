#include "plan.h"

#include <algorithm>

namespace sharp::cpu {
namespace {

constexpr int64_t kMaxPartKeys = 2048;  // enough work for a thread, few enough to balance
constexpr int64_t kMinPartKeys = 256;   // fewer keys are not worth a part of their own
constexpr int64_t kMinParts = 4;        // parts of a tile if tiles are few; two or four threads share them evenly
constexpr int64_t kFewTiles = 8;        // with more tiles, longer parts keep the threads busy and cost less
constexpr int64_t kMaxSplitTiles = 2;   // with more tiles than this, tiles alone keep the threads busy
constexpr int64_t kStoredLogits = 2 * 1024 * 1024;  // floats that a thread may keep: 8 MiB
constexpr int64_t kMinStoredRows = 6;

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

Tile make_tile(const Problem& problem, int64_t sequence, int64_t kv_head, int64_t row_begin, int64_t row_end) {
  Tile tile{sequence, kv_head, row_begin, row_end, 0, 0};
  // Both ends of a row's visible keys grow with its position, but the heads of a token may reach back differently far.
  int64_t begin = row_of(problem, tile, 0).visible.begin;
  for (int64_t row = 1; row < tile.rows() && problem.reach != nullptr; ++row)
    begin = std::min(begin, row_of(problem, tile, row).visible.begin);
  tile.key_begin = begin / kChunkKeys * kChunkKeys;
  tile.key_end = std::max(row_of(problem, tile, tile.rows() - 1).visible.end, tile.key_begin);
  return tile;
}

int64_t tiles_of(const Problem& problem, int64_t sequence, bool stored) {
  const int64_t queries = problem.query_start[sequence + 1] - problem.query_start[sequence];
  const int64_t total = std::max<int64_t>(problem.total(sequence), 1);
  const int64_t tile_rows =
      stored ? std::clamp(kStoredLogits / total, kMinStoredRows, int64_t{kMaxTileRows}) : kMaxTileRows;
  return ceil_divide(queries * problem.group(), tile_rows);
}

// Returns the number of keys in a part of a split tile.
int64_t part_keys(int64_t length, bool few_tiles) {
  if (!few_tiles) return kMaxPartKeys;
  const int64_t even = ceil_divide(ceil_divide(length, kMinParts), kChunkKeys) * kChunkKeys;
  return std::clamp(even, kMinPartKeys, kMaxPartKeys);
}

std::vector<KeyRange> split_keys(const Tile& tile, int64_t step) {
  std::vector<KeyRange> parts;
  for (int64_t begin = tile.key_begin; begin < tile.key_end; begin += step)
    parts.push_back({begin, std::min(begin + step, tile.key_end)});
  if (parts.empty()) parts.push_back({tile.key_begin, tile.key_begin});
  return parts;
}

}  // namespace

std::vector<Work> plan_work(const Problem& problem, bool stored) {
  int64_t all_tiles = 0;
  for (int64_t sequence = 0; sequence < problem.sequences; ++sequence)
    all_tiles += problem.kv_heads * tiles_of(problem, sequence, stored);
  std::vector<Work> works;
  for (int64_t sequence = 0; sequence < problem.sequences; ++sequence) {
    const int64_t rows = (problem.query_start[sequence + 1] - problem.query_start[sequence]) * problem.group();
    const int64_t tiles = tiles_of(problem, sequence, stored);
    for (int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head)
      for (int64_t index = 0; index < tiles; ++index) {
        const Tile tile = make_tile(problem, sequence, kv_head, rows * index / tiles, rows * (index + 1) / tiles);
        const int64_t length = std::max<int64_t>(tile.key_end - tile.key_begin, 1);
        works.push_back(
            {tile, split_keys(tile, tiles <= kMaxSplitTiles ? part_keys(length, all_tiles <= kFewTiles) : length)});
      }
  }
  std::stable_sort(works.begin(), works.end(), [](const Work& a, const Work& b) {
    return a.tile.key_end - a.tile.key_begin > b.tile.key_end - b.tile.key_begin;
  });
  return works;
}

}  // namespace sharp::cpu
