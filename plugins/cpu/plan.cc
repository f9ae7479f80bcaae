#include "plan.h"

#include <algorithm>

namespace sharp::cpu {
namespace {

constexpr int64_t kPartKeys = 2048;                 // enough work for a thread, few enough to balance
constexpr int64_t kMaxSplitTiles = 2;               // with more tiles than this, tiles alone keep the threads busy
constexpr int64_t kStoredLogits = 2 * 1024 * 1024;  // floats that a thread may keep: 8 MiB
constexpr int64_t kMinStoredRows = 6;

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

Tile make_tile(const Problem& problem, int64_t sequence, int64_t kv_head, int64_t row_begin, int64_t row_end) {
  Tile tile{sequence, kv_head, row_begin, row_end, 0, 0};
  // Both ends of what a row sees grow with its position, but heads of a token may reach back differently far.
  int64_t begin = row_of(problem, tile, 0).visible.begin;
  for (int64_t row = 1; row < tile.rows() && problem.reach != nullptr; ++row)
    begin = std::min(begin, row_of(problem, tile, row).visible.begin);
  tile.key_begin = begin / kChunkKeys * kChunkKeys;
  tile.key_end = std::max(row_of(problem, tile, tile.rows() - 1).visible.end, tile.key_begin);
  return tile;
}

std::vector<KeyRange> split_keys(const Tile& tile, bool split) {
  const int64_t length = tile.key_end - tile.key_begin;
  const int64_t step = split ? kPartKeys : std::max<int64_t>(length, 1);
  std::vector<KeyRange> parts;
  for (int64_t begin = tile.key_begin; begin < tile.key_end; begin += step)
    parts.push_back({begin, std::min(begin + step, tile.key_end)});
  if (parts.empty()) parts.push_back({tile.key_begin, tile.key_begin});
  return parts;
}

}  // namespace

std::vector<Work> plan_work(const Problem& problem, bool stored) {
  std::vector<Work> works;
  for (int64_t sequence = 0; sequence < problem.sequences; ++sequence) {
    const int64_t queries = problem.query_start[sequence + 1] - problem.query_start[sequence];
    const int64_t rows = queries * problem.group();
    if (rows == 0) continue;
    const int64_t total = std::max<int64_t>(problem.total(sequence), 1);
    int64_t tile_rows = kMaxTileRows;
    if (stored) tile_rows = std::clamp(kStoredLogits / total, kMinStoredRows, tile_rows);
    const int64_t tiles = ceil_divide(rows, tile_rows);
    for (int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head)
      for (int64_t index = 0; index < tiles; ++index) {
        const Tile tile = make_tile(problem, sequence, kv_head, rows * index / tiles, rows * (index + 1) / tiles);
        works.push_back({tile, split_keys(tile, tiles <= kMaxSplitTiles)});
      }
  }
  std::stable_sort(works.begin(), works.end(), [](const Work& a, const Work& b) {
    return a.tile.key_end - a.tile.key_begin > b.tile.key_end - b.tile.key_begin;
  });
  return works;
}

}  // namespace sharp::cpu
